"""What is noted of a matrix that is too large to look at all of it."""

from __future__ import annotations

import pytest
import torch

from harness.precision.fp8 import meters
from harness.precision.fp8.emulation import EmulatedEngine
from harness.precision.fp8.formats import FORWARD, GRADIENT, LIMITS, UNDERFLOW
from harness.precision.fp8.meters import Column


def test_a_few_rows_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "SAMPLE_SIZE", 16)
    values = torch.ones(8, 8, dtype=torch.bfloat16)
    values[2::4, :3], values[2::4, 3] = 1e-9, 0.0  # of the rows that are looked at
    values[::4] = values[1::4] = 1e-9
    row, scale = torch.zeros(len(Column)), torch.ones(())
    rounded = EmulatedEngine().quantize(values, scale, dtype=FORWARD, transpose=False, amax=None)
    seen = meters.sample_rows(values), meters.sample_rows(rounded.rows)
    meters.record_underflow(row, *seen, scale, every=meters.sample_stride(values))
    assert row.tolist() == [0.0, 1.0, 4 * 2 * 3.0, 4 * 2 * 7.0, 0.0]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
def test_what_vanishes_shows_before_it_is_rounded(dtype: torch.dtype) -> None:
    """Of all numbers of bf16, by scales of all sizes, and of those of fp32 that are next to the border."""
    numbers = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).float()
    border, both_ways = torch.tensor(UNDERFLOW[dtype]), torch.tensor([-torch.inf, torch.inf])
    beside = torch.nextafter(border, both_ways)
    scales = [0.0, *(2.0**exponent for exponent in range(-126, 101, 2)), 3.0, 1e-3]
    for scaled in (border, beside, -beside, *(numbers * scale for scale in scales)):
        kept = scaled.clamp(-LIMITS[dtype], LIMITS[dtype])
        became = kept.to(dtype).view(torch.uint8) & 0x7F
        assert torch.equal(kept.abs() <= UNDERFLOW[dtype], became == 0)
    assert (beside.to(dtype).float() != 0).tolist() == [False, True]
