"""The test that confirms a remedy: criteria with numbers, and their check against the log of a run.

Why: a change that was not tested may not help.
How: the criteria follow from the numbers of the incident. They are checked on the steps that a run kept: after a
restore a step is trained again, and its last record counts. `harness verify` runs the check, on the log of the run
itself if it continued past the place, else on a new run with the same seed and the remedy. The new run keeps
`train.num_steps`, on which the learning rate of each step depends, and is stopped after the last step of the check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import final

from harness.analysis.postmortem.evidence import Evidence, IncidentNumbers
from harness.analysis.postmortem.incident_numbers import EMA_STEPS, smooth_loss
from harness.analysis.postmortem.rules.remedies import Remedy
from harness.config.command_line import directory_and_name, run_overrides, with_changes
from harness.core.events import ActionKind, Event, Outcome, RunStarted, StepRecord

STEPS_PAST = 100
"""Steps that a check covers past the incident."""
TOLERANCE = 0.05
"""Nats that the smoothed loss may be above the pre-spike loss."""
GUILTY_SHARE, GUILTY_SIGMAS = 0.08, 4.0
"""The guilty step may be above the pre-spike loss by `TOLERANCE`, this share of it or this many sigmas, the largest."""
GRAD_FACTOR, HIGHEST_FACTOR = 5.0, 1.5
"""The largest gradient norm may be this many times the usual one, or the second many times the highest one before the
incident if that is more."""
GRAD_BEFORE, GRAD_AFTER = 12, 88
"""Steps around the guilty step in which gradient norms are compared."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a run must fulfil; None: the number is not known, and nothing is checked."""

    seed: int | None
    guilty_step: int
    through: int
    """The last step that is checked."""
    baseline: float | None
    tolerance: float
    guilty_limit: float | None
    grad_limit: float | None
    grad_first: int
    grad_last: int
    clip_norm: float | None
    train: list[str]
    """Arguments of `harness train` that repeat the run with the remedy; empty: the configuration is not known, or the
    run began with weights that its seed does not give."""
    folder: str
    """The run directory of the repetition."""

    def expectations(self) -> list[str]:
        """One line for each criterion."""
        lines = []
        if self.baseline is not None:
            lines.append(
                f"smoothed loss at most {self.tolerance:.2g} above the pre-spike {self.baseline:.4g} "
                f"from step {self.guilty_step} through step {self.through}"
            )
        if self.guilty_limit is not None:
            lines.append(f"loss at step {self.guilty_step} below {self.guilty_limit:.4g}")
        if self.grad_limit is not None:
            window = f"steps {self.grad_first} to {self.grad_last}"
            lines.append(f"largest gradient norm before clipping below {self.grad_limit:.3g} in {window}")
        if self.clip_norm is not None:
            lines.append(f"largest gradient norm after clipping at most {self.clip_norm:g}")
        return lines


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCriterion:
    passed: bool
    text: str


def verification_of(evidence: Evidence, remedy: Remedy | None) -> Verification:
    """The criteria for one incident, and the command that repeats the run with its remedy."""
    run, numbers = evidence.run, evidence.numbers
    changes = [] if remedy is None else remedy.overrides
    through = verify_steps(evidence)
    guilty = min(evidence.onset_step, through)
    limit = None
    if numbers.level is not None:
        limit = numbers.level + max(TOLERANCE, GUILTY_SHARE * abs(numbers.level), GUILTY_SIGMAS * numbers.sigma)
    directory, name = directory_and_name(run.path)
    folder = str(PurePath(directory) / f"verify-{name}-{evidence.folder}")
    seed = run.settings.get("run.seed")
    return Verification(
        seed=seed if isinstance(seed, int) else None,
        guilty_step=guilty,
        through=through,
        baseline=numbers.level,
        tolerance=max(TOLERANCE, numbers.sigma),
        guilty_limit=limit,
        grad_limit=_grad_limit(numbers),
        grad_first=max(guilty - GRAD_BEFORE, 1),
        grad_last=min(guilty + GRAD_AFTER, through),
        clip_norm=_clip_norm(evidence, changes),
        train=[] if evidence.first_weights else _train_arguments(evidence, changes, folder),
        folder=folder,
    )


def _grad_limit(numbers: IncidentNumbers) -> float | None:
    if numbers.usual_grad is None or numbers.highest_grad is None:
        return None
    return max(GRAD_FACTOR * numbers.usual_grad, HIGHEST_FACTOR * numbers.highest_grad)


def verify_steps(evidence: Evidence) -> int:
    """The last step of a check: `STEPS_PAST` after the incident, past warm-up and decay, and at most the run's last."""
    settings, last = evidence.run.settings, max(evidence.incident.last_step, evidence.onset_step)
    schedule = int(settings.get("optim.warmup_steps") or 0)
    if settings.get("optim.schedule") == "wsd":
        schedule += int(settings.get("optim.decay_steps") or 0)
    num_steps = settings.get("train.num_steps")
    return min(max(last + STEPS_PAST, schedule + 1), num_steps if isinstance(num_steps, int) else last + STEPS_PAST)


def _clip_norm(evidence: Evidence, changes: Sequence[str]) -> float | None:
    changed = next((text.partition("=")[2] for text in changes if text.startswith("optim.clip_norm=")), None)
    value = evidence.run.settings.get("optim.clip_norm") if changed is None else float(changed)
    return float(value) if isinstance(value, int | float) else None


def _train_arguments(evidence: Evidence, changes: Sequence[str], folder: str) -> list[str]:
    run = evidence.run
    if run.overrides is None:
        return []
    return with_changes(run.overrides, [*changes, *run_overrides(folder)])


def kept_steps(records: Iterable[StepRecord], events: Iterable[Event] = ()) -> dict[int, StepRecord]:
    """Step -> the record of the update that the run kept, in order. A restore or a start undoes the steps behind its
    own, also if it goes back to before the first record. `events` has those that no step follows."""
    kept: dict[int, StepRecord] = {}
    newest = -1
    for record in records:
        if not record.refused:
            _undo_from(record.step, kept)
            kept[record.step] = record
            newest = max(newest, record.iteration)
    for event in events:
        match event:
            case RunStarted() | Outcome(succeeded=True, kind=ActionKind.rewind | ActionKind.rollback):
                if event.iteration >= newest:
                    _undo_from(event.step + 1, kept)
            case _:
                pass
    return kept


def _undo_from(step: int, kept: dict[int, StepRecord]) -> None:
    while kept and next(reversed(kept)) >= step:
        kept.popitem()


def check_log(wanted: Verification, kept: dict[int, StepRecord], *, clip_norm: float | None) -> list[CheckedCriterion]:
    """Check all criteria on the steps that a run kept; `clip_norm` is that of its configuration."""
    reached = max(kept, default=0)
    checked = [CheckedCriterion(passed=reached >= wanted.through, text=f"reached step {reached} of {wanted.through}")]
    if wanted.baseline is not None:
        checked.append(_check_curve(wanted, wanted.baseline, kept))
    if wanted.guilty_limit is not None:
        loss = kept[wanted.guilty_step].loss if wanted.guilty_step in kept else math.nan
        text = f"loss at step {wanted.guilty_step} is {loss:.4g}, expected below {wanted.guilty_limit:.4g}"
        checked.append(CheckedCriterion(passed=loss < wanted.guilty_limit, text=text))
    if wanted.grad_limit is not None:
        worst = worst_norm(kept, wanted)
        window = f"steps {wanted.grad_first} to {wanted.grad_last}"
        text = (
            f"largest gradient norm before clipping in {window} is {worst:.3g}, expected below {wanted.grad_limit:.3g}"
        )
        checked.append(CheckedCriterion(passed=worst < wanted.grad_limit, text=text))
    if wanted.clip_norm is not None:
        clipped = min(worst_norm(kept, wanted), math.inf if clip_norm is None else clip_norm)
        text = f"largest gradient norm after clipping is {clipped:.3g}, expected at most {wanted.clip_norm:g}"
        checked.append(CheckedCriterion(passed=clipped <= wanted.clip_norm, text=text))
    return checked


def _check_curve(wanted: Verification, baseline: float, kept: dict[int, StepRecord]) -> CheckedCriterion:
    """The smoothed loss from the guilty step on, each value over the steps up to it."""
    bound, steps = baseline + wanted.tolerance, range(wanted.guilty_step, wanted.through + 1)
    curve = [(step, smooth_loss(_losses_until(kept, step))) for step in steps if step in kept]
    worst = max(curve, key=lambda point: point[1] if math.isfinite(point[1]) else math.inf, default=(0, math.nan))
    text = f"smoothed loss is at most {worst[1]:.4g} (step {worst[0]}), expected at most {bound:.4g}"
    return CheckedCriterion(passed=worst[1] <= bound, text=f"{text} through step {wanted.through}")


def _losses_until(kept: dict[int, StepRecord], step: int) -> list[float]:
    return [kept[at].loss for at in range(step - EMA_STEPS + 1, step + 1) if at in kept]


def worst_norm(kept: dict[int, StepRecord], wanted: Verification) -> float:
    """The largest gradient norm of the window; Inf if one is not finite, NaN if there is none."""
    norms = [record.grad_norm for step, record in kept.items() if wanted.grad_first <= step <= wanted.grad_last]
    return max((norm if math.isfinite(norm) else math.inf for norm in norms), default=math.nan)
