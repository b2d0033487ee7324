"""Heartbeat files: every rank writes `heartbeat/rank-NNNNN.json`, and rank 0 also `status.json`.

Why: a collective waits ten minutes for a rank, whether it hangs or is only slow. An outside observer must see which
training loop still moves, separately from which process is alive.
How: the loop counts its beats in memory, which costs nothing. A thread writes them once a second, so a slow file system
delays nothing, and the next write repairs a failed one. `beats` stops when the loop stops, `writes` only when the
process stops: this separates a stopped or killed rank from the ranks that wait for it. Both are counts, because the
clocks of two machines differ and jump. With very many ranks each rank writes less often, to limit the load on a shared
file system.
Left out: communication between ranks. The sentinel detects a slow rank (`slow`) from the reduced step record.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self, final, get_type_hints

from harness.core.events import StepRecord
from harness.core.rundir import RunDir
from harness.core.state import RunState

WRITE_EVERY_S = 1.0
WRITES_PER_S = 100
"""Limit for the writes of all ranks together."""

LONGEST_REASON = 400
LAST_WRITE_WITHIN_S = 2.0
SLOWEST_DECAY = 0.98
"""The slowest step counts half after 34 faster ones."""
"""Time limit of the last write, so that a hanging file system does not keep a rank from exiting."""


class Phase(StrEnum):
    """What a rank is doing."""

    start = "start"
    """Building, resuming, and the first iteration, which may compile."""
    train = "train"
    evaluate = "evaluate"
    pause = "pause"
    save = "save"
    """Saving; may wait for a disk."""
    restore = "restore"
    trial = "trial"
    """Training steps with a remedy that is tried."""
    end = "end"


MOVING = frozenset({Phase.train, Phase.evaluate, Phase.pause, Phase.trial})
"""Phases in which the loop beats often; each other phase is one long call."""


class RunStatus(StrEnum):
    """Value of `state` in `status.json`."""

    running = "running"
    paused = "paused"
    restarting = "restarting"
    """The launcher starts all ranks again after a failure."""
    ended = "ended"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Content of the heartbeat file of one rank."""

    rank: int
    world_size: int
    host: str
    pid: int
    phase: Phase
    iteration: int
    step: int
    beats: int
    """Beats of its training loop since this start."""
    writes: int
    """Writes of this file since this start."""
    every_s: float
    """Seconds between writes."""
    beat_time: float
    """Last beat of its loop, in seconds since 1970."""
    time: float
    """Time of this write, in seconds since 1970."""
    exit_code: int | None = None
    """None while the rank runs."""
    slowest_step_s: float = 0.0
    """Longest time between two beats of training; a past one counts less with every step."""
    end_wait_s: float = 0.0
    """Seconds for which rank 0 may wait at the end of the run. The processes of all ranks exist until then."""


KINDS = get_type_hints(Beat)
"""Type of each field."""


def heartbeat_file(run: RunDir, rank: int) -> Path:
    return run.heartbeat / f"rank-{rank:05d}.json"


def read(path: Path) -> Beat | None:
    """Read one heartbeat file; None if it is missing, unreadable or damaged."""
    try:
        values = json.loads(path.read_bytes())
        beat = Beat(**(values | {"phase": Phase(values["phase"])}))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    fits = (isinstance(getattr(beat, name), int | float if kind is float else kind) for name, kind in KINDS.items())
    return beat if all(fits) else None


def read_all(run: RunDir) -> list[Beat]:
    """Read the heartbeats of all ranks, in rank order."""
    found = [read(path) for path in sorted(run.heartbeat.glob("rank-*.json"))]
    return [beat for beat in found if beat is not None]


@final
class Heartbeat:
    """Writes the heartbeat of one rank."""

    def __init__(self, run: RunDir, *, rank: int, world_size: int, num_steps: int) -> None:
        self._run, self._rank, self._world_size, self._num_steps = run, rank, world_size, num_steps
        self._every_s = max(WRITE_EVERY_S, world_size / WRITES_PER_S)
        self._phase, self._iteration, self._step = Phase.start, 0, 0
        self._beats = self._writes = 0
        self._slowest_step_s = 0.0
        self._beat_s = time.monotonic()
        self._loss: float | None = None
        self._left_s: float | None = None
        self._exit_code: int | None = None
        self._reason = ""
        self._end_wait_s = 0.0
        self._ended = Event()
        self._thread = Thread(target=self._write_until_ended, name="heartbeat", daemon=True)

    @property
    def iteration(self) -> int:
        """Iteration of the last beat."""
        return self._iteration

    def beat(self, state: RunState, phase: Phase = Phase.train) -> None:
        """Count one beat of the loop. The first iteration still belongs to the start."""
        now_s = time.monotonic()
        if phase is self._phase is Phase.train:
            self._slowest_step_s = max(now_s - self._beat_s, SLOWEST_DECAY * self._slowest_step_s)
        self._phase = phase if self._beats else Phase.start
        self._iteration, self._step = state.iteration, state.step
        self._beats += 1
        self._beat_s = now_s

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Context for a long call in which the loop does not beat."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before
            self._beats += 1
            self._beat_s = time.monotonic()

    def set_progress(self, record: StepRecord, *, left_s: float | None = None) -> None:
        """Set loss and time to the end from the last reported step. Without `left_s`, all steps take as long as this
        one."""
        self._loss = record.loss
        self._left_s = record.step_time_s * (self._num_steps - record.step) if left_s is None else left_s

    def end(self, exit_code: int, reason: str, state: RunState | None = None, *, wait_s: float = 0.0) -> None:
        """Set exit code, reason and the last step; the last write includes them.

        `wait_s`: for how long rank 0 may wait until the run is over.
        """
        self._phase, self._exit_code, self._reason, self._end_wait_s = Phase.end, exit_code, reason, wait_s
        if state is not None:
            self._iteration, self._step = state.iteration, state.step

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and self._exit_code is None:
            self.end(1, shorten(f"{kind.__name__}: {error}"))
        self._ended.set()
        self._thread.join(timeout=LAST_WRITE_WITHIN_S)

    def _write_until_ended(self) -> None:
        with suppress(OSError):
            self._run.heartbeat.mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            self._remove_stale_files()
        while True:
            is_last = self._ended.is_set()
            with suppress(OSError):
                self._write()
            if is_last:
                return
            self._ended.wait(self._every_s)

    def _remove_stale_files(self) -> None:
        """Delete the files of ranks that no longer exist after a resume with fewer ranks."""
        for path in self._run.heartbeat.glob("rank-*.json"):
            beat = read(path)
            if beat is None or beat.rank >= self._world_size:
                with suppress(OSError):
                    path.unlink()

    def _write(self) -> None:
        self._writes += 1
        now = time.time()
        beat = Beat(
            rank=self._rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=self._phase,
            iteration=self._iteration,
            step=self._step,
            beats=self._beats,
            writes=self._writes,
            every_s=self._every_s,
            beat_time=now - (time.monotonic() - self._beat_s),
            time=now,
            exit_code=self._exit_code,
            slowest_step_s=self._slowest_step_s,
            end_wait_s=self._end_wait_s,
        )
        replace_file(heartbeat_file(self._run, self._rank), asdict(beat))
        if self._rank == 0:
            replace_file(self._run.status, self._status(now))

    def _status(self, now: float) -> dict[str, Any]:
        """Content of `status.json`, for scripts."""
        status = RunStatus.paused if self._phase is Phase.pause else RunStatus.running
        has_ended = self._exit_code is not None
        return {
            "state": RunStatus.ended if has_ended else status,
            "phase": self._phase,
            "step": self._step,
            "num_steps": self._num_steps,
            "iteration": self._iteration,
            "loss": self._loss if self._loss is None or abs(self._loss) < float("inf") else str(self._loss),
            "eta_s": None if has_ended else self._left_s,
            "exit_code": self._exit_code,
            "reason": self._reason,
            "world_size": self._world_size,
            "time": now,
        }


def mark_ended(run: RunDir, exit_code: int, reason: str) -> None:
    """Set `status.json` to ended, from the launcher, if rank 0 could not: it was killed, or another rank failed."""
    _change_status(run, state=RunStatus.ended, eta_s=None, exit_code=exit_code, reason=shorten(reason))


def mark_restarting(run: RunDir, reason: str) -> None:
    """Set `status.json` to restarting, from the launcher, until rank 0 writes again."""
    _change_status(run, state=RunStatus.restarting, eta_s=None, exit_code=None, reason=shorten(reason))


def _change_status(run: RunDir, **changes: Any) -> None:
    try:
        status = json.loads(run.status.read_bytes())
        replace_file(run.status, status | changes | {"time": time.time()})
    except (OSError, ValueError, TypeError):
        return


def shorten(text: str) -> str:
    return " ".join(text.split())[:LONGEST_REASON]


def replace_file(path: Path, values: dict[str, Any]) -> None:
    """Replace a JSON file atomically, without fsync: the next write follows within a second."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(json.dumps(values) + "\n", encoding="utf-8")
    scratch.replace(path)
