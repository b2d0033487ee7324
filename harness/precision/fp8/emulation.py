"""fp8 in plain torch: the same rounding on any device, and products of the rounded numbers in fp32."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.precision.fp8.formats import BLOCK, LIMITS, SCALE_STEPS, Blocks, Rounded, Side
from harness.precision.fp8.meters import largest_of, scale_of


@final
class Emulated:
    def round(
        self, values: Tensor, scale: Tensor, *, dtype: torch.dtype, both: bool, largest: Tensor | None
    ) -> Rounded:
        if largest is not None:
            largest.copy_(torch.maximum(largest, values.abs().amax()))
        rows, inverse = _cast(values.float() * scale, dtype), scale.reciprocal().view(1)
        return Rounded(rows, rows.T.contiguous() if both else rows.new_empty(0), inverse, inverse)

    def fit(self, values: Tensor, guess: Tensor, *, dtype: torch.dtype) -> Rounded:
        scale = scale_of(largest_of(values), LIMITS[dtype], step=SCALE_STEPS[dtype])
        guess.copy_(scale)
        return self.round(values, scale, dtype=dtype, both=True, largest=None)

    def round_blocks(self, values: Tensor, *, dtype: torch.dtype, both: bool, square: bool) -> Rounded:
        height = BLOCK if square else 1
        rows, row_inverse = _by_blocks(values, dtype, height)
        if not both:
            return Rounded(rows, rows.new_empty(0), row_inverse, row_inverse.new_empty(0))
        columns, column_inverse = _by_blocks(values.T, dtype, height)
        return Rounded(rows, columns, row_inverse, column_inverse)

    def block_scales(self, num_rows: int, num_columns: int, *, square: bool) -> tuple[int, int]:
        return math.ceil(num_rows / (BLOCK if square else 1)), math.ceil(num_columns / BLOCK)

    def multiply(self, left: Side, right: Side, *, out: Tensor | None, blocks: Blocks, exact: bool) -> Tensor:  # noqa: ARG002 -- always exact here
        if blocks is Blocks.none:
            wide = (left.numbers.float() @ right.numbers.float().T) * (left.inverse * right.inverse)
        else:
            wide = _widened(left, 1) @ _widened(right, BLOCK if blocks is Blocks.squares else 1).T
        return wide.to(torch.bfloat16) if out is None else out.copy_(out.float() + wide)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    limit = LIMITS[dtype]
    return values.clamp(-limit, limit).to(dtype)


def block_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that keeps a block within range; NaN where the block holds what is not finite."""
    _, exponent = torch.frexp(LIMITS[dtype] / largest)
    scale = torch.ldexp(torch.ones_like(largest), exponent - 1)
    return torch.where(largest > 0, torch.where(largest.isfinite(), scale, torch.nan), 1.0)


def _by_blocks(values: Tensor, dtype: torch.dtype, height: int) -> tuple[Tensor, Tensor]:
    """`values` in fp8, and one over the scale of each block of `height` x `BLOCK`."""
    num_rows, num_columns = values.shape
    padded = F.pad(values.float(), (0, -num_columns % BLOCK, 0, -num_rows % height))
    tiles = padded.view(padded.shape[0] // height, height, padded.shape[1] // BLOCK, BLOCK)
    scale = block_scale(tiles.abs().amax(dim=(1, 3), keepdim=True), dtype)
    rounded = _cast((tiles * scale).view_as(padded), dtype)[:num_rows, :num_columns]
    return rounded.contiguous(), scale.reciprocal().flatten(1).contiguous()


def _widened(side: Side, height: int) -> Tensor:
    """The numbers of a side, by their blocks' scales."""
    num_rows, num_columns = side.numbers.shape
    inverse = side.inverse.repeat_interleave(height, 0).repeat_interleave(BLOCK, 1)
    return side.numbers.float() * inverse[:num_rows, :num_columns]
