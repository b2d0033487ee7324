"""Section 1 of the tree: is the loss, or a gradient, NaN or Inf?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.analysis.diagnose.diagnosis import NOT_LOGGED, Answers, Diagnosis, Finds
from harness.analysis.diagnose.logged_run import (
    HALF_FORMATS,
    SCALED_BY,
    LoggedRun,
    scaled_override,
)
from harness.analysis.diagnose.precision_section import ask_overflow
from harness.core.events import StepRecord

PATHS = {
    "fp32": "possible causes: log(0) or 0/0 in the loss",
    "bf16": "possible causes: as for fp32, an exponent overflow near 1e38, or a gradient that overflowed",
    "fp16": "possible cause: an activation above 65504; see section 3",
    "fp8": "possible causes: as for bf16; fp8 itself saturates and does not overflow",
}
"""Number format -> what a non-finite value usually means in it."""
RECURS = "if it recurs, the cause is structural"


def ask_non_finite(answers: Answers, run: LoggedRun) -> Diagnosis | None:
    """Ask whether, in which format and where values are not finite, and what fixes it."""
    in_loss = [record for record in run.records if not math.isfinite(record.loss)]
    in_gradient = [record for record in run.records if not math.isfinite(record.grad_norm)]
    broken = [record for record in run.records if not math.isfinite(record.loss + record.grad_norm)]
    refused = sum(record.refused for record in broken)
    places = f"loss in {len(in_loss)} of {len(run.records)} rows, gradient norm in {len(in_gradient)}"
    number = f"{places}; of these rows, rejected: {refused}"
    is_scaling = run.scales_loss and not in_loss
    _ask_first(answers, in_loss, in_gradient, number, is_scaling=is_scaling)
    if not broken or is_scaling:
        return None
    first = (in_loss or in_gradient)[0]
    kind = run.precision
    path = PATHS.get(kind or "", f"the path of {kind or 'an unknown format'} is not known; the fp32 path is followed")
    answers.ask("Q1.2", "What was the dtype regime in the run?", kind or NOT_LOGGED, path)
    replayed = run.replay_of(first.iteration)
    where = describe_origin(broken, first, replayed)
    answers.ask("Q1.3", "Where did it originate?", f"step {first.step}, iteration {first.iteration}", where)
    if run.scales_loss and (overflow := ask_overflow(answers, run)) is not None:
        return overflow
    return _ask_fix(answers, run, broken, first, where)


def _ask_first(
    answers: Answers,
    in_loss: Sequence[StepRecord],
    in_gradient: Sequence[StepRecord],
    number: str,
    *,
    is_scaling: bool,
) -> None:
    """Q1.1, about the loss if the loss is not finite, and about the gradients if only they are."""
    question = "Is the loss, or else the gradient norm, NaN or Inf at any logged step?"
    if not in_loss and not in_gradient:
        answers.ask("Q1.1", question, False, number)
        return
    answer = "yes: the loss" if in_loss else "yes: the gradient norm; the loss is finite in every row"
    if is_scaling:
        answer = "not the loss; only the gradient norm, under a loss scale: see section 3"
    answers.ask("Q1.1", question, answer, f"{number}; the first at step {(in_loss or in_gradient)[0].step}")


def describe_origin(broken: Sequence[StepRecord], first: StepRecord, replayed: dict[str, Any] | None) -> str:
    """Ranks and layer groups from the log, and the first operation from a replay."""
    ranks = sorted({rank for record in broken for rank in record.nonfinite_ranks})
    groups = [name for name, norm in first.group_grad_norms.items() if not math.isfinite(norm)]
    where = f"ranks {', '.join(map(str, ranks)) or NOT_LOGGED}; layer groups {', '.join(groups) or NOT_LOGGED}"
    if replayed is None:
        return where
    points = list(dict.fromkeys(filter(None, map(_origin_of_rank, replayed.get("seen", {}).values()))))
    return f"{where}; replayed: {', '.join(points) or 'every value is finite'}"


def _origin_of_rank(seen: dict[str, Any]) -> str:
    """The first non-finite point of a replay on one rank."""
    if seen.get("broken_weights"):
        return f"weights of {seen['broken_weights']}"
    if seen.get("forward"):
        return str(seen["forward"])
    return f"gradient of {seen['backward']}" if seen.get("backward") else ""


def _ask_fix(
    answers: Answers, run: LoggedRun, broken: Sequence[StepRecord], first: StepRecord, where: str
) -> Diagnosis:
    """Q1.4: the fix for the cause that the log and the replay show."""
    is_undone = all(record.refused for record in broken)
    last = run.records[-1]
    state = (
        "every such update was rejected: no weight changed"
        if is_undone
        else f"the last row has loss {last.loss:.4g} and gradient norm {last.grad_norm:.4g}"
    )
    checkpoint = None if is_undone else run.checkpoint_before(first.step)
    replayed = run.replay_of(first.iteration)
    fix, overrides = _fix_of(run, first, replayed)
    restore = "" if is_undone else f"{run.describe_restore(checkpoint)}; "
    answers.ask("Q1.4", "What is the fix?", f"{restore}{fix}", f"{state}; {RECURS}")
    return Diagnosis(
        nodes=answers.nodes,
        finds=Finds.not_finite,
        conclusion=f"non-finite from step {first.step}: {where}",
        overrides=overrides,
        restore_step=None if checkpoint is None else checkpoint.step,
        replay=[] if replayed is not None else run.replay_arguments(first.iteration),
    )


def _fix_of(run: LoggedRun, first: StepRecord, replayed: dict[str, Any] | None) -> tuple[str, list[str]]:
    """The fix in words, and as overrides."""
    half_rate = scaled_override("optim.lr", run.setting("optim.lr"), 1 / SCALED_BY)
    clip = ("clip gradients by value, before the norm: optim.clip_value=100", ["optim.clip_value=100"])
    if replayed is None:
        if math.isfinite(first.loss):
            return clip
        return "find the operation first: replay the step", []
    if replayed.get("nature") == "transient":
        return "none in the configuration: the replay is finite, so test the machine of the named ranks", []
    seen = [of_rank for of_rank in replayed.get("seen", {}).values() if _origin_of_rank(of_rank)]
    if not seen:
        return "find the operation first: the replay shows none", []
    origin = str(seen[0].get("forward", ""))
    if seen[0].get("broken_weights"):
        return f"restore weights from before {seen[0]['broken_weights']} was damaged", []
    if run.precision in HALF_FORMATS:
        return "compute in bf16: precision=bf16", ["precision=bf16"]
    if not origin:
        return clip
    if ".attention" in origin:
        return "bound the attention logits: model.qk_norm=true in a new run, or half the learning rate", half_rate
    if "logits" in origin or "softmax" in origin or "loss" in origin:
        return "keep the logits small: model.z_loss=1e-4; the loss is already a log-softmax", ["model.z_loss=1e-4"]
    return "half the learning rate: the activations grew out of range", half_rate
