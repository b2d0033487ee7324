"""Section 3 of the tree: did a narrow number format overflow?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.analysis.diagnose.diagnosis import NOT_LOGGED, Answers, Diagnosis, Finds
from harness.analysis.diagnose.logged_run import MIXED_FORMATS, SCALED_BY, LoggedRun, scaled_override
from harness.analysis.postmortem.measures import worst_underflow
from harness.core.events import Finding, FindingKind, StepRecord

LEAST_SCALE = 1.0
"""A loss scale below this has collapsed."""


def ask_overflow(answers: Answers, run: LoggedRun, findings: Sequence[Finding] = ()) -> Diagnosis | None:
    """Ask whether gradients overflowed and whether the loss scale adapted; None: it did, or nothing overflowed."""
    if run.precision is not None and run.precision not in MIXED_FORMATS and not run.loss_scales:
        return None
    broken = [record for record in run.records if not math.isfinite(record.loss + record.grad_norm)]
    in_gradient = any(not math.isfinite(record.grad_norm) for record in broken)
    seen = f"{len(broken)} rows" + (f", the first at step {broken[0].step}" if broken else "")
    question = "Is there a step with a gradient norm of Inf or NaN?"
    if run.has_gradients:
        answers.ask("Q3.1", question, in_gradient, seen)
    else:
        answers.ask("Q3.1", question, NOT_LOGGED, "no gradient norm")
    if run.precision == "fp8":
        answers.ask("Q3.5", "Do the values fit into the range of fp8?", *_fp8_fit(run.records, findings))
    if not broken or not run.scales_loss:
        return None
    is_bad, fix = _ask_loss_scale(answers, run, broken)
    in_loss = [record for record in broken if not math.isfinite(record.loss)]
    replay = _ask_fingerprint(answers, run, broken, in_loss)
    applied = [record for record in broken if not record.refused]
    if not is_bad and not in_loss and not applied:
        answers.ask("Q3.4", "What is the fix?", "none needed: the loss scale has adapted", seen)
        return None
    overrides = _fix_overrides(run, fix)
    answers.ask("Q3.4", "What is the fix?", f"{fix}: {' '.join(overrides)}", seen)
    return Diagnosis(
        nodes=answers.nodes,
        finds=Finds.overflow,
        conclusion=f"{run.precision or 'fp16'} overflow at step {broken[0].step}: {fix}",
        overrides=overrides,
        replay=replay,
    )


BF16, HALF_RATE = "compute in bf16", "compute in bf16, or keep fp16 with half the learning rate"
ENGAGE = "use dynamic loss scaling, or bf16"


def _fix_overrides(run: LoggedRun, fix: str) -> list[str]:
    rate = scaled_override("optim.lr", run.setting("optim.lr"), 1 / SCALED_BY) if fix == HALF_RATE else []
    return ["precision=bf16", *rate]


def _ask_loss_scale(answers: Answers, run: LoggedRun, broken: Sequence[StepRecord]) -> tuple[bool, str]:
    """Q3.2: whether the loss scale is constant or collapsed, and the fix for that."""
    question, scales = "What does the loss-scale history show?", run.loss_scales
    if not scales:
        answers.ask("Q3.2", question, NOT_LOGGED, "no loss scale")
        return True, BF16
    moved = f"from {scales[0]:g} to {scales[-1]:g}, lowest {min(scales):g}"
    if min(scales) < LEAST_SCALE:
        answers.ask("Q3.2", question, "it collapsed below 1: activations are systematically too large", moved)
        return True, HALF_RATE
    has_later_row = run.records[-1].iteration > broken[0].iteration
    if has_later_row and min(scales) == max(scales):
        answers.ask("Q3.2", question, "it is constant: dynamic scaling is not engaged", moved)
        return True, ENGAGE
    answers.ask("Q3.2", question, "it halves at overflows" if has_later_row else NOT_LOGGED, moved)
    return False, BF16


def _ask_fingerprint(
    answers: Answers, run: LoggedRun, broken: Sequence[StepRecord], in_loss: Sequence[StepRecord]
) -> list[str]:
    """Q3.3: where the first non-finite value appears; returns the arguments of the replay in fp32, if it is open."""
    first = broken[0]
    place = "the gradient; the forward pass is finite" if math.isfinite(first.loss) else "the loss"
    number = f"loss not finite in {len(in_loss)} of these {len(broken)} rows"
    question = "Is it the signature of an overflow?"
    verdict = _fp32_verdict(run.replay_of((in_loss or broken)[0].iteration))
    if verdict is not None:
        answers.ask("Q3.3", question, verdict, f"first in {place}; {number}")
        return []
    if not in_loss:
        answers.ask("Q3.3", question, "yes: first in the gradient", f"{place}; {number}")
        return []
    answers.ask("Q3.3", question, "not known until the step is replayed in fp32", f"first in {place}; {number}")
    return [*run.replay_arguments(in_loss[0].iteration), "--precision", "fp32"]


def _fp32_verdict(replayed: dict[str, Any] | None) -> str | None:
    """What a replay in fp32 says about a step; None: there was none."""
    verdict = (replayed or {}).get("precision_verdict")
    return None if not verdict else str(verdict)


def _fp8_fit(records: Sequence[StepRecord], findings: Sequence[Finding]) -> tuple[str, str]:
    """Whether values fit into fp8, and the worst underflow that was probed."""
    shares, away = worst_underflow(records), sum(record.in_fp8 is False for record in records)
    if not shares:
        return NOT_LOGGED, "fp8 underflow was not probed"
    worst = max(shares, key=lambda name: shares[name])
    number = f"at most {shares[worst]:.0%} of the values of a layer group underflowed ({worst})"
    is_unfit = any(finding.kind is FindingKind.fp8_range for finding in findings)
    return ("no" if is_unfit else "yes"), f"{number}; {away} of {len(records)} rows were computed in bf16"
