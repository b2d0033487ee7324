"""The three promises: a refused update changes nothing, a skipped batch has no effect, decisions can be replayed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.replay.request import ReplayRequest
from harness.analysis.replay.rerun import replay_config, run_replay_worker
from harness.core import event_json
from harness.core.events import (
    Action,
    ActionKind,
    CheckpointJudged,
    EvalRecord,
    Event,
    Finding,
    FindingKind,
    Outcome,
    RunEnded,
    StepRecord,
)
from harness.core.rundir import RunDir
from harness.sentinel.policy.policy import replay_actions
from harness.sentinel.policy.policy_state import RESTORES
from tests.distributed import cases, faulty_runs
from tests.distributed.cases import tiny
from tests.distributed.common_part import copy_common_part
from tests.distributed.faulty_runs import Fault, RankResult
from tests.distributed.pool import Pool

NUM_STEPS = 30
STEPS = (
    "model.num_layers=1",
    f"train.num_steps={NUM_STEPS}",
    "optim.warmup_steps=5",
    "checkpoint.every_steps=5",
    "checkpoint.good_after_steps=3",
    "checkpoint.ring.every_steps=4",
    "checkpoint.keep=100",
    "sentinel.policy.rollback_margin_steps=2",
    "sentinel.policy.rollback_window_batches=6",
)

RARE_CHECKPOINTS = "checkpoint.every_steps=20"
"""For runs that never roll back to a checkpoint: writing them costs more than the steps."""

WITHOUT_SNAPSHOTS = "checkpoint.ring.slots=0"
COMMON_STEPS = 18
"""Runs that differ only later continue a copy of this part."""
FAULT_AT = 24
"""The batch of a bad gradient, and the iteration whose update damages the weights."""
FAULTY_LAYER = "blocks.0.mlp.up"


def run(ranks: Pool, directory: Path, name: str, fault: Fault | None, *overrides: str) -> RankResult:
    """A run on two ranks, which must end equally."""
    results = ranks.run(2, faulty_runs.run, str(directory), fault, f"run.name={name}", *STEPS, *overrides)
    assert len({(result.code, result.state) for result in results}) == 1
    first: RankResult = results[0]
    return first


def events_of(kind: Any, log: list[Event]) -> list[Any]:
    return [event for event in log if isinstance(event, kind)]


def refused(log: list[Event]) -> list[StepRecord]:
    return [record for record in events_of(StepRecord, log) if record.refused]


def actions(log: list[Event]) -> list[ActionKind]:
    return [action.kind for action in events_of(Action, log)]


def check_replay(log: list[Event], *overrides: str) -> None:
    """Replaying the logged records through the policy gives the logged actions."""
    cfg = tiny(*STEPS, *overrides).sentinel
    again = replay_actions(log, cfg.policy, lag=cfg.lag)
    logged = [action for action in events_of(Action, log) if action.incident]
    assert [(a.kind, a.iteration, a.onset, a.exclude) for a in again] == [
        (a.kind, a.iteration, a.onset, a.exclude) for a in logged
    ]


TWINS: dict[tuple[Any, ...], RankResult] = {}
"""Cached control runs, by config and excluded batches."""


def run_from_common_steps(ranks: Pool, directory: Path, name: str, fault: Fault | None, *overrides: str) -> RankResult:
    """The same, but the common part is not trained again. It has snapshots, which end with its process."""
    cfg = tiny(*STEPS, *(override for override in overrides if override != WITHOUT_SNAPSHOTS))
    copy_common_part(ranks, directory.parent, cfg, COMMON_STEPS, RunDir(directory / name))
    return run(ranks, directory, name, fault, *overrides)


def check_twin(ranks: Pool, directory: Path, victim: RankResult, *overrides: str) -> RankResult:
    """A control run that excluded the same batches ends bit-identical, without an incident."""
    entries = [json.loads(line) for line in (directory / "victim" / "ledger.jsonl").read_text().splitlines()]
    twin_key = (overrides, *((entry["first"], entry["last"]) for entry in entries))
    if twin_key not in TWINS:
        faulty_runs.copy_ledger(directory / "victim", directory / "twin")
        TWINS[twin_key] = run_from_common_steps(ranks, directory, "twin", None, *overrides)
    twin = TWINS[twin_key]
    assert twin.code == victim.code == 0
    assert twin.state == victim.state
    assert not refused(twin.log)
    assert set(actions(twin.log)) <= {ActionKind.watch}
    return twin


@pytest.mark.full
@pytest.mark.parametrize("factor", [math.nan, 1e6], ids=["nan", "large"])
def test_a_bad_gradient_of_one_rank_is_refused_attributed_and_excluded(
    ranks: Pool, tmp_path: Path, factor: float
) -> None:
    faulty_rank = 1
    fault = Fault("gradient", faulty_rank, factor=factor, batch=FAULT_AT, layer=FAULTY_LAYER)
    victim = run_from_common_steps(ranks, tmp_path, "victim", fault)
    (record,) = refused(victim.log)
    assert record.cursor == FAULT_AT
    other_actions = [kind for kind in actions(victim.log) if kind is not ActionKind.watch]
    assert other_actions == [ActionKind.skip], "one bad step, one refusal: OLMo-core's rule skips 129"
    ledger = [json.loads(line) for line in (tmp_path / "victim" / "ledger.jsonl").read_text().splitlines()]
    assert [(entry["first"], entry["last"]) for entry in ledger] == [(FAULT_AT, FAULT_AT)]
    group = FAULTY_LAYER.rpartition(".mlp")[0]
    kind = FindingKind.grad_spike if math.isfinite(factor) else FindingKind.nonfinite
    (finding,) = [each for each in events_of(Finding, victim.log) if each.kind is kind]
    assert (finding.ranks, finding.groups, finding.cursors) == ([faulty_rank], [group], [FAULT_AT])
    check_replay(victim.log)
    check_twin(ranks, tmp_path, victim)


@pytest.mark.full
def test_damaged_weights_are_rewound(ranks: Pool, tmp_path: Path) -> None:
    """A bad update was applied: the following updates are refused, and the state before it is restored."""
    fault = Fault("weights", 1, factor=30.0, iteration=FAULT_AT - COMMON_STEPS)
    victim = run_from_common_steps(ranks, tmp_path, "victim", fault)
    assert ActionKind.rewind in actions(victim.log)
    assert ActionKind.rollback not in actions(victim.log)
    (outcome,) = [each for each in events_of(Outcome, victim.log) if each.kind is ActionKind.rewind]
    assert outcome.succeeded
    assert outcome.target.startswith("snapshot of iteration 2")
    assert 0 < outcome.steps_lost <= 12
    check_replay(victim.log)
    check_twin(ranks, tmp_path, victim)


@pytest.mark.full
@pytest.mark.parametrize("last", [0, 1])
def test_damage_by_the_last_updates_is_found(ranks: Pool, tmp_path: Path, last: int) -> None:
    """No step follows that shows damage by the very last update. Damage by the one before is rewound, and the state
    that was not kept is not evaluated."""
    fault = Fault("weights", 1, factor=100.0, iteration=NUM_STEPS - last - COMMON_STEPS)
    victim = run_from_common_steps(ranks, tmp_path, "victim", fault, f"eval.every_steps={NUM_STEPS // 2}")
    assert victim.code == 0
    evaluated = {event.step: event.loss for event in events_of(EvalRecord, victim.log)}
    assert len(events_of(EvalRecord, victim.log)) == 2
    assert sorted(evaluated) == [NUM_STEPS // 2, NUM_STEPS]
    reason = events_of(RunEnded, victim.log)[-1].reason
    if last == 0:
        found = re.fullmatch(r"all steps done, but the held-out loss of the last state is (.*), above (.*): .*", reason)
        assert found is not None
        assert float(found[1]) > 1.2 * float(found[2])
        good = [event.directory for event in events_of(CheckpointJudged, victim.log)]
        assert f"step-{NUM_STEPS:08d}-gen-0" not in good
    else:
        assert reason == "all steps done"
        assert evaluated[NUM_STEPS] < evaluated[NUM_STEPS // 2], "that of the state that was kept"


@pytest.mark.full
def test_without_snapshots_a_good_checkpoint_is_restored(ranks: Pool, tmp_path: Path) -> None:
    overrides = (WITHOUT_SNAPSHOTS,)
    fault = Fault("weights", 0, factor=30.0, iteration=FAULT_AT - COMMON_STEPS)
    victim = run_from_common_steps(ranks, tmp_path, "victim", fault, *overrides)
    assert [kind for kind in actions(victim.log) if kind in (ActionKind.rewind, ActionKind.rollback)] == [
        ActionKind.rewind,
        ActionKind.rollback,
    ]
    rewound, rolled_back = [
        each for each in events_of(Outcome, victim.log) if each.kind in (ActionKind.rewind, ActionKind.rollback)
    ]
    assert not rewound.succeeded
    assert rolled_back.succeeded
    assert rolled_back.target.startswith("step-000000")
    check_replay(victim.log, *overrides)
    check_twin(ranks, tmp_path, victim, *overrides)


@pytest.mark.full
def test_a_nan_weight_is_restored(ranks: Pool, tmp_path: Path) -> None:
    """OLMo-core and levanter multiply by zero, and NaN times zero is NaN."""
    fault = Fault("weights", 1, factor=math.nan, iteration=FAULT_AT - COMMON_STEPS)
    victim = run_from_common_steps(ranks, tmp_path, "victim", fault)
    assert victim.code == 0
    restored = [
        each for each in events_of(Outcome, victim.log) if each.kind in (ActionKind.rewind, ActionKind.rollback)
    ]
    assert restored[-1].succeeded
    last = events_of(StepRecord, victim.log[: victim.log.index(restored[-1])])[-1]
    assert last.refused
    assert restored[-1].steps_lost == last.step - restored[-1].step, "a rejected update in flight was not applied"
    check_replay(victim.log)
    check_twin(ranks, tmp_path, victim)


@pytest.mark.full
def test_the_gate_works_from_the_first_step_after_a_restart(ranks: Pool, tmp_path: Path) -> None:
    """OLMo-core does not save its history: 63 steps after each restart are unguarded."""
    fault = Fault("gradient", 1, factor=1e6, iteration=1, layer=FAULTY_LAYER)
    victim = run_from_common_steps(ranks, tmp_path, "victim", fault)
    assert [record.cursor for record in refused(victim.log)] == [COMMON_STEPS]


@pytest.mark.full
def test_a_learning_rate_that_a_resume_changes_is_no_jump_also_after_a_rollback(ranks: Pool, tmp_path: Path) -> None:
    """The second start changes it after step 9. Its NaN weights lead back to step 5, where it was the old one."""
    overrides = (WITHOUT_SNAPSHOTS, "run.resume=changed", "optim.schedule=constant")
    run(ranks, tmp_path, "victim", None, *overrides, "optim.lr=1e-3", "train.num_steps=9")
    fault = Fault("weights", 1, factor=math.nan, iteration=1)
    again = run(ranks, tmp_path, "victim", fault, *overrides, "optim.lr=3e-4", "train.num_steps=13")
    assert again.code == 0
    (restored,) = [each for each in events_of(Outcome, again.log) if each.succeeded and each.kind in RESTORES]
    assert restored.step == 5
    assert [record.lr for record in events_of(StepRecord, again.log) if record.step in (5, 6)] == pytest.approx(
        [1e-3, 1e-3, 3e-4]
    )
    assert FindingKind.lr_jump not in [found.kind for found in events_of(Finding, again.log)]
    check_replay(again.log, *overrides, "optim.lr=3e-4", "train.num_steps=13")


FP8_FALLBACK = (
    "sentinel.detect.fp8_underflow=1e-9",
    "sentinel.probe_every=4",
    "sentinel.policy.precision_iterations=6",
    "optim.schedule=constant",
    "model.num_layers=1",
)
"""A threshold near zero: every probe finds some underflow."""


@pytest.mark.full
def test_all_ranks_fall_back_from_fp8_together_also_after_a_restart_and_in_a_replay(
    ranks: Pool, tmp_path: Path
) -> None:
    """Found at iteration 1, bf16 for 6 iterations; found again at 9, bf16 for 12. The run restarts inside the first
    window."""
    before = ranks.run(2, cases.run_in_fp8, str(tmp_path), *FP8_FALLBACK, "train.num_steps=5")
    again = (*FP8_FALLBACK, "train.num_steps=12", "run.resume=changed")
    after = ranks.run(2, cases.run_in_fp8, str(tmp_path), *again)
    assert before == 2 * [[True, True, False, False, False]]
    assert after == 2 * [[False, False, False, True, True, False, False]]
    victim = RunDir(tmp_path / "victim")
    log = list(event_json.read(victim.events))
    fallbacks = [(each.iteration, each.in_fp8, each.until) for each in events_of(Action, log)]
    assert fallbacks == [(1, False, 8), (7, True, None), (9, False, 22)]
    check_replay(log, *again)
    cfg = replay_config(tiny("precision=fp8_emulated", "run.name=victim", *FP8_FALLBACK, directory=str(tmp_path)))
    request = ReplayRequest(
        run=victim.path,
        report=tmp_path / "replay.json",
        checkpoint=None,
        steps=events_of(StepRecord, log)[:4],
        older=None,
        exactly=True,
        with_samples=False,
    )
    assert ranks.run(2, run_replay_worker, request, cfg) == [0, 0]
    found = json.loads(request.report.read_text())
    assert (found["left_the_log_at"], found["nature"]) == (None, "deterministic"), (
        "each step is replayed in its own precision"
    )


def test_ranks_that_decide_differently_halt_with_an_error(ranks: Pool, tmp_path: Path) -> None:
    victim = run_with_diverging_digest(ranks, tmp_path)
    ended = victim.log[-1]
    assert isinstance(ended, RunEnded)
    assert ended.exit_code == 3
    assert re.fullmatch(r"ranks decided differently: {'[0-9a-f]{6}': \[[01]\], '[0-9a-f]{6}': \[[01]\]}", ended.reason)


def run_with_diverging_digest(ranks: Pool, directory: Path) -> RankResult:
    fault = Fault("digest", 1, iteration=4)
    first, second = ranks.run(2, faulty_runs.run, str(directory), fault, "run.name=victim", *STEPS)
    assert (first.code, second.code) == (3, 3)
    return RankResult(first.code, first.state, first.log)
