"""The precision fallback: bf16 for a while if fp8 underflows or saturates, then fp8 again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from harness.config.sentinel import BudgetConfig
from harness.core.events import Action, ActionKind, Event, FindingKind, RunStarted
from harness.sentinel.policy.policy import Policy, replay_actions
from harness.sentinel.sentinel import Sentinel
from tests.composed import load
from tests.sentinel.policy_runs import LAG, F, K, Run, defaults, finding, kind_of, outcome, record

SHORT = replace(
    defaults(),
    precision_iterations=10,
    budgets=replace(defaults().budgets, precision=BudgetConfig(per_window=2, per_run=2)),
)


def fall_back(run: Run) -> Action:
    """Raise fp8_range and switch to bf16."""
    action = run.iterate(F.fp8_range)
    assert action is not None
    assert run.policy.on_outcome(outcome(action, step=run.step)) is None
    return action


def test_fp8_range_by_itself_switches_to_bf16_and_restores_nothing() -> None:
    run = Run(SHORT)
    run.iterate_clean(150)
    action = fall_back(run)
    assert (action.kind, action.in_fp8, action.exclude, action.until) == (K.precision, False, [], 151 + LAG + 10)
    assert action.reason == "fp8_range seen; bf16 until iteration 162"
    assert run.policy.in_fallback
    assert run.policy.doubtful_since is None, "the weights are not damaged"


def test_the_bf16_window_ends_by_itself() -> None:
    run = Run(SHORT)
    run.iterate_clean(150)
    fall_back(run)
    assert run.iterate_clean(9) == []
    (back,) = run.iterate_clean(1)
    assert (back.kind, back.in_fp8, back.until, back.incident) == (K.precision, True, None, 1)
    assert back.iteration + LAG == 151 + LAG + 10, "the next iteration to be issued is the first after the window"
    assert not run.policy.in_fallback
    assert run.iterate_clean(300) == []
    assert [closed.verdict for closed in run.closed] == ["cured"]


def test_each_window_is_twice_as_long_and_unlimited_once_the_budget_is_spent() -> None:
    run = Run(SHORT)
    run.iterate_clean(150)
    lengths = []
    for _ in range(3):
        action = fall_back(run)
        lengths.append(None if action.until is None else action.until - LAG - action.iteration)
        run.iterate_clean(40)
    assert lengths == [10, 20, None]
    assert action.reason == (
        "fp8_range seen; budget spent: 2 x precision within 2000 steps of progress, bf16 to the end of the run"
    )
    assert run.policy.in_fallback
    assert run.iterate_clean(3000) == []


@pytest.mark.parametrize(
    ("damage", "refused", "first"),
    [
        (F.loss_spike, False, K.rewind),
        (F.divergence, False, K.rollback),
        (F.nonfinite, False, K.rollback),
        (F.grad_spike, True, K.rewind),
        (F.nonfinite, True, K.rewind),
    ],
)
@pytest.mark.parametrize("together", [True, False], ids=["together", "in the lag"])
def test_with_damage_it_restores_first_and_blames_no_batch(
    damage: FindingKind, refused: bool, first: ActionKind, together: bool
) -> None:
    run = Run(SHORT)
    run.iterate_clean(150)
    if together:
        restore = run.iterate(F.fp8_range, damage, refused=refused)
    else:
        fall_back(run)
        restore = run.iterate(damage, refused=refused)
    assert restore is not None
    assert (restore.kind, restore.exclude) == (first, [])
    then = run.restore(restore, steps=20)
    assert kind_of(then) is (K.precision if together else None)
    assert then is None or then.reason == f"fp8_range seen; bf16 until iteration {then.until}"
    assert run.policy.in_fallback, "a restore does not end the bf16 window"


def test_a_watched_spike_is_rewound_once_fp8_is_known_as_its_cause() -> None:
    run = Run(SHORT)
    run.iterate_clean(150)
    assert kind_of(run.iterate(F.loss_spike, loss=4.0)) is K.watch
    restore = run.iterate(F.fp8_range, loss=4.0, back=5)
    assert restore is not None
    assert (restore.kind, restore.exclude) == (K.rewind, [])
    assert restore.onset <= 147
    assert kind_of(run.restore(restore, steps=10)) is K.precision


def test_an_update_rejected_after_the_return_to_fp8_blames_no_batch() -> None:
    """Also after an earlier restore of the same place, when batches would be excluded."""
    run = Run(SHORT)
    run.iterate_clean(150)
    restore = run.iterate(F.fp8_range, F.loss_spike)
    assert restore is not None
    left = run.restore(restore, steps=5)
    assert left is not None
    run.policy.on_outcome(outcome(left, step=run.step))
    assert [action.in_fp8 for action in run.iterate_clean(12)] == [True]
    again = run.iterate(F.fp8_range, F.grad_spike, refused=True)
    assert again is not None
    assert (again.kind, again.in_fp8, again.exclude) == (K.precision, False, [])
    repeat = run.policy.on_outcome(outcome(again, step=run.step))
    assert repeat is not None
    last = run.cursor - 1
    assert (repeat.kind, repeat.exclude, repeat.give_back) == (K.skip, [], [[last, last]]), "it is consumed again"


def test_an_old_rejection_is_no_damage() -> None:
    run = Run(SHORT)
    run.iterate_clean(150)
    skip = run.iterate(F.nonfinite, loss=math.nan, refused=True)
    assert skip is not None
    run.policy.on_outcome(outcome(skip, step=run.step))
    run.iterate_clean(20)
    assert kind_of(run.iterate(F.fp8_range)) is K.precision


def test_bf16_is_used_if_there_is_no_state_to_restore() -> None:
    run = Run(SHORT)
    run.iterate_clean(20)
    action = run.iterate(F.fp8_range, F.divergence)
    while action is not None and action.kind in (K.rewind, K.rollback):
        action = run.fail(action)
        action = action or run.iterate(F.divergence)
    assert kind_of(action) is K.precision


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_run_that_cannot_leave_fp8_is_watched(is_allowed: bool) -> None:
    run = Run(replace(SHORT, fall_back_precision=is_allowed))
    run.iterate_clean(150)
    action = run.iterate(F.fp8_range)
    if is_allowed:
        assert run.fail(action) is None
        assert not run.policy.in_fallback
        assert kind_of(run.iterate(F.fp8_range)) is K.watch
    else:
        assert kind_of(action) is K.watch


def test_a_restart_inside_the_window_keeps_it() -> None:
    log: list[Event] = [record(iteration) for iteration in range(1, 60)]
    found = finding(F.fp8_range, record(60))
    policy = Policy.replay(SHORT, log, lag=LAG)
    left = policy.decide(record(60), [found])
    assert left is not None
    log += [record(60), found, left, outcome(left, step=60)]
    log += [record(iteration) for iteration in (61, 62, 63)]
    log.append(RunStarted(time=0.0, iteration=63, world_size=2, num_steps=500, step=50))
    again = Policy.replay(SHORT, log, lag=LAG)
    assert again.in_fallback
    saved = Policy.restore(SHORT, json.loads(json.dumps(policy.state())), lag=LAG)
    assert saved.in_fallback, "also from a checkpoint without the earlier log"
    after = [record(iteration, step=iteration - 13) for iteration in range(64, 71)]
    decided = [again.decide(each, []) for each in after]
    assert [kind_of(each) for each in decided] == [*[None] * 6, K.precision]
    assert decided[-1] is not None
    log += [*after, decided[-1]]
    assert replay_actions(log, SHORT, lag=LAG) == [left, decided[-1]]


def test_the_next_step_is_probed_after_a_finding_in_fp8_and_when_fp8_is_switched_on() -> None:
    sentinel = Sentinel.start(load().sentinel)

    def probes_next_after(at: int, **facts: Any) -> bool:
        sentinel.process_record(replace(record(at), **facts))
        return at + sentinel.cfg.lag in sentinel.probe_at

    assert not probes_next_after(1, in_fp8=True)
    assert probes_next_after(2, in_fp8=True, grad_norm=math.nan, refused=True)
    assert not probes_next_after(3, in_fp8=True)
    assert not probes_next_after(4, in_fp8=None, grad_norm=math.nan, refused=True), "a run without fp8"
    sentinel.on_operator_action(
        Action(time=0, iteration=5, kind=K.precision, step=5, incident=0, reason="", onset=5, in_fp8=True)
    )
    assert 5 + sentinel.cfg.lag in sentinel.probe_at
