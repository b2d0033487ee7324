"""Every rank says that it is alive and how far it is: `heartbeat/rank-NNNNN.json`; rank 0 also `status.json`.

Why: a collective waits for a rank that hangs as it waits for one that is slow, for ten minutes. Whoever watches from
outside must see which loop moves, and see it apart from whether the process is alive at all.
How: the loop counts its beats in memory, which costs nothing; a thread writes them down once a second, so that a slow
file system holds nobody up and a write that fails is made up for by the next one. `beats` stands still when the loop
does, `writes` only when the process does: a stopped or killed one tells itself from those that wait for it. Both are
counts, because clocks of two machines differ and jump. With very many ranks each writes less often: a file system
shared by all of them has to bear it.
Left out: what the ranks tell each other; the sentinel sees a rank that lags (`slow`), from the step's own numbers.
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
from typing import Any, Self, final

from harness.core.events import StepRecord
from harness.core.rundir import RunDir
from harness.core.state import RunState

WRITE_EVERY_S = 1.0
WRITES_PER_S = 100
"""What all ranks together ask of the file system."""

LONGEST_REASON = 200
LAST_WRITE_WITHIN_S = 2.0
"""A file system that hangs does not keep a rank from leaving."""


class Phase(StrEnum):
    start = "start"
    """Builds, resumes, and computes its first iteration, which may compile."""
    train = "train"
    evaluate = "evaluate"
    pause = "pause"
    save = "save"
    """May wait for a disk."""
    restore = "restore"
    end = "end"


MOVING = frozenset({Phase.train, Phase.evaluate, Phase.pause})
"""Phases in which the loop beats often; the others are one long call."""


class RunStatus(StrEnum):
    running = "running"
    paused = "paused"
    ended = "ended"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What one rank wrote last."""

    rank: int
    world_size: int
    host: str
    pid: int
    phase: Phase
    iteration: int
    step: int
    beats: int
    """How often its loop has moved, in this start."""
    writes: int
    every_s: float
    """How often it writes."""
    beat_time: float
    """When its loop moved last; seconds since 1970."""
    time: float
    """When this was written."""
    exit_code: int | None = None


def file_of(run: RunDir, rank: int) -> Path:
    return run.heartbeat / f"rank-{rank:05d}.json"


def read(path: Path) -> Beat | None:
    """None where there is none, or none that can be read."""
    try:
        words = json.loads(path.read_bytes())
        return Beat(**(words | {"phase": Phase(words["phase"])}))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_all(run: RunDir) -> list[Beat]:
    """What is known of every rank, in their order."""
    found = [read(path) for path in sorted(run.heartbeat.glob("rank-*.json"))]
    return [beat for beat in found if beat is not None]


@final
class Heartbeat:
    """One rank's own."""

    def __init__(self, run: RunDir, *, rank: int, world_size: int, num_steps: int) -> None:
        self._run, self._rank, self._world_size, self._num_steps = run, rank, world_size, num_steps
        self._every_s = max(WRITE_EVERY_S, world_size / WRITES_PER_S)
        self._phase, self._iteration, self._step = Phase.start, 0, 0
        self._beats = self._writes = 0
        self._beat_s = time.monotonic()
        self._loss: float | None = None
        self._step_time_s: float | None = None
        self._exit_code: int | None = None
        self._reason = ""
        self._ended = Event()
        self._thread = Thread(target=self._write_on, name="heartbeat", daemon=True)

    def beat(self, state: RunState, phase: Phase = Phase.train) -> None:
        """The loop has moved. The first iteration still belongs to the start."""
        self._phase = phase if self._beats else Phase.start
        self._iteration, self._step = state.iteration, state.step
        self._beats += 1
        self._beat_s = time.monotonic()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Something long, in which the loop does not move."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before
            self._beats += 1
            self._beat_s = time.monotonic()

    def set_progress(self, record: StepRecord) -> None:
        """What the last step that was reported came to."""
        self._loss, self._step_time_s = record.loss, record.step_time_s

    def end(self, exit_code: int, reason: str) -> None:
        """All is done but the farewells."""
        self._phase, self._exit_code, self._reason = Phase.end, exit_code, reason

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and self._exit_code is None:
            self.end(1, one_line(f"{kind.__name__}: {error}"))
        self._ended.set()
        self._thread.join(timeout=LAST_WRITE_WITHIN_S)

    def _write_on(self) -> None:
        with suppress(OSError):
            self._run.heartbeat.mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            self._forget_others()
        while True:
            is_last = self._ended.is_set()
            with suppress(OSError):
                self._write()
            if is_last:
                return
            self._ended.wait(self._every_s)

    def _forget_others(self) -> None:
        """A run that goes on with fewer ranks leaves no word of the others."""
        for path in self._run.heartbeat.glob("rank-*.json"):
            known = read(path)
            if known is None or known.rank >= self._world_size:
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
        )
        replace_file(file_of(self._run, self._rank), asdict(beat))
        if self._rank == 0:
            replace_file(self._run.status, self._status(now))

    def _status(self, now: float) -> dict[str, Any]:
        """How the run stands, for scripts."""
        status = RunStatus.paused if self._phase is Phase.pause else RunStatus.running
        left = None if self._step_time_s is None else self._step_time_s * (self._num_steps - self._step)
        has_ended = self._exit_code is not None
        return {
            "state": RunStatus.ended if has_ended else status,
            "phase": self._phase,
            "step": self._step,
            "num_steps": self._num_steps,
            "iteration": self._iteration,
            "loss": self._loss if self._loss is None or abs(self._loss) < float("inf") else str(self._loss),
            "eta_s": None if has_ended else left,
            "exit_code": self._exit_code,
            "reason": self._reason,
            "world_size": self._world_size,
            "time": now,
        }


def end_of_run(run: RunDir, exit_code: int, reason: str) -> None:
    """What the launcher knows of a run whose rank 0 could not say it: it was killed, or only saw others go."""
    try:
        words = json.loads(run.status.read_bytes())
        fallen = {"state": RunStatus.ended, "eta_s": None, "exit_code": exit_code, "reason": one_line(reason)}
        replace_file(run.status, words | fallen | {"time": time.time()})
    except (OSError, ValueError, TypeError):
        return


def one_line(text: str) -> str:
    return " ".join(text.split())[:LONGEST_REASON]


def replace_file(path: Path, words: dict[str, Any]) -> None:
    """The old one or the new one, never a part; not forced to disk, for the next one comes in a second."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(json.dumps(words) + "\n", encoding="utf-8")
    scratch.replace(path)
