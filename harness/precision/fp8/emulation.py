"""fp8 emulation in plain torch: bit-equal quantization on any device, and GEMMs of the quantized values in fp32."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.precision.fp8.formats import BLOCK, LIMITS, SCALE_STEPS, BlockScaling, Operand, QuantizedMatrix
from harness.precision.fp8.quantize_meters import compute_amax, compute_scale


@final
class EmulatedEngine:
    """The fp8 engine in plain torch; methods as in `harness.precision.fp8.engine.Engine`."""

    def quantize(
        self, values: Tensor, scale: Tensor, *, dtype: torch.dtype, transpose: bool, amax: Tensor | None
    ) -> QuantizedMatrix:
        if amax is not None:
            amax.copy_(torch.maximum(amax, values.abs().amax()))
        rows, scale_inv = _cast(values.float() * scale, dtype), scale.reciprocal().view(1)
        return QuantizedMatrix(rows, rows.T.contiguous() if transpose else rows.new_empty(0), scale_inv, scale_inv)

    def quantize_to_amax(self, values: Tensor, last_scale: Tensor, *, dtype: torch.dtype) -> QuantizedMatrix:
        scale = compute_scale(compute_amax(values), LIMITS[dtype], step=SCALE_STEPS[dtype])
        last_scale.copy_(scale)
        return self.quantize(values, scale, dtype=dtype, transpose=True, amax=None)

    def quantize_blocks(self, values: Tensor, *, dtype: torch.dtype, transpose: bool, square: bool) -> QuantizedMatrix:
        height = BLOCK if square else 1
        rows, row_scale_inv = _quantize_by_blocks(values, dtype, height)
        if not transpose:
            return QuantizedMatrix(rows, rows.new_empty(0), row_scale_inv, row_scale_inv.new_empty(0))
        columns, column_scale_inv = _quantize_by_blocks(values.T, dtype, height)
        return QuantizedMatrix(rows, columns, row_scale_inv, column_scale_inv)

    def block_scale_shape(self, num_rows: int, num_columns: int, *, square: bool) -> tuple[int, int]:
        return math.ceil(num_rows / (BLOCK if square else 1)), math.ceil(num_columns / BLOCK)

    def gemm(
        self,
        left: Operand,
        right: Operand,
        *,
        out: Tensor | None,
        scaling: BlockScaling,
        split_accumulator: bool,  # noqa: ARG002 -- always accumulates in fp32
    ) -> Tensor:
        if scaling is BlockScaling.none:
            product = (left.data.float() @ right.data.float().T) * (left.scale_inv * right.scale_inv)
        else:
            product = _dequantize(left, 1) @ _dequantize(right, BLOCK if scaling is BlockScaling.two_d else 1).T
        return product.to(torch.bfloat16) if out is None else out.copy_(out.float() + product)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    limit = LIMITS[dtype]
    return values.clamp(-limit, limit).to(dtype)


def block_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that keeps a block within range; NaN if the block's amax is not finite."""
    _, exponent = torch.frexp(LIMITS[dtype] / amax)
    scale = torch.ldexp(torch.ones_like(amax), exponent - 1)
    return torch.where(amax > 0, torch.where(amax.isfinite(), scale, torch.nan), 1.0)


def _quantize_by_blocks(values: Tensor, dtype: torch.dtype, height: int) -> tuple[Tensor, Tensor]:
    """`values` in fp8, and 1 / scale of each block of `height` x `BLOCK`."""
    num_rows, num_columns = values.shape
    padded = F.pad(values.float(), (0, -num_columns % BLOCK, 0, -num_rows % height))
    tiles = padded.view(padded.shape[0] // height, height, padded.shape[1] // BLOCK, BLOCK)
    scale = block_scale(tiles.abs().amax(dim=(1, 3), keepdim=True), dtype)
    quantized = _cast((tiles * scale).view_as(padded), dtype)[:num_rows, :num_columns]
    return quantized.contiguous(), scale.reciprocal().flatten(1).contiguous()


def _dequantize(operand: Operand, height: int) -> Tensor:
    """The operand in fp32, divided by its blocks' scales."""
    num_rows, num_columns = operand.data.shape
    scale_inv = operand.scale_inv.repeat_interleave(height, 0).repeat_interleave(BLOCK, 1)
    return operand.data.float() * scale_inv[:num_rows, :num_columns]
