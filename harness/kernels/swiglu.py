"""SwiGLU and its gradients, quantized to fp8 in the kernel that computes them, as in `harness.kernels.fp8_quantize`.

The GEMM of forward reads the product by rows, that of the weight gradient its transpose. The kernel of the gradients
has gate and up at hand, so it writes the transpose, and nothing of the product is saved for backward.

Underflow is counted in a separate kernel, over sampled rows, from the values before quantization. Counting in the
quantizing kernels needed half as many registers again and made a probed step longer.
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
    QuantizedTiles,
    add_counts,
    count_zeros,
    empty_counts,
    empty_tiles,
    fit_scales,
    max_value,
    num_tiles_to_requantize,
    quantize_tile,
    requantize_grid,
    tile_at,
    triton_dtype,
    write_columns,
    write_quantized,
)


def quantize_swiglu(gate: Tensor, up: Tensor, scale: Tensor, *, dtype: torch.dtype, step: int | None) -> QuantizedTiles:
    """silu(gate) * up in fp8, by rows. With a `step`, `scale` is the last scale and becomes the one that fits the amax;
    without, it is used as given."""
    tiles = empty_tiles(gate, dtype, transpose=False)
    tensors = gate, up, tiles.rows.view(torch.uint8), scale
    rest = *gate.shape, triton_dtype(dtype), max_value(dtype)
    _quantize_swiglu[tiles.amax.shape](*tensors, tiles.amax, None, *rest, num_warps=NUM_WARPS, num_stages=1)
    if step is None:
        return tiles._replace(scale_inv=scale.reciprocal().view(1))
    requantize = fit_scales([tiles], [scale], dtype, step)
    _quantize_swiglu[requantize_grid(tiles)](*tensors, None, requantize, *rest, num_warps=NUM_WARPS, num_stages=1)
    return tiles


def quantize_swiglu_grads(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor,
    scales: Sequence[Tensor],
    product_scale_inv: Tensor,
    *,
    dtype: torch.dtype,
    product_dtype: torch.dtype,
    step: int | None,
) -> tuple[QuantizedTiles, QuantizedTiles, Tensor]:
    """The gradients of gate and up in fp8, from that of silu(gate) * up; scales as in `quantize_swiglu`. And silu(gate)
    * up once more, transposed: `product_scale_inv` is 1 / the scale that forward used, a power of two."""
    both = empty_tiles(gate, dtype), empty_tiles(gate, dtype)
    product = torch.empty(gate.shape[::-1], dtype=product_dtype, device=gate.device)
    layouts = [layout for tiles in both for layout in tiles.layouts]
    tensors, amax = (gradient, gate, up, *layouts, *scales), [tiles.amax for tiles in both]
    rest = *gate.shape, triton_dtype(dtype), max_value(dtype), triton_dtype(product_dtype), max_value(product_dtype)
    _quantize_swiglu_grads[amax[0].shape](
        *tensors, *amax, product.view(torch.uint8), product_scale_inv, None, *rest, num_warps=NUM_WARPS, num_stages=1
    )
    if step is None:
        grad_gate, grad_up = (
            tiles._replace(scale_inv=scale.reciprocal().view(1)) for tiles, scale in zip(both, scales, strict=True)
        )
        return grad_gate, grad_up, product
    requantize = fit_scales(both, scales, dtype, step)
    _quantize_swiglu_grads[requantize_grid(both[0])](
        *tensors, *[None] * 4, requantize, *rest, num_warps=NUM_WARPS, num_stages=1
    )
    return *both, product


def count_swiglu_underflow(
    gate: Tensor, up: Tensor, scale: Tensor, row: Tensor, *, underflow: float, every: int
) -> None:
    """Add the underflow of silu(gate) * up in sampled rows to a meter's row; each row stands for `every`.

    `underflow`: scaled values up to this become zero. The rows have contiguous columns.
    """
    grid = (len(gate), triton.cdiv(gate.shape[1], BLOCK))
    counts = empty_counts(row)
    _count_swiglu_underflow[grid](gate, up, scale, row, counts, gate.shape[1], gate.stride(0), underflow, BLOCK)
    add_counts(counts, [row], every=every)


def count_swiglu_grad_underflow(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor,
    scales: Sequence[Tensor],
    rows: Sequence[Tensor],
    *,
    underflow: float,
    every: int,
) -> None:
    """The same for the gradients of gate and up; `gradient` has the strides of `gate` and `up`."""
    grid = (len(gate), triton.cdiv(gate.shape[1], BLOCK))
    counts = empty_counts(rows[0], len(rows))
    rest = counts, gate.shape[1], gate.stride(0), underflow, BLOCK
    _count_swiglu_grad_underflow[grid](gradient, gate, up, *scales, *rows, *rest)
    add_counts(counts, rows, every=every)


@triton.jit
def _swiglu(gate, up):
    """silu(gate) * up, rounded to bf16."""
    gate_f32 = gate.to(tl.float32)
    return (gate_f32 * tl.sigmoid(gate_f32) * up.to(tl.float32)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _swiglu_grads(gradient, gate, up):
    """The gradients of gate and up from that of silu(gate) * up, rounded to bf16."""
    grad, gate_f32 = gradient.to(tl.float32), gate.to(tl.float32)
    sigmoid = tl.sigmoid(gate_f32)
    grad_gate = grad * up.to(tl.float32) * sigmoid * (1 + gate_f32 * (1 - sigmoid))
    return grad_gate.to(tl.bfloat16).to(tl.float32), (grad * gate_f32 * sigmoid).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _row_at(width, stride, block: tl.constexpr):
    """Offsets of this program's piece of a row, and the mask of those inside."""
    within = tl.program_id(1) * block + tl.arange(0, block)
    return tl.program_id(0).to(tl.int64) * stride + within, within < width


@triton.jit
def _count_swiglu_underflow(gate, up, scale, row, counts, width, stride, underflow: tl.constexpr, block: tl.constexpr):
    at, inside = _row_at(width, stride, block)
    product = _swiglu(tl.load(gate + at, mask=inside, other=0.0), tl.load(up + at, mask=inside, other=0.0))
    count_zeros(row, counts, product, _underflows(product, scale, underflow), scale)


@triton.jit
def _count_swiglu_grad_underflow(
    gradient,
    gate,
    up,
    gate_scale,
    up_scale,
    gate_row,
    up_row,
    counts,
    width,
    stride,
    underflow: tl.constexpr,
    block: tl.constexpr,
):
    at, inside = _row_at(width, stride, block)
    grad, gate_values = tl.load(gradient + at, mask=inside, other=0.0), tl.load(gate + at, mask=inside, other=0.0)
    grad_gate, grad_up = _swiglu_grads(grad, gate_values, tl.load(up + at, mask=inside, other=0.0))
    count_zeros(gate_row, counts, grad_gate, _underflows(grad_gate, gate_scale, underflow), gate_scale)
    count_zeros(up_row, counts + 2, grad_up, _underflows(grad_up, up_scale, underflow), up_scale)


@triton.jit
def _underflows(values, scale, underflow: tl.constexpr):
    return tl.abs(values * tl.load(scale)) <= underflow


@triton.jit
def _quantize_swiglu(gate, up, rows, scale, amax, requantize, height, width, dtype: tl.constexpr, limit: tl.constexpr):
    if requantize is None:
        _quantize_swiglu_tile(tl.program_id(0), gate, up, rows, scale, amax, height, width, dtype, limit)
    else:
        for number in range(tl.program_id(0), num_tiles_to_requantize(requantize, height, width), tl.num_programs(0)):
            _quantize_swiglu_tile(number, gate, up, rows, scale, None, height, width, dtype, limit)


@triton.jit
def _quantize_swiglu_tile(number, gate, up, rows, scale, amax, height, width, dtype: tl.constexpr, limit: tl.constexpr):
    at, inside = tile_at(number, height, width)
    product = _swiglu(tl.load(gate + at, mask=inside, other=0.0), tl.load(up + at, mask=inside, other=0.0))
    if amax is not None:
        tl.store(amax + number, tl.max(tl.abs(product)))
    tl.store(rows + at, quantize_tile(product, tl.load(scale), dtype, limit), mask=inside)


@triton.jit
def _quantize_swiglu_grads(
    gradient,
    gate,
    up,
    gate_rows,
    gate_columns,
    up_rows,
    up_columns,
    gate_scale,
    up_scale,
    gate_amax,
    up_amax,
    product,
    product_scale_inv,
    requantize,
    height,
    width,
    dtype: tl.constexpr,
    limit: tl.constexpr,
    product_dtype: tl.constexpr,
    product_limit: tl.constexpr,
):
    if requantize is None:
        number = tl.program_id(0)
        at, inside = tile_at(number, height, width)
        gate_values, up_values = tl.load(gate + at, mask=inside, other=0.0), tl.load(up + at, mask=inside, other=0.0)
        grad_gate, grad_up = _swiglu_grads(tl.load(gradient + at, mask=inside, other=0.0), gate_values, up_values)
        product_scale = tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(product_scale_inv))
        quantized = quantize_tile(_swiglu(gate_values, up_values), product_scale, product_dtype, product_limit)
        write_columns(number, quantized, product, height, width)
        write_quantized(number, grad_gate, gate_rows, gate_columns, gate_scale, gate_amax, height, width, dtype, limit)
        write_quantized(number, grad_up, up_rows, up_columns, up_scale, up_amax, height, width, dtype, limit)
    else:
        end = tl.maximum(
            num_tiles_to_requantize(requantize, height, width), num_tiles_to_requantize(requantize + 1, height, width)
        )
        for number in range(tl.program_id(0), end, tl.num_programs(0)):
            grad_gate, grad_up = _grads_of_tile(number, gradient, gate, up, height, width)
            write_quantized(number, grad_gate, gate_rows, gate_columns, gate_scale, None, height, width, dtype, limit)
            write_quantized(number, grad_up, up_rows, up_columns, up_scale, None, height, width, dtype, limit)


@triton.jit
def _grads_of_tile(number, gradient, gate, up, height, width):
    at, inside = tile_at(number, height, width)
    grad, gate_values = tl.load(gradient + at, mask=inside, other=0.0), tl.load(gate + at, mask=inside, other=0.0)
    return _swiglu_grads(grad, gate_values, tl.load(up + at, mask=inside, other=0.0))
