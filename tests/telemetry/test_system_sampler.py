"""Tests of the samples of a machine's load, with a real thread, real counters and real files."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from harness.core.event_json import to_json
from harness.core.events import SystemSampled
from harness.core.rundir import RunDir
from harness.telemetry import nvml, system_sampler
from harness.telemetry.nvml import GpuLoad, Nvml
from harness.telemetry.system_sampler import SystemSampler, read, system_file

EVERY_S = 0.001
DRIVER = """
#include <string.h>
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned long long total, free, used; } Memory;
static int device = 7;
static int unknown(void *handle) { return *(int *)handle == device ? 0 : 2; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *name, void **handle) {
  *handle = &device;
  return strcmp(name, "GPU-12-34") ? 6 : 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, Rates *rates) { rates->gpu = 93; return unknown(handle); }
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) { memory->used = 70000000000ULL; return unknown(handle); }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { *milliwatts = 640500; return unknown(handle); }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) { return 3; }
"""
"""A library with NVML's interface, for machines without its driver: one GPU, whose temperature is not supported."""


def make_sampler(run: RunDir, *, every_s: float = EVERY_S) -> SystemSampler:
    return SystemSampler(run, rank=8, every_s=every_s, iteration=lambda: 41)


def wait_for_samples(path: Path, count: int) -> list[SystemSampled]:
    deadline = time.monotonic() + 30
    while len(samples := read(path)) < count:
        assert time.monotonic() < deadline, f"{len(samples)} samples"
        time.sleep(0.005)
    return samples


def test_a_sample_is_what_the_kernel_says(tmp_path: Path) -> None:
    sample = make_sampler(RunDir(tmp_path)).sample()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert (sample.rank, sample.iteration, sample.every_s) == (8, 41, EVERY_S)
    assert sample.host_memory_total_bytes == total
    assert sample.host_memory_bytes is not None
    assert sample.process_memory_bytes is not None
    assert 1 << 20 < sample.process_memory_bytes < sample.host_memory_bytes < total
    block = b"x" * (1 << 26)
    grown = make_sampler(RunDir(tmp_path)).sample().process_memory_bytes
    assert grown is not None
    assert grown - sample.process_memory_bytes > 0.5 * len(block)
    assert sample.cpu_load >= 0
    assert sample.gpu_power_w == []
    assert abs(time.time() - sample.time) < 60


def test_a_run_has_a_sample_at_its_start_and_at_its_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with make_sampler(run, every_s=3600.0):
        wait_for_samples(system_file(run, 8), 1)
    first, last = read(system_file(run, 8))
    assert first.time < last.time


def test_a_full_file_keeps_every_second_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stays bounded, covers the whole run, and says its interval."""
    monkeypatch.setattr(system_sampler, "MOST_SAMPLES", 16)
    run = RunDir(tmp_path)
    started = time.time()
    with make_sampler(run):
        deadline = time.monotonic() + 30
        while not (samples := read(system_file(run, 8))) or samples[-1].every_s < 4 * EVERY_S:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    samples = read(system_file(run, 8))
    assert len(samples) <= 16
    assert samples[0].every_s == EVERY_S
    assert samples[-1].every_s in (4 * EVERY_S, 8 * EVERY_S, 16 * EVERY_S)
    assert 0 <= samples[0].time - started < 10
    assert [sample.time for sample in samples] == sorted(sample.time for sample in samples)


def test_a_resume_continues_the_file_and_its_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_sampler, "MOST_SAMPLES", 4)
    run = RunDir(tmp_path)
    path = system_file(run, 8)
    path.parent.mkdir()
    earlier = SystemSampled(time=1.0, iteration=1, rank=8, host="a", every_s=8.0, cpu_load=0.5)
    path.write_text(f"{to_json(earlier)}\n{to_json(earlier)}\n" + to_json(earlier)[:30], encoding="utf-8")
    with make_sampler(run):
        wait_for_samples(path, 3)
    assert [sample.every_s for sample in read(path)[:3]] == [8.0, 8.0, 8.0]
    assert [sample.host == "a" for sample in read(path)[:3]] == [True, True, False]


def test_an_unwritable_directory_stops_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.system.write_text("a file where the directory should be", encoding="utf-8")
    with make_sampler(run) as sampler:
        time.sleep(0.02)
        assert sampler._thread.is_alive()
    assert not sampler._thread.is_alive()


def test_without_a_driver_no_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Nvml.open([]) is None
    monkeypatch.setattr(nvml, "LIBRARY", "libnothing.so.1")
    assert Nvml.open(["GPU-1"]) is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_gpus_are_read_by_their_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are those of the event; an unknown GPU and a value that is not supported are None."""
    source, library = tmp_path / "driver.c", tmp_path / "libdriver.so"
    source.write_text(DRIVER, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(nvml, "LIBRARY", str(library))
    gpus = Nvml.open(["12-34", "GPU-12-34", "GPU-56"])
    assert gpus is not None
    load = GpuLoad(utilization=0.93, memory_bytes=70_000_000_000, power_w=640.5)
    assert gpus.read() == [load, load, GpuLoad()]
    run = RunDir(tmp_path / "run")
    with SystemSampler(run, rank=0, every_s=3600.0, iteration=lambda: 1, gpus=["12-34", "GPU-56"]):
        (sample, *_) = wait_for_samples(system_file(run, 0), 1)
    assert sample.gpu_utilization == [0.93, None]
    assert sample.gpu_memory_bytes == [70_000_000_000, None]
    assert (sample.gpu_power_w, sample.gpu_temperature_c) == ([640.5, None], [None, None])
