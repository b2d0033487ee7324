"""The rung of precision: bf16 for a while where fp8 does not do, and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from harness.config.compose import load
from harness.config.sentinel import BudgetConfig
from harness.core.events import Action, ActionKind, Event, FindingKind, RunStarted
from harness.sentinel.policy.policy import Policy, replay_actions
from harness.sentinel.sentinel import Sentinel
from tests.sentinel.policy_runs import LAG, F, K, Run, defaults, finding, kind_of, outcome, record

SHORT = replace(
    defaults(),
    precision_iterations=10,
    budgets=replace(defaults().budgets, precision=BudgetConfig(per_window=2, per_run=2)),
)


def fallen_back(run: Run) -> Action:
    """The run finds that fp8 does not do, and leaves it."""
    action = run.take(F.fp8_range)
    assert action is not None
    assert run.policy.on_outcome(outcome(action, step=run.step)) is None
    return action


def test_alone_it_leaves_fp8_and_touches_nothing_else() -> None:
    run = Run(SHORT)
    run.calm(150)
    action = fallen_back(run)
    assert (action.kind, action.in_fp8, action.exclude, action.until) == (K.precision, False, [], 151 + LAG + 10)
    assert action.reason == "fp8_range seen; bf16 until iteration 162"
    assert run.policy.in_fallback
    assert run.policy.doubtful_since is None, "the weights are as good as ever"


def test_the_window_ends_by_itself_after_as_many_iterations_as_it_has() -> None:
    run = Run(SHORT)
    run.calm(150)
    fallen_back(run)
    assert run.calm(9) == []
    (back,) = run.calm(1)
    assert (back.kind, back.in_fp8, back.until, back.incident) == (K.precision, True, None, 1)
    assert back.iteration + LAG == 151 + LAG + 10, "the next iteration to be issued is the first after the window"
    assert not run.policy.in_fallback
    assert run.calm(300) == []
    assert [closed.verdict for closed in run.closed] == ["cured"]


def test_each_window_is_twice_as_long_and_the_one_beyond_the_budget_has_no_end() -> None:
    run = Run(SHORT)
    run.calm(150)
    lengths = []
    for _ in range(3):
        action = fallen_back(run)
        lengths.append(None if action.until is None else action.until - LAG - action.iteration)
        run.calm(40)
    assert lengths == [10, 20, None]
    assert action.reason == (
        "fp8_range seen; budget spent: 2 x precision within 2000 steps of progress, bf16 to the end of the run"
    )
    assert run.policy.in_fallback
    assert run.calm(3000) == []


@pytest.mark.parametrize(
    ("harm", "refused", "first"),
    [
        (F.loss_spike, False, K.rewind),
        (F.divergence, False, K.rollback),
        (F.nonfinite, False, K.rollback),
        (F.grad_spike, True, K.rewind),
        (F.nonfinite, True, K.rewind),
    ],
)
@pytest.mark.parametrize("together", [True, False], ids=["together", "in the lag"])
def test_with_harm_it_goes_back_first_and_blames_no_batch(
    harm: FindingKind, refused: bool, first: ActionKind, together: bool
) -> None:
    run = Run(SHORT)
    run.calm(150)
    if together:
        restore = run.take(F.fp8_range, harm, refused=refused)
    else:
        fallen_back(run)
        restore = run.take(harm, refused=refused)
    assert restore is not None
    assert (restore.kind, restore.exclude) == (first, [])
    then = run.go_back(restore, steps=20)
    assert kind_of(then) is (K.precision if together else None)
    assert then is None or then.reason == f"fp8_range seen; bf16 until iteration {then.until}"
    assert run.policy.in_fallback, "and stays in bf16, whatever older weights were computed in"


def test_harm_that_was_watched_is_undone_once_its_cause_is_known() -> None:
    run = Run(SHORT)
    run.calm(150)
    assert kind_of(run.take(F.loss_spike, loss=4.0)) is K.watch
    restore = run.take(F.fp8_range, loss=4.0, back=5)
    assert restore is not None
    assert (restore.kind, restore.exclude) == (K.rewind, [])
    assert restore.onset <= 147
    assert kind_of(run.go_back(restore, steps=10)) is K.precision


def test_an_update_that_fp8_spoils_when_it_comes_back_blames_no_batch() -> None:
    """Also where the place was set back to before, and batches would be excluded by now."""
    run = Run(SHORT)
    run.calm(150)
    restore = run.take(F.fp8_range, F.loss_spike)
    assert restore is not None
    left = run.go_back(restore, steps=5)
    assert left is not None
    run.policy.on_outcome(outcome(left, step=run.step))
    assert [action.in_fp8 for action in run.calm(12)] == [True]
    again = run.take(F.fp8_range, F.grad_spike, refused=True)
    assert again is not None
    assert (again.kind, again.in_fp8, again.exclude) == (K.precision, False, [])


def test_a_refused_batch_long_ago_is_no_harm() -> None:
    run = Run(SHORT)
    run.calm(150)
    skip = run.take(F.nonfinite, loss=math.nan, refused=True)
    assert skip is not None
    run.policy.on_outcome(outcome(skip, step=run.step))
    run.calm(20)
    assert kind_of(run.take(F.fp8_range)) is K.precision


def test_where_nothing_is_left_to_go_back_to_fp8_can_still_be_left() -> None:
    run = Run(SHORT)
    run.calm(20)
    action = run.take(F.fp8_range, F.divergence)
    while action is not None and action.kind in (K.rewind, K.rollback):
        action = run.fail(action)
        action = action or run.take(F.divergence)
    assert kind_of(action) is K.precision


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_run_that_cannot_leave_fp8_watches(is_allowed: bool) -> None:
    run = Run(replace(SHORT, fall_back_precision=is_allowed))
    run.calm(150)
    action = run.take(F.fp8_range)
    if is_allowed:
        assert run.fail(action) is None
        assert not run.policy.in_fallback
        assert kind_of(run.take(F.fp8_range)) is K.watch
    else:
        assert kind_of(action) is K.watch


def test_a_restart_inside_the_window_finds_it_as_it_was() -> None:
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
    saved = Policy.restore(SHORT, json.loads(json.dumps(policy.state())))
    assert saved.in_fallback, "also where the log before is gone and a checkpoint remembers"
    after = [record(iteration, step=iteration - 13) for iteration in range(64, 71)]
    decided = [again.decide(each, []) for each in after]
    assert [kind_of(each) for each in decided] == [*[None] * 6, K.precision]
    assert decided[-1] is not None
    log += [*after, decided[-1]]
    assert replay_actions(log, SHORT, lag=LAG) == [left, decided[-1]]


def test_a_step_in_fp8_is_looked_at_more_closely_after_a_suspicion_and_when_fp8_begins_anew() -> None:
    sentinel = Sentinel.start(load().sentinel)

    def probes_next_after(at: int, **facts: Any) -> bool:
        sentinel.process_record(replace(record(at), **facts))
        return sentinel.probe_next_step

    assert not probes_next_after(1, in_fp8=True)
    assert probes_next_after(2, in_fp8=True, grad_norm=math.nan, refused=True)
    assert not probes_next_after(3, in_fp8=True)
    assert not probes_next_after(4, in_fp8=None, grad_norm=math.nan, refused=True), "nothing more is measured there"
    sentinel.on_operator_action(
        Action(time=0, iteration=5, kind=K.precision, step=5, incident=0, reason="", onset=5, in_fp8=True)
    )
    assert sentinel.probe_next_step
