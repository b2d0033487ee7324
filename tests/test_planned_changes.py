"""The windows of planned changes follow the ledger."""

from __future__ import annotations

from harness.core.state import RunState
from harness.data.order.ledger import Ledger
from harness.planned_changes import PlannedChanges
from tests.composed import load


def test_a_reweighting_opens_a_window_after_an_exclusion_that_was_only_tried() -> None:
    """A trial looks at the windows with one more entry in the ledger; the next entry that is written is another one."""
    ledger, state = Ledger(), RunState()
    planned = PlannedChanges(load(["sentinel.planned_batches=3"]), ledger)
    with ledger.trying_exclusion(5, 6):
        assert planned.at(1, state) is None
    ledger.reweight(2, {"a": 0.0}, "poisoned")
    windows = [planned.at(cursor, state) for cursor in range(7)]
    assert [window is not None for window in windows] == [False, False, True, True, True, False, False]
