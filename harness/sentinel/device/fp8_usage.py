"""Computes fp8 underflow, saturation and scale range of a probed step from the sums of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.core.events import Fp8Health
from harness.precision.fp8.quantize_meters import SCALE_EXPONENTS, TensorRole


class Fp8Usage(NamedTuple):
    """The fp8 fields of a `ReducedRecord`."""

    health: dict[str, Fp8Health]
    underflow: dict[str, float]


def summarize_fp8_usage(groups: Sequence[str], sums: dict[str, list[float]]) -> Fp8Usage:
    """`sums`: part name of the report -> values, role index fastest. Empty if nothing was computed in fp8."""
    roles = len(TensorRole)
    zeros, nonzeros = (_rows(sums[name], roles) for name in ("fp8_zeros", "fp8_nonzeros"))
    shares = [[_share(*pair) for pair in zip(*rows, strict=True)] for rows in zip(zeros, nonzeros, strict=True)]
    worst = [max((share for share in row if share is not None), default=None) for row in shares]
    health = {}
    for role, scales in zip(TensorRole, _rows(sums["fp8_scales"], len(SCALE_EXPONENTS)), strict=True):
        underflow = _share(sum(row[role] for row in zeros), sum(row[role] for row in nonzeros))
        saturated = _share(sums["fp8_saturated"][role], sums["fp8_tensors"][role])
        exponents = [exponent for exponent, count in zip(SCALE_EXPONENTS, scales, strict=True) if count > 0]
        if underflow is not None and exponents:
            health[role.name] = {
                "underflow": underflow,
                "saturated": saturated or 0.0,
                "scale_log2": [exponents[0], exponents[-1] + SCALE_EXPONENTS.step],
            }
    return Fp8Usage(health, {name: share for name, share in zip(groups, worst, strict=True) if share is not None})


def _rows(values: list[float], width: int) -> list[list[float]]:
    return [values[begin : begin + width] for begin in range(0, len(values), width)]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
