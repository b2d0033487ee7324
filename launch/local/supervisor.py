"""Detects hung ranks of this node from their heartbeat files.

Why: a rank that hangs keeps all others waiting in a collective until `parallel.timeout_s`, and a stopped process never
reports anything.
How: the supervisor reads the heartbeat files once a second and counts the time since the last change by its own
clock. Time counts only while it can read, and write a small probe file: neither a clock that jumps nor a file system
that stalls makes a rank look hung. A process that does not write at all is reported a little before those that write
but make no progress, which are mostly its victims. The run is ended within `HangLimits.limit_s` plus ten seconds.
`launch.start_within_s` is the limit for a start, a restore and a save, which are one long call each.
Left out: ranks that have not written a heartbeat yet; `parallel.timeout_s` covers those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import final

from harness.core.rundir import RunDir
from harness.telemetry import heartbeat
from harness.telemetry.rank_progress import HangLimits, RankProgress, find_hung_rank

CHECK_EVERY_S = 1.0
WRITE_TIMEOUT_S = 2.0
"""A file system that needs longer for a few bytes stalls; the stall does not count as time."""


@final
class Supervisor:
    def __init__(self, run: RunDir, ranks: range, limits: HangLimits) -> None:
        self._run, self._ranks, self._limits = run, ranks, limits
        self._progress: dict[int, RankProgress] = {}
        self._checked_s = -math.inf
        self._writing: Thread | None = None
        for rank in ranks:  # left by an earlier start
            with suppress(OSError):
                heartbeat.heartbeat_file(run, rank).unlink(missing_ok=True)

    def check(self, now_s: float) -> str | None:
        """At most once a second by the time given: one line about a hung rank, or None."""
        if now_s - self._checked_s < CHECK_EVERY_S:
            return None
        elapsed_s = min(now_s - self._checked_s, 2 * CHECK_EVERY_S) if self._can_write() else 0.0
        hung = find_hung_rank([*self._update_all(elapsed_s)], self._limits)
        self._checked_s = now_s
        return None if hung is None else hung.render()

    def _can_write(self) -> bool:
        """Whether the file system accepts a write. While one stalls, no other is started."""
        if self._writing is not None and self._writing.is_alive():
            return False
        self._writing = Thread(target=self._write, name="probe", daemon=True)
        self._writing.start()
        self._writing.join(timeout=WRITE_TIMEOUT_S)
        return not self._writing.is_alive()

    def _write(self) -> None:
        with suppress(OSError):
            probe_path(self._run, self._ranks).write_text("\n")

    def _update_all(self, elapsed_s: float) -> Iterator[RankProgress]:
        for rank in self._ranks:
            beat = heartbeat.read(heartbeat.heartbeat_file(self._run, rank))
            if beat is not None:
                progress = self._progress.setdefault(rank, RankProgress(beat))
                progress.update(beat, elapsed_s)
            if rank in self._progress:
                yield self._progress[rank]


def probe_path(run: RunDir, ranks: range) -> Path:
    """The probe file of the supervisor of these ranks."""
    return run.heartbeat / f".supervisor-{ranks.start:05d}"
