"""What is noted of a matrix that is too large to look at all of it."""

from __future__ import annotations

import pytest
import torch

from harness.fp8 import meters
from harness.fp8.emulated import Emulated
from harness.fp8.engine import FORWARD
from harness.fp8.meters import Column


def test_a_few_rows_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "SAMPLE", 16)
    values = torch.ones(8, 8, dtype=torch.bfloat16)
    values[2::4, :3], values[2::4, 3] = 1e-9, 0.0  # of the rows that are looked at
    values[::4] = values[1::4] = 1e-9
    row, scale = torch.zeros(len(Column)), torch.ones(())
    rounded = Emulated().round(values, scale, dtype=FORWARD, both=False, largest=None)
    seen = meters.sample_of(values), meters.sample_of(rounded.rows)
    meters.note(row, *seen, scale, every=meters.stride_of(values))
    assert row.tolist() == [0.0, 1.0, 4 * 2 * 3.0, 4 * 2 * 7.0, 0.0]
