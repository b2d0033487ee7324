"""Rules for causes that lie in a machine, in the optimizer, in the numbers' format or in the model itself.

Each is a pure function of the evidence; thresholds stand above, where they can be argued with.
"""

from __future__ import annotations

import math

from harness.analysis.postmortem import measures as m
from harness.analysis.postmortem.evidence import Evidence
from harness.analysis.postmortem.measures import Measures
from harness.analysis.postmortem.rules.causes import Cause, Judgement, Panel, Reason, ruled
from harness.core.events import FindingKind

OVERFLOW_PRECISION = "fp16"
"""fp8 saturates instead, and a run in fp8 gives everything on in bf16."""
RANK_FACTOR = 10.0
"""Times the other ranks' gradient norm from which one stands out."""
ORDINARY = 5.0
"""Times the usual gradient norm up to which one is ordinary."""
STALE_RATIO, STALE_BETA2 = 4.0, 0.98
GROWN, TORN = 2.0, 100.0
"""Weights of a group that grow by the first factor within the window; that change by the second between two probes."""
OFF_SCHEDULE = 1.2
SCALE_ROWS = 5
"""Rows after an overflow in which the loss scale gives way."""


def corrupted_rank(evidence: Evidence, measures: Measures) -> Judgement:
    """One rank's own numbers are wrong before the reduction, or weights change without an update that could do it."""
    cause, world = Cause.corrupted_rank, evidence.run.world_size
    if FindingKind.replica_mismatch in evidence.kinds():
        ranks = ", ".join(map(str, evidence.incident.ranks)) or "some"
        return ruled(cause, 1.0, Reason(f"weights of rank {ranks} differ from their replicas", Panel.ranks))
    broken = [record for record in measures.during if record.nonfinite_ranks]
    if broken:
        named = {rank for record in broken for rank in record.nonfinite_ranks}
        if len(named) >= world:
            words = "all ranks were not finite at once" if world > 1 else "there is one rank, nobody to compare it with"
            return ruled(cause, 0.15, None, Reason(words, Panel.ranks))
        listed = ", ".join(map(str, sorted(named)))
        often = f"{len(broken)} iteration{'s' if len(broken) > 1 else ''}"
        words = f"rank {listed} alone of {world} was not finite before the reduction, in {often}"
        score = 0.5 if evidence.run.precision == OVERFLOW_PRECISION else 0.95
        return ruled(cause, score, Reason(words, Panel.ranks))
    if (torn := _torn_weights(evidence, measures)) is not None:
        return ruled(cause, 0.9, torn)
    if (transient := _transient(evidence, measures)) is not None:
        return ruled(cause, 0.65, transient)
    outlier = _outlying_rank(measures)
    if outlier is not None:
        rank, value, usual, share = outlier
        words = f"gradient norm of rank {rank} before the reduction was {value:.3g}, of the others {usual:.3g}"
        loud = min(0.55 + 0.15 * math.log10(value / max(usual, 1e-9) / RANK_FACTOR), 0.9)
        return ruled(cause, loud * share, Reason(words, Panel.ranks))
    words = "no rank stood out: norms before the reduction were alike and finite"
    return ruled(cause, 0.05, None, Reason(words, Panel.ranks))


def _torn_weights(evidence: Evidence, measures: Measures) -> Reason | None:
    """Weights that jump while the last applied gradient was ordinary were not moved by the optimizer."""
    jump = m.weight_jump(evidence)
    if jump is None or jump[1] < TORN or not is_ordinary(measures):
        return None
    change = f"changed {jump[1]:.3g}-fold" if math.isfinite(jump[1]) else "stopped being finite"
    words = f"weights of {jump[0]} {change} between two probes, after ordinary gradients"
    return Reason(f"{words} ({measures.before[-1].grad_norm:.3g}): memory, not training", Panel.weights)


def _transient(evidence: Evidence, measures: Measures) -> Reason | None:
    """Batches that went wrong and went well when they were trained again from an older state: not they were broken."""
    spoiled = {record.cursor: record for record in measures.suspects if measures.stands_out(record)}
    again = [r for r in evidence.records if r.cursor in spoiled and r.iteration > spoiled[r.cursor].iteration]
    clean = [record for record in again if not measures.stands_out(record)]
    if not clean or len(clean) < len(again) or not is_ordinary(measures):
        return None
    before = spoiled[clean[0].cursor]
    words = f"batch {before.cursor} gave loss {before.loss:.4g}, and {clean[0].loss:.4g} again from an older state"
    return Reason(f"{words}, after ordinary gradients: the weights were broken, not the data", Panel.loss)


def is_ordinary(measures: Measures) -> bool:
    """Whether the last update before the onset came from an ordinary gradient."""
    applied, usual = measures.before[-1:], measures.usual_grad or 0.0
    return bool(applied) and all(math.isfinite(r.grad_norm) and r.grad_norm <= ORDINARY * usual for r in applied)


def _outlying_rank(measures: Measures) -> tuple[int, float, float, float] | None:
    """The rank far above the others: its number, norm, theirs, and its share of the rows with an outlier."""
    rows: list[tuple[int, float, float]] = []
    for record in measures.during:
        worst = [(int(rank), float(value)) for rank, value in record.ranks.get("grad_norm", {}).get("worst", [])]
        worst = sorted((each for each in worst if math.isfinite(each[1])), key=lambda each: -each[1])
        centre = float(record.ranks.get("grad_norm", {}).get("median", math.nan))
        if len(worst) >= 2 and worst[0][1] > 0:
            others = worst[1][1] if len(worst) == 2 else centre
            if worst[0][1] > RANK_FACTOR * others:
                rows.append((*worst[0], others))
    if not rows:
        return None
    guilty = max({rank for rank, _, _ in rows}, key=lambda rank: sum(each[0] == rank for each in rows))
    rank, value, others = max((row for row in rows if row[0] == guilty), key=lambda row: row[1])
    return rank, value, others, sum(row[0] == guilty for row in rows) / len(rows)


def fp16_overflow(evidence: Evidence, measures: Measures) -> Judgement:
    """Activations or gradients beyond what a narrow format can hold, and a loss scale that gives way."""
    cause, precision = Cause.fp16_overflow, evidence.run.precision
    if precision != OVERFLOW_PRECISION:
        return ruled(
            cause,
            0.0,
            None,
            Reason(f"the run computes in {precision}, which does not overflow as fp16 does", Panel.scale),
        )
    broken = [record for record in measures.during if not math.isfinite(record.grad_norm)]
    around = range(evidence.onset - 1, evidence.incident.last + SCALE_ROWS)
    scales = [r.loss_scale for r in evidence.records if r.loss_scale is not None and r.iteration in around]
    collapsed = FindingKind.scale_collapse in evidence.kinds()
    if not broken and not collapsed:
        return ruled(cause, 0.05, None, Reason("no gradient overflowed and the loss scale held", Panel.scale))
    fell = f", loss scale {scales[0]:g} -> {min(scales):g}" if scales else ""
    layers = [name for record in broken for name, value in record.activation_rms.items() if not math.isfinite(value)]
    where = f"; activations of {layers[0]} were not finite" if layers else ""
    often = f"{len(broken)} gradient{'s' if len(broken) != 1 else ''}"
    words = f"{often} overflowed in {precision}{fell}{where}"
    everywhere = any(len(record.nonfinite_ranks) >= evidence.run.world_size for record in broken)
    halved = bool(scales) and min(scales) < max(scales)
    score = 0.55 + 0.2 * everywhere + 0.1 * halved + 0.15 * (collapsed or bool(layers))
    return ruled(cause, score, Reason(words, Panel.scale))


def fp8_range(evidence: Evidence, measures: Measures) -> Judgement:
    """Numbers out of all proportion made the scale of a tensor, and fp8 has nothing left for the others."""
    cause, precision = Cause.fp8_range, evidence.run.precision
    if precision != "fp8":
        return ruled(cause, 0.0, None, Reason(f"the run computes in {precision}", Panel.scale))
    found = [finding for finding in evidence.findings if finding.kind is FindingKind.fp8_range]
    if found:
        again = f", and {len(found) - 1} more time{'s' if len(found) > 2 else ''}" if len(found) > 1 else ""
        words = f"{found[0].message}, iteration {found[0].iteration}{again}"
        return ruled(cause, 0.95, Reason(words, Panel.scale))
    shares = m.zeroed([*measures.before, *measures.during])
    if not shares:
        return ruled(cause, 0.1, None, Reason("the range of fp8 was not probed around the onset", Panel.scale))
    worst = max(shares, key=lambda name: shares[name])
    words = f"at most {shares[worst]:.0%} of the numbers of any layer group became zero in fp8 ({worst})"
    return ruled(cause, 0.0, None, Reason(words, Panel.scale))


def lr_discontinuity(evidence: Evidence, measures: Measures) -> Judgement:
    """The learning rate jumped, or is not what its schedule says."""
    cause = Cause.lr_discontinuity
    jump = next((finding for finding in evidence.findings if finding.kind is FindingKind.lr_jump), None)
    off = m.off_schedule(evidence, measures)
    is_off = off is not None and max(off[1], 1 / off[1]) > OFF_SCHEDULE
    if jump is not None:
        told = f"; its schedule says {m.scheduled(evidence, off[0]):.3g}" if off is not None and is_off else ""
        return ruled(
            cause, 0.9 + 0.05 * is_off, Reason(f"{jump.message}, iteration {jump.iteration}{told}", Panel.rate)
        )
    if off is not None and is_off:
        words = f"learning rate {off[0].lr:.3g} at iteration {off[0].iteration} is {off[1]:.3g} times its schedule's"
        return ruled(cause, 0.8, Reason(words, Panel.rate))
    if measures.usual_lr is None or measures.onset_lr is None:
        return ruled(cause, 0.1, None, Reason("the learning rate before the onset is not in the log", Panel.rate))
    words = f"the learning rate was smooth: {measures.usual_lr:.3g} before, {measures.onset_lr:.3g} at the onset"
    return ruled(cause, 0.0, None, Reason(words, Panel.rate))


def optimizer_reset(evidence: Evidence, measures: Measures) -> Judgement:
    """Adam's moments are near zero while training goes on."""
    cause = Cause.optimizer_reset
    found = next((finding for finding in evidence.findings if finding.kind is FindingKind.optimizer_reset), None)
    if found is not None:
        return ruled(cause, 0.95, Reason(f"{found.message}, iteration {found.iteration}", Panel.moments))
    norms = [r.v_norm for r in [*measures.before, *measures.during] if r.v_norm is not None and math.isfinite(r.v_norm)]
    if len(norms) < 2:
        return ruled(cause, 0.1, None, Reason("Adam's second moment was not probed around the onset", Panel.moments))
    words = f"Adam's second moment never fell: {min(norms):.3g} to {max(norms):.3g}"
    return ruled(cause, 0.0, None, Reason(words, Panel.moments))


def beta2_stale(evidence: Evidence, measures: Measures) -> Judgement:
    """Adam's second moment forgets too slowly to damp a large gradient, and the step that follows is too long."""
    cause, beta2 = Cause.beta2_stale, evidence.run.settings.get("optim.beta2")
    if not isinstance(beta2, int | float) or beta2 < STALE_BETA2:
        told = (
            "is not known"
            if beta2 is None
            else f"is {beta2:g}, a memory of {1 / max(1 - float(beta2), 1e-9):.0f} steps"
        )
        return ruled(cause, 0.05, None, Reason(f"optim.beta2 {told}", Panel.moments))
    ratio = max((r.square_ratio for r in measures.during if r.square_ratio is not None), default=None)
    is_stale = FindingKind.v_stale in evidence.kinds() or (ratio is not None and ratio > STALE_RATIO)
    memory = f"optim.beta2={beta2:g} remembers {1 / (1 - beta2):.0f} steps"
    if not is_stale:
        told = "was not probed" if ratio is None else f"was at most {ratio:.3g} times its root"
        return ruled(cause, 0.3, Reason(memory, Panel.moments), Reason(f"the gradient {told}", Panel.moments))
    told = "" if ratio is None else f", and the gradient was {ratio:.3g} times the root of Adam's second moment"
    score = 0.9 if FindingKind.optimizer_reset not in evidence.kinds() else 0.3
    return ruled(cause, score, Reason(f"{memory}{told}", Panel.moments))


def structural(evidence: Evidence, _measures: Measures) -> Judgement:
    """Weights or logits grow, or trouble comes back whatever is skipped and cured: no batch is to blame."""
    cause, growth = Cause.structural, m.weight_growth(evidence)
    halted = next((action for action in evidence.actions if "structural" in action.reason), None)
    if halted is not None:
        return ruled(cause, 0.85, Reason(halted.reason, Panel.loss))
    drifts = FindingKind.weight_drift in evidence.kinds()
    if growth is not None and growth[1] > GROWN:
        words = f"weights of {growth[0]} grew {growth[1]:.3g}-fold within the window"
        return ruled(cause, 0.8 if drifts or growth[1] > 2 * GROWN else 0.55, Reason(words, Panel.weights))
    alike = [each for each in evidence.earlier if set(each.kinds) & set(evidence.incident.kinds)]
    vain = m.skipped_in_vain(evidence)
    if len(alike) >= 2 or vain >= 3:
        words = f"{vain} answers in a row did not help" if vain >= 3 else f"{len(alike)} earlier incidents of this kind"
        return ruled(cause, 0.5, Reason(words, Panel.loss))
    told = "was not probed" if growth is None else f"of {growth[0]} grew at most {growth[1]:.2f}-fold"
    return ruled(cause, 0.1, None, Reason(f"norm of the weights {told}, and what was done helped", Panel.weights))


def lr_too_high(evidence: Evidence, measures: Measures) -> Judgement:
    """The loss leaves its level without any of the other signs; a lower rate is the classical answer."""
    cause = Cause.lr_too_high
    cooled = any(action.lr_scale is not None and action.lr_scale < 1 for action in evidence.actions)
    diverged = FindingKind.divergence in evidence.kinds()
    rates = [record.lr for record in evidence.records if math.isfinite(record.lr)]
    at_peak = bool(rates) and measures.onset_lr is not None and measures.onset_lr >= 0.8 * max(rates)
    risen = measures.rise is not None and measures.rise > 3
    if not (risen or diverged or cooled):
        return ruled(cause, 0.1, None, Reason("the loss did not leave its level", Panel.loss))
    high = "" if measures.rise is None else f"loss {measures.rise:.1f} spreads above its level"
    high = high if measures.rise != math.inf else "loss not finite"
    signs = [high if risen else "", "divergence" if diverged else ""]
    signs += ["near the peak of the learning rate" if at_peak else "", "a lower rate was tried" if cooled else ""]
    score = 0.2 + 0.3 * diverged + 0.1 * at_peak + 0.1 * cooled
    return ruled(cause, score, Reason(", ".join(sign for sign in signs if sign), Panel.rate))
