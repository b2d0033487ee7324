"""Weights and moments: the update, and what a probe adds up of them.

Why: torch's fused AdamW, told to divide the gradient, writes it back, which nobody reads again, and on CUDA it moves
three quarters of what memory could; what a probe adds up of weights and moments takes it nine passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers that one program takes at once."""
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
