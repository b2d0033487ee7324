"""Diagnoses a run with a decision tree, question by question; a pure function of its step records.

Why: the order of the questions matters, and the log already holds every answer.
How: there are four sections of numbered questions: is anything non-finite (1), did the loss
spike (2), did a narrow format overflow (3), does the loss rise slowly (4). The walk stops at the first section with an
answer. Rows three sigma above the mean are only candidates for a spike, because noise alone gives one in a few hundred
rows. A candidate counts if the sentinel's detectors confirm it or the gate rejected the update.
Left out: questions that need the weights (1.3, the first layer with a non-finite value). `harness replay` answers them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import mean, pstdev
from typing import Any, final

from harness.analysis.diagnose.log_numbers import (
    WINDOW_ROWS,
    Spike,
    describe_rare_tokens,
    is_confirmed,
    largest_weight_change,
    run_detectors,
    spikes_of,
    split_in_thirds,
)
from harness.analysis.postmortem.measures import worst_underflow
from harness.config.sentinel import DetectConfig
from harness.core.events import ABOUT_SPEED, Finding, FindingKind, StepRecord

RECOVERED_SIGMAS, RECOVERED_ROWS = 0.5, 50
LONG_TAIL_FACTOR = 30.0
CREEP_ROWS = 200
DRIFT_FACTOR = 2.0
HARMLESS = ABOUT_SPEED | {FindingKind.grad_spike, FindingKind.v_stale}
"""Findings that need no action by themselves."""
NARROW, MIXED = ("fp16",), ("fp16", "bf16", "fp8")


class Finds(IntEnum):
    """Exit codes of `harness diagnose`."""

    nothing = 0
    not_finite = 10
    spike = 20
    lasting_spike = 21
    overflow = 30
    divergence = 40
    other = 50
    """Something outside the tree's questions: duplicate batches, lost moments, drifting weights."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One question, its answer, and the number behind the answer."""

    question: str
    """Such as Q2.1."""
    text: str
    answer: str
    number: str
    """With its unit and its step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    nodes: list[Node]
    finds: Finds
    conclusion: str


def walk(records: Sequence[StepRecord], settings: dict[str, Any], *, detect: DetectConfig) -> Diagnosis:
    """Walk the tree over the records of a run."""
    nodes: list[Node] = []
    findings = run_detectors(records, detect)
    if not records:
        return Diagnosis(nodes=nodes, finds=Finds.nothing, conclusion="the log has no steps yet")
    return (
        _ask_non_finite(nodes, records, findings, settings)
        or _ask_spikes(nodes, records, findings)
        or _ask_overflow(nodes, records, findings, settings)
        or _ask_slow_rise(nodes, records, findings)
    )


def _ask_non_finite(
    nodes: list[Node], records: Sequence[StepRecord], findings: Sequence[Finding], settings: dict[str, Any]
) -> Diagnosis | None:
    losses = [record for record in records if not math.isfinite(record.loss)]
    broken = [record for record in records if not math.isfinite(record.loss + record.grad_norm)]
    refused = sum(record.refused for record in broken)
    seen = f"loss in {len(losses)} of {len(records)} rows; loss or gradient in {len(broken)}, {refused} of them refused"
    _ask(nodes, "Q1.1", "Is the loss or the gradient norm NaN or Inf at any logged step?", _yes(bool(broken)), seen)
    if not broken:
        return None
    first, kind = broken[0], str(settings.get("precision.kind", "not known"))
    path = {
        "fp32": "possible causes: log(0) or 0/0 in the loss, or a corrupted rank",
        "bf16": "possible causes: as for fp32, or an overflow of the exponent",
        "fp16": "possible cause: an activation above 65504; see section 3",
        "fp8": "possible causes: as for bf16; fp8 itself saturates and does not overflow",
    }.get(kind, "the log does not record it")
    _ask(nodes, "Q1.2", "What was the dtype regime?", kind, path)
    ranks = sorted({rank for record in broken for rank in record.nonfinite_ranks})
    groups = [name for name, norm in first.group_grad_norms.items() if not math.isfinite(norm)]
    where = f"ranks {', '.join(map(str, ranks)) or 'not known'}; layer groups {', '.join(groups) or 'not known'}"
    _ask(nodes, "Q1.3", "Where did it originate?", f"step {first.step}, iteration {first.iteration}", where)
    if kind in NARROW and (overflow := _ask_overflow(nodes, records, findings, settings)) is not None:
        return overflow
    state = "every such update was refused: no weight changed" if refused == len(broken) else _last_row(records)
    fix = "clip by value (optim.clip_value=100); if it recurs, the cause is structural"
    _ask(nodes, "Q1.4", "What is the fix?", fix, state)
    return Diagnosis(nodes=nodes, finds=Finds.not_finite, conclusion=f"non-finite from step {first.step}: {where}")


def _last_row(records: Sequence[StepRecord]) -> str:
    last = records[-1]
    return f"the last row has loss {last.loss:.4g} and gradient norm {last.grad_norm:.4g}"


def _ask_spikes(nodes: list[Node], records: Sequence[StepRecord], findings: Sequence[Finding]) -> Diagnosis | None:
    candidates = spikes_of(records)
    confirmed = [spike for spike in candidates if spike.at.refused or is_confirmed(spike, findings)]
    worst = max(confirmed or candidates, key=lambda spike: spike.sigmas, default=None)
    number = f"{len(candidates)} rows above 3 sigma, {len(confirmed)} of them confirmed"
    if worst is not None:
        number += f"; worst at step {worst.at.step}: loss {worst.at.loss:.4g}, {worst.sigmas:.1f} sigma"
    question = "Is there a step with a loss 3 sigma above the mean of the 100 steps before it?"
    _ask(nodes, "Q2.1", question, "yes" if confirmed else "no", number)
    if not confirmed or worst is None:
        return None
    after = [r for r in records if r.iteration > worst.at.iteration and not r.refused][:RECOVERED_ROWS]
    back = next((r for r in after if r.loss <= worst.mean + RECOVERED_SIGMAS * worst.sigma), None)
    level = f"mean + 0.5 sigma is {worst.mean + RECOVERED_SIGMAS * worst.sigma:.4g}"
    recovery = f"back at step {back.step}" if back else f"not in the {len(after)} rows after it"
    _ask(
        nodes,
        "Q2.2",
        "Does the loss return to mean + 0.5 sigma within 50 steps?",
        "yes" if back else "no",
        f"{level}; {recovery}",
    )
    if back is None:
        fix = "restore the last checkpoint before it; optim.clip_norm=0.5, data.stratify.rare_below=10"
        _ask(nodes, "Q2.4", "The loss stays elevated: what is the fix?", fix, f"step {worst.at.step}")
        conclusion = f"the loss has not recovered from the spike at step {worst.at.step}"
        return Diagnosis(nodes=nodes, finds=Finds.lasting_spike, conclusion=conclusion)
    cause = _cause_of(worst, records, findings)
    _ask(nodes, "Q2.3", "The loss recovered: what caused the spike?", *cause)
    return Diagnosis(
        nodes=nodes, finds=Finds.spike, conclusion=f"a spike at step {worst.at.step} that recovered: {cause[0]}"
    )


def _cause_of(spike: Spike, records: Sequence[StepRecord], findings: Sequence[Finding]) -> tuple[str, str]:
    """Cause of a spike from gradient norm, learning rate and batch, in the order of the question."""
    before = [
        r.grad_norm
        for r in records
        if r.iteration < spike.at.iteration and math.isfinite(r.grad_norm) and not r.refused
    ]
    usual = mean(before[-WINDOW_ROWS:]) if before else 0.0
    near = [finding for finding in findings if abs(finding.iteration - spike.at.iteration) <= RECOVERED_ROWS]
    number = f"gradient norm {spike.at.grad_norm:.4g} (usually {usual:.4g})"
    if usual and not spike.at.grad_norm <= LONG_TAIL_FACTOR * usual:
        return "a long-tail token in the batch", f"{number}: more than 30 times"
    for kind, cause in (
        (FindingKind.lr_jump, "a bug in the learning-rate schedule"),
        (FindingKind.duplicate_batch, "a bug in the data loader"),
    ):
        found = next((finding for finding in near if finding.kind is kind), None)
        if found is not None:
            return cause, found.message
    if (rare_tokens := describe_rare_tokens(spike, records)) is not None:
        return "a long-tail token in the batch", f"{number}; {rare_tokens}"
    return "not known", f"{number}; no jump of the learning rate; no duplicate batch; no unusual number of rare tokens"


def _ask_overflow(
    nodes: list[Node], records: Sequence[StepRecord], findings: Sequence[Finding], settings: dict[str, Any]
) -> Diagnosis | None:
    kind = settings.get("precision.kind")
    scales = [record.loss_scale for record in records if record.loss_scale is not None]
    if kind not in MIXED and not scales:
        return None
    broken = [record for record in records if not math.isfinite(record.grad_norm)]
    seen = f"{len(broken)} rows" + (f", the first at step {broken[0].step}" if broken else "")
    _ask(nodes, "Q3.1", "Is there a step with a gradient norm of Inf or NaN?", "yes" if broken else "no", seen)
    if kind == "fp8":
        _ask(nodes, "Q3.5", "Do the values fit into the range of fp8?", *_fp8_fit(records, findings))
    if not broken or (kind not in NARROW and not scales):
        return None
    moved = f"from {scales[0]:g} to {scales[-1]:g}, lowest {min(scales):g}" if scales else "no loss scale in the log"
    constant = bool(scales) and min(scales) == max(scales)
    shape = "constant: dynamic scaling is not active" if constant else "it changes" if scales else "not known"
    if scales and min(scales) < 1:
        shape = "collapsed below 1: activations are systematically too large"
    _ask(nodes, "Q3.2", "How does the loss scale change?", shape, moved)
    in_loss = sum(not math.isfinite(record.loss) for record in broken)
    signature = "in the backward pass" if math.isfinite(broken[0].loss) else "in the forward pass"
    _ask(
        nodes,
        "Q3.3",
        "Where does the overflow appear first?",
        signature,
        f"loss not finite in {in_loss} of these {len(broken)} rows",
    )
    lasting = len(broken) > 1 and (constant or min(scales, default=1.0) < 1 or in_loss > 0)
    if not lasting:
        _ask(nodes, "Q3.4", "What is the fix?", "none needed: the loss scale has adapted", seen)
        return None
    _ask(nodes, "Q3.4", "What is the fix?", "precision=bf16, or half the learning rate", seen)
    return Diagnosis(nodes=nodes, finds=Finds.overflow, conclusion=f"{kind} overflow at step {broken[0].step}")


def _fp8_fit(records: Sequence[StepRecord], findings: Sequence[Finding]) -> tuple[str, str]:
    """Whether values fit into fp8, and the worst underflow that was probed."""
    shares, away = worst_underflow(records), sum(record.in_fp8 is False for record in records)
    if not shares:
        return "not known", "fp8 underflow was not probed"
    worst = max(shares, key=lambda name: shares[name])
    number = f"at most {shares[worst]:.0%} of the values of a layer group underflowed ({worst})"
    is_unfit = any(finding.kind is FindingKind.fp8_range for finding in findings)
    return ("no" if is_unfit else "yes"), f"{number}; {away} of {len(records)} rows were computed in bf16"


def _ask_slow_rise(nodes: list[Node], records: Sequence[StepRecord], findings: Sequence[Finding]) -> Diagnosis:
    applied = [record for record in records if not record.refused and math.isfinite(record.loss)]
    recent = applied[-CREEP_ROWS:]
    thirds = [mean(r.loss for r in part) for part in split_in_thirds(recent)] if len(recent) == CREEP_ROWS else []
    means = " -> ".join(f"{third:.4g}" for third in thirds) or f"only {len(recent)} rows, {CREEP_ROWS} are needed"
    spread = pstdev([r.loss for r in recent]) if len(recent) > 1 else 0.0
    rises = bool(thirds) and thirds[0] < thirds[1] < thirds[2] and thirds[2] - thirds[0] > 0.5 * spread
    rises = rises or any(finding.kind is FindingKind.divergence for finding in findings)
    _ask(
        nodes,
        "Q4.1",
        "Has the loss risen over the last 200 steps?",
        "yes" if rises else "no",
        f"means of thirds: {means}",
    )
    if not rises or not recent:
        return _ask_other_findings(nodes, records, findings)
    first, last = recent[0], recent[-1]
    _ask(
        nodes,
        "Q4.2",
        "Has the learning rate risen with it?",
        _yes(last.lr > first.lr),
        f"{first.lr:.3g} -> {last.lr:.3g}",
    )
    if last.lr > first.lr:
        return Diagnosis(
            nodes=nodes, finds=Finds.divergence, conclusion="the schedule is misconfigured: the learning rate rises"
        )
    name, factor = largest_weight_change(recent)
    question = "Has the weight norm of any layer group changed more than 2x in 200 steps?"
    _ask(nodes, "Q4.3", question, _yes(factor > DRIFT_FACTOR), f"{name} {factor:.2f}-fold" if name else "not probed")
    if factor > DRIFT_FACTOR:
        return Diagnosis(
            nodes=nodes, finds=Finds.divergence, conclusion=f"weights of {name} drift: adjust optim.weight_decay by 2x"
        )
    halves = [
        mean(r.grad_norm for r in part) for part in (recent[: CREEP_ROWS // 2], recent[CREEP_ROWS // 2 :]) if part
    ]
    up = len(halves) == 2 and halves[1] > 1.1 * halves[0]
    _ask(nodes, "Q4.4", "Is the mean gradient norm going up?", _yes(up), " -> ".join(f"{half:.3g}" for half in halves))
    if up:
        return Diagnosis(
            nodes=nodes, finds=Finds.divergence, conclusion="the loss rises with the gradient norm: halve optim.lr"
        )
    return Diagnosis(
        nodes=nodes, finds=Finds.divergence, conclusion="the loss rises without another sign: inspect the data"
    )


def _ask_other_findings(nodes: list[Node], records: Sequence[StepRecord], findings: Sequence[Finding]) -> Diagnosis:
    """Findings and rejected updates outside the tree's questions."""
    kinds = Counter(str(finding.kind) for finding in findings)
    grave = [finding for finding in findings if finding.kind not in HARMLESS]
    refused = [record for record in records if record.refused]
    counts = ", ".join(f"{kind} {count}" for kind, count in kinds.items()) or "none"
    number = f"findings: {counts}; refused updates: {len(refused)}"
    _ask(nodes, "other", "Did the detectors find anything else?", _yes(bool(grave or refused)), number)
    if grave:
        conclusion = f"{grave[0].kind} at step {grave[0].step}: {grave[0].message}"
        return Diagnosis(nodes=nodes, finds=Finds.other, conclusion=conclusion)
    if refused:
        conclusion = f"the gate refused {len(refused)} updates, the first at iteration {refused[0].iteration}"
        return Diagnosis(nodes=nodes, finds=Finds.other, conclusion=conclusion)
    return Diagnosis(nodes=nodes, finds=Finds.nothing, conclusion="healthy")


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _ask(nodes: list[Node], question: str, text: str, answer: str, number: str) -> None:
    nodes.append(Node(question=question, text=text, answer=answer, number=number))


def render(diagnosis: Diagnosis) -> str:
    """All questions with answers, and the conclusion, as text."""
    lines = []
    for node in diagnosis.nodes:
        lines += [f"{node.question:<5} {node.text}", f"      {node.answer} ({node.number})"]
    return "\n".join([*lines, f"=> {diagnosis.conclusion}"])
