"""Tests of throughput, peak FLOP/s by device name, and memory."""

from __future__ import annotations

import pytest
import torch

from harness.telemetry.meters import Meter, memory_bytes, peak_flops


def test_the_first_step_and_pauses_are_excluded() -> None:
    meter = Meter(tokens_per_step=100, flops_per_step=6e9, peak_flops=12e9, started_s=0.0)
    first = meter.tick(50.0)
    assert (first.step_time_s, first.tokens_per_s) == (50.0, 2.0)
    meter.tick(51.0)
    meter.resume(1000.0)
    rates = meter.tick(1003.0)
    assert rates.step_time_s == 3.0
    assert rates.tokens_per_s == pytest.approx(100 / 2.0)
    assert rates.flops_per_s == pytest.approx(3e9)
    assert rates.mfu == pytest.approx(0.25)


def test_a_step_issued_before_a_pause_may_be_reported_after_it() -> None:
    meter = Meter(tokens_per_step=100, flops_per_step=1.0, peak_flops=None, started_s=0.0)
    meter.tick(50.0)
    meter.resume(1000.0)
    assert [meter.tick(now_s).step_time_s for now_s in (51.0, 1003.0, 1004.0)] == [1.0, 3.0, 1.0]


def test_rates_cover_only_recent_steps() -> None:
    meter = Meter(tokens_per_step=10, flops_per_step=1.0, peak_flops=None, started_s=0.0, window_steps=2)
    rates = [meter.tick(now_s) for now_s in (1.0, 101.0, 102.0, 104.0)]
    assert rates[-1].tokens_per_s == pytest.approx(10 / 1.5)
    assert rates[-1].mfu is None


def test_a_clock_that_does_not_advance_causes_no_division_by_zero() -> None:
    meter = Meter(tokens_per_step=10, flops_per_step=1.0, peak_flops=1.0, started_s=5.0)
    assert meter.tick(5.0).tokens_per_s > 0
    assert meter.tick(4.0).tokens_per_s > 0


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", None),
        ("Some Future Device", None),
        (None, None),
    ],
)
def test_peak_by_name(name: str | None, tflops: float | None) -> None:
    assert peak_flops(name, None) == (None if tflops is None else tflops * 1e12)


def test_an_override_replaces_the_table() -> None:
    assert peak_flops("NVIDIA H100 PCIe", 500) == 500e12
    assert peak_flops(None, 0.5) == 0.5e12


def test_memory_on_cpu_is_the_peak_of_the_process() -> None:
    before = memory_bytes(torch.device("cpu"))
    block = bytearray(before + 50_000_000)
    block[::4096] = b"x" * len(block[::4096])
    assert memory_bytes(torch.device("cpu")) - before > 40_000_000
