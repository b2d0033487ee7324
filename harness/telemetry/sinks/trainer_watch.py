"""Follows the training process whose log is being sent: alive, done, restarted, or gone.

Why: after a crash the launcher, not rank 0, writes how the start ended. A sink that gave up as soon as rank 0 is gone
would miss it.
How: the sink process is a child of rank 0 and sees at once when it becomes an orphan. It then waits for `run_ended` or
`run_restarted` while the launcher lives, for at most `LAUNCHER_WITHIN_S`. The events of the next start are left to the
sink process of that start.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from threading import Lock
from typing import final

from harness.core.event_json import parse
from harness.core.events import DrillScored, Event, RunEnded, RunRestarted, RunStarted, StepRecord
from harness.core.locking.lease_holder import start_of
from harness.core.rundir import RunDir
from harness.telemetry.event_log import log_size, read_chunk, tail

LAUNCHER_WITHIN_S = 120.0
"""How long a launcher may take to log the end or the restart of a start whose rank 0 is gone. With several machines it
first waits until no rank is left on any of them; that takes up to a minute, and half a minute more if one is lost."""
BOUNDARIES = tuple(f'{{"event":"{kind.name}",'.encode() for kind in (RunStarted, RunRestarted, RunEnded, DrillScored))
"""How the lines begin that tell where a start begins and ends."""


@final
@dataclass(slots=True)
class Trainer:
    """The training process of one start. Its methods may be called from several threads."""

    pid: int
    log_bytes: int
    """Size of the log when it started; older events are of earlier starts."""
    launcher_pid: int = 0
    """Its parent; 0: unknown, and its end is not waited for."""
    launcher_started: int | None = None
    with_restarts: bool = False
    """The launcher sends what is left of all its starts, so a restart ends nothing."""
    _gone_s: float | None = None
    """When it was first seen to be gone, by the monotonic clock."""
    _lock: Lock = field(default_factory=Lock)
    """Guards the fields below."""
    _scanned_bytes: int = -1
    """The log was searched up to this byte; -1: not yet."""
    _has_started: bool = False
    """Its `run_started` was found."""
    _has_ended: bool = False
    """The last line that was searched is `run_ended`."""
    _is_replaced: bool = False
    """Another start follows, and nothing has logged how this one ended."""
    _end_bytes: int | None = None
    """Where the log of this start ends because another start follows."""

    def is_alive(self) -> bool:
        """Whether the trainer lives. Call in its child process: an orphan gets another parent at once."""
        return os.getppid() == self.pid

    def has_launcher(self) -> bool:
        """Whether the launcher lives, which logs the end of a run after a crash."""
        started = start_of(self.launcher_pid)
        return started is not None and started == self.launcher_started

    def is_over(self, run: RunDir) -> bool:
        """Whether this start will log nothing more. False while it lives, and while its launcher may log its end."""
        if self.is_alive():
            return False
        if self._gone_s is None:
            self._gone_s = time.monotonic()
        if self.has_ended(run) or not self.has_launcher():
            return True
        return time.monotonic() - self._gone_s > LAUNCHER_WITHIN_S

    def has_trained(self, run: RunDir) -> bool:
        """Whether the log holds a step of this start."""
        chunk = read_chunk(run.events, self.log_bytes)
        return chunk is not None and any(isinstance(event, StepRecord) for event in chunk.events)

    def has_ended(self, run: RunDir) -> bool:
        """Whether the log says that this start has ended: by `run_ended`, or because another start follows."""
        if self.with_restarts:
            return log_size(run.events) > self.log_bytes and isinstance(last_event(run), RunEnded)
        with self._lock:
            self._scan(run)
            return self._has_ended or self._end_bytes is not None

    def is_replaced(self, run: RunDir) -> bool:
        """Whether another start follows although nothing has logged the end of this one, as after plain torchrun's."""
        with self._lock:
            self._scan(run)
            return self._is_replaced

    def end_bytes(self, run: RunDir) -> int | None:
        """The byte after the last event of this start if another start follows; None if the log ends with this one."""
        with self._lock:
            self._scan(run)
            return self._end_bytes

    def _scan(self, run: RunDir) -> None:
        """Search the part of the log that is new. Each byte is read once."""
        place = max(self._scanned_bytes, self.log_bytes)
        if self.with_restarts or self._end_bytes is not None or log_size(run.events) <= place:
            return
        with run.events.open("rb") as file:
            file.seek(place)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._end_bytes = self._observe(line, place)
                place += len(line)
                if self._end_bytes is not None:
                    break
        self._scanned_bytes = place

    def _observe(self, line: bytes, start_bytes: int) -> int | None:
        """Where the log of this start ends, if this line shows it."""
        event = next(parse(line.decode(errors="replace")), None) if line.startswith(BOUNDARIES) else None
        match event:
            case RunStarted() if self._has_started:
                self._is_replaced = not self._has_ended
                return start_bytes
            case RunRestarted():
                return start_bytes + len(line)
            case DrillScored():
                pass
            case _:
                self._has_started = self._has_started or isinstance(event, RunStarted)
                self._has_ended = isinstance(event, RunEnded)
        return None


def last_event(run: RunDir) -> Event | None:
    """The last event of the run itself, without the drill score that is appended later."""
    return next((event for event in reversed(tail(run.events)) if not isinstance(event, DrillScored)), None)
