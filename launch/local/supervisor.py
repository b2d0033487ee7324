"""Detects hung ranks of this node from their heartbeat files.

Why: a rank that hangs keeps all others waiting in a collective until `parallel.timeout_s`, and a stopped process never
reports anything.
How: the supervisor reads the heartbeat files once a second and counts the time since the last change by its own
clock. Time counts only while it can read, and write a small probe file: neither a clock that jumps nor a file system
that stalls makes a rank look hung. A process that does not write at all is reported a little before those that write
but make no progress, which are mostly its victims. The run is ended within `launch.hang_after_s` plus ten seconds.
`launch.start_within_s` is the limit for a start, a restore and a save, which are one long call each.
Left out: ranks that have not written a heartbeat yet; `parallel.timeout_s` covers those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import final

from harness.config.launch import LaunchConfig
from harness.core.rundir import RunDir
from harness.telemetry import heartbeat
from harness.telemetry.heartbeat import MOVING, Beat

CHECK_EVERY_S = 1.0
MIN_WRITES = 3
"""With thousands of ranks each writes rarely; a healthy one shows no progress between two writes."""
WRITE_TIMEOUT_S = 2.0
"""A file system that needs longer for a few bytes stalls; the stall does not count as time."""
ALIVE_EXTRA_S = 5.0
"""Extra time for a rank whose process still writes."""


@final
@dataclass(slots=True)
class RankProgress:
    """The newest heartbeat of a rank, and the time since it changed."""

    beat: Beat
    stalled_s: float = 0.0
    """Since its loop made progress."""
    silent_s: float = 0.0
    """Since its process wrote."""

    def update(self, beat: Beat, elapsed_s: float) -> None:
        same = beat.pid == self.beat.pid
        moved = not same or (beat.beats, beat.phase) != (self.beat.beats, self.beat.phase)
        wrote = not same or beat.writes != self.beat.writes
        self.stalled_s = 0.0 if moved else self.stalled_s + elapsed_s
        self.silent_s = 0.0 if wrote else self.silent_s + elapsed_s
        self.beat = beat

    def is_hung(self, cfg: LaunchConfig) -> bool:
        hang_after_s = max(cfg.hang_after_s, MIN_WRITES * self.beat.every_s)
        limit_s = hang_after_s if self.beat.phase in MOVING else max(cfg.start_within_s, hang_after_s)
        if self.beat.exit_code is not None:  # it is exiting and writes no more
            return self.stalled_s > limit_s and is_alive(self.beat.pid)
        is_silent = self.silent_s > max(limit_s / 2, 2 * self.beat.every_s)
        return self.stalled_s > limit_s + (0.0 if is_silent else ALIVE_EXTRA_S)

    def render(self) -> str:
        """One line about a rank that hangs."""
        beat = self.beat
        alive = f"its process (pid {beat.pid}) " + ("is silent too" if self.silent_s > 2 * beat.every_s else "is alive")
        return (
            f"rank {beat.rank} on {beat.host} has not moved for {self.stalled_s:.0f} s, "
            f"in iteration {beat.iteration + 1} ({beat.phase}); {alive}"
        )


def is_alive(pid: int) -> bool:
    """Whether a process of this machine exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@final
class Supervisor:
    def __init__(self, run: RunDir, ranks: range, cfg: LaunchConfig) -> None:
        self._run, self._ranks, self._cfg = run, ranks, cfg
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
        hung = [progress for progress in self._update_all(elapsed_s) if progress.is_hung(self._cfg)]
        self._checked_s = now_s
        if not hung:
            return None
        return max(
            hung, key=lambda progress: (progress.silent_s, -progress.beat.iteration, -progress.beat.rank)
        ).render()

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
