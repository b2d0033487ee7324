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
WIDE_BLOCK = 4096
"""The same where little is done with each number."""
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


def join_gradients(gradient: Tensor, place: Tensor) -> None:
    """Fill the rows of `place` [chunks, width], one after the other, with a contiguous tensor, then with zeros."""
    num_chunks, width = place.shape
    grid = (triton.cdiv(width, WIDE_BLOCK), num_chunks)
    _join[grid](gradient, place, gradient.numel(), width, place.stride(0), WIDE_BLOCK)


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
def _join(tensor, place, count, width, stride, block: tl.constexpr):
    within = tl.program_id(0) * block + tl.arange(0, block)
    source = tl.program_id(1).to(tl.int64) * width + within
    numbers = tl.load(tensor + source, mask=(within < width) & (source < count), other=0.0)
    tl.store(place + tl.program_id(1).to(tl.int64) * stride + within, numbers.to(tl.float32), mask=within < width)


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
