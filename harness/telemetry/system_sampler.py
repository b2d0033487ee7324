"""Samples the load of a machine during a run: GPUs, host memory, resident memory of the rank, CPU load.

Why: a slow or dying run is often a hot GPU, a full host or a starved CPU, and nobody was logged in when it happened.
How: on each machine the first rank has a thread that appends one `SystemSampled` event every few seconds to
`system/rank-NNNNN.jsonl`. It is outside the step: it reads counters of the kernel and of the driver, takes no CUDA
context, and nothing it reads decides anything. What cannot be read is None; what cannot be written is dropped.
A file holds at most `MOST_SAMPLES` samples. When it is full, every second sample is dropped and the interval doubles,
so that a run of months has a file of a megabyte that still covers all of it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Self, final

from harness.core.event_json import parse, to_json
from harness.core.events import SystemSampled
from harness.core.memory_limits import resident_bytes
from harness.core.rundir import RunDir
from harness.telemetry.heartbeat import WRITES_PER_S, Heartbeat
from harness.telemetry.nvml import Nvml

if TYPE_CHECKING:
    from harness.distributed.world import World

MOST_SAMPLES = 2048
LAST_SAMPLE_WITHIN_S = 2.0
"""Time limit of the last sample, so that a hanging driver or file system does not keep a rank from exiting."""


def system_file(run: RunDir, rank: int) -> Path:
    return run.system / f"rank-{rank:05d}.jsonl"


def read(path: Path) -> list[SystemSampled]:
    """All samples of a file; empty if it is missing. Damaged lines are skipped."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [event for line in lines for event in parse(line) if isinstance(event, SystemSampled)]


@final
class SystemSampler:
    """Samples the machine of one rank until the context ends."""

    def __init__(
        self, run: RunDir, *, rank: int, every_s: float, iteration: Callable[[], int], gpus: Sequence[str] = ()
    ) -> None:
        self._path, self._rank, self._every_s, self._iteration = system_file(run, rank), rank, every_s, iteration
        self._gpus = gpus
        self._nvml: Nvml | None = None
        self._num_samples = 0
        self._ended = Event()
        self._thread = Thread(target=self._sample_until_ended, name="system-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=LAST_SAMPLE_WITHIN_S)

    def sample(self) -> SystemSampled:
        """The load of this machine now."""
        loads = [] if self._nvml is None else self._nvml.read()
        total_bytes, used_bytes = host_memory()
        return SystemSampled(
            time=time.time(),
            iteration=self._iteration(),
            rank=self._rank,
            host=socket.gethostname(),
            every_s=self._every_s,
            cpu_load=round(os.getloadavg()[0] / (os.cpu_count() or 1), 3),
            host_memory_bytes=used_bytes,
            host_memory_total_bytes=total_bytes,
            process_memory_bytes=resident_bytes(os.getpid()) or None,
            gpu_utilization=[load.utilization for load in loads],
            gpu_memory_bytes=[load.memory_bytes for load in loads],
            gpu_power_w=[load.power_w for load in loads],
            gpu_temperature_c=[load.temperature_c for load in loads],
        )

    def _sample_until_ended(self) -> None:
        self._nvml = Nvml.open(self._gpus)
        with suppress(OSError):
            self._continue_file()
        while True:
            is_last = self._ended.is_set()
            with suppress(OSError):
                self._append(to_json(self.sample()))
            if is_last:
                return
            self._ended.wait(self._every_s)

    def _continue_file(self) -> None:
        """Create the file, or continue that of an earlier start at its interval."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if samples := read(self._path):
            self._write(samples)  # without a line that a crash cut short
            self._every_s = max(self._every_s, samples[-1].every_s if len(samples) * 2 >= MOST_SAMPLES else 0.0)

    def _append(self, line: str) -> None:
        if self._num_samples >= MOST_SAMPLES:
            self._write(read(self._path)[::2])
            self._every_s *= 2
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        self._num_samples += 1

    def _write(self, samples: Sequence[SystemSampled]) -> None:
        """Replace the file by these samples."""
        scratch = self._path.with_name(f".{self._path.name}.tmp")
        scratch.write_text("".join(f"{to_json(sample)}\n" for sample in samples), encoding="utf-8")
        scratch.replace(self._path)
        self._num_samples = len(samples)


@contextmanager
def sampling_system(run: RunDir, world: World, heartbeat: Heartbeat, *, every_s: float) -> Iterator[None]:
    """Sample this machine while the block runs, if `every_s` is not 0 and this is the first rank of the machine."""
    if every_s == 0 or not world.is_first_on_host:
        yield
        return
    every_s = max(every_s, world.size / WRITES_PER_S)
    sampler = SystemSampler(
        run, rank=world.rank, every_s=every_s, iteration=lambda: heartbeat.iteration, gpus=world.gpu_uuids
    )
    with sampler:
        yield


def host_memory() -> tuple[int | None, int | None]:
    """Total and used bytes of this machine, from /proc/meminfo; None where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None, None
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, available = kilobytes.get("MemTotal"), kilobytes.get("MemAvailable")
    if total is None or available is None:
        return None, None
    return total * 1024, (total - available) * 1024
