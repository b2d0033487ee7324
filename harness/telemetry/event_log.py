"""The event log: one line for each thing that happened, written by rank 0, read by everything else.

Why: console, MLflow and picture can all be rebuilt from this file, so this is the one write that must survive
trouble. It must not hold up training either: a shared file system may stall for a minute.
How: `write` puts the line into a queue in memory; one thread appends the lines to the file in order, each with one
`write` call. A line cut short, by a crash or by a full disk, is ended before the next one begins. A write that fails
costs that event and one warning, never the training step; the next event tries again.
While the file system stalls, events wait in the queue, up to `QUEUE_BYTES`. When it is full, new step records are lost
first; all other events have as much room again. Lost events are counted, with one warning.

What holds when the process is killed (SIGKILL, power): the queue is lost. It is empty milliseconds after each event
unless the file system stalls. An action or an intervention is in the file before it is carried out: `flush` waits for
it, for at most `FLUSH_WAIT_S` a stall. If the file system has not taken it by then, one warning says so and training
goes on. Ledger entries and the marks of checkpoints do not use this queue: they are written by their owners, with
fsync, before the decision takes effect, however long that takes; they are rare. So a decision whose line was lost in a
stall still holds for data and checkpoints; what a resume no longer knows is that the policy spent an attempt on it.
`close` waits at most `CLOSE_WAIT_S` for the queue.
Left out: fsync. After a power cut the last seconds may be missing; checkpoints do not depend on them.
"""

from __future__ import annotations

import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import final

from harness.core.events import Event, StepRecord, parse, to_json
from harness.core.locking import run_lease
from harness.telemetry.log_index import IndexWriter, covered_until, read_blocks, sampled, whole_lines

TAIL_BYTES = 64 * 1024
CHUNK_BYTES = 1 << 20
RECALL_BYTES = 16 << 20
"""What a resume reads of the ordinary steps since its checkpoint, at most about."""
QUEUE_BYTES = 64 << 20
"""Lines that wait for a file system: 17,000 steps of a model of 80 layers."""
FLUSH_WAIT_S = 5.0
CLOSE_WAIT_S = 10.0
BACKFILL_BYTES = 16 << 20
"""What a start adds to an index that ends before the log does. A longer part is left to the readers' scan."""


@dataclass(frozen=True, slots=True)
class Chunk:
    events: list[Event]
    end: int
    """Where in the log the chunk ends, in bytes."""


def read_chunk(path: Path, offset: int) -> Chunk | None:
    """About a megabyte of whole lines from byte `offset` on; None where there is no further whole line."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.readlines(CHUNK_BYTES)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    return Chunk(_parse_all(lines), offset + sum(map(len, lines))) if lines else None


def tail(path: Path, num_bytes: int = TAIL_BYTES) -> list[Event]:
    """The last events of a log in order, from about `num_bytes` of its end; more where those hold none."""
    if not path.is_file():
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
    """The events of a log after the record of an iteration, in order; all of them where there is no such record.

    Of more than `RECALL_BYTES` ordinary steps are left out evenly. All other events are there, and so is the step
    before each of them.
    """
    num_bytes, size_bytes = TAIL_BYTES, path.stat().st_size if path.is_file() else 0
    while True:
        events = tail(path, num_bytes)
        seen = [place for place, event in enumerate(events) if _is_record_until(event, iteration)]
        if seen or num_bytes >= size_bytes:
            return events[seen[-1] + 1 :] if seen else events
        if num_bytes >= RECALL_BYTES:
            break
        num_bytes = min(4 * num_bytes, RECALL_BYTES)
    blocks = read_blocks(path)
    start = max((block.start for block in blocks if block.first is not None and block.first <= iteration), default=0)
    events = _parse_all(sampled(path, start=start, budget_bytes=RECALL_BYTES, with_extremes=False).lines)
    seen = [place for place, event in enumerate(events) if _is_record_until(event, iteration)]
    return events[seen[-1] + 1 :] if seen else events


def _is_record_until(event: Event, iteration: int) -> bool:
    return isinstance(event, StepRecord) and event.iteration <= iteration


def _parse_all(lines: Iterable[bytes]) -> list[Event]:
    return [event for line in lines for event in parse(line.decode(errors="replace"))]


@final
class EventLog:
    """Appends events to `path` from a thread; `num_lost` counts those that are not in the file.

    `after` is called in that thread with each event that was written.
    """

    def __init__(self, path: Path, *, after: Callable[[Event], None] | None = None) -> None:
        self.path = path
        self.num_lost = 0
        self._after = after
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        status = os.fstat(self._descriptor)
        self._torn = status.st_size > 0 and os.pread(self._descriptor, 1, status.st_size - 1) != b"\n"
        self._has_index = stat.S_ISREG(status.st_mode)
        self._index: IndexWriter | None = None
        if self._has_index and not self._torn:
            self._index = _continue_index(path, status.st_size)
        self._queue: deque[tuple[Event, bytes]] = deque()
        self._changed = Condition()
        """Guards the queue and what follows."""
        self._queued_bytes = 0
        self._num_queued = self._num_done = 0
        """Events that were given to the thread, and those it is done with."""
        self._gave_up_at = -1
        """How many were done when a flush last gave up."""
        self._closed = False
        self._thread = Thread(target=self._append_all, name="event log", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Put an event into the queue. Never waits for the file."""
        line = (to_json(event) + "\n").encode()
        room_bytes = QUEUE_BYTES if isinstance(event, StepRecord) else 2 * QUEUE_BYTES
        with self._changed:
            assert not self._closed, "the log is closed"
            is_full = self._queued_bytes + len(line) > room_bytes
            if not is_full:
                self._queue.append((event, line))
                self._queued_bytes += len(line)
                self._num_queued += 1
                self._changed.notify_all()
        if is_full:
            self._lose("it takes no data and the queue in memory is full")

    def flush(self, wait_s: float = FLUSH_WAIT_S) -> bool:
        """Wait until all events so far are in the file; False if they are not after `wait_s`. In one stall only the
        first call waits."""
        with self._changed:
            until = self._num_queued
            if self._num_done < until and self._gave_up_at == self._num_done:
                return False
            if self._changed.wait_for(lambda: self._num_done >= until, timeout=wait_s):
                return True
            self._gave_up_at = self._num_done
        _warn(f"{self.path} takes no data for {wait_s:g} s; training goes on, its events wait in memory")
        return False

    def close(self, wait_s: float = CLOSE_WAIT_S) -> bool:
        """Wait for the queue, at most `wait_s`, and say what was lost; False if something was not written in time."""
        with self._changed:
            if self._closed:
                return True
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=wait_s)
        num_left = self._num_queued - self._num_done
        if self.num_lost + num_left:
            _warn(f"{self.num_lost + num_left} events could not be written to {self.path}")
        return num_left == 0

    def _append_all(self) -> None:
        """The thread: until the log is closed and the queue is empty."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    break
                event, line = self._queue.popleft()
            self._append(line)
            self._pass_on(event)
            with self._changed:
                self._queued_bytes -= len(line)
                self._num_done += 1
                self._changed.notify_all()
        os.close(self._descriptor)

    def _pass_on(self, event: Event) -> None:
        if self._after is None:
            return
        try:
            self._after(event)
        except Exception as error:  # the log goes on
            self._after = None
            _warn(f"no further post-mortems in this start: {type(error).__name__}: {error}")

    def _append(self, line: bytes) -> None:
        pending = b"\n" + line if self._torn else line
        try:
            run_lease.guard()  # after a stall, another process may own the run
            num_written = os.write(self._descriptor, pending)
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        self._torn = not pending[:num_written].endswith(b"\n")
        if num_written < len(pending):
            self._lose("no space for a whole line")
        if self._has_index:
            self._add_to_index(line, is_clean=num_written == len(line))

    def _add_to_index(self, line: bytes, *, is_clean: bool) -> None:
        """Index a line that was appended. After a torn line, or a line by another process, a new block begins."""
        if self._index is None and not self._torn:
            self._index = IndexWriter(self.path, os.fstat(self._descriptor).st_size - len(line))
        elif not is_clean:
            self._index = None
        if self._index is not None and not self._index.add(line):
            self._index = None

    def _lose(self, reason: str) -> None:
        if self.num_lost == 0:
            _warn(f"cannot write {self.path}: {reason}; training goes on, this event is lost")
        self.num_lost += 1


def _continue_index(path: Path, size_bytes: int) -> IndexWriter:
    """The index of a log of that size, brought up to its end if it is not far behind."""
    start = covered_until(path)
    if size_bytes - start > BACKFILL_BYTES:
        return IndexWriter(path, size_bytes)
    index = IndexWriter(path, start)
    with path.open("rb") as file:
        for line in whole_lines(file, start, size_bytes):
            index.block.add(line)
    return index


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
