"""Computes the numbers of an incident that every report states: onset, pre-spike loss, peak, recovery.

Why: the post-mortem, the dashboard and the index of runs describe the same incident. If each computed its own numbers,
they would differ.
How: one pass over the step records around the incident. A rejected update is part of the incident but not of the loss
curve: levels and recovery come from applied steps. Steps from before the incident that are trained again, after a
restore or a crash, are not part of it: their loss is that of an earlier step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from harness.analysis.postmortem.evidence import RECOVERY_STEPS, IncidentNumbers
from harness.core.events import ABOUT_SPEED, Finding, Incident, StepRecord

EMA_STEPS, RANGE_RECORDS, SPREAD_RECORDS = 50, 25, 100
"""Applied records before the onset that the level is taken from; those whose range bounds it, because a trend must not
be extrapolated, and that the usual gradient norm is the median of; those that the spread is taken from."""
MAD_TO_SIGMA = 1.4826
LEAST_RECORDS = 3
MEDIAN_RECORDS = 9
LATE_STEPS = 500
RECOVERED_SIGMAS = 0.5
REPEATED_SIGMAS, REPEATED_SHARE, REPEATED_GRAD = 4.0, 0.02, 5.0
"""A step that is trained again is as healthy as the first time if its loss is above that of then by at most this many
sigmas, or by this share of it if that is more, and its gradient norm is at most this many times that of then."""
AFTER_RECORDS = LATE_STEPS + 2 * MEDIAN_RECORDS
"""Records after an incident from which all numbers can be computed."""
REJECTIONS = frozenset({"refusal", "refusals"})
"""Kinds of an incident whose updates were rejected (`harness.sentinel.policy.open_incident`)."""


def incident_numbers(
    incident: Incident, records: Sequence[StepRecord], findings: Iterable[Finding] = ()
) -> IncidentNumbers:
    """All numbers of one incident; `records` are those around it in order, not thinned."""
    onset = exact_onset(incident, records, findings)
    first = next((record for record in records if record.iteration == onset), None)
    level = level_of(records, onset)
    sigma = 0.0 if level is None else level[1]
    repeated = repeated_iterations(records, onset, sigma)
    before = [record for record in records if record.iteration < onset and not record.refused][-SPREAD_RECORDS:]
    inside = [record for record in records if onset <= record.iteration <= incident.last]
    during = [record for record in inside if record.iteration not in repeated]
    peak = peak_of(during)
    grads = [record.grad_norm for record in during]
    numbers = IncidentNumbers(
        onset=onset,
        onset_step=incident.onset_step if first is None else first.step + first.refused,
        onset_cursor=None if first is None else first.cursor,
        level=None if level is None else level[0],
        sigma=sigma,
        usual_grad=finite_median(record.grad_norm for record in before[-RANGE_RECORDS:]),
        highest_grad=max((r.grad_norm for r in before if math.isfinite(r.grad_norm)), default=None),
        peak_grad=next((grad for grad in grads if not math.isfinite(grad)), max(grads, default=None)),
    )
    if peak is not None:
        numbers.peak, numbers.peak_iteration, numbers.peak_refused = peak.loss, peak.iteration, peak.refused
        _add_recovery(numbers, records, peak)
    return numbers


def repeated_iterations(records: Iterable[StepRecord], onset: int, sigma: float) -> set[int]:
    """Iterations from the onset on that train a step from before it again, after a restore or a start, and are as
    healthy as the first time."""
    earlier: dict[int, StepRecord] = {}
    repeated: set[int] = set()
    highest = -1
    for record in filter(_is_clean, records):
        if record.iteration < onset:
            earlier[record.step] = record
            highest = max(highest, record.step)
        elif record.step <= highest and _is_as_healthy(record, earlier.get(record.step), sigma):
            repeated.add(record.iteration)
    return repeated


def _is_as_healthy(record: StepRecord, earlier: StepRecord | None, sigma: float) -> bool:
    """Whether a step is as healthy as the record of its first time, if there is one."""
    if earlier is None:
        return True
    margin = max(REPEATED_SIGMAS * sigma, REPEATED_SHARE * abs(earlier.loss))
    return record.loss <= earlier.loss + margin and record.grad_norm <= REPEATED_GRAD * earlier.grad_norm


def exact_onset(incident: Incident, records: Sequence[StepRecord], findings: Iterable[Finding]) -> int:
    """Iteration of the first affected step.

    In logs of earlier versions the onset of several rejected updates in a row is the applied update before them. Unless
    a finding names it, it is healthy, and the first rejected update is the onset.
    """
    named = any(found.onset == incident.onset and found.kind not in ABOUT_SPEED for found in findings)
    here = next((record for record in records if record.iteration == incident.onset), None)
    if named or REJECTIONS.isdisjoint(incident.kinds) or (here is not None and not _is_clean(here)):
        return incident.onset
    rejected = (
        r.iteration for r in records if incident.onset < r.iteration <= incident.last and r.refused and not r.is_empty
    )
    return next(rejected, incident.onset)


def _is_clean(record: StepRecord) -> bool:
    return not record.refused and math.isfinite(record.loss + record.grad_norm)


def level_of(records: Sequence[StepRecord], onset: int) -> tuple[float, float] | None:
    """Loss and its spread right before the onset; None if there are too few applied records.

    The loss is that of a line through the last records, with the weights of a 50-step exponential average: equal to
    that average where the loss is flat, and without its lag where the loss falls. The spread comes from the median
    difference between neighbouring records, which neither a trend nor single outliers change much.
    """
    losses = [r.loss for r in records if r.iteration < onset and not r.refused and math.isfinite(r.loss)]
    losses = losses[-SPREAD_RECORDS:]
    if len(losses) < LEAST_RECORDS:
        return None
    level = smooth_loss(losses)
    sigma = MAD_TO_SIGMA * median(abs(b - a) for a, b in pairwise(losses)) / math.sqrt(2)
    return (level, sigma) if math.isfinite(level + sigma) else None


def smooth_loss(losses: Sequence[float]) -> float:
    """The loss at the end of a sequence, smoothed over about fifty steps; within the range of the last 25."""
    last = losses[-RANGE_RECORDS:]
    return min(max(_weighted_line_end(losses[-EMA_STEPS:]), min(last)), max(last))


def _weighted_line_end(values: Sequence[float]) -> float:
    """The value at the end of the weighted least-squares line through the values; their mean if they are too few."""
    decay = 1 - 2 / (EMA_STEPS + 1)
    weights = [decay ** (len(values) - 1 - place) for place in range(len(values))]
    total = sum(weights)
    at = [float(place - len(values) + 1) for place in range(len(values))]
    centre = sum(w * x for w, x in zip(weights, at, strict=True)) / total
    mean = sum(w * y for w, y in zip(weights, values, strict=True)) / total
    spread = sum(w * (x - centre) ** 2 for w, x in zip(weights, at, strict=True))
    if len(values) < MEDIAN_RECORDS or spread <= 0:
        return mean
    slope = sum(w * (x - centre) * (y - mean) for w, x, y in zip(weights, at, values, strict=True)) / spread
    return mean - slope * centre


def peak_of(during: Sequence[StepRecord]) -> StepRecord | None:
    """The record with the highest loss, or the first with a loss that is not finite."""
    broken = next((record for record in during if not math.isfinite(record.loss)), None)
    return broken or max(during, key=lambda record: record.loss, default=None)


def _add_recovery(numbers: IncidentNumbers, records: Sequence[StepRecord], peak: StepRecord) -> None:
    later = [record for record in records if record.iteration > peak.iteration]
    applied = [record for record in later if not record.refused]
    losses = [record.loss if math.isfinite(record.loss) else math.inf for record in applied]
    numbers.num_after_peak = len(applied)
    numbers.loss_after_50 = _median_at(losses, RECOVERY_STEPS)
    numbers.loss_after_500 = _median_at(losses, LATE_STEPS)
    tail = [peak, *later][-MEDIAN_RECORDS:]
    if numbers.loss_after_50 is None and not any(math.isfinite(record.loss) for record in tail):
        numbers.loss_after_50 = math.nan
    if numbers.level is None:
        return
    bound = numbers.level + RECOVERED_SIGMAS * numbers.sigma
    for place in range(len(losses) - MEDIAN_RECORDS + 1):
        if median(losses[place : place + MEDIAN_RECORDS]) <= bound:
            first = applied[place]
            numbers.resumed_step, numbers.resumed_iteration = first.step, first.iteration
            numbers.resumed_after = place + 1
            return


def _median_at(losses: Sequence[float], steps: int) -> float | None:
    """Median of the last few of the first `steps` losses; None if there are fewer; NaN if it is not finite."""
    if len(losses) < steps:
        return None
    value = median(losses[steps - MEDIAN_RECORDS : steps])
    return value if math.isfinite(value) else math.nan


def finite_median(values: Iterable[float | None]) -> float | None:
    """Median of the finite values; None if there are none."""
    kept = [value for value in values if value is not None and math.isfinite(value)]
    return median(kept) if kept else None
