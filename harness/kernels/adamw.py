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

from harness.kernels.multi_tensor import (
    BLOCK,
    PIECE,
    Table,
    empty_sums,
    empty_update_sums,
    find_piece,
    load_entry,
    make_table,
    offsets_from,
    reduce_sums,
    store_update_sums,
)

MULTIPLIER1, MULTIPLIER2 = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)
"""Of the hash in `harness.optim.stochastic_rounding`."""
KEPT_BITS, EXPONENT = tl.constexpr(0xFFFF0000), tl.constexpr(0x7F800000)
"""Bits of fp32 that bf16 has, and its exponent."""


def step_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    terms: Tensor,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Update parameters in place by their gradients and moments; all contiguous, and in fp32. Returns the sums of the
    parameters' bit patterns before and after (int64, modulo 2**32), and the sum of their squares after.

    `terms`, one row per tensor: 1 to skip the update, the divisor of the gradient, 1 - lr * weight_decay,
    lr / bias_correction1, sqrt(bias_correction2), 1 - beta1, 1 - beta2, eps.
    With `keys` the moments are in bf16 and rounded stochastically (`harness.optim.stochastic_rounding`); one row per
    tensor: key of the noise in this update, index of the first element in the whole tensor; int32.
    """
    table = _table_with_moments([parameters, gradients], [firsts, seconds])
    sums = empty_update_sums(table)
    grid = (table.num_programs,)
    _step_adamw[grid](parameters[0], firsts[0], terms, keys, sums.bits, sums.squares, *table.arguments, BLOCK)
    return sums.add_up()


def _table_with_moments(lists: Sequence[Sequence[Tensor]], moments: Sequence[Sequence[Tensor]]) -> Table:
    """A table as of `build_table`; offsets of the moments are from the first moment, in values of their dtype."""
    base, moment_base = lists[0][0], moments[0][0]
    counts = tuple(tensor.numel() for tensor in lists[0])
    assert all(len(tensors) == len(counts) for tensors in (*lists, *moments)), "the lists differ in length"
    assert base.dtype is torch.float32, "tensors must be fp32"
    offsets = [offsets_from(tensors, base) for tensors in lists]
    offsets += [offsets_from(tensors, moment_base) for tensors in moments]
    return make_table((counts, *offsets), counts, base, moment_base)


def sum_state(
    weights: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor], correction: Tensor, *, eps: float
) -> Tensor:
    """[tensors, 4]: sums of squared weights, of second moments, of squared second moments, and of squared
    first / (sqrt(second / correction) + eps); all contiguous, weights in fp32, moments in fp32 or bf16."""
    table = _table_with_moments([weights], [firsts, seconds])
    sums = empty_sums(table, 4)
    terms = torch.stack([correction, torch.full_like(correction, eps)])
    _sum_state[(table.num_programs,)](weights[0], firsts[0], terms, sums, *table.arguments, BLOCK)
    return reduce_sums(sums, table)


@triton.jit
def _mix(values):
    """`harness.optim.stochastic_rounding.mix`, on uint32."""
    values = (values ^ (values >> 16)) * MULTIPLIER1
    values = (values ^ (values >> 15)) * MULTIPLIER2
    return values ^ (values >> 16)


@triton.jit
def _round_to_bf16(values, noise):
    """`harness.optim.stochastic_rounding.round_to_bf16`."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + noise) & KEPT_BITS
    is_finite = (bits & EXPONENT) != EXPONENT
    return tl.where(is_finite, rounded, bits).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _step_adamw(
    base,
    moments,
    terms,
    keys,
    bits,
    squares,
    table,
    num_tensors,
    max_tensors: tl.constexpr,
    unit: tl.constexpr,
    block: tl.constexpr,
):
    number, begin = find_piece(table, num_tensors, max_tensors)
    count = load_entry(table, 1, number, num_tensors, unit)
    parameter = base + load_entry(table, 2, number, num_tensors, unit)
    gradient = base + load_entry(table, 3, number, num_tensors, unit)
    first = moments + load_entry(table, 4, number, num_tensors, unit)
    second = moments + load_entry(table, 5, number, num_tensors, unit)
    row = terms + number * 8
    skip = tl.load(row) != 0
    divisor, decay, step_size, correction2 = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    weight1, weight2, eps = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    if keys is not None:
        key = tl.load(keys + number * 2).to(tl.uint32, bitcast=True)
        first_index = tl.load(keys + number * 2 + 1).to(tl.uint32, bitcast=True)
    before, square = tl.zeros((block,), tl.int32), tl.zeros((block,), tl.float32)
    after = before
    for start in range(begin, tl.minimum(begin + PIECE, count), block):
        at = start + tl.arange(0, block)
        inside = at < count
        updated = tl.load(parameter + at, mask=inside, other=0.0)
        before += updated.to(tl.int32, bitcast=True)  # wraps around
        if not skip:
            grad = tl.load(gradient + at, mask=inside, other=0.0) / divisor
            exp_avg = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
            exp_avg += (grad - exp_avg) * weight1
            exp_avg_sq = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
            exp_avg_sq += (grad * grad - exp_avg_sq) * weight2
            updated = updated * decay
            updated -= step_size * exp_avg / (tl.sqrt_rn(exp_avg_sq) / correction2 + eps)
            if keys is not None:
                noise = _mix((at.to(tl.uint32) + first_index) ^ key)
                exp_avg = _round_to_bf16(exp_avg, noise & 0xFFFF)
                exp_avg_sq = _round_to_bf16(exp_avg_sq, noise >> 16)
            tl.store(first + at, exp_avg, mask=inside)
            tl.store(second + at, exp_avg_sq, mask=inside)
            tl.store(parameter + at, updated, mask=inside)
        after += tl.where(inside, updated.to(tl.int32, bitcast=True), 0)
        square += tl.where(inside, updated * updated, 0.0)
    store_update_sums(bits, squares, before, after, square)


@triton.jit
def _sum_state(
    base, moments, terms, sums, table, num_tensors, max_tensors: tl.constexpr, unit: tl.constexpr, block: tl.constexpr
):
    number, begin = find_piece(table, num_tensors, max_tensors)
    count = load_entry(table, 1, number, num_tensors, unit)
    weight = base + load_entry(table, 2, number, num_tensors, unit)
    first = moments + load_entry(table, 3, number, num_tensors, unit)
    second = moments + load_entry(table, 4, number, num_tensors, unit)
    correction, eps = tl.load(terms), tl.load(terms + 1)
    weights = tl.zeros((block,), tl.float32)
    sum_seconds, squares, directions = weights, weights, weights
    for start in range(begin, tl.minimum(begin + PIECE, count), block):
        at = start + tl.arange(0, block)
        inside = at < count
        value = tl.load(weight + at, mask=inside, other=0.0)
        moment = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
        step = tl.load(first + at, mask=inside, other=0.0).to(tl.float32) / (tl.sqrt_rn(moment / correction) + eps)
        weights += value * value
        sum_seconds += moment
        squares += moment * moment
        directions += step * step
    out = sums + tl.program_id(0) * 4
    tl.store(out, tl.sum(weights))
    tl.store(out + 1, tl.sum(sum_seconds))
    tl.store(out + 2, tl.sum(squares))
    tl.store(out + 3, tl.sum(directions))
