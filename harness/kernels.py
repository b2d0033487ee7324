"""Passes over a rank's own tensors for which torch has no kernel that is as fast as memory, in Triton.

Why: torch's fused AdamW, told to divide the gradient, writes it back, which nobody reads again, and on CUDA it moves
three quarters of what memory could; what a probe adds up of weights and moments takes it nine passes, and counting what
became zero in fp8 eight. `torch.compile` makes such kernels too, but to call one costs the host a millisecond, and
there are hundreds of parameters in a step.
How: every number is read once and written once. Triton comes with torch for CUDA; nobody else imports this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers that one program takes at once."""
LOGITS_BLOCK, LOGITS_WARPS = 8192, 16
"""The same of one token's logits, and the warps that share it."""
NUM_SUMMANDS = 512
"""Programs that share the sums of one tensor, each a part; added up in one order, whoever is done first."""


def step_adamw(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, terms: Tensor) -> None:
    """Update a parameter in place by its gradient and moments; all contiguous and in fp32.

    `terms`: 1 where nothing is to be touched, what the gradient is divided by, what decay leaves of the parameter, the
    rate over the first correction, the root of the second correction, 1 - beta1, 1 - beta2, and eps.
    """
    count = parameter.numel()
    _step_adamw[(triton.cdiv(count, BLOCK),)](parameter, gradient, first, second, terms, count, BLOCK)


def sum_state(
    weights: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor], correction: Tensor, *, eps: float
) -> Tensor:
    """Parameters x (sum of squared weights, of second moments, of their squares, and of squares of
    first / (sqrt(second / correction) + eps)); all contiguous and in fp32."""
    sums = torch.zeros(len(weights), NUM_SUMMANDS, 4, dtype=torch.float32, device=correction.device)
    terms = torch.stack([correction, torch.full_like(correction, eps)])
    for weight, first, second, row in zip(weights, firsts, seconds, sums, strict=True):
        count = weight.numel()
        grid = (min(triton.cdiv(count, BLOCK), NUM_SUMMANDS),)
        _sum_state[grid](weight, first, second, terms, row, count, BLOCK)
    return sums.sum(dim=1)


def differentiate_loss(
    logits: Tensor, targets: Tensor, seed: Tensor, *, multiplier: float, z_loss: float, ignored: int
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row of `logits` [T, V], contiguous, and its z term; the logits become their gradient.

    As `harness.model.loss` has it: of seed * (losses + z terms), where logits count times `multiplier`.
    """
    losses, partitions = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    terms = torch.stack([seed, torch.full_like(seed, multiplier), torch.full_like(seed, z_loss)])
    width = logits.shape[1]
    _differentiate_loss[(len(logits),)](
        logits, targets, terms, losses, partitions, width, ignored, LOGITS_BLOCK, num_warps=LOGITS_WARPS
    )
    return losses, partitions


def scaled(values: Tensor, factor: Tensor) -> Tensor:
    """A contiguous tensor times one number of the device; torch does it number by number, at a quarter of the rate."""
    made = torch.empty_like(values)
    count = values.numel()
    _scale[(triton.cdiv(count, BLOCK),)](values, factor, made, count, BLOCK)
    return made


def note_rounded(values: Tensor, rounded: Tensor, scale: Tensor, row: Tensor, *, stride: int) -> None:
    """Add to a row of a meter what rounding did to every `stride`-th row of a matrix; `rounded`: fp8 as plain bytes.

    The first one is number `stride // 2`. The meter's row has the columns of `harness.fp8.meters.Column`, by number.
    """
    height, width = values.shape
    grid = (triton.cdiv(height - stride // 2, stride), triton.cdiv(width, BLOCK))
    _note_rounded[grid](values, rounded, scale, row, width, stride, BLOCK)


@triton.jit
def _step_adamw(parameter, gradient, first, second, terms, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    if tl.load(terms) == 0:
        slope = tl.load(gradient + at, mask=inside) / tl.load(terms + 1)
        mean = tl.load(first + at, mask=inside)
        mean += (slope - mean) * tl.load(terms + 5)
        square = tl.load(second + at, mask=inside)
        square += (slope * slope - square) * tl.load(terms + 6)
        moved = tl.load(parameter + at, mask=inside) * tl.load(terms + 2)
        moved -= tl.load(terms + 3) * mean / (tl.sqrt_rn(square) / tl.load(terms + 4) + tl.load(terms + 7))
        tl.store(first + at, mean, mask=inside)
        tl.store(second + at, square, mask=inside)
        tl.store(parameter + at, moved, mask=inside)


@triton.jit
def _sum_state(weight, first, second, terms, row, count, block: tl.constexpr):
    weights = tl.zeros((block,), tl.float32)
    moments, squares, directions = weights, weights, weights
    wide = tl.full((), block, tl.int64)
    for number in range(tl.program_id(0), tl.cdiv(count, block), tl.num_programs(0)):
        at = number * wide + tl.arange(0, block)
        inside = at < count
        value = tl.load(weight + at, mask=inside, other=0.0)
        moment = tl.load(second + at, mask=inside, other=0.0)
        length = tl.sqrt_rn(moment / tl.load(terms)) + tl.load(terms + 1)
        step = tl.load(first + at, mask=inside, other=0.0) / length
        weights += value * value
        moments += moment
        squares += moment * moment
        directions += step * step
    place = row + tl.program_id(0) * 4
    tl.store(place, tl.sum(weights))
    tl.store(place + 1, tl.sum(moments))
    tl.store(place + 2, tl.sum(squares))
    tl.store(place + 3, tl.sum(directions))


@triton.jit
def _differentiate_loss(logits, targets, terms, losses, squares, width, ignored, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seed, multiplier, z_loss = tl.load(terms), tl.load(terms + 1), tl.load(terms + 2)
    target = tl.load(targets + row)
    counts = target != ignored
    begin = logits + row * width
    aimed = tl.load(begin + tl.where(counts, target, 0)).to(tl.float32) * multiplier
    most, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        value = tl.load(begin + at, mask=at < width, other=float("-inf")).to(tl.float32) * multiplier
        raised = tl.maximum(most, tl.max(value), propagate_nan=tl.PropagateNan.ALL)
        total = total * tl.exp(most - raised) + tl.sum(tl.exp(value - raised))
        most = raised
    partition = most + tl.log(total)
    tl.store(losses + row, tl.where(counts, partition - aimed, 0.0))
    tl.store(squares + row, tl.where(counts, z_loss * partition * partition, 0.0))
    slope = seed * multiplier
    of_partition = tl.where(counts, slope * (1 + 2 * z_loss * partition), 0.0)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        value = tl.load(begin + at, mask=at < width, other=float("-inf")).to(tl.float32) * multiplier
        gradient = tl.exp(value - partition) * of_partition - tl.where(at == target, slope, 0.0)
        tl.store(begin + at, gradient, mask=at < width)


@triton.jit
def _scale(values, factor, made, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(values + at, mask=at < count).to(tl.float32) * tl.load(factor)
    tl.store(made + at, value, mask=at < count)


@triton.jit
def _note_rounded(values, rounded, scale, row, width, stride, block: tl.constexpr):
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    begin = (tl.program_id(0).to(tl.int64) * stride + stride // 2) * width
    before = tl.sum((tl.load(values + begin + at, mask=inside, other=0.0) != 0).to(tl.int32))
    after = tl.sum(((tl.load(rounded + begin + at, mask=inside, other=0) & 0x7F) != 0).to(tl.int32))
    tl.atomic_add(row + 2, ((before - after) * stride).to(tl.float32))
    tl.atomic_add(row + 3, (before * stride).to(tl.float32))
    if tl.program_id(0) + tl.program_id(1) == 0:
        known, now = tl.load(row + 1), tl.load(scale)
        tl.store(row + 1, tl.where(known > 0, tl.minimum(known, now), now))
