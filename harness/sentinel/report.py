"""One step's report: reduced signals and what was decided on them, from device scalars to a `StepRecord`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.events import StepRecord
from harness.sentinel.signals import SCALARS, Layout


class Totals(NamedTuple):
    """What the gate and the update need of a step, on the device and equal on every rank."""

    loss: Tensor
    """Mean over the tokens of the global batch."""
    grad_norm: Tensor
    """Global, before clipping."""
    divisor: Tensor
    """What the stored gradient must be divided by to be the true one."""


def totals(layout: Layout, reduced: Tensor, *, scale: Tensor, expected_tokens: int) -> Totals:
    """The backward pass was seeded with scale / expected_tokens; here the true token count is known."""
    tokens = layout.scalar(reduced, "tokens")
    divisor = scale * tokens / expected_tokens
    grad_norm = layout.group_squares(reduced).sum().sqrt() / divisor
    return Totals(loss=layout.scalar(reduced, "loss") / tokens, grad_norm=grad_norm, divisor=divisor)


DECIDED = 6
"""Numbers that follow the reduced signals in a report."""


def pack(reduced: Tensor, total: Totals, *, refused: Tensor, lr: Tensor, step: Tensor, scale: Tensor) -> Tensor:
    """Everything the host will read of this step, as one vector."""
    decided = [total.grad_norm, total.divisor, refused, lr, step.to(torch.float32), scale]
    return torch.cat([reduced, torch.stack(decided)])


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What only the host knows of the step, noted when it was issued."""

    iteration: int
    cursor: int
    tokens: int
    """Tokens consumed since the start of the run, this step included."""
    probed: bool
    posted_s: float
    """The host's clock; steps are as far apart as their posts."""
    memory_bytes: int
    batch: dict[str, Any]
    """What the batch held."""


def unpack(layout: Layout, facts: HostFacts, values: list[float], *, dim: int, dynamic_scale: bool) -> StepRecord:
    """The record of a step; throughput is filled in by whoever reads the clock."""
    numbers = iter(values)
    named, groups, layers, source_losses, source_tokens = (list(islice(numbers, size)) for size in layout.parts)
    scalars = dict(zip(SCALARS, named, strict=True))
    grad_norm, divisor, refused, lr, step, scale = numbers
    tokens = scalars["tokens"] or math.nan
    return StepRecord(
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
        step_time_s=0.0,
        flops_per_s=0.0,
        z_loss=scalars["z_loss"] / tokens,
        loss_scale=scale if dynamic_scale else None,
        memory_bytes=facts.memory_bytes,
        group_grad_norms={name: _root(square) / divisor for name, square in zip(layout.groups, groups, strict=True)},
        source_losses={
            name: loss / count
            for name, loss, count in zip(layout.sources, source_losses, source_tokens, strict=True)
            if count > 0
        },
        param_norm=_root(scalars["param"]) if facts.probed else None,
        v_norm=_root(scalars["v"]) if facts.probed else None,
        activation_rms={
            name: _root(square / (tokens * dim)) for name, square in zip(layout.layers, layers, strict=True)
        }
        if facts.probed
        else {},
        batch=facts.batch,
    )


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan
