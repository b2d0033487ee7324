"""Rules for updates that destroy the weights, and for round-off that grows from layer to layer."""

from __future__ import annotations

import math

from harness.analysis.postmortem import measures as m
from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures
from harness.analysis.postmortem.rules.causes import Cause, Panel, Reason, RuleResult, leave_unexamined, rate_cause
from harness.core.events import StepRecord

ORDINARY = 5.0
"""A gradient norm up to this many times the usual one is ordinary."""
TORN = 100.0
"""Factor by which a weight norm changes between two probes to be violent."""
COARSE = ("bf16", "fp8", "fp16")
"""Precisions in which round-off is visible within one step."""
LAYER_GROWTH = 3.0
"""Activations of the last layer that grew this many times as much as those of the first."""
NAN_IN_ROW = 3
"""Steps in a row with a loss that is not finite, on different batches."""


def is_ordinary(measures: Measures) -> bool:
    """Whether the last update before the onset came from an ordinary gradient."""
    applied, usual = measures.before[-1:], measures.usual_grad or 0.0
    return bool(applied) and all(math.isfinite(r.grad_norm) and r.grad_norm <= ORDINARY * usual for r in applied)


def destructive_update(evidence: Evidence, measures: Measures) -> RuleResult:
    """An applied update wrote a value into a parameter that is not finite, or far too large."""
    cause = Cause.destructive_update
    applied = [r for r in evidence.records if r.iteration <= evidence.incident.last and not r.refused]
    bad_update = next((r for r in applied if not math.isfinite(r.grad_norm)), None)
    broken = m.first_broken_weights(evidence)
    if bad_update is not None and broken is not None and bad_update.iteration <= broken[0].iteration:
        text = (
            f"the update of iteration {bad_update.iteration} was applied with gradient norm {bad_update.grad_norm}; "
            f"weights of {broken[1]} are not finite since the probe of iteration {broken[0].iteration}"
        )
        return rate_cause(cause, 0.95, Reason(text, Panel.weights))
    if broken is not None and not is_ordinary(measures):
        text = f"weights of {broken[1]} are not finite since the probe of iteration {broken[0].iteration}"
        return rate_cause(cause, 0.9, Reason(f"{text}, after a gradient that was not ordinary", Panel.weights))
    jump = m.weight_jump(evidence)
    if jump is not None and jump[1] >= TORN and not is_ordinary(measures):
        text = f"weights of {jump[0]} changed {jump[1]:.3g}-fold between two probes, after a gradient far above usual"
        return rate_cause(cause, 0.85, Reason(text, Panel.weights))
    if bad_update is not None:
        text = f"the update of iteration {bad_update.iteration} was applied with gradient norm {bad_update.grad_norm}"
        return rate_cause(cause, 0.9, Reason(text, Panel.gradient))
    if broken is not None:
        text = f"weights of {broken[1]} became non-finite after an ordinary gradient: not by an update"
        return rate_cause(cause, 0.3, None, Reason(text, Panel.weights))
    return _without_broken_weights(evidence, measures)


def _without_broken_weights(evidence: Evidence, measures: Measures) -> RuleResult:
    """No probe shows broken weights: judge by what later steps compute."""
    cause, in_row = Cause.destructive_update, longest_nan_run(measures.during)
    probed = [r for r in evidence.records if r.iteration > evidence.onset and r.group_param_norms]
    if in_row >= NAN_IN_ROW and not probed:
        text = f"the loss was not finite in {in_row} steps in a row, on different batches: the state is broken"
        return rate_cause(cause, 0.55, Reason(text, Panel.loss))
    later = [r for r in evidence.records if r.iteration > evidence.onset and math.isfinite(r.loss)]
    if not probed and not later:
        return leave_unexamined(cause, "the weights were not probed after the onset", Panel.weights)
    shown = f"weight norms are finite at iteration {probed[-1].iteration}" if probed else ""
    shown = shown or f"the loss is finite at iteration {later[-1].iteration}"
    return rate_cause(cause, 0.05, None, Reason(shown, Panel.weights if probed else Panel.loss))


def longest_nan_run(records: list[StepRecord]) -> int:
    """The largest number of steps in a row whose loss is not finite."""
    longest = current = 0
    for record in records:
        current = 0 if math.isfinite(record.loss) else current + 1
        longest = max(longest, current)
    return longest


def numerical_cascade(evidence: Evidence, measures: Measures) -> RuleResult:
    """Round-off grows from layer to layer, until activations are far above usual in the last ones."""
    cause, precision = Cause.numerical_cascade, evidence.run.precision
    if precision == "fp32":
        text = "the run computes in fp32: round-off accumulates over many steps, not within one"
        return rate_cause(cause, 0.0, None, Reason(text, Panel.activations))
    if precision not in COARSE:
        return leave_unexamined(cause, f"the precision is {precision}", Panel.activations)
    growth = m.layer_growth(measures)
    if growth is None:
        return leave_unexamined(cause, "activations were not probed in the incident", Panel.activations)
    first, last, is_steady = growth
    text = f"activations are {first:.3g} times usual in the first probed layer and {last:.3g} times in the last"
    if last < LAYER_GROWTH * first or last < LAYER_GROWTH:
        return rate_cause(cause, 0.05, None, Reason(text, Panel.activations))
    score = 0.6 + 0.2 * is_steady + 0.05 * min(math.log10(last / first), 2)
    steady = ", growing from layer to layer" if is_steady else ""
    return rate_cause(cause, score, Reason(f"{text}{steady}, in {precision}", Panel.activations))
