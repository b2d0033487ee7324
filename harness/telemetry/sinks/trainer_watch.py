"""Follows the training process whose log is being sent: alive, done, or gone.

Why: after a crash the launcher, not rank 0, writes how the run ended. A sink that gave up as soon as rank 0 is gone
would miss it.
How: the sink process is a child of rank 0 and sees at once when it becomes an orphan. It then waits for `run_ended`
while the launcher lives, for at most `LAUNCHER_WITHIN_S`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import final

from harness.core.events import DrillScored, Event, RunEnded, StepRecord
from harness.core.locking.lease_holder import start_of
from harness.core.rundir import RunDir
from harness.telemetry.event_log import log_size, read_chunk, tail

LAUNCHER_WITHIN_S = 10.0
"""How long a launcher may take to log the end of a run whose rank 0 is gone."""


@final
@dataclass(slots=True)
class Trainer:
    """The training process of one start."""

    pid: int
    log_bytes: int
    """Size of the log when it started; older events are of earlier starts."""
    launcher_pid: int = 0
    """Its parent; 0: unknown, and its end is not waited for."""
    launcher_started: int | None = None
    _gone_s: float | None = None
    """When it was first seen to be gone, by the monotonic clock."""
    _last_read: tuple[int, bool] = (-1, False)
    """Size of the log when its last event was read, and whether that was `run_ended`."""

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
        """Whether the log holds the `run_ended` event of this start."""
        size_bytes = log_size(run.events)
        if size_bytes != self._last_read[0]:
            self._last_read = (size_bytes, size_bytes > self.log_bytes and isinstance(last_event(run), RunEnded))
        return self._last_read[1]


def last_event(run: RunDir) -> Event | None:
    """The last event of the run itself, without the drill score that is appended later."""
    return next((event for event in reversed(tail(run.events)) if not isinstance(event, DrillScored)), None)
