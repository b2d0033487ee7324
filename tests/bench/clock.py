"""What all benchmarks measure with: a block of steps from an idle device to an idle device, and the device itself."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from harness.telemetry.meters import memory_bytes

WARMUP_STEPS = 4


class Block(NamedTuple):
    """A few steps in a row."""

    step_s: float
    """Seconds of a step, the mean of the block."""
    peak_bytes: int
    """The most that torch's allocator had handed out meanwhile; without a GPU the most this process ever had."""


def timed(run: Callable[[int], object], num_steps: int, device: torch.device) -> Block:
    """Have `num_steps` run, waiting for the device before and after."""
    wait_for(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begun_s = time.perf_counter()
    run(num_steps)
    wait_for(device)
    return Block((time.perf_counter() - begun_s) / num_steps, memory_bytes(device))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def let_go() -> None:
    """Give back what nobody holds any more: tensors, their memory on the device, and compiled graphs."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def matmul_flops_per_s(size: int = 8192, repeats: int = 20) -> float | None:
    """Rate of a bf16 matrix product on random data; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    left, right = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        left @ right
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / (time.perf_counter() - begun)


def heat(seconds: float) -> None:
    """Keep a GPU busy until it is as warm as training makes it."""
    begun_s = time.perf_counter()
    while time.perf_counter() - begun_s < seconds and matmul_flops_per_s(repeats=100) is not None:
        pass
