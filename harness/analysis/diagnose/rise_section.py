"""Section 4 of the tree: does the loss rise slowly, and why?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, pstdev

from harness.analysis.diagnose.diagnosis import NOT_LOGGED, Answers, Diagnosis, Finds
from harness.analysis.diagnose.log_numbers import change_factor, largest_weight_change, split_in_thirds
from harness.analysis.diagnose.logged_run import SCALED_BY, LoggedRun, scaled_override
from harness.core.events import Finding, FindingKind, StepRecord

RISE_ROWS = 200
DRIFT_FACTOR = 2.0
GRADIENT_RISE = 1.1
"""Second over first half of the window from which the mean gradient norm is going up."""
DEFAULT_DECAY = 0.1
"""Weight decay to start from if there is none."""
PLATEAU = 0.01
"""Relative change of the held-out loss over the window below which it is flat."""


def ask_slow_rise(answers: Answers, run: LoggedRun, findings: Sequence[Finding]) -> Diagnosis | None:
    """Ask whether the loss rises over the last rows, and why; None: it does not rise."""
    applied = [record for record in run.records if not record.refused and math.isfinite(record.loss)]
    recent = applied[-RISE_ROWS:]
    if not _ask_rise(answers, recent, findings):
        return None
    return (
        _ask_rate(answers, run, recent)
        or _ask_weights(answers, run, recent)
        or _ask_gradients(answers, run, recent)
        or _ask_evaluations(answers, run, recent)
    )


def _ask_rise(answers: Answers, recent: Sequence[StepRecord], findings: Sequence[Finding]) -> bool:
    """Q4.1, on the means of three thirds of the window: single rows are too noisy to rise one by one."""
    question = "Has the loss risen monotonically over the last 200 steps?"
    first = recent[0].iteration if recent else 0
    is_found = any(finding.kind is FindingKind.divergence and finding.iteration >= first for finding in findings)
    if len(recent) < RISE_ROWS and not is_found:
        answers.ask("Q4.1", question, NOT_LOGGED, f"only {len(recent)} rows, {RISE_ROWS} are needed")
        return False
    thirds = [mean(row.loss for row in part) for part in split_in_thirds(recent) if part]
    spread = pstdev([row.loss for row in recent])
    is_rising = len(thirds) == 3 and thirds[0] < thirds[1] < thirds[2] and thirds[2] - thirds[0] > 0.5 * spread
    is_higher = bool(thirds) and thirds[-1] > thirds[0]
    means = "means of thirds: " + " -> ".join(f"{third:.4g}" for third in thirds)
    answers.ask("Q4.1", question, is_rising or (is_found and is_higher), means)
    return is_rising or (is_found and is_higher)


def _ask_rate(answers: Answers, run: LoggedRun, recent: Sequence[StepRecord]) -> Diagnosis | None:
    first, last = recent[0], recent[-1]
    question = "Has the learning rate increased over the same window?"
    if not math.isfinite(first.lr + last.lr):
        answers.ask("Q4.2", question, NOT_LOGGED, "no learning rate")
        return None
    answers.ask("Q4.2", question, last.lr > first.lr, f"{first.lr:.3g} -> {last.lr:.3g}")
    if last.lr <= first.lr:
        return None
    warmup = run.setting("optim.warmup_steps")
    is_warming = warmup is not None and last.step <= warmup
    cause = f"the warm-up of {warmup:g} steps still raises it" if is_warming else "it rises after the warm-up"
    return _divergence(
        answers,
        run,
        recent,
        conclusion=f"the schedule is misconfigured: {cause}",
        overrides=scaled_override("optim.lr", run.setting("optim.lr"), 1 / SCALED_BY) if is_warming else [],
    )


def _ask_weights(answers: Answers, run: LoggedRun, recent: Sequence[StepRecord]) -> Diagnosis | None:
    question = "Has the weight norm of any layer group changed by more than 2x in the last 200 steps?"
    changed = largest_weight_change(recent)
    if changed is None:
        answers.ask("Q4.3", question, NOT_LOGGED, "fewer than two probes of the weights")
        return None
    name, ratio = changed
    is_climbing = ratio > 1
    number = f"{name} {'up' if is_climbing else 'down'} {change_factor(ratio):.2f}-fold"
    answers.ask("Q4.3", question, change_factor(ratio) > DRIFT_FACTOR, number)
    if change_factor(ratio) <= DRIFT_FACTOR:
        return None
    overrides = adjusted_decay(run.setting("optim.weight_decay"), is_climbing=is_climbing)
    cause = "climbs: weight decay is too low" if is_climbing else "collapses: weight decay is too high"
    fix = " ".join(overrides) or f"{'double' if is_climbing else 'halve'} it"
    conclusion = f"the weight norm of {name} {cause}; {fix}"
    return _divergence(answers, run, recent, conclusion=conclusion, overrides=overrides)


def adjusted_decay(decay: float | None, *, is_climbing: bool) -> list[str]:
    """The override that doubles the weight decay if norms climb, and halves it if they collapse."""
    if decay == 0 and is_climbing:
        return [f"optim.weight_decay={DEFAULT_DECAY:g}"]
    return scaled_override("optim.weight_decay", decay, SCALED_BY if is_climbing else 1 / SCALED_BY)


def _ask_gradients(answers: Answers, run: LoggedRun, recent: Sequence[StepRecord]) -> Diagnosis | None:
    question = "Is the rolling mean of the gradient norm trending up?"
    if not run.has_gradients:
        answers.ask("Q4.4", question, NOT_LOGGED, "no gradient norm")
        return None
    half = len(recent) // 2
    halves = [mean(row.grad_norm for row in part) for part in (recent[:half], recent[half:])]
    is_rising = halves[1] > GRADIENT_RISE * halves[0]
    answers.ask("Q4.4", question, is_rising, " -> ".join(f"{value:.3g}" for value in halves))
    if not is_rising:
        return None
    overrides = scaled_override("optim.lr", run.setting("optim.lr"), 1 / SCALED_BY)
    fix = " ".join(overrides) or "optim.lr"
    conclusion = f"the loss rises with the gradient norm (bad data, or the learning rate is too high): halve it, {fix}"
    return _divergence(answers, run, recent, conclusion=conclusion, overrides=overrides)


def _ask_evaluations(answers: Answers, run: LoggedRun, recent: Sequence[StepRecord]) -> Diagnosis:
    """The end of Q4.4: without a sign of divergence the run is done, if the held-out loss is flat too."""
    question = "Is the held-out loss flat as well?"
    inside = [event for event in run.evaluations if event.iteration >= recent[0].iteration]
    before = [event for event in run.evaluations if event.iteration < recent[0].iteration][-1:]
    losses = [event.loss for event in [*before, *inside] if math.isfinite(event.loss)]
    if len(losses) < 2:
        number = f"{len(losses)} evaluations in the window; set eval.every_steps"
        answers.ask("Q4.4", question, NOT_LOGGED, number)
        conclusion = "the model has plateaued: check the held-out loss, and stop if it is flat too"
        return Diagnosis(nodes=answers.nodes, finds=Finds.plateau, conclusion=conclusion)
    change = (losses[-1] - losses[0]) / abs(losses[0]) if losses[0] else 0.0
    number = f"{losses[0]:.4g} -> {losses[-1]:.4g} in {len(losses)} evaluations, {change:+.1%}"
    answers.ask("Q4.4", question, abs(change) <= PLATEAU, number)
    if abs(change) <= PLATEAU:
        conclusion = "plateaued in training and in evaluation: stop, the run is done"
        return Diagnosis(nodes=answers.nodes, finds=Finds.plateau, conclusion=conclusion)
    if change < 0:
        conclusion = "the held-out loss still falls: the training data became harder, the model is healthy"
        return Diagnosis(nodes=answers.nodes, finds=Finds.other, conclusion=conclusion)
    conclusion = "the held-out loss rises too: restore the checkpoint from before the rise"
    return _divergence(answers, run, recent, conclusion=conclusion, overrides=[])


def _divergence(
    answers: Answers, run: LoggedRun, recent: Sequence[StepRecord], *, conclusion: str, overrides: list[str]
) -> Diagnosis:
    """A divergence with the checkpoint from before the window to run again from."""
    checkpoint = run.checkpoint_before(recent[0].step + 1)
    where = f"; {run.describe_restore(checkpoint)}" if checkpoint is not None else ""
    return Diagnosis(
        nodes=answers.nodes,
        finds=Finds.divergence,
        conclusion=f"{conclusion}{where}",
        overrides=overrides,
        restore_step=None if checkpoint is None else checkpoint.step,
    )
