"""SwiGLU that is rounded to fp8 where it is computed, as `harness.kernels.fp8_quantize` does it; its gradients
likewise.

What becomes zero is counted apart, over a sample of rows, by its size before it is rounded. In the kernels that round,
where the numbers are at hand, it took half as many registers again, and a probed step was longer for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.fp8_quantize import (
    BLOCK,
    NUM_WARPS,
    Matrix,
    add_to_meter,
    fit,
    limit_of,
    name_of,
    num_tiles_again,
    programs_again,
    room_for,
    tile_at,
    write_rounded,
)


def round_product(gate: Tensor, up: Tensor, scale: Tensor, *, dtype: torch.dtype, step: int | None) -> Matrix:
    """silu(gate) * up. With a step, `scale` is a guess, and becomes the one that fits; without, it is given."""
    made = room_for(gate, dtype)
    tensors = gate, up, *made.sides, scale
    rest = *gate.shape, name_of(dtype), limit_of(dtype)
    _round_product[made.largest.shape](*tensors, made.largest, None, *rest, num_warps=NUM_WARPS, num_stages=1)
    if step is None:
        return made._replace(inverse=scale.reciprocal().view(1))
    again = fit([made], [scale], dtype, step)
    _round_product[programs_again(made)](*tensors, None, again, *rest, num_warps=NUM_WARPS, num_stages=1)
    return made


def round_slopes(
    gradient: Tensor, gate: Tensor, up: Tensor, scales: Sequence[Tensor], *, dtype: torch.dtype, step: int | None
) -> tuple[Matrix, Matrix]:
    """The gradients of gate and of up from the one of silu(gate) * up, each as `round_product` has it."""
    both = room_for(gate, dtype), room_for(gate, dtype)
    sides = [side for made in both for side in made.sides]
    tensors, largest = (gradient, gate, up, *sides, *scales), [made.largest for made in both]
    rest = *gate.shape, name_of(dtype), limit_of(dtype)
    _round_slopes[largest[0].shape](*tensors, *largest, None, *rest, num_warps=NUM_WARPS, num_stages=1)
    if step is None:
        of_gate, of_up = (
            made._replace(inverse=scale.reciprocal().view(1)) for made, scale in zip(both, scales, strict=True)
        )
        return of_gate, of_up
    again = fit(both, scales, dtype, step)
    _round_slopes[programs_again(both[0])](*tensors, None, None, again, *rest, num_warps=NUM_WARPS, num_stages=1)
    return both


def count_product(gate: Tensor, up: Tensor, scale: Tensor, row: Tensor, *, underflow: float, every: int) -> None:
    """Add to a row of a meter what becomes zero of silu(gate) * up: of a few rows, whose columns lie side by side, each
    of which stands for `every`. `underflow`: values up to this, times the scale, become zero."""
    grid = (len(gate), triton.cdiv(gate.shape[1], BLOCK))
    _count_product[grid](gate, up, scale, row, gate.shape[1], gate.stride(0), every, underflow, BLOCK)


def count_slopes(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor,
    scales: Sequence[Tensor],
    rows: Sequence[Tensor],
    *,
    underflow: float,
    every: int,
) -> None:
    """The same of the gradients of gate and up; `gradient` lies as they do."""
    grid = (len(gate), triton.cdiv(gate.shape[1], BLOCK))
    rest = gate.shape[1], gate.stride(0), every, underflow, BLOCK
    _count_slopes[grid](gradient, gate, up, *scales, *rows, *rest)


@triton.jit
def _product(gate, up):
    """silu(gate) * up as bf16 has it."""
    turned = gate.to(tl.float32)
    return (turned * tl.sigmoid(turned) * up.to(tl.float32)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _slopes(gradient, gate, up):
    """The gradients of gate and up from that of their product, as bf16 has them."""
    slope, turned = gradient.to(tl.float32), gate.to(tl.float32)
    share = tl.sigmoid(turned)
    of_gate = slope * up.to(tl.float32) * share * (1 + turned * (1 - share))
    return of_gate.to(tl.bfloat16).to(tl.float32), (slope * turned * share).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _row_at(width, stride, block: tl.constexpr):
    """Where this program's piece of a row lies, and what of it is inside."""
    within = tl.program_id(1) * block + tl.arange(0, block)
    return tl.program_id(0).to(tl.int64) * stride + within, within < width


@triton.jit
def _count_product(gate, up, scale, row, width, stride, every, vanishing: tl.constexpr, block: tl.constexpr):
    at, inside = _row_at(width, stride, block)
    product = _product(tl.load(gate + at, mask=inside, other=0.0), tl.load(up + at, mask=inside, other=0.0))
    add_to_meter(row, product, _vanishes(product, scale, vanishing), scale, every)


@triton.jit
def _count_slopes(
    gradient,
    gate,
    up,
    gate_scale,
    up_scale,
    gate_row,
    up_row,
    width,
    stride,
    every,
    vanishing: tl.constexpr,
    block: tl.constexpr,
):
    at, inside = _row_at(width, stride, block)
    slope, turned = tl.load(gradient + at, mask=inside, other=0.0), tl.load(gate + at, mask=inside, other=0.0)
    of_gate, of_up = _slopes(slope, turned, tl.load(up + at, mask=inside, other=0.0))
    add_to_meter(gate_row, of_gate, _vanishes(of_gate, gate_scale, vanishing), gate_scale, every)
    add_to_meter(up_row, of_up, _vanishes(of_up, up_scale, vanishing), up_scale, every)


@triton.jit
def _vanishes(values, scale, vanishing: tl.constexpr):
    return tl.abs(values * tl.load(scale)) <= vanishing


@triton.jit
def _round_product(
    gate, up, rows, columns, scale, largest, again, height, width, dtype: tl.constexpr, limit: tl.constexpr
):
    if again is None:
        _round_product_tile(tl.program_id(0), gate, up, rows, columns, scale, largest, height, width, dtype, limit)
    else:
        for number in range(tl.program_id(0), num_tiles_again(again, height, width), tl.num_programs(0)):
            _round_product_tile(number, gate, up, rows, columns, scale, None, height, width, dtype, limit)


@triton.jit
def _round_product_tile(
    number, gate, up, rows, columns, scale, largest, height, width, dtype: tl.constexpr, limit: tl.constexpr
):
    at, inside = tile_at(number, height, width)
    product = _product(tl.load(gate + at, mask=inside, other=0.0), tl.load(up + at, mask=inside, other=0.0))
    write_rounded(number, product, rows, columns, scale, largest, height, width, dtype, limit)


@triton.jit
def _round_slopes(
    gradient,
    gate,
    up,
    gate_rows,
    gate_columns,
    up_rows,
    up_columns,
    gate_scale,
    up_scale,
    gate_largest,
    up_largest,
    again,
    height,
    width,
    dtype: tl.constexpr,
    limit: tl.constexpr,
):
    if again is None:
        number = tl.program_id(0)
        of_gate, of_up = _slopes_of_tile(number, gradient, gate, up, height, width)
        write_rounded(number, of_gate, gate_rows, gate_columns, gate_scale, gate_largest, height, width, dtype, limit)
        write_rounded(number, of_up, up_rows, up_columns, up_scale, up_largest, height, width, dtype, limit)
    else:
        end = tl.maximum(num_tiles_again(again, height, width), num_tiles_again(again + 1, height, width))
        for number in range(tl.program_id(0), end, tl.num_programs(0)):
            of_gate, of_up = _slopes_of_tile(number, gradient, gate, up, height, width)
            write_rounded(number, of_gate, gate_rows, gate_columns, gate_scale, None, height, width, dtype, limit)
            write_rounded(number, of_up, up_rows, up_columns, up_scale, None, height, width, dtype, limit)


@triton.jit
def _slopes_of_tile(number, gradient, gate, up, height, width):
    at, inside = tile_at(number, height, width)
    slope, turned = tl.load(gradient + at, mask=inside, other=0.0), tl.load(gate + at, mask=inside, other=0.0)
    return _slopes(slope, turned, tl.load(up + at, mask=inside, other=0.0))
