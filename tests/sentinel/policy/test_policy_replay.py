"""The policy can be saved, rebuilt from its log, and compared with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace

from harness.core.event_json import from_json, to_json
from harness.core.events import Action, Event, Finding, RunStarted, StepRecord
from harness.sentinel.policy.policy import Policy, replay_actions
from harness.sentinel.sentinel import Sentinel
from tests import composed
from tests.sentinel.policy_runs import LAG, F, K, Run, defaults, finding, kind_of, record


class TestReplay:
    def test_a_restart_after_a_halt_resets_the_incidents(self) -> None:
        log = clean_log(100)
        log += decide_on(log, finding(F.replica_mismatch, last_record(log)))
        assert isinstance(log[-1], Action)
        assert log[-1].kind is K.halt
        halted = Policy.replay(defaults(), log, lag=LAG)
        assert halted.decide(record(101), [finding(F.divergence, record(101))]) is None
        log.append(RunStarted(time=0.0, iteration=100, world_size=2, num_steps=500, step=100))
        policy = Policy.replay(defaults(), log, lag=LAG)
        assert kind_of(policy.decide(record(101), [finding(F.divergence, record(101))])) is K.rollback

    def test_a_crash_between_an_action_and_its_outcome_does_not_block_the_policy(self) -> None:
        log = clean_log(100)
        log += decide_on(log, finding(F.divergence, last_record(log)))
        log.append(RunStarted(time=0.0, iteration=100, world_size=2, num_steps=500, step=80))
        policy = Policy.replay(defaults(), log, lag=LAG)
        now = record(101, step=81)
        assert kind_of(policy.decide(now, [finding(F.divergence, now)])) is K.rollback

    def test_a_restart_after_a_halt_resets_the_window_budget_but_not_the_run_budget(self) -> None:
        run = Run(replace(defaults(), min_lr_scale=1.0))
        run.iterate_clean(300)
        rollback = run.iterate(F.divergence)
        assert rollback is not None
        run.restore(rollback, steps=200)
        assert kind_of(run.iterate(F.replica_mismatch)) is K.halt
        run.policy.policy_state.resume(run.iteration, run.step)
        budgets = run.policy.policy_state.budgets
        assert (budgets.recent, budgets.num_spent) == ([], {"rollback": 1})

    def test_replay_follows_the_actions_taken_not_those_of_the_new_config(self) -> None:
        """After a restart with another config the state holds the rollback that the new config would not choose."""
        log = clean_log(100)
        log += decide_on(log, finding(F.divergence, last_record(log)))
        other_config = replace(defaults(), rollback_margin_steps=7)
        policy = Policy.replay(other_config, log, lag=LAG)
        assert policy.policy_state.is_awaiting
        assert policy.policy_state.budgets.num_spent == {"rollback": 1}
        (recomputed,) = replay_actions(log, other_config, lag=LAG)
        assert recomputed != log[-1]

    def test_a_log_read_from_disk_replays_to_the_same_actions(self) -> None:
        log = clean_log(50)
        log.append(replace(record(51, step=50, loss=math.nan), refused=True))
        log += decide_on(log, finding(F.nonfinite, last_record(log)))
        read = [from_json(to_json(event)) for event in log]
        assert replay_actions(read, defaults(), lag=LAG) == [event for event in read if isinstance(event, Action)]

    def test_state_is_json(self) -> None:
        run = Run()
        run.iterate_clean(50)
        run.iterate(F.nonfinite, loss=math.nan, refused=True)
        text = json.dumps(run.policy.state(), allow_nan=False)
        assert Policy.restore(defaults(), json.loads(text), lag=LAG).state() == run.policy.state()

    def test_a_resume_with_another_lag_times_its_actions_with_it(self) -> None:
        """A bf16 window ends `lag` iterations later than without lag, whatever the lag of the earlier start was."""
        sentinel = composed.load().sentinel
        before, after = Sentinel.start(replace(sentinel, lag=1)), Sentinel.start(replace(sentinel, lag=4))
        after.resume(before.memory(), ())
        now = record(1)
        fallback = after.policy.decide(now, [finding(F.fp8_range, now)])
        assert fallback is not None
        assert (fallback.kind, fallback.until) == (K.precision, 1 + 4 + sentinel.policy.precision_iterations)


def clean_log(num: int) -> list[Event]:
    return [record(iteration) for iteration in range(1, num + 1)]


def last_record(log: Iterable[Event]) -> StepRecord:
    return [event for event in log if isinstance(event, StepRecord)][-1]


def decide_on(log: list[Event], found: Finding) -> list[Event]:
    """The events that follow the last record of a log with this finding."""
    policy = Policy.replay(defaults(), log[:-1], lag=LAG)
    action = policy.decide(last_record(log), [found])
    assert action is not None
    return [found, action]
