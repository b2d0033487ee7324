"""The event log: one line for each thing that happened, written by rank 0, read by everything else.

Why: console, MLflow and picture can all be rebuilt from this file, so this is the one write that must survive
trouble.
How: every event is one `write` to the end of the file, so a killed process loses at most the line it was writing. A
line cut short, by a crash or by a full disk, is ended before the next one begins. A write that fails costs that event
and one warning, never the training step; the next event tries again.
Left out: fsync. After a power cut the last seconds may be missing; checkpoints do not depend on them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from harness.events import Event, StepRecord, parse, to_json

TAIL_BYTES = 64 * 1024
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    events: list[Event]
    end: int
    """Where in the log the chunk ends, in bytes."""


def read_chunk(path: Path, offset: int) -> Chunk | None:
    """About a megabyte of whole lines from byte `offset` on; None where there is no further whole line."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.readlines(CHUNK_BYTES)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    return Chunk(_parse_all(lines), offset + sum(map(len, lines))) if lines else None


def tail(path: Path, num_bytes: int = TAIL_BYTES) -> list[Event]:
    """The last events of a log in order, from about `num_bytes` of its end; more where those hold none."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        while True:
            start = max(0, size_bytes - num_bytes)
            file.seek(start)
            lines = file.read(size_bytes - start).split(b"\n")
            events = _parse_all(lines if start == 0 else lines[1:])
            if events or start == 0:
                return events
            num_bytes *= 4


def last_iteration(path: Path) -> int:
    """The highest iteration near the end of a log (records come late, so not that of the last line); -1 where none."""
    return max((event.iteration for event in tail(path)), default=-1)


def events_since(path: Path, iteration: int) -> list[Event]:
    """The events of a log after the record of an iteration, in order; all of them where there is no such record."""
    num_bytes, size_bytes = TAIL_BYTES, path.stat().st_size if path.exists() else 0
    while True:
        events = tail(path, num_bytes)
        seen = [place for place, event in enumerate(events) if _is_record_until(event, iteration)]
        if seen or num_bytes >= size_bytes:
            return events[seen[-1] + 1 :] if seen else events
        num_bytes *= 4


def _is_record_until(event: Event, iteration: int) -> bool:
    return isinstance(event, StepRecord) and event.iteration <= iteration


def _parse_all(lines: Iterable[bytes]) -> list[Event]:
    return [event for line in lines for event in parse(line.decode(errors="replace"))]


@final
class EventLog:
    """Appends events to `path`; `num_lost` counts those that could not be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lost = 0
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size_bytes = os.fstat(self._descriptor).st_size
        self._torn = size_bytes > 0 and os.pread(self._descriptor, 1, size_bytes - 1) != b"\n"

    def write(self, event: Event) -> None:
        assert self._descriptor is not None, "the log is closed"
        line = (to_json(event) + "\n").encode()
        pending = b"\n" + line if self._torn else line
        try:
            num_written = os.write(self._descriptor, pending)
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        self._torn = not pending[:num_written].endswith(b"\n")
        if num_written < len(pending):
            self._lose("no space for a whole line")

    def close(self) -> None:
        """Every event is already in the file; this frees the descriptor and says what was lost."""
        if self._descriptor is None:
            return
        os.close(self._descriptor)
        self._descriptor = None
        if self.num_lost:
            _warn(f"{self.num_lost} events could not be written to {self.path}")

    def _lose(self, reason: str) -> None:
        if self.num_lost == 0:
            _warn(f"cannot write {self.path}: {reason}; training goes on, this event is lost")
        self.num_lost += 1


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
