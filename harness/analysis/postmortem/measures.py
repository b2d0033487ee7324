"""Numbers of an incident that the rules, the report and the pictures share; each is computed once, here.

Usual values come from the applied records before the onset. A number that was not recorded is None and counts neither
for nor against any cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median
from typing import final

from harness.analysis.postmortem.costs import level_of
from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.recorded_batch import entropy, rare_count
from harness.config.errors import ConfigError
from harness.config.optim import OptimConfig, ScheduleKind
from harness.core.events import ActionKind, Intervention, StepRecord
from harness.optim.schedule import schedule_factor

EMA_STEPS = 50
RECOVERY_STEPS, RECOVERY_RECORDS = 50, 9
RECOVERED_SIGMAS = 0.5
"""Recovered: fifty steps after the peak the loss is within half a sigma of the mean before."""
SETTLED_STEPS = 100
"""Weight norms before this step are not compared: they still grow from initialization."""
LEAST_SPREAD = 0.02
"""Lower bound of a spread, as a fraction of the usual value."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    before: list[StepRecord]
    """Applied records with a finite loss before the onset; at most the last hundred."""
    during: list[StepRecord]
    """From the onset to the incident's last iteration."""
    level: float | None
    """Mean loss of the last 25 records before the onset."""
    sigma: float
    ema: float | None
    """Loss before the onset: exponential moving average over about fifty steps."""
    peak: StepRecord | None
    """Record with the highest loss, or the first with a non-finite loss."""
    recovery_loss: float | None
    """Median loss of a few records fifty steps after the peak; None: the log ends before."""
    usual_grad: float | None
    peak_grad: float | None
    """The highest gradient norm before clipping; NaN or Inf if one occurred."""
    usual_lr: float | None
    onset_lr: float | None

    @property
    def has_recovered(self) -> bool | None:
        if self.level is None or self.recovery_loss is None:
            return None
        return self.recovery_loss <= self.level + RECOVERED_SIGMAS * self.sigma

    @property
    def grad_factor(self) -> float | None:
        """The highest gradient norm over the usual one; Inf if it was not finite."""
        if self.peak_grad is None or not self.usual_grad:
            return None
        return self.peak_grad / self.usual_grad if math.isfinite(self.peak_grad) else math.inf

    @property
    def rise(self) -> float | None:
        """Peak loss above its level, in spreads; Inf if it was not finite."""
        if self.peak is None or self.level is None:
            return None
        spread = max(self.sigma, LEAST_SPREAD * abs(self.level), 1e-9)
        return (self.peak.loss - self.level) / spread if math.isfinite(self.peak.loss) else math.inf

    @property
    def suspects(self) -> list[StepRecord]:
        """Records of the incident that stand out; all of them if none does."""
        return [record for record in self.during if self.stands_out(record)] or self.during

    def stands_out(self, record: StepRecord) -> bool:
        """Whether a record was rejected, not finite, or far above usual in loss or gradient norm."""
        if record.refused or not math.isfinite(record.loss + record.grad_norm):
            return True
        is_high = self.level is not None and record.loss > self.level + 3 * self.sigma
        return is_high or bool(self.usual_grad and record.grad_norm > 5 * self.usual_grad)


def measure(evidence: Evidence) -> Measures:
    """Compute all measures of an incident."""
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
    """The loss fifty applied steps after the peak, or at the end of the log if at least half of them are there."""
    later = [r for r in records if r.iteration > peak.iteration and not r.refused][:RECOVERY_STEPS]
    if len(later) < RECOVERY_STEPS // 2:
        return None
    return median(sorted(r.loss if math.isfinite(r.loss) else math.inf for r in later[-RECOVERY_RECORDS:]))


def middle(values: Iterable[float | None]) -> float | None:
    """Median of the finite values; None if there are none."""
    kept = [value for value in values if value is not None and math.isfinite(value)]
    return median(kept) if kept else None


def spread_of(values: Sequence[float]) -> tuple[float, float] | None:
    """Median and robust spread (scaled MAD); None for fewer than eight values."""
    if len(values) < 8:
        return None
    centre = median(values)
    spread = 1.4826 * median(abs(value - centre) for value in values)
    return centre, max(spread, LEAST_SPREAD * abs(centre), 1e-9)


def entropy_shift(measures: Measures) -> tuple[float, float, float] | None:
    """Token entropy of the most unusual suspected batch, the usual entropy, and their distance in spreads."""
    usual = spread_of([e for record in measures.before if (e := entropy(record)) is not None])
    seen = [e for record in measures.suspects if (e := entropy(record)) is not None]
    if usual is None or not seen:
        return None
    farthest = max(seen, key=lambda value: abs(value - usual[0]))
    return farthest, usual[0], abs(farthest - usual[0]) / usual[1]


def rare_surplus(measures: Measures) -> tuple[int, float, StepRecord] | None:
    """Highest count of rarest tokens in a suspected batch, the usual count, and the record of that batch."""
    usual = middle(rare_count(record) for record in measures.before)
    counted = [(count, record) for record in measures.suspects if (count := rare_count(record)) is not None]
    if usual is None or not counted:
        return None
    count, record = max(counted, key=lambda pair: pair[0])
    return count, max(usual, 1.0), record


def weight_growth(evidence: Evidence) -> tuple[str, float] | None:
    """The layer group whose weight norm grew most after `SETTLED_STEPS`, and the factor. Ignores non-finite norms."""
    probes = [record.group_param_norms for record in _probes(evidence) if record.step >= SETTLED_STEPS]
    names = probes[0] if len(probes) > 1 else {}
    factors = [(name, max(norms) / min(norms)) for name in names if len(norms := _finite_norms(name, probes)) > 1]
    return max(factors, key=lambda pair: pair[1], default=None)


def worst_underflow(records: Iterable[StepRecord]) -> dict[str, float]:
    """Layer group -> largest share of its values that underflowed in fp8, over all probes."""
    shares: dict[str, float] = {}
    for record in records:
        for name, share in record.fp8_underflow.items():
            shares[name] = max(share, shares.get(name, 0.0))
    return shares


def weight_jump(evidence: Evidence) -> tuple[str, float] | None:
    """The layer group whose weight norm changed most between two probes, and the factor; Inf: it became non-finite."""
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


def _finite_norms(name: str, probes: Sequence[dict[str, float]]) -> list[float]:
    return [norm for probe in probes if 0 < (norm := probe.get(name, 0.0)) < math.inf]


def held_out_check(evidence: Evidence) -> tuple[float, float] | None:
    """Held-out loss measured during the incident, and the expected one; None: it was not checked."""
    measured = [outcome.held_out_loss for outcome in evidence.outcomes if outcome.kind is ActionKind.check]
    expected = [action.level for action in evidence.actions if action.kind is ActionKind.check]
    if not measured or not expected or measured[-1] is None or expected[-1] is None:
        return None
    return measured[-1], expected[-1]


def num_failed_recoveries(evidence: Evidence) -> int:
    """Recovery actions of the incident that were followed by another one."""
    others = (ActionKind.watch, ActionKind.check, ActionKind.accept, ActionKind.precision)
    return max(0, sum(action.kind not in others for action in evidence.actions) - 1)


def scheduled_lr(evidence: Evidence, record: StepRecord) -> float | None:
    """Learning rate of the configured schedule for the update of a record; None if the schedule is not known."""
    settings = evidence.run.settings
    names = [item.name for item in fields(OptimConfig)]
    try:
        optim = OptimConfig(**{name: settings[f"optim.{name}"] for name in names})
        optim.schedule = ScheduleKind(optim.schedule)
        num_steps = int(settings["train.num_steps"])
    except (KeyError, TypeError, ValueError, ConfigError):
        return None
    step = record.step if record.refused else record.step - 1
    return optim.lr * schedule_factor(optim, step=max(0, step), num_steps=num_steps)


def off_schedule(evidence: Evidence, measures: Measures) -> tuple[StepRecord, float] | None:
    """The record of the incident whose learning rate is farthest from its schedule, and the factor.

    A scale that already held before the onset is divided out. None if an action or an operator changed the rate.
    """
    usual = middle(_rate_factor(evidence, record) for record in measures.before[-20:])
    if not usual or any(action.lr_scale is not None for action in evidence.actions) or any(evidence.of(Intervention)):
        return None
    factors = [(record, factor / usual) for record in measures.during if (factor := _rate_factor(evidence, record))]
    return max(factors, key=lambda pair: abs(math.log(pair[1])), default=None)


def _rate_factor(evidence: Evidence, record: StepRecord) -> float | None:
    rate = scheduled_lr(evidence, record)
    return record.lr / rate if rate and math.isfinite(record.lr) and record.lr > 0 else None
