"""The windows of planned changes follow the ledger and the recorded interventions."""

from __future__ import annotations

from dataclasses import replace

from harness.core.events import ChangePlanned, Intervention
from harness.core.rundir import CONFIG_CHANGED
from harness.core.state import RunState
from harness.data.order.ledger import Ledger
from harness.planned_changes import REASONS, DataChange, PlannedChanges, newest_data_change, newest_schedule_change
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


DATA = REASONS["data."]


def changed(iteration: int, *keys: str) -> Intervention:
    return Intervention(
        time=0.0, iteration=iteration, who="user", reason=CONFIG_CHANGED, changes={key: [1, 2] for key in keys}
    )


def announced(iteration: int, until: int, reason: str) -> ChangePlanned:
    return ChangePlanned(time=0.0, iteration=iteration, step=0, cursor=until - 50, until=until, reason=reason)


def test_the_newest_resume_with_other_data_is_found_with_its_window() -> None:
    data, size = DATA, REASONS["train.batch_size"]
    changes = [
        changed(10, "data.sources.main.weight"),
        changed(40, "train.batch_size", "optim.lr"),
        changed(60, "optim.lr"),
    ]
    log = [announced(11, 62, data), announced(30, 90, "batches are given back"), announced(41, 92, size)]
    assert newest_data_change(changes, log) == DataChange(size, 42)
    assert newest_data_change(changes[:1], log) == DataChange(data, 12)
    assert newest_data_change(changes[:1], log[1:]) == DataChange(data, None), "no step was taken since"
    assert newest_data_change([changed(60, "optim.lr")], log) is None
    rope = "the run was resumed with another model.rope_theta"
    changes = [*changes, changed(70, "model.rope_theta")]
    assert newest_data_change(changes, [*log, announced(71, 130, rope)]) == DataChange(rope, 80)


def test_the_newest_resume_with_another_schedule_is_found() -> None:
    changes = [changed(10, "optim.lr"), changed(40, "train.num_steps", "data.paths"), changed(60, "optim.beta1")]
    assert newest_schedule_change(changes) == 40
    assert newest_schedule_change(changes[2:]) == newest_schedule_change([]) == -1


def test_of_two_windows_that_begin_together_that_of_the_resume_is_announced() -> None:
    phases = "data.phases=[{from_batch: 7, weights: {main: 2}}]"
    planned, state = PlannedChanges(load(["sentinel.planned_batches=3", phases]), Ledger()), RunState()
    planned.resume(DataChange("other", None), 7)
    event = planned.announce(planned.at(7, state), 7, state)
    assert event is not None
    assert (event.reason, event.until) == ("other", 10)


def test_the_window_of_a_resume_stays_where_it_was_announced() -> None:
    planned, state = PlannedChanges(load(["sentinel.planned_batches=3"]), Ledger()), RunState()
    planned.resume(None, 7)
    assert planned.at(7, state) is None
    planned.resume(DataChange("other", None), 7)
    assert [planned.at(cursor, state) is not None for cursor in range(6, 12)] == [False, True, True, True, False, False]
    planned.resume(DataChange("other", 7), 9)
    assert [planned.at(cursor, state) is not None for cursor in range(6, 12)] == [False, True, True, True, False, False]


def test_the_window_of_a_resume_is_the_same_after_a_restart_within_it() -> None:
    """Also if batches in it were excluded before it was announced, and if it begins with one that was given back."""
    ledger, state, cfg = Ledger(), RunState(), load(["sentinel.planned_batches=3"])
    ledger.exclude(9, 12, "bad shard")
    before, after = PlannedChanges(cfg, ledger), PlannedChanges(cfg, ledger)
    before.resume(DataChange("other", None), 7)
    event = before.announce(before.at(7, state), 2, state)
    assert event is not None
    change = newest_data_change([changed(6, "data.sources.main.weight")], [replace(event, iteration=7, reason=DATA)])
    after.resume(change, 8)
    read = [batch for batch in range(20) if not ledger.is_excluded(batch)]
    assert [batch for batch in read if after.at(batch, state) is not None] == [7, 8, 13]
    assert [batch for batch in read if before.at(batch, state) is not None] == [7, 8, 13]


def test_files_that_were_added_open_a_window_where_they_are_read() -> None:
    """The resume itself reads the batches that it would have read without them."""
    added = changed(10, "data.sources.main.paths", "data.sources.main.files", "data.remote.cache_gb")
    assert newest_data_change([added], []) is None
    cfg, state = load(["sentinel.planned_batches=3"]), RunState()
    planned = PlannedChanges(cfg, Ledger(), lambda: [(7, "source main begins with its added files")])
    assert [cursor for cursor in range(12) if planned.at(cursor, state) is not None] == [7, 8, 9]


def test_excluded_batches_do_not_use_up_a_window() -> None:
    """A rollback excludes more batches than a window has, often just those with which the change began."""
    ledger, state = Ledger(), RunState()
    planned = PlannedChanges(
        load(["sentinel.planned_batches=3", "data.phases=[{from_batch: 7, weights: {main: 2}}]"]), ledger
    )
    planned.resume(DataChange("other", None), 30)

    def read(first: int, last: int) -> list[tuple[int, str]]:
        """The batches within a window, and where one is announced."""
        found = []
        for batch in range(first, last):
            if not ledger.is_excluded(batch) and (window := planned.at(batch, state)) is not None:
                event = planned.announce(window, batch, state)
                found.append((batch, "" if event is None else event.reason))
        return found

    begins = "a phase of data.phases begins"
    assert read(0, 8) == [(7, begins)]
    ledger.exclude(8, 8, "rejected")
    assert read(8, 20) == [(9, ""), (10, "")], "announced once"
    ledger.exclude(5, 20, "rolled back")
    assert read(4, 30) == [(21, ""), (22, ""), (23, "")], "nothing was read outside of the window in between"
    ledger.exclude(29, 40, "rolled back")
    assert read(24, 60) == [(41, "other"), (42, ""), (43, "")]
