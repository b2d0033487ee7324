"""Numbers of an incident that the rules, the post-mortem and the pictures all speak of; each is taken once, here.

What is normal comes from the applied records before the onset. A number that the records do not hold is None, and is
no evidence of anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median
from typing import final

from harness.analysis.postmortem.batch_facts import entropy, rare_count
from harness.analysis.postmortem.costs import level_of
from harness.analysis.postmortem.evidence import Evidence
from harness.config.errors import ConfigError
from harness.config.optim import OptimConfig, ScheduleKind
from harness.core.events import ActionKind, Intervention, StepRecord
from harness.optim.schedule import schedule_factor

EMA_STEPS = 50
RECOVERY_STEPS, RECOVERY_RECORDS = 50, 9
RECOVERED_SIGMAS = 0.5
"""Seed 004, Q2.2: back within half a sigma of the mean before, fifty steps after the peak."""
SETTLED_STEPS = 100
"""Steps before norms of weights are held against anything: they start from nothing."""
LEAST_SPREAD = 0.02
"""Of the usual value: a spread below that is no measure of anything."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    before: list[StepRecord]
    """Applied, finite, before the onset; at most the last hundred."""
    during: list[StepRecord]
    """From the onset to its last sign."""
    level: float | None
    """Loss before: mean over the last 25 records."""
    sigma: float
    ema: float | None
    """Loss before: exponential mean over about fifty steps."""
    peak: StepRecord | None
    """The highest loss; the first that is not finite, where one is."""
    recovery_loss: float | None
    """Median of some records fifty steps after the peak; None: the log ends before."""
    usual_grad: float | None
    peak_grad: float | None
    """The highest gradient norm before clipping; NaN or Inf where one was."""
    usual_lr: float | None
    onset_lr: float | None

    @property
    def has_recovered(self) -> bool | None:
        if self.level is None or self.recovery_loss is None:
            return None
        return self.recovery_loss <= self.level + RECOVERED_SIGMAS * self.sigma

    @property
    def grad_factor(self) -> float | None:
        """The highest gradient norm over the usual one; Inf where it was not finite."""
        if self.peak_grad is None or not self.usual_grad:
            return None
        return self.peak_grad / self.usual_grad if math.isfinite(self.peak_grad) else math.inf

    @property
    def rise(self) -> float | None:
        """Of the loss, in spreads above its level; Inf where it was not finite."""
        if self.peak is None or self.level is None:
            return None
        spread = max(self.sigma, LEAST_SPREAD * abs(self.level), 1e-9)
        return (self.peak.loss - self.level) / spread if math.isfinite(self.peak.loss) else math.inf

    @property
    def suspects(self) -> list[StepRecord]:
        """Records of the incident that stand out; where none does, all of them."""
        return [record for record in self.during if self.stands_out(record)] or self.during

    def stands_out(self, record: StepRecord) -> bool:
        """Whether a record was refused, not finite, or far above what was usual."""
        if record.refused or not math.isfinite(record.loss + record.grad_norm):
            return True
        is_high = self.level is not None and record.loss > self.level + 3 * self.sigma
        return is_high or bool(self.usual_grad and record.grad_norm > 5 * self.usual_grad)


def measure(evidence: Evidence) -> Measures:
    """All of them."""
    incident, records = evidence.incident, evidence.records
    before = [r for r in records if r.iteration < incident.onset and not r.refused and math.isfinite(r.loss)][-100:]
    during = [r for r in records if incident.onset <= r.iteration <= incident.last]
    level = level_of(records, incident.onset)
    peak = peak_of(during)
    grads = [record.grad_norm for record in during]
    return Measures(
        before=before,
        during=during,
        level=None if level is None else level[0],
        sigma=0.0 if level is None else level[1],
        ema=ema_of(before),
        peak=peak,
        recovery_loss=None if peak is None else recovery_of(records, peak),
        usual_grad=middle(record.grad_norm for record in before),
        peak_grad=next((grad for grad in grads if not math.isfinite(grad)), max(grads, default=None)),
        usual_lr=before[-1].lr if before else None,
        onset_lr=during[0].lr if during else None,
    )


def peak_of(during: Sequence[StepRecord]) -> StepRecord | None:
    broken = next((record for record in during if not math.isfinite(record.loss)), None)
    return broken or max(during, key=lambda record: record.loss, default=None)


def ema_of(before: Sequence[StepRecord]) -> float | None:
    mean: float | None = None
    for record in before:
        mean = record.loss if mean is None else mean + (record.loss - mean) * 2 / (EMA_STEPS + 1)
    return mean


def recovery_of(records: Sequence[StepRecord], peak: StepRecord) -> float | None:
    """The loss fifty iterations after the peak, or where the log ends, if that is later than half of it."""
    later = [r for r in records if r.iteration > peak.iteration and not r.refused][:RECOVERY_STEPS]
    if len(later) < RECOVERY_STEPS // 2:
        return None
    return median(sorted(r.loss if math.isfinite(r.loss) else math.inf for r in later[-RECOVERY_RECORDS:]))


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what is finite; None where nothing is."""
    kept = [value for value in values if value is not None and math.isfinite(value)]
    return median(kept) if kept else None


def spread_of(values: Sequence[float]) -> tuple[float, float] | None:
    """Median and robust spread; None where there are too few."""
    if len(values) < 8:
        return None
    centre = median(values)
    spread = 1.4826 * median(abs(value - centre) for value in values)
    return centre, max(spread, LEAST_SPREAD * abs(centre), 1e-9)


def entropy_shift(measures: Measures) -> tuple[float, float, float] | None:
    """Entropy of the most remarkable suspected batch, what is usual, and how many spreads lie between."""
    usual = spread_of([e for record in measures.before if (e := entropy(record)) is not None])
    seen = [e for record in measures.suspects if (e := entropy(record)) is not None]
    if usual is None or not seen:
        return None
    farthest = max(seen, key=lambda value: abs(value - usual[0]))
    return farthest, usual[0], abs(farthest - usual[0]) / usual[1]


def rare_surplus(measures: Measures) -> tuple[int, float, StepRecord] | None:
    """Occurrences of the rarest tokens in the suspected batch that has most, what is usual, and that record."""
    usual = middle(rare_count(record) for record in measures.before)
    counted = [(count, record) for record in measures.suspects if (count := rare_count(record)) is not None]
    if usual is None or not counted:
        return None
    count, record = max(counted, key=lambda each: each[0])
    return count, max(usual, 1.0), record


def weight_growth(evidence: Evidence) -> tuple[str, float] | None:
    """The layer group whose weights grew most since they had settled, and by which factor; what is not finite apart."""
    probes = [record.group_param_norms for record in _probes(evidence) if record.step >= SETTLED_STEPS]
    names = probes[0] if len(probes) > 1 else {}
    factors = [(name, max(norms) / min(norms)) for name in names if len(norms := _sound(name, probes)) > 1]
    return max(factors, key=lambda each: each[1], default=None)


def zeroed(records: Iterable[StepRecord]) -> dict[str, float]:
    """The largest share of its numbers that became zero in fp8, of each layer group that was probed."""
    shares: dict[str, float] = {}
    for record in records:
        for name, share in record.fp8_underflow.items():
            shares[name] = max(share, shares.get(name, 0.0))
    return shares


def weight_jump(evidence: Evidence) -> tuple[str, float] | None:
    """The layer group whose norm changed most between two probes, and by which factor; Inf: it stopped being finite."""
    worst: tuple[str, float] | None = None
    for earlier, later in pairwise(record.group_param_norms for record in _probes(evidence)):
        for name, norm in later.items():
            before = earlier.get(name, math.nan)
            if math.isfinite(before) and before > 0:
                factor = max(norm / before, before / norm) if 0 < norm < math.inf else math.inf
                worst = (name, factor) if worst is None or factor > worst[1] else worst
    return worst


def _probes(evidence: Evidence) -> list[StepRecord]:
    return [r for r in evidence.records if r.group_param_norms and r.iteration <= evidence.incident.last + 1]


def _sound(name: str, probes: Sequence[dict[str, float]]) -> list[float]:
    return [norm for probe in probes if 0 < (norm := probe.get(name, 0.0)) < math.inf]


def held_out_check(evidence: Evidence) -> tuple[float, float] | None:
    """The held-out loss that was measured during an incident, and that of a healthy state; None: there was no check."""
    measured = [each.held_out_loss for each in evidence.outcomes if each.kind is ActionKind.check]
    expected = [each.level for each in evidence.actions if each.kind is ActionKind.check]
    if not measured or not expected or measured[-1] is None or expected[-1] is None:
        return None
    return measured[-1], expected[-1]


def skipped_in_vain(evidence: Evidence) -> int:
    """Restores and exclusions that trouble followed again."""
    others = (ActionKind.watch, ActionKind.check, ActionKind.accept, ActionKind.precision)
    return max(0, sum(action.kind not in others for action in evidence.actions) - 1)


def scheduled(evidence: Evidence, record: StepRecord) -> float | None:
    """What the configured schedule gives for the update of a record; None where it is not known."""
    settings = evidence.run.settings
    names = [each.name for each in fields(OptimConfig)]
    try:
        optim = OptimConfig(**{name: settings[f"optim.{name}"] for name in names})
        optim.schedule = ScheduleKind(optim.schedule)
        num_steps = int(settings["train.num_steps"])
    except (KeyError, TypeError, ValueError, ConfigError):
        return None
    step = record.step if record.refused else record.step - 1
    return optim.lr * schedule_factor(optim, step=max(0, step), num_steps=num_steps)


def off_schedule(evidence: Evidence, measures: Measures) -> tuple[StepRecord, float] | None:
    """The record of the incident whose learning rate is farthest from its schedule, and by which factor; a scale that
    held before the onset, and changes that were ordered or decided, are allowed for."""
    usual = middle(_rate_factor(evidence, record) for record in measures.before[-20:])
    if not usual or any(action.lr_scale is not None for action in evidence.actions) or any(evidence.of(Intervention)):
        return None
    factors = [(record, factor / usual) for record in measures.during if (factor := _rate_factor(evidence, record))]
    return max(factors, key=lambda each: abs(math.log(each[1])), default=None)


def _rate_factor(evidence: Evidence, record: StepRecord) -> float | None:
    rate = scheduled(evidence, record)
    return record.lr / rate if rate and math.isfinite(record.lr) and record.lr > 0 else None
