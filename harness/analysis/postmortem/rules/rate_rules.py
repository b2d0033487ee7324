"""Rules about the learning rate: one that jumps, and one that is too high.

Both read the configuration and the interventions first: a rate that a person changed is no mystery.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from statistics import median
from typing import Any, NamedTuple

from harness.analysis.plan.preflight import LR_RANGE, usual_lr
from harness.analysis.postmortem import measures as m
from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures
from harness.analysis.postmortem.rules.causes import Cause, Panel, Reason, RuleResult, leave_unexamined, rate_cause
from harness.config.errors import ConfigError
from harness.config.model import ModelConfig
from harness.config.optim import SCHEDULE_KEYS
from harness.core.events import FindingKind, Intervention, PrecursorSignal
from harness.model.size import num_parameters

OFF_SCHEDULE = 1.2
"""Tolerated ratio between learning rate and schedule, and between the rates before and after a change."""
CHANGE_BEFORE = 300
"""Iterations before the onset within which a change of the configuration explains an incident."""
RAISED = 3.0
"""A resume that raises the rate by this factor is blamed for what follows."""
FAR_ABOVE = 10.0
"""A rate this many times above the upper end of its usual range explains every other sign."""
TREND_RECORDS, GRAD_TREND = 40, 1.5
"""Records before the onset in which a trend is looked for, and the growth of the gradient norm that counts as one."""


class RateChange(NamedTuple):
    """A change of the learning rate that a person made."""

    text: str
    factor: float
    """Rate after it over the rate before it."""
    key: str


def rate_range(settings: dict[str, Any]) -> tuple[float, float] | None:
    """The usual range of the peak learning rate for the size of the model; None if the size is not known."""
    if settings.get("model.mup_base_width") is not None:
        return None
    try:
        names = [item.name for item in fields(ModelConfig) if f"model.{item.name}" in settings]
        model = ModelConfig(**{name: settings[f"model.{name}"] for name in names})
        usual = usual_lr(num_parameters(model))
    except (TypeError, ValueError, ConfigError):
        return None
    return usual * LR_RANGE[0], usual * LR_RANGE[1]


def rate_excess(evidence: Evidence) -> float | None:
    """The configured learning rate, as far as it was reached, over the upper end of its usual range; None: not known.

    A rate above the configured one is a jump, not a high rate.
    """
    span, configured = rate_range(evidence.run.settings), evidence.run.settings.get("optim.lr")
    rates = [r.lr for r in evidence.records if r.iteration <= evidence.incident.last and math.isfinite(r.lr)]
    if span is None or not rates or not isinstance(configured, int | float):
        return None
    return min(max(rates), float(configured)) / span[1]


def find_rate_change(evidence: Evidence) -> RateChange | None:
    """The intervention that changed the learning rate and is nearest to the onset: the newest one before it, else the
    newest one before the last record of the incident."""
    changes = [(event, *named) for event in evidence.of(Intervention) if (named := _name_rate_change(event))]
    span = range(evidence.onset - CHANGE_BEFORE, evidence.incident.last)
    ends = [*(event.iteration for event, _, _ in changes[1:]), math.inf]
    inside = [(*change, end) for change, end in zip(changes, ends, strict=False) if change[0].iteration in span]
    inside.reverse()
    for event, key, text, end in sorted(inside, key=lambda change: change[0].iteration >= evidence.onset):
        before = [r.lr for r in evidence.records if r.iteration <= event.iteration and r.lr > 0]
        after = [r.lr for r in evidence.records if event.iteration < r.iteration <= end and r.lr > 0]
        if not before or not after:
            continue
        factor = max(after[:TREND_RECORDS], key=lambda rate: abs(math.log(rate / before[-1]))) / before[-1]
        if max(factor, 1 / factor) >= OFF_SCHEDULE:
            return RateChange(text, factor, key)
    return None


def _name_rate_change(event: Intervention) -> tuple[str, str] | None:
    """The key and the text of an intervention that changed the learning rate; None for any other."""
    key = next((key for key in SCHEDULE_KEYS if key in event.changes), None)
    if key is not None:
        old, new = event.changes[key]
        return key, f"{event.reason} changed {key} from {old} to {new} at iteration {event.iteration}"
    if str(event.changes.get("command", "")).startswith("lr "):
        return "optim.lr", f"an operator sent `{event.changes['command']}` at iteration {event.iteration}"
    return None


def lr_discontinuity(evidence: Evidence, measures: Measures) -> RuleResult:
    """The learning rate jumped, or differs from its schedule."""
    cause, change = Cause.lr_discontinuity, find_rate_change(evidence)
    if change is not None:
        is_raise = change.key == "optim.lr" and change.factor >= RAISED
        text = f"{change.text}, which multiplied the learning rate by {change.factor:.3g}"
        against = Reason("the new rate itself is too high, not its jump", Panel.rate) if is_raise else None
        return rate_cause(cause, 0.4 if is_raise else 0.9, Reason(text, Panel.rate), against)
    jump = next((finding for finding in evidence.findings if finding.kind is FindingKind.lr_jump), None)
    off = m.off_schedule(evidence, measures)
    is_off = off is not None and max(off[1], 1 / off[1]) > OFF_SCHEDULE
    if jump is not None:
        schedule = f"; its schedule gives {m.scheduled_lr(evidence, off[0]):.3g}" if off is not None and is_off else ""
        return rate_cause(
            cause, 0.9 + 0.05 * is_off, Reason(f"{jump.message}, iteration {jump.iteration}{schedule}", Panel.rate)
        )
    if off is not None and is_off:
        text = f"learning rate {off[0].lr:.3g} at iteration {off[0].iteration} is {off[1]:.3g} times the scheduled one"
        return rate_cause(cause, 0.8, Reason(text, Panel.rate))
    known = measures.usual_lr is not None and measures.onset_lr is not None
    if not known or not math.isfinite((measures.usual_lr or 0.0) + (measures.onset_lr or 0.0)):
        return leave_unexamined(cause, "the learning rate before the onset is not in the log", Panel.rate)
    text = f"the learning rate did not jump: {measures.usual_lr:.3g} before, {measures.onset_lr:.3g} at the onset"
    return rate_cause(cause, 0.0, None, Reason(text, Panel.rate))


def lr_too_high(evidence: Evidence, measures: Measures) -> RuleResult:
    """The rate is far above what is usual for the size, or loss and gradient norm climb before the spike."""
    cause, excess, change = Cause.lr_too_high, rate_excess(evidence), find_rate_change(evidence)
    span = rate_range(evidence.run.settings)
    rises = change is not None and change.key == "optim.lr" and change.factor >= RAISED
    if excess is not None and span is not None and excess > 1:
        usual = f"{excess:.3g} times the upper end of the usual range ({span[0]:.1g} to {span[1]:.1g} for this size)"
        text = f"learning rate {excess * span[1]:.3g}, {usual}{f'; {change.text}' if rises and change else ''}"
        return rate_cause(cause, min(0.7 + 0.1 * math.log10(excess) + 0.1 * rises, 0.97), Reason(text, Panel.rate))
    if rises and change is not None:
        text = f"{change.text}, which multiplied the learning rate by {change.factor:.3g}"
        return rate_cause(cause, 0.85, Reason(text, Panel.rate))
    if early := m.find_precursor(evidence, PrecursorSignal.update_ratio):
        return rate_cause(cause, 0.8, Reason(early.message, Panel.weights))
    return _rate_by_trend(evidence, measures)


def _rate_by_trend(evidence: Evidence, measures: Measures) -> RuleResult:
    cause = Cause.lr_too_high
    cooled = any(action.lr_scale is not None and action.lr_scale < 1 for action in evidence.actions)
    diverged = FindingKind.divergence in evidence.kinds()
    rates = [record.lr for record in evidence.records if math.isfinite(record.lr)]
    at_peak = bool(rates) and measures.onset_lr is not None and measures.onset_lr >= 0.8 * max(rates)
    risen = not measures.is_finite or (measures.rise is not None and measures.rise > 3)
    climbs = climbs_before(measures)
    if not (risen or diverged or cooled):
        if measures.rise is None:
            return leave_unexamined(cause, "the loss before the onset is not in the log", Panel.loss)
        return rate_cause(cause, 0.1, None, Reason("the loss did not leave its level", Panel.loss))
    high = "the loss or gradient was not finite"
    if measures.is_finite and measures.rise is not None:
        high = f"loss {measures.rise:.1f} sigma above normal"
    signs = [high if risen else "", "divergence" if diverged else ""]
    signs += ["gradient norm and loss climbed before the onset" if climbs else ""]
    signs += ["near the peak of the learning rate" if at_peak else "", "a lower rate was tried" if cooled else ""]
    score = 0.2 + 0.3 * diverged + 0.3 * climbs + 0.1 * at_peak + 0.1 * cooled
    return rate_cause(cause, max(score, 0.25), Reason(", ".join(sign for sign in signs if sign), Panel.rate))


def climbs_before(measures: Measures) -> bool:
    """Whether gradient norm and loss both rise over the last records before the onset."""
    last = measures.before[-TREND_RECORDS:]
    if len(last) < TREND_RECORDS // 2:
        return False
    grads = _quarters([record.grad_norm for record in last if math.isfinite(record.grad_norm)])
    losses = _quarters([record.loss for record in last])
    return grads[1] > GRAD_TREND * grads[0] and losses[1] > losses[0] + measures.sigma


def _quarters(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last quarter."""
    quarter = max(len(values) // 4, 1)
    return median(values[:quarter] or [0.0]), median(values[-quarter:] or [0.0])
