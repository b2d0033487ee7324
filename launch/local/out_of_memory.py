"""Recognises that a rank ran out of memory, and says in one line what was needed, what there was and what to change.

Why: an allocator's error is a page of text on one rank, and the kernel's out-of-memory killer leaves only SIGKILL. Both
look like any other crash.
How: a rank whose exception is about memory stores the numbers with it (`describe_shortage`). For a rank that SIGKILL
ended, the launcher compares the kernel's count of out-of-memory kills with the one at the start. Where the kernel shows
no count, the memory that the launcher saw free in the last second decides, and the line says "probably". The change
comes from the plan (`harness.analysis.plan.machine_memory`).
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from harness.analysis.plan.fit import memory_text
from harness.analysis.plan.machine_memory import MachineMemory, estimate_line, smallest_change
from harness.analysis.plan.memory import OUTSIDE_BYTES
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core.memory_limits import address_space_left, count_oom_kills, free_bytes, resident_bytes
from launch.local.ranks import RankFailure

OBSERVE_EVERY_S = 1.0
LITTLE = 0.05
"""Share of all memory. With less than this free, a rank that SIGKILL ended probably ran out of memory. Other processes
that hold less are not mentioned."""
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
CPU_ALLOCATOR = ("can't allocate memory", "not enough memory")
"""Words of torch's CPU allocator; which of them depends on the platform it was built for."""
ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (\w+)|Unable to allocate ([\d.]+) (\w+)")


def describe_shortage(error: BaseException) -> dict[str, Any]:
    """What a rank knows about an error for want of memory, as plain data; empty for any other error."""
    while not (kind := memory_kind(error)):
        if error.__cause__ is None:
            return {}
        error = error.__cause__
    sizes = _gpu_bytes() if kind == "GPU memory" else _host_bytes()
    return {"kind": kind, "asked_bytes": asked_bytes(str(error))} | sizes


def memory_kind(error: BaseException) -> str:
    """Which memory an error says has run out; empty if none."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or ("CUDA" in text and "out of memory" in text):
        return "GPU memory"
    is_host = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return "memory" if is_host or any(words in text for words in CPU_ALLOCATOR) else ""


def asked_bytes(text: str) -> int | None:
    """The size of the allocation that failed, from the message of torch or NumPy."""
    if (found := ASKED.search(text)) is None:
        return None
    number, unit = (group for group in found.groups() if group)
    return round(float(number) * UNITS[unit]) if unit in UNITS else None


def _gpu_bytes() -> dict[str, int]:
    """What is free of the GPU, its size, and what torch holds for this process."""
    with suppress(RuntimeError):
        free, total = torch.cuda.mem_get_info()
        return {"free_bytes": free, "total_bytes": total, "own_bytes": torch.cuda.memory_reserved()}
    return {}


def _host_bytes() -> dict[str, int]:
    free, left = free_bytes(), address_space_left()
    return {"free_bytes": free if left is None else min(free, left)}


@final
@dataclass(slots=True)
class MemoryWatch:
    """Observes the memory of the ranks of this machine, and explains their failures."""

    cfg: Config
    machine: MachineMemory
    world_size: int
    kills_before: int
    used_bytes: int = 0
    """Of all ranks here, when last observed."""
    free_bytes: int | None = None
    observed_s: float = float("-inf")

    @classmethod
    def start(cls, cfg: Config, machine: MachineMemory, *, world_size: int) -> MemoryWatch:
        return cls(cfg, machine, world_size, count_oom_kills())

    def observe(self, pids: Sequence[int], now_s: float) -> None:
        """Once a second: remember what the ranks use and what is free."""
        if now_s - self.observed_s < OBSERVE_EVERY_S:
            return
        self.observed_s = now_s
        self.used_bytes = sum(map(resident_bytes, pids)) or self.used_bytes
        with suppress(OSError):
            self.free_bytes = free_bytes()

    def explain(self, failure: RankFailure) -> RankFailure:
        """The failure, with an explanation if the rank ran out of memory."""
        if failure.shortage:
            return replace(failure, explanation=self._shortage_line(failure.shortage))
        if failure.exit_code == -signal.SIGKILL and (cause := self._kill_cause()):
            seen = f"the ranks here used {memory_text(self.used_bytes)}" if self.used_bytes else ""
            left = "" if self.free_bytes is None else f"{memory_text(self.free_bytes)} was free a second before"
            numbers = " and ".join(filter(None, [seen, left]))
            return replace(failure, explanation="; ".join(filter(None, [cause, numbers, self._advice(self.machine)])))
        return failure

    def _shortage_line(self, shortage: dict[str, Any]) -> str:
        asked, free, total = (shortage.get(name) for name in ("asked_bytes", "free_bytes", "total_bytes"))
        what = [f"needed {memory_text(asked)} more"] if asked else []
        of = f" of {memory_text(total)}" if total else ""
        what += [] if free is None else [f"{memory_text(free)}{of} was free"]
        head = f"ran out of {shortage['kind']}" + (f": {' and '.join(what)}" if what else "")
        if taken := self._taken_bytes(shortage):
            held = f"other processes held {memory_text(taken)}: end them, or change the run"
            return f"{head}, {held}; {self._advice(replace(self.machine, free_bytes=shortage['total_bytes'] - taken))}"
        return f"{head}; {self._advice(self.machine)}"

    def _taken_bytes(self, shortage: dict[str, Any]) -> int:
        """Memory of the GPU that processes outside the run held; 0 if little, or if it is not known."""
        own, free, total = (shortage.get(name) for name in ("own_bytes", "free_bytes", "total_bytes"))
        if own is None or free is None or not total or self.machine.ranks_per_gpu > 1:
            return 0
        taken = int(total - free - own - OUTSIDE_BYTES)
        return taken if taken > LITTLE * total else 0

    def _kill_cause(self) -> str:
        """Why SIGKILL ended a rank; empty if memory was not the reason."""
        if count_oom_kills() > self.kills_before:
            return "ran out of memory and was killed by the kernel (SIGKILL)"
        if self.free_bytes is not None and self.free_bytes < LITTLE * (self.free_bytes + self.used_bytes):
            return "was killed by SIGKILL, probably by the kernel because memory ran out"
        return ""

    def _advice(self, machine: MachineMemory) -> str:
        """What the plan estimates, and the smallest change that needs less."""
        try:
            change = smallest_change(self.cfg, machine, self.world_size)
            return f"{estimate_line(self.cfg, machine, self.world_size)}; {change}"
        except ConfigError as error:
            return str(error)
