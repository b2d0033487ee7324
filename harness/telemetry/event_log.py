"""Writes and reads the event log: `events.jsonl`, appended by a writer thread on rank 0.

Why: console, MLflow and picture can all be rebuilt from this file, so its writes must survive errors. They must not
delay training either: a shared file system may stall for a minute.
How: `write` puts the line into a queue in memory; the writer thread appends the lines to the file in order, each with
one `write` call. A line cut short by a crash or a full disk is terminated before the next one. A failed write loses
that event and prints one warning; training continues, and the next event is written normally.
While the file system stalls, events wait in the queue, up to `QUEUE_BYTES`. If it is full, new step records are
dropped; all other events may use the same amount again. Dropped events are counted, with one warning.

Guarantees after a kill (SIGKILL, power failure): the queue is lost. It is empty milliseconds after each event unless
the file system stalls. An action or an intervention is in the file before it is executed: `flush` waits for it, for at
most `FLUSH_WAIT_S` per stall. If it is not written by then, one warning is printed and training continues. Ledger
entries and checkpoint marks do not use this queue: their owners write them with fsync before the decision takes effect,
however long that takes; they are rare. A decision whose line was lost in a stall therefore still holds for data and
checkpoints; only the attempt that the policy spent on it is unknown after a resume.
`close` waits at most `CLOSE_WAIT_S` for the queue.
Left out: fsync. After a power failure the last seconds may be missing; checkpoints do not depend on them.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import Any, final

from harness.config.errors import EXIT_DONE
from harness.config.schema import Config
from harness.core import rundir
from harness.core.event_json import parse, to_json
from harness.core.events import EndCause, Event, RunEnded, RunRestarted, RunStarted, StepRecord
from harness.core.locking import run_lease
from harness.core.stderr_lines import print_warning
from harness.core.transient_io import retry_transient
from harness.telemetry.log_index import (
    IndexWriter,
    between,
    rare_lines,
    read_blocks,
    repair_index,
    sample_lines,
    whole_lines,
)

TAIL_BYTES = 64 * 1024
CHUNK_BYTES = 1 << 20
RECALL_BYTES = 16 << 20
"""Approximate limit of the ordinary steps that a resume reads since its checkpoint."""
QUEUE_BYTES = 64 << 20
"""Limit of the queued lines: 17,000 steps of a model with 80 layers."""
FLUSH_WAIT_S = 5.0
CLOSE_WAIT_S = 10.0
BACKFILL_BYTES = 16 << 20
"""Most that a start adds to an index that ends before the log does. Readers scan a longer part themselves."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Events of a part of the log."""

    events: list[Event]
    start: int
    """Byte position in the log where the chunk starts."""
    end: int
    """Byte position in the log where the chunk ends."""
    line_ends: list[int]
    """Byte position after the line of each event."""


def read_chunk(path: Path, offset: int, until: int | None = None) -> Chunk | None:
    """Read about a megabyte of whole lines from byte `offset` on; None if there is no further whole line.

    `until` is the end of a line; the chunk ends there at the latest.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.readlines(CHUNK_BYTES)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    events, line_ends, end = [], [], offset
    for line in lines:
        if end == until:
            break
        end += len(line)
        for event in parse(line.decode(errors="replace")):
            events.append(event)
            line_ends.append(end)
    return Chunk(events, offset, end, line_ends) if lines else None


def log_size(path: Path) -> int:
    """Bytes of a log; 0 if there is none yet."""
    return path.stat().st_size if path.exists() else 0


def tail(path: Path, num_bytes: int = TAIL_BYTES) -> list[Event]:
    """The last events of a log in order, from about its last `num_bytes`; from more if those hold no event."""
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
    """The highest iteration near the end of a log, whose lines are not in order of iteration; -1 if there is none."""
    return max((event.iteration for event in tail(path)), default=-1)


def last_recorded_iteration(path: Path) -> int:
    """The highest iteration whose step record is near the end of a log; -1 if there is none."""
    return max((event.iteration for event in tail(path) if isinstance(event, StepRecord)), default=-1)


def find_done_step(path: Path) -> int:
    """The steps of a run whose last start ended with all of them done, by its log; 0 for any other run."""
    last = next((event for event in reversed(tail(path)) if isinstance(event, RunEnded | RunStarted)), None)
    return last.step if isinstance(last, RunEnded) and last.exit_code == EXIT_DONE else 0


def prepare_run(cfg: Config) -> rundir.RunDir:
    """Create the run directory, or accept a changed config and log the change as an intervention."""
    run = rundir.locate(cfg)
    require_appendable(run)
    seen = max(last_iteration(run.events), 0)
    if changes := rundir.prepare_run_dir(cfg, run, iteration=seen):
        rundir.append_line(run.events, to_json(rundir.make_config_change_event(changes, iteration=seen)))
    return run


def require_appendable(run: rundir.RunDir) -> None:
    """Raise a one-line error if a log of the run cannot be appended to. Creates none: the start may be rejected."""
    for path in (run.events, run.interventions, run.ledger):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise run_lease.io_error(path, "cannot write", error) from None


def record_crash(run: rundir.RunDir, exit_code: int, reason: str, cause: EndCause) -> bool:
    """Log the end of a start whose rank 0 could not do it; called by the launcher when all ranks are gone.

    The event has the time of the last one before it, so that the time until the crash was noticed counts as stopped.
    Returns whether the log has it.
    """

    def make_event(events: list[Event]) -> RunEnded:
        return RunEnded(
            time=events[-1].time if events else time.time(),
            iteration=_last_iteration(events),
            step=_last_step(events),
            exit_code=exit_code,
            reason=reason,
            cause=str(cause),
        )

    return _append_from_launcher(run, make_event)


def record_restart(
    run: rundir.RunDir,
    reason: str,
    cause: EndCause,
    *,
    number: int,
    noticed: float,
    stopped_s: float,
    machines: dict[str, Any],
) -> None:
    """Log a restart inside the job; called by the launcher when all ranks are gone, before it starts them again.

    `machines` holds the fields of the event about machines: `out`, `replaced_by`, `num_nodes`.
    """

    def make_event(events: list[Event]) -> RunRestarted:
        return RunRestarted(
            time=noticed,
            iteration=_last_iteration(events),
            step=_last_step(events),
            number=number,
            reason=reason,
            cause=str(cause),
            stopped_s=round(stopped_s, 3),
            **machines,
        )

    _append_from_launcher(run, make_event)


def _last_step(events: list[Event]) -> int:
    return next((event.step for event in reversed(events) if isinstance(event, StepRecord | RunStarted | RunEnded)), 0)


def _last_iteration(events: list[Event]) -> int:
    return max(0, *(event.iteration for event in events)) if events else 0


def _append_from_launcher(run: rundir.RunDir, make_event: Callable[[list[Event]], Event]) -> bool:
    """Append an event, made from the last ones, to the log of a run that has a config; returns whether it is there."""
    try:
        if not retry_transient(run.config.exists):
            return False
        event = make_event(retry_transient(lambda: tail(run.events)))
        rundir.append_line(run.events, to_json(event))
    except OSError as error:
        print_warning(f"cannot write {run.events}: {error.strerror}")
        return False
    return True


def events_since(path: Path, iteration: int) -> list[Event]:
    """The events of a log after the record of an iteration, in order; all events if there is no such record.

    Beyond `RECALL_BYTES`, ordinary steps are sampled evenly. All other events are included, and the step before each.
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
    events = _parse_all(sample_lines(path, start=start, budget_bytes=RECALL_BYTES, with_extremes=False).lines)
    seen = [place for place, event in enumerate(events) if _is_record_until(event, iteration)]
    return events[seen[-1] + 1 :] if seen else events


def read_non_step_events(path: Path) -> list[Event]:
    """All events of a log except step records."""
    return [event for event in _parse_all(rare_lines(path)) if not isinstance(event, StepRecord)]


def read_steps(path: Path, first: int, last: int) -> list[StepRecord]:
    """Step records of a log from iteration `first` to `last`, both included."""
    inside = _parse_all(between(path, first, last))
    return [event for event in inside if isinstance(event, StepRecord) and first <= event.iteration <= last]


def _is_record_until(event: Event, iteration: int) -> bool:
    return isinstance(event, StepRecord) and event.iteration <= iteration


def _parse_all(lines: Iterable[bytes]) -> list[Event]:
    return [event for line in lines for event in parse(line.decode(errors="replace")) if type(event.iteration) is int]


@final
class EventLog:
    """Appends events to `path` from a writer thread; `num_lost` counts the events that are not in the file.

    `on_written` is called in that thread with each event after its write.
    """

    def __init__(self, path: Path, *, on_written: Callable[[Event], None] | None = None) -> None:
        self.path = path
        self.num_lost = 0
        self._on_written = on_written
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        status = os.fstat(self._descriptor)
        self._torn = status.st_size > 0 and os.pread(self._descriptor, 1, status.st_size - 1) != b"\n"
        self._has_index = stat.S_ISREG(status.st_mode)
        self._index: IndexWriter | None = None
        if self._has_index:
            self._index = _continue_index(path, status.st_size, is_torn=self._torn)
        self._queue: deque[tuple[Event, bytes]] = deque()
        self._changed = Condition()
        """Guards the queue and the fields below."""
        self._queued_bytes = 0
        self._num_queued = self._num_done = 0
        """Events that were queued, and events that the thread has finished."""
        self._gave_up_at = -1
        """Value of `_num_done` when a flush last gave up."""
        self._closed = False
        self._thread = Thread(target=self._append_all, name="event log", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Queue an event. Never waits for the file."""
        line = (to_json(event) + "\n").encode()
        limit_bytes = QUEUE_BYTES if isinstance(event, StepRecord) else 2 * QUEUE_BYTES
        with self._changed:
            assert not self._closed, "the log is closed"
            is_full = self._queued_bytes + len(line) > limit_bytes
            if not is_full:
                self._queue.append((event, line))
                self._queued_bytes += len(line)
                self._num_queued += 1
                self._changed.notify_all()
        if is_full:
            self._lose("the file system accepts no data and the queue in memory is full")

    def flush(self, wait_s: float = FLUSH_WAIT_S) -> bool:
        """Wait until all queued events are in the file; False if they are not after `wait_s`.

        During one stall only the first call waits.
        """
        with self._changed:
            until = self._num_queued
            if self._num_done < until and self._gave_up_at == self._num_done:
                return False
            if self._changed.wait_for(lambda: self._num_done >= until, timeout=wait_s):
                return True
            self._gave_up_at = self._num_done
        print_warning(f"{self.path} accepted no data for {wait_s:g} s; training continues, events wait in memory")
        return False

    def close(self, wait_s: float = CLOSE_WAIT_S) -> bool:
        """Wait at most `wait_s` for the queue and report lost events; False if some were not written in time."""
        with self._changed:
            if self._closed:
                return True
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=wait_s)
        num_left = self._num_queued - self._num_done
        if self.num_lost + num_left:
            print_warning(f"{self.num_lost + num_left} events could not be written to {self.path}")
        return num_left == 0

    def _append_all(self) -> None:
        """Body of the writer thread: runs until the log is closed and the queue is empty."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    break
                event, line = self._queue.popleft()
            self._append(line)
            self._notify(event)
            with self._changed:
                self._queued_bytes -= len(line)
                self._num_done += 1
                self._changed.notify_all()
        os.close(self._descriptor)

    def _notify(self, event: Event) -> None:
        if self._on_written is None:
            return
        try:
            self._on_written(event)
        except Exception as error:  # the log must continue
            self._on_written = None
            print_warning(f"no more post-mortems until the next start: {type(error).__name__}: {error}")

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
        """Index a line that was appended. After a torn line, or a line of another process, a new block starts."""
        if self._index is None and not self._torn:
            self._index = IndexWriter(self.path, os.fstat(self._descriptor).st_size - len(line))
        elif not is_clean:
            self._index = None
        if self._index is not None and not self._index.add(line):
            self._index = None

    def _lose(self, reason: str) -> None:
        if self.num_lost == 0:
            print_warning(f"cannot write {self.path}: {reason}; training continues, this event is lost")
        self.num_lost += 1


def _continue_index(path: Path, size_bytes: int, *, is_torn: bool) -> IndexWriter | None:
    """Open the index of a log of that size, and extend it to the end of the log if it is not far behind.

    After a torn line there is none until the next line starts a block.
    """
    try:
        start = repair_index(path)
    except OSError:
        return None
    if is_torn:
        return None
    if size_bytes - start > BACKFILL_BYTES:
        return IndexWriter(path, size_bytes)
    index = IndexWriter(path, start)
    with path.open("rb") as file:
        for line in whole_lines(file, start, size_bytes):
            index.block.add(line)
    return index
