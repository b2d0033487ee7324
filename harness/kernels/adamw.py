"""Weights and moments: the update, and what a probe adds up of them; all tensors in one launch.

Why: torch's fused AdamW, told to divide the gradient, writes it back, which nobody reads again, and on CUDA it moves
three quarters of what memory could; what a probe adds up of weights and moments takes it nine passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.multi_tensor import BLOCK, PIECE, added_up, entry, piece, room_for_sums, table_of


def step_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    terms: Tensor,
) -> None:
    """Update parameters in place by their gradients and moments; all contiguous and in fp32.

    `terms`, a row for each: 1 where nothing is to be touched, what the gradient is divided by, what decay leaves of the
    parameter, the rate over the first correction, the root of the second correction, 1 - beta1, 1 - beta2, and eps.
    """
    table = table_of(parameters, gradients, firsts, seconds)
    _step_adamw[(table.num_programs,)](parameters[0], terms, *table.arguments, BLOCK)


def sum_state(
    weights: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor], correction: Tensor, *, eps: float
) -> Tensor:
    """Parameters x (sum of squared weights, of second moments, of their squares, and of squares of
    first / (sqrt(second / correction) + eps)); all contiguous and in fp32."""
    table = table_of(weights, firsts, seconds)
    sums = room_for_sums(table, 4)
    terms = torch.stack([correction, torch.full_like(correction, eps)])
    _sum_state[(table.num_programs,)](weights[0], terms, sums, *table.arguments, BLOCK)
    return added_up(sums, table)


@triton.jit
def _step_adamw(base, terms, table, num_tensors, room: tl.constexpr, unit: tl.constexpr, block: tl.constexpr):
    number, begin = piece(table, num_tensors, room)
    count = entry(table, 1, number, num_tensors, unit)
    parameter = base + entry(table, 2, number, num_tensors, unit)
    gradient = base + entry(table, 3, number, num_tensors, unit)
    first = base + entry(table, 4, number, num_tensors, unit)
    second = base + entry(table, 5, number, num_tensors, unit)
    row = terms + number * 8
    divisor, kept, rate, root = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    to_mean, to_square, eps = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    if tl.load(row) == 0:
        for start in range(begin, tl.minimum(begin + PIECE, count), block):
            at = start + tl.arange(0, block)
            inside = at < count
            slope = tl.load(gradient + at, mask=inside) / divisor
            mean = tl.load(first + at, mask=inside)
            mean += (slope - mean) * to_mean
            square = tl.load(second + at, mask=inside)
            square += (slope * slope - square) * to_square
            moved = tl.load(parameter + at, mask=inside) * kept
            moved -= rate * mean / (tl.sqrt_rn(square) / root + eps)
            tl.store(first + at, mean, mask=inside)
            tl.store(second + at, square, mask=inside)
            tl.store(parameter + at, moved, mask=inside)


@triton.jit
def _sum_state(base, terms, sums, table, num_tensors, room: tl.constexpr, unit: tl.constexpr, block: tl.constexpr):
    number, begin = piece(table, num_tensors, room)
    count = entry(table, 1, number, num_tensors, unit)
    weight = base + entry(table, 2, number, num_tensors, unit)
    first = base + entry(table, 3, number, num_tensors, unit)
    second = base + entry(table, 4, number, num_tensors, unit)
    correction, eps = tl.load(terms), tl.load(terms + 1)
    weights = tl.zeros((block,), tl.float32)
    moments, squares, directions = weights, weights, weights
    for start in range(begin, tl.minimum(begin + PIECE, count), block):
        at = start + tl.arange(0, block)
        inside = at < count
        value = tl.load(weight + at, mask=inside, other=0.0)
        moment = tl.load(second + at, mask=inside, other=0.0)
        step = tl.load(first + at, mask=inside, other=0.0) / (tl.sqrt_rn(moment / correction) + eps)
        weights += value * value
        moments += moment
        squares += moment * moment
        directions += step * step
    place = sums + tl.program_id(0) * 4
    tl.store(place, tl.sum(weights))
    tl.store(place + 1, tl.sum(moments))
    tl.store(place + 2, tl.sum(squares))
    tl.store(place + 3, tl.sum(directions))
