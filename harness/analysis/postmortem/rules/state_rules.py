"""Rules for causes in the hardware, the optimizer, the number format or the model itself.

Each rule is a pure function of the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.analysis.postmortem import measures as m
from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures
from harness.analysis.postmortem.rules.causes import Cause, Panel, Reason, RuleResult, leave_unexamined, rate_cause
from harness.analysis.postmortem.rules.update_rules import TORN, is_ordinary
from harness.config.optim import OptimizerKind
from harness.core.events import FindingKind, PrecursorSignal, StepRecord
from harness.sentinel.policy.open_incident import IncidentVerdict

OVERFLOW_PRECISION = "fp16"
"""fp8 saturates instead of overflowing, and its GEMMs return bf16."""
RANK_FACTOR = 10.0
"""A rank is an outlier if its gradient norm exceeds this many times that of the others."""
HARMLESS_SCORE = 0.45
"""Highest score of an outlier in a harmless incident: each rank has other rows, and rows alone can make one."""
STALE_RATIO, STALE_BETA2 = 4.0, 0.98
GROWN = 2.0
"""Factor by which a weight norm grows within the window to count as evidence."""
NOT_KNOWN = "not known"
RESET_SHARE, RESET_WITHIN = 0.25, 20
"""A second moment that falls to this share of its last value, within this many iterations, was reset."""
SCALE_ROWS = 5
"""Rows after an overflow within which the loss scale decreases."""


def corrupted_rank(evidence: Evidence, measures: Measures) -> RuleResult:
    """One rank has wrong values before the reduction, or weights change without an update that explains it."""
    cause, world = Cause.corrupted_rank, evidence.run.world_size
    if FindingKind.replica_mismatch in evidence.kinds():
        ranks = ", ".join(map(str, evidence.incident.ranks)) or "some"
        return rate_cause(cause, 1.0, Reason(f"weights of rank {ranks} differ from their replicas", Panel.ranks))
    if FindingKind.weights_changed in evidence.kinds():
        ranks = ", ".join(map(str, evidence.incident.ranks)) or "some"
        return rate_cause(cause, 1.0, Reason(f"weights of rank {ranks} changed between two updates", Panel.ranks))
    if kinds := [kind for kind in (FindingKind.corrupting_rank, FindingKind.corruption) if kind in evidence.kinds()]:
        ranks = " or ".join(map(str, evidence.incident.ranks)) or "some"
        again = "again and again" if kinds[0] is FindingKind.corrupting_rank else "once"
        text = f"rank {ranks} computed other bits than a second computation of the same rows, {again}"
        return rate_cause(cause, 1.0, Reason(text, Panel.ranks))
    repeated = [record for record in measures.during if record.iteration == evidence.reproduced]
    is_reproduced = any(r.nonfinite_ranks for r in repeated) or _outlying_rank(repeated) is not None
    broken = [record for record in measures.during if record.nonfinite_ranks]
    if broken and not is_reproduced:
        named = {rank for record in broken for rank in record.nonfinite_ranks}
        if len(named) >= world:
            if world == 1:
                return leave_unexamined(cause, "world_size is 1: there is no rank to compare with", Panel.ranks)
            return rate_cause(cause, 0.15, None, Reason("all ranks were not finite at once", Panel.ranks))
        ranks = ", ".join(map(str, sorted(named)))
        often = f"{len(broken)} iteration{'s' if len(broken) > 1 else ''}"
        text = f"only rank {ranks} of {world} ranks was not finite before the reduction, in {often}"
        score = 0.5 if evidence.run.precision == OVERFLOW_PRECISION else 0.95
        return rate_cause(cause, score, Reason(text, Panel.ranks))
    if (torn := _torn_weights(evidence, measures)) is not None:
        return rate_cause(cause, 0.9, torn)
    if (transient := _transient(evidence, measures)) is not None:
        return rate_cause(cause, 0.65, transient)
    if is_reproduced:
        text = (
            f"a replay reproduced the step of iteration {evidence.reproduced}: its values follow from data and weights"
        )
        return rate_cause(cause, 0.05, None, Reason(text, Panel.ranks))
    outlier = _outlying_rank(measures.during)
    if outlier is not None:
        rank, value, usual, share = outlier
        text = f"gradient norm of rank {rank} before the reduction was {value:.3g}; of the others {usual:.3g}"
        score = min(0.55 + 0.15 * math.log10(value / max(usual, 1e-9) / RANK_FACTOR), 0.9)
        if evidence.incident.verdict != IncidentVerdict.harmless:
            return rate_cause(cause, score * share, Reason(text, Panel.ranks))
        against = Reason("its update was applied, and no damage followed: its rows may be the cause", Panel.ranks)
        return rate_cause(cause, min(score * share, HARMLESS_SCORE), Reason(text, Panel.ranks), against)
    if world == 1:
        return leave_unexamined(cause, "world_size is 1: there is no rank to compare with", Panel.ranks)
    if not any(record.ranks.get("grad_norm") for record in measures.suspects):
        return leave_unexamined(cause, "gradient norms of single ranks are not in the log", Panel.ranks)
    text = "no rank stood out: gradient norms before the reduction were similar and finite"
    return rate_cause(cause, 0.05, None, Reason(text, Panel.ranks))


def _torn_weights(evidence: Evidence, measures: Measures) -> Reason | None:
    """Weights that jump after an ordinary gradient were not changed by the optimizer."""
    jump = m.weight_jump(evidence)
    if jump is None or jump[1] < TORN or not is_ordinary(measures):
        return None
    change = f"changed {jump[1]:.3g}-fold" if math.isfinite(jump[1]) else "became non-finite"
    text = f"weights of {jump[0]} {change} between two probes, after an ordinary gradient"
    return Reason(f"{text} (norm {measures.before[-1].grad_norm:.3g}): memory corruption, not training", Panel.weights)


def _transient(evidence: Evidence, measures: Measures) -> Reason | None:
    """Batches that failed, and were fine when trained again from an older state: the batches are not the cause."""
    failed = {record.cursor: record for record in measures.suspects if measures.stands_out(record)}
    again = [r for r in evidence.records if r.cursor in failed and r.iteration > failed[r.cursor].iteration]
    clean = [record for record in again if not measures.stands_out(record)]
    if not clean or len(clean) < len(again) or not is_ordinary(measures):
        return None
    before = failed[clean[0].cursor]
    text = (
        f"batch {before.cursor} gave loss {before.loss:.4g}, and {clean[0].loss:.4g} when trained from an older state"
    )
    return Reason(f"{text}, after an ordinary gradient: the weights were corrupted, not the data", Panel.loss)


def _outlying_rank(records: Sequence[StepRecord]) -> tuple[int, float, float, float] | None:
    """The rank far above the others: rank, its norm, the others' norm, and its share of the rows with an outlier."""
    rows: list[tuple[int, float, float]] = []
    for record in records:
        worst = [(int(rank), float(value)) for rank, value in record.ranks.get("grad_norm", {}).get("worst", [])]
        worst = sorted((pair for pair in worst if math.isfinite(pair[1])), key=lambda pair: -pair[1])
        centre = float(record.ranks.get("grad_norm", {}).get("median", math.nan))
        if len(worst) >= 2 and worst[0][1] > 0:
            others = worst[1][1] if len(worst) == 2 else centre
            if worst[0][1] > RANK_FACTOR * others:
                rows.append((*worst[0], others))
    if not rows:
        return None
    guilty = max({rank for rank, _, _ in rows}, key=lambda rank: sum(row[0] == rank for row in rows))
    rank, value, others = max((row for row in rows if row[0] == guilty), key=lambda row: row[1])
    return rank, value, others, sum(row[0] == guilty for row in rows) / len(rows)


def fp16_overflow(evidence: Evidence, measures: Measures) -> RuleResult:
    """Activations or gradients exceed the range of fp16, and the loss scale falls."""
    cause, precision = Cause.fp16_overflow, evidence.run.precision
    if precision == NOT_KNOWN:
        return leave_unexamined(cause, "the precision is not known", None)
    if precision != OVERFLOW_PRECISION:
        return rate_cause(
            cause,
            0.0,
            None,
            Reason(f"the run uses {precision}, which does not overflow like fp16", None),
        )
    broken = [record for record in measures.during if not math.isfinite(record.grad_norm)]
    around = range(evidence.onset - 1, evidence.incident.last + SCALE_ROWS)
    scales = [r.loss_scale for r in evidence.records if r.loss_scale is not None and r.iteration in around]
    collapsed = FindingKind.scale_collapse in evidence.kinds()
    if not broken and not collapsed:
        return rate_cause(
            cause, 0.05, None, Reason("no gradient overflowed and the loss scale did not collapse", Panel.scale)
        )
    fell = f", loss scale {scales[0]:g} -> {min(scales):g}" if scales else ""
    layers = [name for record in broken for name, value in record.activation_rms.items() if not math.isfinite(value)]
    where = f"; activations of {layers[0]} were not finite" if layers else ""
    often = f"{len(broken)} gradient{'s' if len(broken) != 1 else ''}"
    text = f"{often} overflowed in {precision}{fell}{where}"
    everywhere = any(len(record.nonfinite_ranks) >= evidence.run.world_size for record in broken)
    halved = bool(scales) and min(scales) < max(scales)
    score = 0.55 + 0.2 * everywhere + 0.1 * halved + 0.15 * (collapsed or bool(layers))
    return rate_cause(cause, score, Reason(text, Panel.scale))


def fp8_range(evidence: Evidence, measures: Measures) -> RuleResult:
    """Outliers set the fp8 scale of a tensor, and the other values underflow."""
    cause, precision = Cause.fp8_range, evidence.run.precision
    if precision == NOT_KNOWN:
        return leave_unexamined(cause, "the precision is not known", None)
    if precision != "fp8":
        return rate_cause(cause, 0.0, None, Reason(f"the run uses {precision}", None))
    found = [finding for finding in evidence.findings if finding.kind is FindingKind.fp8_range]
    if found:
        again = f", and {len(found) - 1} more time{'s' if len(found) > 2 else ''}" if len(found) > 1 else ""
        text = f"{found[0].message}, iteration {found[0].iteration}{again}"
        return rate_cause(cause, 0.95, Reason(text, Panel.scale))
    if early := m.find_precursor(evidence, PrecursorSignal.fp8_underflow):
        return rate_cause(cause, 0.8, Reason(early.message, Panel.scale))
    shares = m.worst_underflow([*measures.before, *measures.during])
    if not shares:
        return leave_unexamined(cause, "fp8 underflow was not probed around the onset", Panel.scale)
    worst = max(shares, key=lambda name: shares[name])
    text = f"at most {shares[worst]:.0%} of the values of any layer group underflowed in fp8 ({worst})"
    return rate_cause(cause, 0.0, None, Reason(text, Panel.scale))


def optimizer_reset(evidence: Evidence, _measures: Measures) -> RuleResult:
    """Adam's moments fall to near zero during training."""
    cause = Cause.optimizer_reset
    found = next((finding for finding in evidence.findings if finding.kind is FindingKind.optimizer_reset), None)
    if found is not None:
        return rate_cause(cause, 0.95, Reason(f"{found.message}, iteration {found.iteration}", Panel.moments))
    probes = [r for r in evidence.records if r.v_norm is not None and math.isfinite(r.v_norm)]
    since = [r.v_norm or 0.0 for r in probes if evidence.onset <= r.iteration <= evidence.incident.last + RESET_WITHIN]
    earlier = [r.v_norm or 0.0 for r in probes if r.iteration < evidence.onset]
    if not since or not earlier:
        return leave_unexamined(cause, "Adam's second moment was not probed before and after the onset", Panel.moments)
    if min(since) < RESET_SHARE * earlier[-1]:
        text = f"Adam's second moment fell from norm {earlier[-1]:.3g} to {min(since):.3g}"
        return rate_cause(cause, 0.6, Reason(text, Panel.moments))
    text = f"Adam's second moment did not fall: norm {earlier[-1]:.3g} before, {min(since):.3g} after the onset"
    return rate_cause(cause, 0.0, None, Reason(text, Panel.moments))


def beta2_stale(evidence: Evidence, measures: Measures) -> RuleResult:
    """Adam's second moment adapts too slowly to a large gradient, and the updates that follow are too large."""
    cause, beta2 = Cause.beta2_stale, evidence.run.settings.get("optim.beta2")
    if not isinstance(beta2, int | float):
        return leave_unexamined(cause, "optim.beta2 is not known", None)
    if beta2 < STALE_BETA2:
        text = f"optim.beta2 is {beta2:g}, which averages only {1 / max(1 - float(beta2), 1e-9):.0f} steps"
        return rate_cause(cause, 0.05, None, Reason(text, None))
    ratio = max((r.square_ratio for r in measures.during if r.square_ratio is not None), default=None)
    is_stale = FindingKind.v_stale in evidence.kinds() or (ratio is not None and ratio > STALE_RATIO)
    memory = f"optim.beta2={beta2:g} averages {1 / (1 - beta2):.0f} steps"
    if not is_stale and ratio is None:
        text = f"{memory}; the gradient relative to the second moment was not probed in the incident"
        return leave_unexamined(cause, text, Panel.moments)
    if not is_stale and evidence.run.settings.get("optim.kind") == OptimizerKind.muon:
        text = "the matrices of the blocks have Muon, without a second moment; only that of the others was probed"
        return leave_unexamined(cause, text, Panel.moments)
    if not is_stale:
        size = f"the gradient was at most {ratio:.3g} times the root of the second moment"
        return rate_cause(cause, 0.2, Reason(memory, Panel.moments), Reason(size, Panel.moments))
    size = "" if ratio is None else f", and the gradient was {ratio:.3g} times the root of Adam's second moment"
    score = 0.9 if FindingKind.optimizer_reset not in evidence.kinds() else 0.3
    return rate_cause(cause, score, Reason(f"{memory}{size}", Panel.moments))


def structural(evidence: Evidence, _measures: Measures) -> RuleResult:
    """Weights or logits grow, or recovery actions keep failing: no batch is the cause."""
    cause, growth = Cause.structural, m.weight_growth(evidence)
    halted = next((action for action in evidence.actions if "structural" in action.reason), None)
    if halted is not None:
        return rate_cause(cause, 0.85, Reason(halted.reason, Panel.loss))
    if early := m.find_precursor(evidence, PrecursorSignal.attention_logit):
        return rate_cause(cause, 0.8, Reason(early.message, Panel.weights))
    drifts = FindingKind.weight_drift in evidence.kinds()
    if growth is not None and growth[1] > GROWN:
        text = f"weights of {growth[0]} grew {growth[1]:.3g}-fold within the window"
        return rate_cause(cause, 0.8 if drifts or growth[1] > 2 * GROWN else 0.55, Reason(text, Panel.weights))
    same_kind = [earlier for earlier in evidence.earlier if set(earlier.kinds) & set(evidence.incident.kinds)]
    failed = m.num_failed_recoveries(evidence)
    if len(same_kind) >= 2 or failed >= 3:
        earlier_text = f"{len(same_kind)} earlier incidents of this kind"
        text = f"{failed} recovery actions in a row failed" if failed >= 3 else earlier_text
        return rate_cause(cause, 0.5, Reason(text, Panel.loss))
    if growth is None:
        return leave_unexamined(cause, "weight norms were not probed around the onset", Panel.weights)
    size = f"weight norm of {growth[0]} grew at most {growth[1]:.2f}-fold" if growth[1] >= 1 else "no weight norm grew"
    return rate_cause(cause, 0.1, None, Reason(f"{size}, and recovery did not fail repeatedly", Panel.weights))
