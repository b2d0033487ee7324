"""Measurements of an incident that the rules share.

Usual values come from the applied records before the onset. A number that was not recorded is None and counts neither
for nor against any cause.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median
from typing import final

from harness.analysis.postmortem.evidence import Evidence, IncidentNumbers
from harness.analysis.postmortem.incident_numbers import finite_median, repeated_iterations
from harness.analysis.postmortem.recorded_batch import entropy
from harness.config.errors import ConfigError
from harness.config.optim import OptimConfig, ScheduleKind
from harness.core.events import ActionKind, Finding, Intervention, PrecursorSignal, StepRecord
from harness.optim.schedule import schedule_factor

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
    repeated: Collection[int]
    """Iterations that trained a step from before the onset again (`repeated_iterations`)."""
    numbers: IncidentNumbers
    usual_lr: float | None
    onset_lr: float | None

    @property
    def level(self) -> float | None:
        return self.numbers.level

    @property
    def sigma(self) -> float:
        return self.numbers.sigma

    @property
    def usual_grad(self) -> float | None:
        return self.numbers.usual_grad

    @property
    def peak_grad(self) -> float | None:
        return self.numbers.peak_grad

    @property
    def is_finite(self) -> bool:
        """Whether all losses and gradient norms of the incident are finite."""
        return all(math.isfinite(record.loss + record.grad_norm) for record in self.during)

    @property
    def grad_factor(self) -> float | None:
        """The highest gradient norm over the usual one; Inf if it was not finite."""
        if self.peak_grad is None or not self.usual_grad:
            return None
        return self.peak_grad / self.usual_grad if math.isfinite(self.peak_grad) else math.inf

    @property
    def rise(self) -> float | None:
        """Peak loss above its level, in spreads; Inf if it was not finite."""
        peak = self.numbers.peak
        if peak is None or self.level is None:
            return None
        spread = max(self.sigma, LEAST_SPREAD * abs(self.level), 1e-9)
        return (peak - self.level) / spread if math.isfinite(peak) else math.inf

    @property
    def suspects(self) -> list[StepRecord]:
        """Records of the incident that stand out; all of them if none does."""
        return [record for record in self.during if self.stands_out(record)] or self.during

    def stands_out(self, record: StepRecord) -> bool:
        """Whether a record was rejected, not finite, or far above usual in loss or gradient norm. A batch without a
        token to predict does not stand out."""
        if record.is_empty or record.iteration in self.repeated:
            return False
        if record.refused or not math.isfinite(record.loss + record.grad_norm):
            return True
        is_high = self.level is not None and record.loss > self.level + 3 * self.sigma
        return is_high or bool(self.usual_grad and record.grad_norm > 5 * self.usual_grad)


def measure(evidence: Evidence) -> Measures:
    """Compute all measures of an incident."""
    incident, records, onset = evidence.incident, evidence.records, evidence.onset
    before = [r for r in records if r.iteration < onset and not r.refused and math.isfinite(r.loss)][-100:]
    during = [r for r in records if onset <= r.iteration <= incident.last]
    return Measures(
        before=before,
        during=during,
        repeated=repeated_iterations(records, onset, evidence.numbers.sigma),
        numbers=evidence.numbers,
        usual_lr=before[-1].lr if before else None,
        onset_lr=during[0].lr if during else None,
    )


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


def weight_growth(evidence: Evidence) -> tuple[str, float] | None:
    """The layer group whose weight norm grew most after `SETTLED_STEPS`, and the factor; below 1: all of them shrank.

    A norm is compared with earlier ones since the last restore. Non-finite norms are ignored.
    """
    factors: list[tuple[str, float]] = []
    least: dict[str, float] = {}
    last_step = 0
    for record in _probes(evidence):
        if record.step < last_step:
            least.clear()
        last_step = record.step
        norms = record.group_param_norms if record.step >= SETTLED_STEPS else {}
        for name, norm in norms.items():
            if 0 < norm < math.inf:
                factors += [(name, norm / least[name])] if name in least else []
                least[name] = min(norm, least.get(name, norm))
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


def first_broken_weights(evidence: Evidence) -> tuple[StepRecord, str] | None:
    """The first step with a weight norm that is not finite, and the layer group if it was probed, else "the model".
    None: all are finite."""
    for record in evidence.records:
        broken = [name for name, norm in record.group_param_norms.items() if not math.isfinite(norm)]
        if broken or not math.isfinite(record.weight_norm or 0.0):
            return record, broken[0] if broken else "the model"
    return None


def layer_growth(measures: Measures) -> tuple[float, float, bool] | None:
    """Activations of the first and last probed layer over their usual values, and whether they grow in between.

    From the probe of the incident where the last layer is highest; None: not probed.
    """
    usual: dict[str, list[float]] = {}
    for record in measures.before:
        for name, value in record.activation_rms.items():
            if 0 < value < math.inf:
                usual.setdefault(name, []).append(value)
    rows = [
        [value / median(usual[name]) for name, value in record.activation_rms.items() if name in usual]
        for record in measures.during
    ]
    rows = [[math.inf if math.isnan(value) else value for value in row] for row in rows if len(row) > 1]
    if not rows:
        return None
    worst = max(rows, key=lambda row: row[-1])
    return worst[0], worst[-1], all(later >= 0.9 * earlier for earlier, later in pairwise(worst))


def _probes(evidence: Evidence) -> list[StepRecord]:
    return [r for r in evidence.records if r.group_param_norms and r.iteration <= evidence.incident.last + 1]


def held_out_check(evidence: Evidence) -> tuple[float, float] | None:
    """Held-out loss measured during the incident, and the expected one; None: it was not checked."""
    measured = [outcome.held_out_loss for outcome in evidence.outcomes if outcome.kind is ActionKind.check]
    expected = [action.level for action in evidence.actions if action.kind is ActionKind.check]
    if not measured or not expected or measured[-1] is None or expected[-1] is None:
        return None
    return measured[-1], expected[-1]


def num_failed_recoveries(evidence: Evidence) -> int:
    """Recovery actions of the incident that were followed by another one. Skips in a row, each of another batch, count
    as one action. The return to the scheduled learning rate, a `cool` with a larger factor, is none."""
    others = (ActionKind.watch, ActionKind.check, ActionKind.accept, ActionKind.precision, ActionKind.qk_clip)
    cools = [action for action in evidence.actions if action.kind is ActionKind.cool]
    raises = [later for now, later in pairwise(cools) if (later.lr_scale or 0.0) > (now.lr_scale or 0.0)]
    kinds = [action.kind for action in evidence.actions if action.kind not in others and action not in raises]
    return sum(kind is not ActionKind.skip or later is not ActionKind.skip for kind, later in pairwise(kinds))


def find_precursor(evidence: Evidence, signal: PrecursorSignal) -> Finding | None:
    """The first early sign of the incident in this signal."""
    return next((finding for finding in evidence.findings if finding.signal == signal), None)


def scheduled_lr(evidence: Evidence, record: StepRecord) -> float | None:
    """Learning rate of the configured schedule for the update of a record; None if the schedule is not known."""
    settings = evidence.run.settings
    names = [item.name for item in fields(OptimConfig)]
    try:
        optim = OptimConfig(**{name: settings[f"optim.{name}"] for name in names if f"optim.{name}" in settings})
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
    usual = finite_median(_rate_factor(evidence, record) for record in measures.before[-20:])
    first = measures.before[0].iteration if measures.before else evidence.onset
    changed = any(event.iteration >= first for event in evidence.of(Intervention))
    if not usual or changed or any(action.lr_scale is not None for action in evidence.actions):
        return None
    factors = [(record, factor / usual) for record in measures.during if (factor := _rate_factor(evidence, record))]
    return max(factors, key=lambda pair: abs(math.log(pair[1])), default=None)


def _rate_factor(evidence: Evidence, record: StepRecord) -> float | None:
    rate = scheduled_lr(evidence, record)
    return record.lr / rate if rate and math.isfinite(record.lr) and record.lr > 0 else None
