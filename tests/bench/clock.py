"""Timing for all benchmarks: blocks of steps, blocks of alternating sides, and the matmul rate of the device.

The clock of a block starts after a run-up step that is not counted, and stops when the device is idle. Why: after an
idle period the device waits for the host until the host is ahead again, which happens once in a training run. Automatic
garbage collection is off during a block, for every trainer that is compared: each of them does this or can do it.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from harness.core.gc_schedule import GcSchedule
from harness.telemetry.meters import memory_bytes

WARMUP_STEPS = 4
"""Steps of a side before it is timed; the first one compiles."""
SETTLING_STEPS = 2
"""How many of the warm-up steps alternate with the other sides, so that the memory of all sides is allocated."""
RUN_UP_STEPS = 1
"""Steps at the start of a block that are not counted."""


def do_nothing() -> None:
    """The default of `begin`."""


class Side(Protocol):
    """One side of a comparison: runs steps with `iterate_steps`."""

    def __call__(self, num_steps: int, begin: Callable[[], None] = do_nothing) -> object: ...


def iterate_steps(num_steps: int, begin: Callable[[], None] = do_nothing) -> Iterator[int]:
    """Yield the step numbers; call `begin` after the run-up steps."""
    for number in range(num_steps):
        yield number
        if number == RUN_UP_STEPS - 1:
            begin()


class Block(NamedTuple):
    """The measurement of some consecutive steps."""

    step_s: float
    """Mean seconds per step."""
    peak_bytes: int
    """Peak of allocated CUDA memory during the block; without a GPU, the peak memory of the process so far."""
    num_compiled: int = 0
    """Frames that torch.compile compiled during the block; 0 after a complete warm-up."""
    num_alloc_retries: int = 0
    """How often the CUDA allocator had to free its cache to serve a request, which stalls the device."""


class _Mark:
    """A point in time: on the device if it is a GPU, else on the host."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host_s = 0.0

    def set(self) -> None:
        self._host_s = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def seconds_to(self, end: _Mark) -> float:
        """Must be called after the device is idle."""
        if self._event is None or end._event is None:
            return end._host_s - self._host_s
        milliseconds: float = self._event.elapsed_time(end._event)
        return milliseconds / 1e3


def time_block(run: Side, num_steps: int, device: torch.device) -> Block:
    """Time `num_steps` steps, after a run-up from an idle device, until the device is idle again."""
    begin, end = _Mark(device), _Mark(device)
    gc.collect()
    wait_for(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    compiled, alloc_retries = _num_compiled(), _num_alloc_retries(device)
    with GcSchedule():
        run(RUN_UP_STEPS + num_steps, begin.set)
        end.set()
        wait_for(device)
    return Block(
        step_s=begin.seconds_to(end) / num_steps,
        peak_bytes=memory_bytes(device),
        num_compiled=_num_compiled() - compiled,
        num_alloc_retries=_num_alloc_retries(device) - alloc_retries,
    )


def alternate(sides: Sequence[Side], *, rounds: int, num_steps: int, device: torch.device) -> list[tuple[Block, ...]]:
    """Time one block of every side in every round; returns the blocks of each round in the order of `sides`.

    Each side first runs `SETTLING_STEPS` steps that are not timed.
    """
    for _ in range(SETTLING_STEPS):
        for side in sides:
            side(1)
    measured = []
    for number in range(rounds):
        blocks = {index: time_block(sides[index], num_steps, device) for index in round_order(len(sides), number)}
        measured.append(tuple(blocks[index] for index in range(len(sides))))
    return measured


def round_order(num_sides: int, number: int) -> list[int]:
    """The order of the sides in a round: forward and backward in alternation, so that no side is always first."""
    forward = list(range(num_sides))
    return forward[::-1] if number % 2 else forward


def _num_compiled() -> int:
    return torch._dynamo.utils.counters["frames"]["total"] if "torch._dynamo" in sys.modules else 0


def _num_alloc_retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory() -> None:
    """Free unreferenced tensors, cached CUDA memory and compiled graphs."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def matmul_flops_per_s(size: int = 8192, repeats: int = 20) -> float | None:
    """FLOP/s of a bf16 matmul on random data; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    left, right = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(repeats):
        left @ right
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / (time.perf_counter() - start_s)


def heat_device(seconds: float) -> None:
    """Run matmuls for some time, so that the GPU is as warm as during training."""
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < seconds and matmul_flops_per_s(repeats=100) is not None:
        pass
