"""Profiles a few steps of a run that goes on: a trace, a table of kernels, and a snapshot of GPU memory for each rank.

Why: a run that is slow on the cluster must be profiled there, without a restart.
How: all ranks agree on the profiled iterations, through `harness ctl RUN profile` or `profile.at_step`; a rank that was
not chosen only counts them. The loop starts and stops torch's profiler. A thread writes the files, because that takes
seconds and may wait for a disk. Whatever goes wrong on a rank is one warning of that rank: no branch of the loop
depends on it.
The profiler slows the steps that it records, and its last one waits for the device. Without a profile an iteration
costs one comparison.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, Self, final

import torch
from torch.profiler import ProfilerActivity, profile

from harness.config.errors import ConfigError
from harness.config.profile import ProfileConfig, require_ranks
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.core.stderr_lines import print_warning
from harness.distributed.torch_private import memory_history

NEVER = sys.maxsize
NUM_TABLE_ROWS = 60
WRITE_WAIT_S = 60.0
"""How long the end of a run waits for the files of its last profile."""


@final
class StepProfiler:
    """The profiles of one rank. `request` and `advance` are called on all ranks alike."""

    def __init__(
        self, run: RunDir, cfg: ProfileConfig, *, rank: int, world_size: int, device: torch.device, last_step: int
    ) -> None:
        """`last_step`: the step after which the run is done."""
        self._last_step = last_step
        self._run, self._rank, self._world_size, self._device = run, rank, world_size, device
        self._planned = cfg
        self._ranks: Sequence[int] = ()
        self._first = self._num_steps = 0
        self._next_change = NEVER
        """Iteration before which the profile starts or stops."""
        self._is_running = False
        self._profile: profile | None = None
        """Only on a chosen rank, between start and stop."""
        self._writers: list[Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._attempt(self._stop)
        for writer in self._writers:
            writer.join(timeout=WRITE_WAIT_S)

    def plan(self, state: RunState) -> None:
        """Request the profile of `profile.at_step`, unless the run resumes after that step."""
        cfg = self._planned
        if cfg.at_step is None or state.step >= cfg.at_step:
            return
        self._request(state.iteration + cfg.at_step - 1 - state.step, cfg.num_steps, cfg.ranks)

    def request(self, state: RunState, *, num_steps: int, ranks: Sequence[int]) -> Path:
        """Profile the next steps; returns the folder. Raises `ConfigError` on all ranks if that is impossible."""
        require_ranks("profile", ranks, self._world_size)
        if self._next_change != NEVER:
            raise ConfigError("profile", "another profile is planned or not finished")
        if state.step >= self._last_step:
            raise ConfigError("profile", f"the run ends with step {self._last_step}, which has begun")
        self._request(state.iteration, num_steps, ranks)
        return self._folder()

    def advance(self, state: RunState) -> None:
        """Start or stop before this iteration, if it is due."""
        if state.iteration < self._next_change:
            return
        if self._is_running:
            self._is_running, self._next_change = False, NEVER
            self._attempt(self._stop)
        else:
            self._is_running, self._next_change = True, state.iteration + self._num_steps
            self._first = state.iteration
            if self._rank in (self._ranks or (self._rank,)):
                self._attempt(self._start)

    def _request(self, first: int, num_steps: int, ranks: Sequence[int]) -> None:
        self._first = self._next_change = first
        self._num_steps, self._ranks = num_steps, tuple(ranks)

    def _folder(self) -> Path:
        return self._run.profiles / f"iteration-{self._first + 1:08d}"

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            memory_history.record_allocations()
        self._profile = profile(activities=activities, profile_memory=True)
        self._profile.start()

    def _stop(self) -> None:
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        recorded.stop()
        memory = memory_history.stop_recording() if self._device.type == "cuda" else None
        folder = self._folder()
        writer = Thread(
            target=self._attempt,
            args=(lambda: self._write(recorded, memory, folder),),
            name="profile writer",
            daemon=True,
        )
        self._writers.append(writer)
        writer.start()

    def _write(self, recorded: profile, memory: dict[str, Any] | None, folder: Path) -> None:
        """Write all files; the table first, because it is small and what most people read."""
        folder.mkdir(parents=True, exist_ok=True)
        sorted_by = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=sorted_by, row_limit=NUM_TABLE_ROWS, max_name_column_width=80)
        (folder / f"rank-{self._rank}.kernels.txt").write_text(f"{table}\n", encoding="utf-8")
        if memory is not None:
            (folder / f"rank-{self._rank}.memory.pickle").write_bytes(pickle.dumps(memory))
        trace = folder / f"rank-{self._rank}.trace.json.gz"
        scratch = trace.with_name(f".{trace.name}.{time.time_ns()}.json.gz")
        try:
            recorded.export_chrome_trace(str(scratch))
            scratch.replace(trace)
        finally:
            scratch.unlink(missing_ok=True)
        if self._rank == 0:
            print(f"profile: {folder}", flush=True)

    def _attempt(self, call: Callable[[], None]) -> None:
        """Run a part that only this rank runs; a failure is a warning."""
        try:
            call()
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            print_warning(f"rank {self._rank}: the profile failed: {message}")
