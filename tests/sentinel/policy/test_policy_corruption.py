"""Tests of the policy with silent data corruption: no batch is lost, and a rank that stays wrong ends the run."""

from __future__ import annotations

from dataclasses import replace

from harness.config.sentinel import AllowedActions
from harness.core.events import Action, Event, StepRecord
from harness.sentinel.policy.policy import Policy, replay_actions
from tests.sentinel.policy_runs import LAG, F, K, Run, defaults, finding, kind_of, outcome, record


def corrupted(iteration: int) -> StepRecord:
    now = record(iteration, step=iteration - 1, refused=True)
    return replace(now, recomputed=0, corrupted_ranks=[1], corrupted="output of blocks.1")


def test_the_batch_of_a_corrupted_update_is_consumed_again_and_nobody_is_blamed() -> None:
    policy = Policy.start(defaults(), lag=LAG)
    for iteration in range(1, 60):
        assert policy.decide(record(iteration, sources={"web": 3.0}), []) is None
    now = corrupted(60)
    action = policy.decide(now, [finding(F.corruption, now)])
    assert action is not None
    assert (action.kind, action.exclude, action.give_back) == (K.skip, [], [[59, 59]])
    assert policy.policy_state.rejections.num_in_row == 0, "it says nothing about the state"
    assert policy.policy_state.suspects.state()["blamed"] == []


def test_many_corrupted_updates_in_a_row_are_not_taken_for_a_damaged_state() -> None:
    policy = Policy.start(defaults(), lag=LAG)
    for iteration in range(1, 60):
        policy.decide(record(iteration), [])
    for iteration in range(60, 66):
        action = policy.decide(corrupted(iteration), [])
        assert action is not None
        assert action.kind is K.skip
        assert policy.on_outcome(outcome(action, step=59)) is None


def test_a_corrupting_rank_is_restored_once_and_then_halts_without_a_cure() -> None:
    run = Run()
    run.iterate_clean(150)
    rewind = run.iterate(F.corrupting_rank, back=10)
    assert rewind is not None
    assert (rewind.kind, rewind.onset, rewind.exclude) == (K.rewind, 141, [])
    assert run.restore(rewind, steps=12) is None, "neither cool nor swap"
    run.iterate_clean(20)
    halt = run.iterate(F.corrupting_rank)
    assert halt is not None
    assert halt.kind is K.halt
    assert "restart without its machine" in halt.reason


def test_fp8_that_does_not_fit_is_left_also_after_a_corrupting_rank() -> None:
    run = Run()
    run.iterate_clean(150)
    rewind = run.iterate(F.corrupting_rank)
    assert rewind is not None
    assert run.restore(rewind, steps=5) is None
    run.iterate_clean(10)
    left = run.iterate(F.fp8_range)
    assert left is not None
    assert (left.kind, left.in_fp8) == (K.precision, False)
    assert run.fail(left) is None, "neither cool nor swap"


def test_a_preset_that_only_logs_watches_corruption() -> None:
    run = Run(replace(defaults(), actions=AllowedActions.nonfinite_only))
    run.iterate_clean(150)
    assert kind_of(run.iterate(F.corruption)) is K.watch
    assert kind_of(run.iterate(F.corrupting_rank)) in (None, K.watch)


def test_actions_are_replayed_from_the_log() -> None:
    policy = Policy.start(defaults(), lag=LAG)
    log: list[Event] = []
    for iteration in range(1, 140):
        is_bad = iteration in (100, 102, 103, 130, 132, 133)
        now = corrupted(iteration) if is_bad else record(iteration)
        kinds = {100: F.corruption, 103: F.corrupting_rank, 130: F.corruption, 133: F.corrupting_rank}
        findings = [finding(kinds[iteration], now, onset=90)] if iteration in kinds else []
        log += [now, *findings]
        action = policy.decide(now, findings)
        while action is not None:
            result = outcome(action, step=now.step)
            log += [action, result]
            action = policy.on_outcome(result)
    taken = [event for event in log if isinstance(event, Action)]
    assert [action.kind for action in taken][-1] is K.halt
    assert replay_actions(log, defaults(), lag=LAG) == taken
