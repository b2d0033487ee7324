"""Trials of remedies: when they start, what is tried, and which remedy wins."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.errors import ConfigError
from harness.config.sentinel import PolicyConfig
from harness.core.events import Action, ActionKind, FindingKind, TrialMeasured
from harness.sentinel.policy.policy import Policy
from harness.sentinel.policy.trial_choice import TrialKind, choose_candidate, is_decided, is_healthy
from harness.sentinel.sentinel import Sentinel
from harness.trials import is_interrupted, trial_obstacle
from tests import composed
from tests.sentinel.cluster import Hostility, actions_of, run_cluster
from tests.sentinel.policy_runs import LAG, Run, defaults, outcome, record


def with_trials() -> PolicyConfig:
    return replace(defaults(), trials=4, trial_steps=10)


def result(
    loss: float = 2.9,
    *,
    remedy: str = "unchanged",
    findings: tuple[str, ...] = (),
    num_refused: int = 0,
    grad_norm: float = 1.0,
) -> TrialMeasured:
    return TrialMeasured(
        time=0.0,
        iteration=100,
        incident=1,
        remedy=remedy,
        steps=10,
        num_refused=num_refused,
        findings=list(findings),
        held_out_before=3.0,
        held_out_loss=loss,
        grad_norm_before=1.0,
        grad_norm=grad_norm,
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("tried", "healthy"),
    [
        (result(3.0), True),
        (result(3.029), True),
        (result(3.031), False),
        (result(math.nan), False),
        (result(findings=("loss_spike",)), False),
        (result(num_refused=5), True),
        (result(num_refused=6), False),
        (result(grad_norm=3.0), True),
        (result(grad_norm=3.1), False),
        (result(grad_norm=math.nan), False),
    ],
)
def test_a_candidate_is_healthy_if_neither_loss_nor_gradient_rose(tried: TrialMeasured, healthy: bool) -> None:
    assert is_healthy(tried) is healthy
    assert is_decided([tried]) is healthy


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([3.5, 3.4], 1),
        ([3.5, 3.49], 0),  # a tie: the least intrusive
        ([3.5, 2.5, 2.48], 1),
        ([3.5, 2.5, 2.4], 2),
        ([2.9, 2.0], 0),  # the first is healthy: others are not compared
        ([math.inf, math.inf], 0),
        ([math.nan, 3.6], 1),
        ([3.5, math.nan, 3.0], 2),
    ],
)
def test_the_lowest_held_out_loss_wins_and_ties_go_to_the_least_intrusive(losses: list[float], best: int) -> None:
    assert choose_candidate([result(loss) for loss in losses]) == best


def test_a_healthy_candidate_wins_against_an_unhealthy_one_with_a_lower_loss() -> None:
    tried = [result(3.5), result(2.0, findings=("grad_spike",)), result(2.9)]
    assert choose_candidate(tried) == 2
    assert choose_candidate([]) == 0
    assert not is_decided([])


def reach_rewind(run: Run) -> Action:
    """Sixty clean steps, then a loss spike with a known cause."""
    assert not run.iterate_clean(60)
    run.iterate(FindingKind.grad_spike)
    action = run.iterate(FindingKind.loss_spike, loss=9.0)
    assert action is not None
    assert action.kind is ActionKind.rewind
    return action


def restore_to(run: Run, action: Action, step: int) -> Action | None:
    """The rewind of an action to a step."""
    run.iteration += LAG
    run.step, run.cursor = step, step
    return run.policy.on_outcome(replace(outcome(action, step=step), iteration=run.iteration))


def start_trial(run: Run) -> Action:
    action = reach_rewind(run)
    trial = restore_to(run, action, 55)
    while trial is None:
        trial = run.iterate()
    assert trial.kind is ActionKind.trial
    return trial


def finish_trial(run: Run, trial: Action, *results: TrialMeasured, succeeded: bool = True) -> Action | None:
    for each in results:
        run.policy.on_trial_measured(each)
    return run.policy.on_outcome(outcome(trial, step=run.step, succeeded=succeeded))


def test_a_trial_starts_just_before_the_onset_on_the_way_back() -> None:
    run = Run(with_trials())
    rewind = reach_rewind(run)
    trial = restore_to(run, rewind, 55)
    while trial is None:
        trial = run.iterate()
    assert trial.kind is ActionKind.trial
    assert run.step + LAG == 61 - 2 - LAG  # the onset is step 61
    assert trial.num_steps == 10
    assert [each["remedy"] for each in trial.candidates] == ["unchanged", "wider", "lower_lr"]
    first, last = trial.candidates[1]["exclude"]
    assert first == rewind.exclude[1] + 1 + LAG
    assert last - first + 1 == defaults().neighbours
    assert trial.candidates[2]["lr_scale"] == defaults().cool_factor


def test_a_larger_window_lies_ahead_of_all_batches_while_some_are_given_back() -> None:
    """Batches 40 to 49 are given back after batch 1019; that of the onset is 46, and the trial starts at 43."""
    run = Run(with_trials())
    assert not run.iterate_clean(40)
    run.cursor = 1000
    assert not run.iterate_clean(20)
    run.cursor = 40
    assert not run.iterate_clean(6)
    run.iterate(FindingKind.grad_spike)
    rewind = run.iterate(FindingKind.loss_spike, loss=9.0)
    assert rewind is not None
    assert rewind.exclude == [45, 46]
    run.iteration += LAG
    run.step, run.cursor = 62, 42
    trial = run.policy.on_outcome(replace(outcome(rewind, step=62), iteration=run.iteration))
    while trial is None:
        trial = run.iterate()
    assert run.cursor < 45
    assert trial.candidates[1]["exclude"] == [1019 + 1 + LAG, 1019 + LAG + defaults().neighbours]


def test_a_trial_is_held_once_and_is_off_by_default() -> None:
    run = Run(with_trials())
    trial = start_trial(run)
    assert finish_trial(run, trial, result()) is None
    assert not [action for action in run.iterate_clean(60) if action.kind is ActionKind.trial]
    assert defaults().trials == 0
    untried = Run()
    restore_to(untried, reach_rewind(untried), 55)
    assert not untried.iterate_clean(60)


def test_the_winner_becomes_an_action() -> None:
    bad, good = result(4.0), result(2.9)
    run = Run(with_trials())
    cool = finish_trial(run, start_trial(run), bad, bad, good)
    assert cool is not None
    assert cool.kind is ActionKind.cool
    assert cool.lr_scale == run.policy.lr_scale == defaults().cool_factor
    run = Run(with_trials())
    trial = start_trial(run)
    skip = finish_trial(run, trial, bad, good, good)
    assert skip is not None
    assert skip.kind is ActionKind.skip
    assert skip.exclude == trial.candidates[1]["exclude"]


@pytest.mark.parametrize("num_in_flight", [0, 1, 4, 5])
def test_a_larger_window_holds_no_batch_that_was_in_flight_at_the_trial(num_in_flight: int) -> None:
    """The batches of the steps in flight lie behind ranges that were excluded before."""
    run = Run(with_trials())
    trial = start_trial(run)
    first, last = trial.candidates[1]["exclude"]
    assert last == first + 4
    run.cursor = first
    assert not run.iterate_clean(num_in_flight)
    skip = finish_trial(run, trial, result(4.0), result(2.9))
    if num_in_flight == 5:
        assert skip is None
    else:
        assert skip is not None
        assert skip.exclude == [first + num_in_flight, last]


def test_a_trial_that_breaks_off_changes_nothing() -> None:
    run = Run(with_trials())
    assert finish_trial(run, start_trial(run), result(9.0), succeeded=False) is None
    assert run.policy.lr_scale == 1.0


def test_a_response_to_a_step_in_flight_follows_the_trial_that_it_prevents() -> None:
    run = Run(with_trials())
    trial = start_trial(run)
    assert run.iterate(FindingKind.divergence) is None
    assert run.policy.is_busy
    assert run.policy.policy_state.response is not None
    follow_up = finish_trial(run, trial, succeeded=False)
    assert follow_up is not None
    assert follow_up.kind in (ActionKind.rewind, ActionKind.rollback, ActionKind.check)


def test_fp8_that_no_longer_fits_prevents_the_trial_and_is_left_at_once() -> None:
    """The finding comes from a step in flight, and is raised once."""
    run = Run(with_trials())
    trial = start_trial(run)
    assert run.iterate(FindingKind.fp8_range) is None
    trainer: Any = SimpleNamespace(
        parts=SimpleNamespace(sentinel=SimpleNamespace(policy=run.policy), check=SimpleNamespace(rows=["row"]))
    )
    assert trial_obstacle(trainer, 4) == "a step before it calls for another action"
    follow_up = finish_trial(run, trial, succeeded=False)
    assert follow_up is not None
    assert (follow_up.kind, follow_up.in_fp8) == (ActionKind.precision, False)


def test_all_steps_in_flight_at_a_trial_are_answered_after_it() -> None:
    """With sentinel.lag=3: a rejected update, a corrupted one, and a clean step."""
    run = Run(with_trials())
    run.policy.lag = 3
    trial = start_trial(run)
    first = run.cursor
    for corrupted_ranks in ([], [1]):
        run.iteration, run.cursor = run.iteration + 1, run.cursor + 1
        now = record(run.iteration, step=run.step, cursor=run.cursor - 1, loss=9.0, refused=True)
        assert run.policy.decide(replace(now, corrupted_ranks=corrupted_ranks), []) is None
    assert run.iterate(FindingKind.fp8_range) is None
    assert run.iterate() is None
    precision = finish_trial(run, trial, succeeded=False)
    assert precision is not None
    assert precision.in_fp8 is False
    skip = run.policy.on_outcome(outcome(precision, step=run.step))
    assert skip is not None
    assert (skip.kind, skip.exclude, skip.give_back) == (ActionKind.skip, [first, first], [])
    repeat = run.policy.on_outcome(outcome(skip, step=run.step))
    assert repeat is not None
    assert (repeat.kind, repeat.exclude, repeat.give_back) == (ActionKind.skip, [], [[first + 1, first + 1]])
    assert run.policy.on_outcome(outcome(repeat, step=run.step)) is None


@pytest.mark.parametrize("shares_source", [True, False])
@pytest.mark.parametrize("num_swaps", [0, 1])
def test_steps_of_a_trial_are_kept_only_if_nothing_follows_the_remedy(num_swaps: int, shares_source: bool) -> None:
    """The batches that the winner excludes may be the last of a bad source; then it is swapped, or the rate cooled."""
    cfg = with_trials()
    swaps = replace(cfg.budgets.swap, per_window=num_swaps)
    run = Run(replace(cfg, budgets=replace(cfg.budgets, swap=swaps)))
    trial = start_trial(run)
    for each in (result(9.0), result(2.9, remedy="wider")):
        run.policy.on_trial_measured(each)
    suspects = run.policy.policy_state.suspects
    suspects.loss_stats = {"web": (50, 3.0, 0.1), "books": (50, 3.0, 0.1)}
    for _ in range(cfg.swap_after if shares_source else 0):
        suspects.blame("web", progress=run.policy.policy_state.progress)
    sentinel = Sentinel.start(composed.load().sentinel)
    sentinel.cfg, sentinel.policy = replace(sentinel.cfg, policy=run.policy.policy_state.cfg), run.policy
    trainer: Any = SimpleNamespace(parts=SimpleNamespace(sentinel=sentinel))
    done = replace(outcome(trial, step=run.step), remedy="wider", kept_steps=3)
    records = [record(run.iteration + n, step=run.step + n, cursor=run.cursor + n) for n in (1, 2, 3)]
    assert is_interrupted(trainer, done, records) is shares_source


def test_a_restart_drops_the_trial() -> None:
    run = Run(with_trials())
    start_trial(run)
    run.policy.on_trial_measured(result(9.0))
    run.policy.policy_state.resume(run.iteration, run.step)
    assert run.policy.policy_state.trial is None
    assert not [action for action in run.iterate_clean(30) if action.kind is ActionKind.trial]


def test_nothing_is_tried_if_the_restore_removed_the_cause() -> None:
    run = Run(with_trials())
    run.iterate_clean(60)
    action = run.iterate(FindingKind.weights_changed)
    assert action is not None
    assert action.kind is ActionKind.rewind
    assert restore_to(run, action, 55) is None
    assert not run.iterate_clean(30)


def test_bf16_is_tried_in_fp8_only() -> None:
    run = Run(with_trials())
    trial = start_trial(run)
    assert TrialKind.bf16 not in [each["remedy"] for each in trial.candidates]
    run = Run(with_trials())
    rewind = reach_rewind(run)
    run.policy.policy_state.in_fp8 = True
    trial_at_once = restore_to(run, rewind, 58)
    assert trial_at_once is not None
    assert trial_at_once.candidates[-1] == {"remedy": "bf16"}
    precision = finish_trial(run, trial_at_once, *(result(4.0) for _ in range(3)), result(2.9))
    assert precision is not None
    assert precision.in_fp8 is False


def test_the_budget_limits_trials() -> None:
    cfg = with_trials()
    run = Run(replace(cfg, budgets=replace(cfg.budgets, trial=replace(cfg.budgets.trial, per_window=0))))
    restore_to(run, reach_rewind(run), 55)
    assert not run.iterate_clean(30)


def test_one_candidate_is_no_trial() -> None:
    with pytest.raises(ConfigError, match=r"sentinel\.policy\.trials: must be 0 \(off\) or at least 2"):
        replace(defaults(), trials=1)


def test_random_runs_hold_trials_and_their_log_replays() -> None:
    hostility = Hostility(
        seed=3, lag=1, refuse=0.02, find=0.03, late=0.5, fail=0.0, damage=0.5, measure=0.1, restart=0.0, round_trip=0.0
    )
    clusters = [run_cluster(replace(hostility, seed=seed, trials=4)) for seed in range(40)]
    kinds = [action.kind for cluster in clusters for action in actions_of(cluster)]
    assert kinds.count(ActionKind.trial) >= 8
    assert any("the best of the remedies" in action.reason for c in clusters for action in actions_of(c))
    for cluster in clusters:
        policy = Policy.replay(cluster.hostility.cfg, cluster.log, lag=1)
        assert policy.state() == cluster.policy.state()
