"""NVML measures the GPU that torch uses, without a CUDA context of its own."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from harness.core.rundir import RunDir
from harness.telemetry.nvml import GpuLoad, Nvml
from harness.telemetry.system_sampler import SystemSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCK_BYTES = 1 << 31


def uuid() -> str:
    return str(torch.cuda.get_device_properties(0).uuid)


def read_until_memory(gpus: Nvml, least_bytes: float) -> GpuLoad:
    """Read until NVML, which updates its values a few times a second, shows this much memory in use."""
    deadline = time.monotonic() + 30.0
    while True:
        (load,) = gpus.read()
        assert load.memory_bytes is not None
        if load.memory_bytes >= least_bytes:
            return load
        assert time.monotonic() < deadline, f"{load.memory_bytes} of {least_bytes:.0f} bytes in use"
        time.sleep(0.05)


@pytest.mark.alone
def test_memory_power_and_temperature_are_measured() -> None:
    gpus = Nvml.open([uuid()])
    assert gpus is not None
    torch.zeros(1, device="cuda")
    (before,) = gpus.read()
    assert before.memory_bytes is not None
    block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    after = read_until_memory(gpus, before.memory_bytes + 0.9 * block.numel())
    assert after.power_w is not None
    assert 10 < after.power_w < 2000
    assert after.temperature_c is not None
    assert 10 < after.temperature_c < 110


def test_utilization_rises_with_work() -> None:
    gpus = Nvml.open([uuid()])
    assert gpus is not None
    matrix = torch.randn(8192, 8192, device="cuda")
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        for _ in range(10):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        torch.cuda.synchronize()
    (load,) = gpus.read()
    assert load.utilization is not None
    assert 0.5 < load.utilization <= 1.0


READING = """
import sys
from harness.telemetry.nvml import Nvml
assert Nvml.open([sys.argv[1]]).read()[0].memory_bytes
assert "torch" not in sys.modules
"""
CREATING = """
import torch
torch.zeros(1, device="cuda")
"""
HAS_CONTEXT = """
import ctypes
cuda, device, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_uint(), ctypes.c_int(-1)
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
print(active.value)
"""
"""Asks the driver whether this process has a CUDA context; that creates none. NVML itself may load CUDA's library."""


@pytest.mark.parametrize(("program", "num_contexts"), [(READING, 0), (CREATING, 1)], ids=["reading", "creating"])
def test_reading_creates_no_context_and_imports_no_torch(program: str, num_contexts: int) -> None:
    command = [sys.executable, "-c", program + HAS_CONTEXT, uuid()]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (f"{num_contexts}\n", 0), done.stderr


def test_an_unknown_gpu_is_not_measured() -> None:
    gpus = Nvml.open(["GPU-00000000-0000-0000-0000-000000000000"])
    assert gpus is not None
    assert gpus.read()[0].memory_bytes is None


def test_a_sample_has_one_value_per_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    sampler = SystemSampler(run, rank=0, every_s=1.0, iteration=lambda: 3, gpus=[uuid()])
    sampler._nvml = Nvml.open([uuid()])
    sample = sampler.sample()
    assert len(sample.gpu_utilization) == len(sample.gpu_memory_bytes) == 1
    assert len(sample.gpu_power_w) == len(sample.gpu_temperature_c) == 1
