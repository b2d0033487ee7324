"""Actions carried out on one rank without a model: the policy, the trials, the mailbox and the ledger are real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from harness import recovery, train
from harness.config.errors import StorageError
from harness.core.events import Action, ActionKind, Event, HeldOutMeasured, StepRecord
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.data.order.ledger import Ledger
from harness.run import Run
from harness.sentinel.device.mailbox import Mailbox
from harness.sentinel.sentinel import Sentinel
from tests import composed
from tests.sentinel.policy_runs import record

HELD_OUT_LOSS = 3.0


class Harness:
    """A run of one rank whose updates the test makes up. Its held-out loss is always that of healthy weights.

    At each point at which a state may be saved or shared it checks that a run that resumed from there loses no batch.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rejected: list[tuple[int, int]] = []
        """Iteration and batch."""
        self.taken: list[ActionKind] = []
        self.processed: list[int] = []
        """Iterations whose report was processed."""
        self.may_be_shared: list[int] = []
        """Iterations whose report shared the states before it."""
        self.may_be_saved: list[int] = []
        """Iterations whose state could be saved."""
        cfg = composed.load()
        parts, reporter = MagicMock(), MagicMock()
        parts.sentinel = Sentinel.start(cfg.sentinel)
        parts.ledger = self.ledger = Ledger.load(directory / "ledger.jsonl")
        parts.mailbox = self.mailbox = Mailbox[Any](size=1, lag=cfg.sentinel.lag, device=torch.device("cpu"))
        parts.check.receive.return_value = None
        parts.checkpoints.on_step_record = self.on_step_record
        parts.checkpoints.write_queued = self.write_queued
        reporter.emit_step.side_effect = lambda logged, **_: logged
        reporter.emit_event.side_effect = self.on_event
        monkeypatch.setattr("harness.run.unpack_report", lambda _layout, facts, _values, **_: facts.record)
        monkeypatch.setattr(recovery, "held_out_mean", lambda _: HELD_OUT_LOSS)
        monkeypatch.setattr(recovery, "gather_results", lambda work: [work()])
        self.run = Run(
            cfg=cfg,
            directory=RunDir(directory),
            parts=parts,
            state=RunState(),
            reporter=reporter,
            stop=MagicMock(),
            inbox=None,
            heartbeat=MagicMock(),
            gc_schedule=MagicMock(),
            profiler=MagicMock(),
        )
        parts.sentinel.on_held_out_measured(HeldOutMeasured(time=0.0, iteration=0, step=0, loss=HELD_OUT_LOSS))

    def on_step_record(self, record: StepRecord, _state: RunState, *, is_busy: bool, **_: Any) -> None:
        self.processed.append(record.iteration)
        if not is_busy:
            self.require_recorded(until=record.iteration - 1)
            self.may_be_shared.append(record.iteration)

    def write_queued(self) -> None:
        self.require_recorded(until=self.processed[-1])
        self.may_be_saved.append(self.processed[-1])

    def require_recorded(self, *, until: int) -> None:
        for iteration, batch in self.rejected:
            is_recorded = self.ledger.is_excluded(batch) or self.ledger.is_given_back(batch)
            assert iteration > until or is_recorded, f"batch {batch} is lost if the run resumes from {until}"

    def on_event(self, event: Event) -> None:
        if isinstance(event, Action):
            self.taken.append(event.kind)

    def iterate(self, *, refused: bool = False, **facts: Any) -> None:
        """Issue one update, then process the report that is ready and carry out what it calls for."""
        state = self.run.state
        batch = state.cursor
        state.advance(next_cursor=batch + 1, tokens=1)
        if refused:
            self.rejected.append((state.iteration, batch))
        loss = 5.0 if refused else 3.0
        now = record(state.iteration, step=state.step - refused, cursor=batch, loss=loss, refused=refused)
        report = {"record": replace(now, **facts), "iteration": state.iteration}
        self.mailbox.post(SimpleNamespace(**report, probed=False, posted_s=0.0, batch_tokens=1), torch.zeros(1))
        assert train.process_reports(self.run) is None

    def iterate_clean(self, num: int) -> None:
        for _ in range(num):
            self.iterate()


def test_a_state_is_saved_or_shared_once_all_that_its_record_calls_for_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out check of a rejected update reads the reports in flight, while its batch is not in the ledger yet."""
    run = Harness(tmp_path, monkeypatch)
    run.iterate_clean(60)
    run.iterate(refused=True)
    run.iterate_clean(20)
    run.iterate(refused=True, in_planned_change=True)
    run.iterate_clean(3)
    assert run.taken == [ActionKind.skip, ActionKind.check, ActionKind.accept]
    assert run.processed == [*range(1, 85)]
    assert run.may_be_shared == [*range(1, 82), 84]
    assert run.may_be_saved == [*range(1, 82), 83, 84]


@pytest.mark.parametrize(
    ("num_rejected", "kind"), [(1, ActionKind.skip), (3, ActionKind.accept)], ids=["skip", "accept"]
)
def test_a_run_ends_if_a_rejected_batch_cannot_be_written_to_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rejected: int, kind: ActionKind
) -> None:
    """It resumes from before that batch: the state behind it is not saved."""
    run = Harness(tmp_path, monkeypatch)
    run.iterate_clean(60)
    for _ in range(num_rejected - 1):
        run.iterate(refused=True)
        run.iterate()
    run.iterate(refused=True)
    run.ledger.path = tmp_path / "missing" / "ledger.jsonl"
    with pytest.raises(StorageError, match=r"/ledger.jsonl: cannot write it: .*No such file") as raised:
        run.iterate()
    assert raised.value.is_shared
    assert run.taken[-1] is kind
    assert run.may_be_saved[-1] == 60 + 2 * num_rejected - 2
    assert len(run.ledger) == num_rejected - 1
