"""What all benchmarks measure with: a block of steps, several sides that take turns at it, and the device itself.

A block begins when the device is done with a step that is not counted, and ends when it is idle. That step is the
run-up: a device that stood idle waits for the host until that is ahead again, which in training happens once. Python's
collector rests meanwhile, whoever runs: every trainer that is compared has it rest, or can.
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
"""Of a side, before it is timed; the first compiles."""
SETTLING_STEPS = 2
"""Of these, how many a side makes in turns with the others: what they allocate beside each other is there then."""


LEAD_STEPS = 1
"""Of a block, which are not counted."""


def nothing() -> None:
    """Where nobody wants to hear of the beginning."""


class Side(Protocol):
    """Whoever makes steps, by `led`."""

    def __call__(self, num_steps: int, begin: Callable[[], None] = nothing) -> object: ...


def led(num_steps: int, begin: Callable[[], None] = nothing) -> Iterator[int]:
    """The numbers of steps; after those of the run-up it calls `begin`."""
    for number in range(num_steps):
        yield number
        if number == LEAD_STEPS - 1:
            begin()


class Block(NamedTuple):
    """A few steps in a row."""

    step_s: float
    """Seconds of a step, the mean of the block."""
    peak_bytes: int
    """The most that torch's allocator had handed out meanwhile; without a GPU the most this process ever had."""
    num_compiled: int = 0
    """Frames that torch.compile took up meanwhile: a block that was warm has none."""
    num_shortages: int = 0
    """How often the allocator had to give cached memory back to the device to find some, which stops the device."""


class _Mark:
    """A moment: of the device, where there is one, else of the host."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host_s = 0.0

    def set(self) -> None:
        self._host_s = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def seconds_to(self, end: _Mark) -> float:
        """Once the device is done."""
        if self._event is None or end._event is None:
            return end._host_s - self._host_s
        milliseconds: float = self._event.elapsed_time(end._event)
        return milliseconds / 1e3


def timed(run: Side, num_steps: int, device: torch.device) -> Block:
    """Have `num_steps` run, after a run-up from an idle device, and wait until it is idle again."""
    begin, end = _Mark(device), _Mark(device)
    gc.collect()
    wait_for(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    compiled, shortages = _num_compiled(), _num_shortages(device)
    with GcSchedule():
        run(LEAD_STEPS + num_steps, begin.set)
        end.set()
        wait_for(device)
    return Block(
        step_s=begin.seconds_to(end) / num_steps,
        peak_bytes=memory_bytes(device),
        num_compiled=_num_compiled() - compiled,
        num_shortages=_num_shortages(device) - shortages,
    )


def in_turns(sides: Sequence[Side], *, rounds: int, num_steps: int, device: torch.device) -> list[tuple[Block, ...]]:
    """A block of every side in every round; blocks of a round are in the order of the sides, however they ran.

    Each side first makes `SETTLING_STEPS` that nobody times.
    """
    for _ in range(SETTLING_STEPS):
        for side in sides:
            side(1)
    taken = []
    for number in range(rounds):
        blocks = {index: timed(sides[index], num_steps, device) for index in order(len(sides), number)}
        taken.append(tuple(blocks[index] for index in range(len(sides))))
    return taken


def order(num_sides: int, number: int) -> list[int]:
    """Who comes after whom in a round: forth and back, so that of any two each is the first as often as the other."""
    forth = list(range(num_sides))
    return forth[::-1] if number % 2 else forth


def _num_compiled() -> int:
    return torch._dynamo.utils.counters["frames"]["total"] if "torch._dynamo" in sys.modules else 0


def _num_shortages(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


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
