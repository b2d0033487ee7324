"""The report of one step: packs reduced signals and the gate decision on the device, unpacks them to a `StepRecord`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.core.events import StepRecord
from harness.sentinel.device.fp8_usage import summarize_fp8_usage
from harness.sentinel.device.gate import GateDecision
from harness.sentinel.device.signals import SCALARS, SignalLayout
from harness.sentinel.device.slots import summarize_slots


class Totals(NamedTuple):
    """Inputs of the gate and of the update, on the device and equal on every rank."""

    loss: Tensor
    """Mean over the tokens of the global batch."""
    grad_norm: Tensor
    """Global norm before clipping."""
    divisor: Tensor
    """The stored gradient divided by this is the true gradient."""


def totals(layout: SignalLayout, reduced: Tensor, *, scale: Tensor, expected_tokens: int) -> Totals:
    """Loss, gradient norm and divisor. The backward pass was seeded with scale / expected_tokens; `reduced` holds the
    true token count."""
    tokens = layout.scalar(reduced, "tokens")
    divisor = scale * tokens / expected_tokens
    grad_norm = layout.group_squares(reduced).sum().sqrt() / divisor
    return Totals(loss=layout.scalar(reduced, "loss") / tokens, grad_norm=grad_norm, divisor=divisor)


DECIDED = 8
"""Number of values that follow the reduced signals in a report."""


def pack_report(
    reduced: Tensor, total: Totals, *, decision: GateDecision, lr: Tensor, step: Tensor, scale: Tensor
) -> Tensor:
    """All values of this step that the host reads, as one vector."""
    decided = [total.grad_norm, total.divisor, decision.skip_mask, lr, step.to(torch.float32), scale]
    return torch.cat([reduced, torch.stack(decided), decision.bounds])


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Host-side facts of a step, stored when it was issued. Equal on all ranks, except `posted_s`, `memory_bytes`,
    `loader_wait_s` and `batch`, which are of this rank and only logged."""

    iteration: int
    cursor: int
    tokens: int
    """Tokens consumed since the start of the run, this step included."""
    probed: bool
    posted_s: float
    """Host clock at posting; the difference between two posts is the step time."""
    memory_bytes: int
    batch: dict[str, Any]
    """Facts about the rows of the batch; empty on all ranks but the first."""
    in_fp8: bool | None = None
    """Whether the step was computed in fp8; None if the run does not use fp8."""
    stride: int = 1
    """Distance from a rank to the rank whose row it also read, if rows were compared."""
    in_planned_change: bool = False
    """Whether the batch lies within the window after a planned change; equal on all ranks."""
    loader_wait_s: float | None = None
    """Seconds for which this rank waited for its batch; None: not measured."""
    batch_tokens: int | None = None
    """Tokens of the global batch, equal on all ranks; None: as many as in every batch."""
    batch_size: int | None = None
    """Rows of the global batch, equal on all ranks; None: each rank has as many."""
    recomputed: int | None = None
    """Distance from a rank to the rank whose rows it also computed; 0: its own; None: nothing was computed twice."""


def unpack_report(
    layout: SignalLayout,
    facts: HostFacts,
    report: Tensor,
    *,
    dim: int,
    dynamic_scale: bool,
    clip_norm: float | None,
    replicate: int,
) -> StepRecord:
    """The record of a step, from its report in host memory. The caller fills in the throughput."""
    parts = layout.parts
    values = report[: parts["slots"].start].tolist()  # sync: none, the report is in host memory
    decided = report[layout.size :].tolist()  # sync: none, likewise
    grad_norm, divisor, refused, lr, step, scale, loss_bound, grad_bound = decided
    scalars = dict(zip(SCALARS, values[parts["scalars"]], strict=True))
    tokens, divisor = scalars["tokens"] or math.nan, divisor or math.nan
    is_empty = scalars["tokens"] == scalars["loss"] == sum(values[parts["group_squares"]]) == 0
    if is_empty:  # the document mask ignores every target: 0 / 0 on the device, which rejects the update
        tokens, divisor, grad_norm = 1.0, 1.0, 0.0
    group_squares = zip(layout.groups, values[parts["group_squares"]], strict=True)
    source_sums = zip(layout.sources, values[parts["source_losses"]], values[parts["source_tokens"]], strict=True)
    table = layout.slots(report[: layout.size]).numpy()  # sync: none, likewise
    rank_facts = summarize_slots(
        table,
        divisor=divisor,
        replicate=replicate,
        stride=facts.stride,
        recomputed=facts.recomputed,
        context=layout.context,
        batch_size=facts.batch_size,
    )
    stage = rank_facts.corrupted_stage
    corrupted, corrupted_groups = ("", []) if stage is None else layout.describe_stage(stage)
    record = StepRecord(
        time=0.0,
        iteration=facts.iteration,
        step=int(step),
        cursor=facts.cursor,
        tokens=facts.tokens,
        loss=scalars["loss"] / tokens,
        grad_norm=grad_norm,
        lr=lr,
        tokens_per_s=0.0,
        refused=refused == 1.0,
        stop_requested=scalars["stop"] > 0,
        save_requested=scalars["save"] > 0,
        command_waits=scalars["command"] > 0,
        step_time_s=0.0,
        flops_per_s=0.0,
        z_loss=scalars["z_loss"] / tokens,
        loss_scale=scale if dynamic_scale else None,
        memory_bytes=facts.memory_bytes,
        loader_wait_s=facts.loader_wait_s,
        group_grad_norms={name: _root(square) / divisor for name, square in group_squares},
        source_losses={name: loss / count for name, loss, count in source_sums if count > 0},
        bounds={"loss": loss_bound, "grad_norm": grad_bound},
        ranks=rank_facts.ranks,
        nonfinite_ranks=rank_facts.nonfinite_ranks,
        mismatched_ranks=rank_facts.mismatched_ranks,
        changed_ranks=rank_facts.changed_ranks,
        recomputed=facts.recomputed,
        corrupted_ranks=rank_facts.corrupted_ranks,
        corrupted=corrupted,
        corrupted_groups=corrupted_groups,
        weight_digest=rank_facts.weight_digest,
        weight_norm=_root(scalars["weights"]),
        digests=rank_facts.digests,
        median_step_s=rank_facts.median_step_s,
        batch_tokens=facts.batch_tokens or 0,
        fingerprint=rank_facts.fingerprint,
        other_data=rank_facts.other_data,
        batch={"fingerprint": rank_facts.fingerprint, **facts.batch} if facts.batch else {},
        in_fp8=facts.in_fp8,
        in_planned_change=facts.in_planned_change,
    )
    if facts.probed:
        excess = 1.0 if clip_norm is None else max(1.0, grad_norm / clip_norm)
        _add_probe(record, layout, values, num_activations=tokens * dim, divisor=divisor * excess)
    return record


def _add_probe(
    record: StepRecord, layout: SignalLayout, values: list[float], *, num_activations: float, divisor: float
) -> None:
    """Add the values of a probed step; the stored gradient divided by `divisor` is the clipped one that Adam gets."""
    parts = layout.parts
    scalars = dict(zip(SCALARS, values[parts["scalars"]], strict=True))
    params, moments = values[parts["group_params"]], values[parts["group_moments"]]
    layers = zip(layout.layers, values[parts["layer_squares"]], strict=True)
    record.group_param_norms = {name: _root(square) for name, square in zip(layout.groups, params, strict=True)}
    record.param_norm = _root(sum(params))
    record.v_norm = _root(scalars["v"])
    record.update_ratio = _root(scalars["update"]) / (record.param_norm or math.nan)
    updates = zip(layout.groups, values[parts["group_updates"]], params, strict=True)
    record.group_update_ratios = {name: _root(square / param) for name, square, param in updates if param > 0}
    ratios = _square_ratios(layout.groups, values[parts["group_squares"]], moments, divisor=divisor)
    record.group_square_ratios = ratios
    record.square_ratio = max(ratios.values(), default=None)
    logits = zip(layout.blocks, values[parts["attention_logits"]], strict=True)
    record.attention_logits = {name: total / layout.num_ranks for name, total in logits}
    record.output_entropy = scalars["entropy"] / scalars["entropy_tokens"] if scalars["entropy_tokens"] else None
    record.activation_rms = {name: _root(square / num_activations) for name, square in layers}
    record.token_loss_counts = [int(count) for count in values[parts["token_losses"]]]
    if record.in_fp8:
        sums = {name: values[place] for name, place in parts.items() if name.startswith("fp8_")}
        record.fp8, record.fp8_underflow = summarize_fp8_usage(layout.groups, sums)


def _square_ratios(
    groups: Sequence[str], squares: list[float], moments: list[float], *, divisor: float
) -> dict[str, float]:
    """Gradient norm over the root of Adam's second moment of each layer group; empty before the first update or if the
    gradient is not finite."""
    measured = zip(groups, squares, moments, strict=True)
    ratios = {name: _root(square / moment) / divisor for name, square, moment in measured if moment > 0}
    return ratios if math.isfinite(sum(ratios.values())) else {}


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan
