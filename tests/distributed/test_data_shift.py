"""Different data is not damage, on real ranks: the same rise of the loss, opposite actions, and no batch is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.analysis.replay import history
from harness.analysis.replay.request import plan_replay
from harness.analysis.replay.rerun import replay_config, run_replay_worker
from harness.build import Parts
from harness.checkpoint import catalog
from harness.core import event_json
from harness.core.events import Action, ActionKind, Event, Outcome, StepRecord
from harness.core.rundir import RunDir
from harness.data.order.ledger import Ledger, Revocation
from harness.data.sources import open_data
from harness.faults.bad_batches import corrupt_batches
from harness.faults.fault_plan import Fault as Shift
from harness.faults.fault_plan import FaultKind
from harness.sentinel.policy.policy import replay_actions
from tests.distributed import faulty_runs
from tests.distributed.cases import tiny
from tests.distributed.common_part import copy_common_part
from tests.distributed.faulty_runs import Fault, RankResult
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

NUM_STEPS = 62
SHIFT = 52
COMMON_STEPS = 40
STEPS = (
    "model.num_layers=1",
    f"train.num_steps={NUM_STEPS}",
    "optim.warmup_steps=5",
    "checkpoint.every_steps=20",
    "checkpoint.good_after_steps=3",
    "checkpoint.ring.every_steps=4",
)


LATER = (f"data.phases=[{{from_batch: {SHIFT}, weights: {{synthetic: 0.002}}}}]", "run.resume=changed")
"""Overrides that a run is continued with after the common part: the planned change."""


def run(ranks: Pool, directory: Path, name: str, fault: Fault | None, *overrides: str) -> RankResult:
    """A run that continues a copy of the part before the fault."""
    cfg = tiny(*STEPS, *(override for override in overrides if override not in LATER))
    copy_common_part(ranks, directory.parent, cfg, COMMON_STEPS, RunDir(directory / name))
    results = ranks.run(2, faulty_runs.run, str(directory), fault, f"run.name={name}", *STEPS, *overrides)
    assert len({(result.code, result.state) for result in results}) == 1
    first: RankResult = results[0]
    return first


def events_of(kind: Any, log: list[Event]) -> list[Any]:
    return [event for event in log if isinstance(event, kind)]


def action_kinds(log: list[Event]) -> list[ActionKind]:
    return [action.kind for action in events_of(Action, log) if action.kind is not ActionKind.watch]


def consumed(log: list[Event]) -> list[int]:
    return [record.cursor for record in events_of(StepRecord, log) if not record.refused]


def check_replay(log: list[Event]) -> None:
    cfg = tiny(*STEPS).sentinel
    again = [
        (action.kind, action.iteration, action.give_back) for action in replay_actions(log, cfg.policy, lag=cfg.lag)
    ]
    assert again == [(action.kind, action.iteration, action.give_back) for action in events_of(Action, log)]


def shift_data(factor: float, parts: Parts) -> None:
    """What `Fault("data")` does to a run."""
    shift = Shift(kind=FaultKind.data_shift, at=SHIFT, duration=faulty_runs.SHIFT_DURATION, factor=factor)
    corrupt_batches(parts.batches, shift, seed=0, world_size=2)


def replay_last_step(ranks: Pool, run: RunDir, factor: float, *overrides: str) -> dict[str, Any]:
    """Replay the last step of a run from the checkpoint before the shift."""
    cfg = replay_config(tiny(*STEPS, *overrides, f"run.name={run.path.name}", directory=str(run.path.parent)))
    log = history.read(run.events)
    last = events_of(StepRecord, list(event_json.read(run.events)))[-1].iteration
    names = [saved.name for saved in catalog.list_checkpoints(run.checkpoints) if log.checkpoints[saved.name] < SHIFT]
    path = history.find_path(log, last, names)
    planned = plan_replay(run, cfg, log, path, ranks=2, report=run.path / "replay.json")
    request = replace(planned, tamper=partial(shift_data, factor))
    assert ranks.run(2, run_replay_worker, request, cfg) == [0, 0]
    found: dict[str, Any] = json.loads(request.report.read_text())
    assert found["num_on_the_way"] > last - SHIFT
    return found


def test_a_replay_accepts_the_updates_of_a_planned_change(ranks: Pool, tmp_path: Path) -> None:
    """Without the window the gate rejects the first of them."""
    mixture = ("data=mixture", "data.sources.synthetic.weight=0.001", "data.phases=[]")
    shift = Fault("data", 0, factor=1.0, batch=SHIFT)
    unplanned = run(ranks, tmp_path, "unplanned", shift, *mixture)
    assert any(record.refused for record in events_of(StepRecord, unplanned.log))
    victim = run(ranks, tmp_path, "victim", shift, *mixture, *LATER)
    assert not any(record.refused for record in events_of(StepRecord, victim.log))
    found = replay_last_step(ranks, RunDir(tmp_path / "victim"), 1.0, *mixture, *LATER)
    assert (found["left_the_log_at"], found["nature"]) == (None, "deterministic")


def test_new_data_is_accepted_and_a_control_with_the_final_ledger_has_the_same_weights(
    ranks: Pool, tmp_path: Path
) -> None:
    shift = Fault("data", 0, factor=0.8, batch=SHIFT)
    victim = run(ranks, tmp_path, "victim", shift)
    assert victim.code == 0
    assert action_kinds(victim.log) == [ActionKind.skip, ActionKind.skip, ActionKind.check, ActionKind.accept]
    (check,) = [each for each in events_of(Outcome, victim.log) if each.kind is ActionKind.check]
    (request,) = [each for each in events_of(Action, victim.log) if each.kind is ActionKind.check]
    assert check.held_out_loss <= 1.05 * request.level
    assert sorted(consumed(victim.log)) == list(range(NUM_STEPS)), "every batch was trained on once"
    ledger = Ledger.load(RunDir(tmp_path / "victim").ledger, writer=False)
    assert ledger.num_excluded == 0
    assert isinstance(ledger.entries[-1], Revocation)
    check_replay(victim.log)
    found = replay_last_step(ranks, RunDir(tmp_path / "victim"), 0.8)
    assert (found["left_the_log_at"], found["nature"]) == (None, "deterministic"), "the gate accepts the new level"
    faulty_runs.copy_ledger(tmp_path / "victim", tmp_path / "control")
    control = run(ranks, tmp_path, "control", shift)
    assert consumed(control.log) == consumed(victim.log)
    assert control.weights == victim.weights


def test_the_same_rise_from_damaged_weights_is_rewound(ranks: Pool, tmp_path: Path) -> None:
    victim = run(ranks, tmp_path, "victim", Fault("weights", 0, factor=30.0, iteration=SHIFT - COMMON_STEPS))
    assert victim.code == 0
    kinds = action_kinds(victim.log)
    assert kinds[kinds.index(ActionKind.check) + 1] is ActionKind.rewind
    assert ActionKind.accept not in kinds
    (check,) = [each for each in events_of(Outcome, victim.log) if each.kind is ActionKind.check]
    (request,) = [each for each in events_of(Action, victim.log) if each.kind is ActionKind.check]
    assert check.held_out_loss > 1.05 * request.level
    check_replay(victim.log)


def test_a_source_swap_never_leaves_a_run_without_data(tmp_path: Path) -> None:
    """A phase turns the other source off: the remaining one cannot be turned off, now or later."""
    phases = "data.phases=[{from_batch: 50, weights: {synthetic: 0.0}}]"
    cfg = tiny("data=mixture", phases, directory=str(tmp_path))
    ledger = Ledger(tmp_path / "ledger.jsonl")

    def open_batches() -> Any:
        cpu = torch.device("cpu")
        return open_data(cfg, rank=0, world_size=1, device=cpu, ledger=Ledger.load(tmp_path / "ledger.jsonl"))[0]

    batches = open_data(cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=ledger)[0]
    assert not batches.can_reweight(60, {"text": 0.0})
    assert not batches.can_reweight(10, {"text": 0.0}), "from batch 50 on nothing would be left"
    assert batches.can_reweight(10, {"synthetic": 0.0})
    ledger.reweight(10, {"synthetic": 0.0}, "as a swap does")
    assert not batches.can_reweight(20, {"text": 0.0})
    again = open_batches()
    assert json.dumps(again.mixture.phases[-1].weights) == "[1.0, 0.0]"
    for each in (batches, again):
        each.close()
