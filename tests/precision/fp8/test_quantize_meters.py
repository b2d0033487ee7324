"""Underflow counts of a matrix that is sampled by rows."""

from __future__ import annotations

import pytest
import torch

from harness.precision.fp8 import quantize_meters
from harness.precision.fp8.emulation import EmulatedEngine
from harness.precision.fp8.formats import FORWARD, GRADIENT, LIMITS, UNDERFLOW
from harness.precision.fp8.quantize_meters import Column


def test_sampled_rows_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_meters, "SAMPLE_SIZE", 16)
    values = torch.ones(8, 8, dtype=torch.bfloat16)
    values[2::4, :3], values[2::4, 3] = 1e-9, 0.0  # the sampled rows
    values[::4] = values[1::4] = 1e-9
    row, scale = torch.zeros(len(Column)), torch.ones(())
    matrix = EmulatedEngine().quantize(values, scale, dtype=FORWARD, transpose=False, amax=None)
    sampled = quantize_meters.sample_rows(values), quantize_meters.sample_rows(matrix.rows)
    quantize_meters.record_underflow(row, *sampled, scale, every=quantize_meters.sample_stride(values))
    assert row.tolist() == [0.0, 1.0, 4 * 2 * 3.0, 4 * 2 * 7.0, 0.0]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
def test_underflow_is_known_before_quantization(dtype: torch.dtype) -> None:
    """For all bf16 values with scales of all sizes, and the fp32 values next to the threshold."""
    numbers = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).float()
    border, both_ways = torch.tensor(UNDERFLOW[dtype]), torch.tensor([-torch.inf, torch.inf])
    beside = torch.nextafter(border, both_ways)
    scales = [0.0, *(2.0**exponent for exponent in range(-126, 101, 2)), 3.0, 1e-3]
    for scaled in (border, beside, -beside, *(numbers * scale for scale in scales)):
        kept = scaled.clamp(-LIMITS[dtype], LIMITS[dtype])
        quantized = kept.to(dtype).view(torch.uint8) & 0x7F
        assert torch.equal(kept.abs() <= UNDERFLOW[dtype], quantized == 0)
    assert (beside.to(dtype).float() != 0).tolist() == [False, True]
