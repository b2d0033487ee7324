"""Trials of remedies on real ranks: kept steps have the bits of plain training, and a kill loses nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.core import event_json
from harness.core.events import Action, ActionKind, Event, Outcome, RunEnded, StepRecord, TrialMeasured
from harness.core.rundir import RunDir
from harness.sentinel.policy.trial_choice import is_healthy
from tests.bench.trials import HOT
from tests.distributed import faulty_runs, test_sentinel
from tests.distributed.cases import tiny
from tests.distributed.common_part import copy_common_part
from tests.distributed.faulty_runs import Fault, RankResult
from tests.distributed.killable_ranks import KillableRanks, KillAtCall, Place, When
from tests.distributed.pool import Pool
from tests.distributed.test_sentinel import check_replay, events_of

NUM_STEPS = "train.num_steps=34"
STEPS = (*test_sentinel.STEPS, NUM_STEPS, test_sentinel.RARE_CHECKPOINTS, "model.num_layers=1")
TRIALS = ("sentinel.policy.trials=4", "sentinel.policy.trial_steps=4")
DAMAGE_AT, COMMON_STEPS = 22, 14
"""The update of this iteration damages the weights: the run rewinds, and is healthy again. Victims and twins continue a
copy of the part before it."""
BATCH_TOKENS = 8 * 32
TWINS: dict[bytes, list[RankResult]] = {}
"""Control runs by their ledger, which is all that they have of the victim."""


def damage(num_before: int) -> Fault:
    """The fault in a run that has this many steps behind it."""
    return Fault("weights", 1, factor=30.0, iteration=DAMAGE_AT - num_before)


def copy_common_steps(ranks: Pool, directory: Path, name: str) -> None:
    copy_common_part(ranks, directory.parent, tiny(*STEPS, *TRIALS), COMMON_STEPS, RunDir(directory / name))


def train_twin(ranks: Pool, directory: Path) -> list[RankResult]:
    """The control run with the ledger of the victim."""
    ledger = RunDir(directory / "victim").ledger.read_bytes()
    if ledger not in TWINS:
        faulty_runs.copy_ledger(directory / "victim", directory / "twin")
        copy_common_steps(ranks, directory, "twin")
        TWINS[ledger] = ranks.run(2, faulty_runs.run, str(directory), None, "run.name=twin", *STEPS, *TRIALS)
    return TWINS[ledger]


def run(ranks: Pool, directory: Path, name: str, fault: Fault | None, *overrides: str) -> RankResult:
    results = ranks.run(2, faulty_runs.run, str(directory), fault, f"run.name={name}", *overrides)
    assert len({(result.code, result.state) for result in results}) == 1
    first: RankResult = results[0]
    return first


def trial_outcomes(log: list[Event]) -> list[Outcome]:
    return [each for each in events_of(Outcome, log) if each.kind is ActionKind.trial]


def check_log(log: list[Event]) -> None:
    """Iterations never go back, and the present lineage consumed every batch that is not excluded once."""
    iterations = [record.iteration for record in events_of(StepRecord, log)]
    assert iterations == sorted(set(iterations))


@pytest.mark.full
def test_the_steps_of_a_healthy_trial_are_kept_bit_for_bit(ranks: Pool, tmp_path: Path) -> None:
    """With and without trials the run ends in the same state, after the same records, and so does its twin."""
    copy_common_steps(ranks, tmp_path, "victim")
    victim = run(ranks, tmp_path, "victim", damage(COMMON_STEPS), *STEPS, *TRIALS)
    plain = run(ranks, tmp_path, "plain", damage(0), *STEPS)
    twin = train_twin(ranks, tmp_path)[0]
    assert victim.code == plain.code == twin.code == 0
    assert victim.state == plain.state == twin.state
    (outcome,) = trial_outcomes(victim.log)
    assert outcome.succeeded
    assert (outcome.remedy, outcome.kept_steps, outcome.steps_lost) == ("unchanged", 4, 0)
    (result,) = events_of(TrialMeasured, victim.log)
    assert result.iteration == outcome.iteration
    records = [
        [(each.iteration, each.step, each.cursor, each.loss, each.grad_norm) for each in events_of(StepRecord, log)]
        for log in (victim.log, plain.log)
    ]
    assert records[0] == records[1]
    check_log(victim.log)
    check_replay(victim.log, *TRIALS)
    assert not trial_outcomes(twin.log)


@pytest.mark.full
def test_a_trial_finds_the_remedy_that_the_ladder_tries_last(ranks: Pool, tmp_path: Path) -> None:
    """The learning rate rises without end. The ladder excludes batches first, which does not help."""
    overrides = (*HOT, "optim.lr=3", "eval.every_steps=0", "train.num_steps=60", *TRIALS)
    victim = run(ranks, tmp_path, "victim", None, *overrides, "optim.warmup_steps=60")
    trials = events_of(TrialMeasured, victim.log)
    first = trials[: 1 + next(number for number, each in enumerate(trials) if each.remedy == "lower_lr")]
    assert not is_healthy(first[0])
    assert first[-1].held_out_loss < first[0].held_out_loss
    outcome = trial_outcomes(victim.log)[0]
    assert outcome.remedy == "lower_lr"
    for each in trial_outcomes(victim.log):
        assert each.tokens_lost == each.steps_lost * BATCH_TOKENS
    assert outcome.tokens_lost > 0
    kinds = [action.kind for action in events_of(Action, victim.log)]
    cool = kinds.index(ActionKind.cool)
    assert sum(kind in (ActionKind.rewind, ActionKind.rollback) for kind in kinds[:cool]) < 3, "the ladder's rule"
    check_log(victim.log)


@pytest.fixture(scope="module")
def killable() -> Iterator[KillableRanks]:
    ranks = KillableRanks("tests.distributed.faulty_runs", "harness.train")
    yield ranks
    ranks.close()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked from a process that imported torch")
@pytest.mark.parametrize("place", ["train_candidate", "measure_candidate", "restore_steps"])
def test_a_run_killed_in_a_trial_resumes_as_if_there_had_been_none(
    ranks: Pool, killable: KillableRanks, tmp_path: Path, place: str
) -> None:
    def attempt(fault: Fault | None, **options: Any) -> Any:
        arguments = (str(tmp_path), fault, "run.name=victim", *STEPS, *TRIALS)
        return killable.run(2, faulty_runs.run, *arguments, **options)

    module = "harness.recovery" if place == "restore_steps" else "harness.trials"
    kill = KillAtCall(place=Place("trial", f"{module}:{place}"), when=When.after, nth=1, rank=1, grace_s=0.0)
    copy_common_steps(ranks, tmp_path, "victim")
    assert attempt(damage(COMMON_STEPS), kill_point=kill).killed
    run_dir = RunDir(tmp_path / "victim")
    killed_log = list(event_json.read(run_dir.events))
    assert [each.kind for each in events_of(Action, killed_log)][-1] is ActionKind.trial
    resumed = attempt(None).results
    log = list(event_json.read(run_dir.events))
    twin = train_twin(ranks, tmp_path)
    assert [result.state for result in resumed] == [result.state for result in twin]
    assert isinstance(log[-1], RunEnded)
    assert log[-1].exit_code == 0
    check_log(log)
    check_replay(log, *TRIALS)
