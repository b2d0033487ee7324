"""A policy can be put away, rebuilt from its log, and checked against it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace

from harness.core.events import Action, Event, Finding, RunStarted, StepRecord, from_json, to_json
from harness.sentinel.policy.policy import Policy, replay_actions
from tests.sentinel.policy_runs import LAG, F, K, Run, defaults, finding, kind_of, record


class TestReplay:
    def test_a_person_who_starts_a_halted_run_again_gets_a_new_beginning(self) -> None:
        log = calm_log(100)
        log += decided(log, finding(F.replica_mismatch, last_record(log)))
        assert isinstance(log[-1], Action)
        assert log[-1].kind is K.halt
        halted = Policy.replay(defaults(), log, lag=LAG)
        assert halted.decide(record(101), [finding(F.divergence, record(101))]) is None
        log.append(RunStarted(time=0.0, iteration=100, world_size=2, num_steps=500, step=100))
        policy = Policy.replay(defaults(), log, lag=LAG)
        assert kind_of(policy.decide(record(101), [finding(F.divergence, record(101))])) is K.rollback

    def test_a_crash_between_an_action_and_its_outcome_leaves_no_deaf_policy(self) -> None:
        log = calm_log(100)
        log += decided(log, finding(F.divergence, last_record(log)))
        log.append(RunStarted(time=0.0, iteration=100, world_size=2, num_steps=500, step=80))
        policy = Policy.replay(defaults(), log, lag=LAG)
        now = record(101, step=81)
        assert kind_of(policy.decide(now, [finding(F.divergence, now)])) is K.rollback

    def test_a_new_beginning_forgets_the_budget_of_the_window_but_not_of_the_run(self) -> None:
        run = Run(replace(defaults(), min_lr_scale=1.0))
        run.calm(300)
        rollback = run.take(F.divergence)
        assert rollback is not None
        run.go_back(rollback, steps=200)
        assert kind_of(run.take(F.replica_mismatch)) is K.halt
        run.policy.policy_state.resume(run.iteration, run.step)
        budgets = run.policy.policy_state.budgets
        assert (budgets.recent, budgets.num_spent) == ([], {"rollback": 1})

    def test_what_was_done_counts_and_not_what_would_be_done_today(self) -> None:
        """A run that was restarted with other options remembers the rollback that these would not have chosen."""
        log = calm_log(100)
        log += decided(log, finding(F.divergence, last_record(log)))
        stingy = replace(defaults(), rollback_margin_steps=7)
        policy = Policy.replay(stingy, log, lag=LAG)
        assert policy.policy_state.is_awaiting
        assert policy.policy_state.budgets.num_spent == {"rollback": 1}
        (today,) = replay_actions(log, stingy, lag=LAG)
        assert today != log[-1]

    def test_a_log_read_back_from_disk_gives_its_actions(self) -> None:
        log = calm_log(50)
        log.append(replace(record(51, step=50, loss=math.nan), refused=True))
        log += decided(log, finding(F.nonfinite, last_record(log)))
        read = [from_json(to_json(event)) for event in log]
        assert replay_actions(read, defaults(), lag=LAG) == [event for event in read if isinstance(event, Action)]

    def test_state_is_json(self) -> None:
        run = Run()
        run.calm(50)
        run.take(F.nonfinite, loss=math.nan, refused=True)
        text = json.dumps(run.policy.state(), allow_nan=False)
        assert Policy.restore(defaults(), json.loads(text)).state() == run.policy.state()


def calm_log(num: int) -> list[Event]:
    return [record(iteration) for iteration in range(1, num + 1)]


def last_record(log: Iterable[Event]) -> StepRecord:
    return [event for event in log if isinstance(event, StepRecord)][-1]


def decided(log: list[Event], found: Finding) -> list[Event]:
    """What follows the last record of a log when this is found."""
    policy = Policy.replay(defaults(), log[:-1], lag=LAG)
    action = policy.decide(last_record(log), [found])
    assert action is not None
    return [found, action]
