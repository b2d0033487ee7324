"""The fp8 formats: dtypes, limits, scale granularity, and quantized matrices as plain tensors."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
"""E4M3 has more precision, for activations and weights; E5M2 has more range, for gradients."""

LIMITS = {dtype: torch.finfo(dtype).max for dtype in (FORWARD, GRADIENT)}
"""The largest finite value of each format."""

UNDERFLOW = {dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2 for dtype in (FORWARD, GRADIENT)}
"""Half of the smallest subnormal: a scaled value up to this underflows to zero, since ties round to even."""

SCALE_STEPS = {FORWARD: 2, GRADIENT: 4}
"""For scales that are fitted to the tensor's amax: only every 2nd or 4th power of two is used. So the last scale mostly
fits again. The cost is up to 2 of 17 binades of range for E4M3 and 4 of 32 for E5M2."""

BLOCK = 128
"""Values in a row that share a scale in the recipe `block`."""


class BlockScaling(StrEnum):
    """Scale granularity of the right operand of a GEMM."""

    none = "none"
    """One scale per tensor, for both operands."""
    one_d = "one_d"
    """One scale per 1 x `BLOCK` values."""
    two_d = "two_d"
    """One scale per `BLOCK` x `BLOCK` values."""


class Operand(NamedTuple):
    """One operand of a GEMM, stored along the axis that is summed over."""

    data: Tensor
    """[rows, summed]"""
    scale_inv: Tensor


class QuantizedMatrix(NamedTuple):
    """A matrix in fp8: its values times its scale."""

    rows: Tensor
    """[M, K]"""
    columns: Tensor
    """The transpose [K, M], or empty if it was not requested."""
    row_scale_inv: Tensor
    """1 / scale, or 1 / scale of each block."""
    column_scale_inv: Tensor

    @property
    def as_rows(self) -> Operand:
        return Operand(self.rows, self.row_scale_inv)

    @property
    def as_columns(self) -> Operand:
        return Operand(self.columns, self.column_scale_inv)
