"""The fp8 formats: dtypes, limits, scale granularity, and quantized matrices as plain tensors."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
"""More digits for activations and weights, more range for gradients."""

LIMITS = {dtype: torch.finfo(dtype).max for dtype in (FORWARD, GRADIENT)}

VANISHING = {dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2 for dtype in (FORWARD, GRADIENT)}
"""Half of the smallest number: what is no larger becomes zero, for a half goes to what is even."""

SCALE_STEPS = {FORWARD: 2, GRADIENT: 4}
"""Where scales fit the tensor: of the powers of two only every second or fourth is taken. So the last one mostly fits
again, and numbers have up to two or four binades less below them, of 17 and 32."""

BLOCK = 128
"""Numbers that share a scale in the recipe `block`."""


class Blocks(StrEnum):
    """What shares a scale on the right side of a product."""

    none = "none"
    """All of it, and all of the left side."""
    lines = "lines"
    squares = "squares"


class Side(NamedTuple):
    """One side of a product, read along the axis that is summed over."""

    numbers: Tensor
    """[rows, summed]"""
    inverse: Tensor


class Rounded(NamedTuple):
    """A matrix in fp8: what it was, times its scale."""

    rows: Tensor
    """[M, K]"""
    columns: Tensor
    """[K, M], or empty where it was not wanted."""
    row_inverse: Tensor
    """One over its scale, or one over those of its blocks."""
    column_inverse: Tensor

    @property
    def by_rows(self) -> Side:
        return Side(self.rows, self.row_inverse)

    @property
    def by_columns(self) -> Side:
        return Side(self.columns, self.column_inverse)
