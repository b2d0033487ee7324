"""AdamW, and a probe's sums over weights and moments; all tensors in one launch.

Why: torch's fused AdamW with `grad_scale` writes the divided gradient back, which is not read again, and on CUDA it
reaches three quarters of memory bandwidth. In plain torch a probe's sums over weights and moments take nine passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.multi_tensor import BLOCK, PIECE, build_table, empty_sums, find_piece, load_entry, reduce_sums


def step_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    terms: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Update parameters in place by their gradients and moments; all contiguous and in fp32. Returns the sums of the
    parameters' bit patterns before and after (int64, modulo 2**32), and the sum of their squares after.

    `terms`, one row per tensor: 1 to skip the update, the divisor of the gradient, 1 - lr * weight_decay,
    lr / bias_correction1, sqrt(bias_correction2), 1 - beta1, 1 - beta2, eps.
    """
    table = build_table(parameters, gradients, firsts, seconds)
    squares = empty_sums(table, 1)
    bits = torch.empty(2, table.num_programs, dtype=torch.int32, device=squares.device)
    _step_adamw[(table.num_programs,)](parameters[0], terms, bits, squares, *table.arguments, BLOCK)
    before, after = bits.sum(dim=1)
    return before, after, squares.sum()


def sum_state(
    weights: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor], correction: Tensor, *, eps: float
) -> Tensor:
    """[tensors, 4]: sums of squared weights, of second moments, of squared second moments, and of squared
    first / (sqrt(second / correction) + eps); all contiguous and in fp32."""
    table = build_table(weights, firsts, seconds)
    sums = empty_sums(table, 4)
    terms = torch.stack([correction, torch.full_like(correction, eps)])
    _sum_state[(table.num_programs,)](weights[0], terms, sums, *table.arguments, BLOCK)
    return reduce_sums(sums, table)


@triton.jit
def _step_adamw(
    base, terms, bits, squares, table, num_tensors, max_tensors: tl.constexpr, unit: tl.constexpr, block: tl.constexpr
):
    number, begin = find_piece(table, num_tensors, max_tensors)
    count = load_entry(table, 1, number, num_tensors, unit)
    parameter = base + load_entry(table, 2, number, num_tensors, unit)
    gradient = base + load_entry(table, 3, number, num_tensors, unit)
    first = base + load_entry(table, 4, number, num_tensors, unit)
    second = base + load_entry(table, 5, number, num_tensors, unit)
    row = terms + number * 8
    skip = tl.load(row) != 0
    divisor, decay, step_size, correction2 = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    weight1, weight2, eps = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    before, square = tl.zeros((block,), tl.int32), tl.zeros((block,), tl.float32)
    after = before
    for start in range(begin, tl.minimum(begin + PIECE, count), block):
        at = start + tl.arange(0, block)
        inside = at < count
        updated = tl.load(parameter + at, mask=inside, other=0.0)
        before += updated.to(tl.int32, bitcast=True)  # wraps around
        if not skip:
            grad = tl.load(gradient + at, mask=inside, other=0.0) / divisor
            exp_avg = tl.load(first + at, mask=inside, other=0.0)
            exp_avg += (grad - exp_avg) * weight1
            exp_avg_sq = tl.load(second + at, mask=inside, other=0.0)
            exp_avg_sq += (grad * grad - exp_avg_sq) * weight2
            updated = updated * decay
            updated -= step_size * exp_avg / (tl.sqrt_rn(exp_avg_sq) / correction2 + eps)
            tl.store(first + at, exp_avg, mask=inside)
            tl.store(second + at, exp_avg_sq, mask=inside)
            tl.store(parameter + at, updated, mask=inside)
        after += tl.where(inside, updated.to(tl.int32, bitcast=True), 0)
        square += tl.where(inside, updated * updated, 0.0)
    out, num_programs = bits + tl.program_id(0), tl.num_programs(0)
    tl.store(out, tl.sum(before))
    tl.store(out + num_programs, tl.sum(after))
    tl.store(squares + tl.program_id(0), tl.sum(square))


@triton.jit
def _sum_state(
    base, terms, sums, table, num_tensors, max_tensors: tl.constexpr, unit: tl.constexpr, block: tl.constexpr
):
    number, begin = find_piece(table, num_tensors, max_tensors)
    count = load_entry(table, 1, number, num_tensors, unit)
    weight = base + load_entry(table, 2, number, num_tensors, unit)
    first = base + load_entry(table, 3, number, num_tensors, unit)
    second = base + load_entry(table, 4, number, num_tensors, unit)
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
    out = sums + tl.program_id(0) * 4
    tl.store(out, tl.sum(weights))
    tl.store(out + 1, tl.sum(moments))
    tl.store(out + 2, tl.sum(squares))
    tl.store(out + 3, tl.sum(directions))
