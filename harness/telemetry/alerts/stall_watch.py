"""Detects from outside that training does not move: a hung rank, or no new iteration for a long time.

Why: a stuck training process logs nothing, so the log cannot tell.
How: the sink process reads the heartbeat files of all ranks, at most `heartbeat.WRITES_PER_S` a second, and counts the
time without a change by its own clock. Hung ranks are found by the rule of the launcher's supervisor. `no_progress` is
about the iteration of rank 0, whatever the reason: a hang, a slow start, or a save that waits for its disk. A small
write precedes each reading: while the file system of the run directory stalls, it blocks, and no time counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import final

from harness.config.alerts import AlertKind
from harness.core.rundir import RunDir
from harness.telemetry import heartbeat
from harness.telemetry.alerts.alert import HANG_TOPIC, Alert
from harness.telemetry.heartbeat import WRITES_PER_S, Beat, Phase
from harness.telemetry.rank_progress import HangLimits, RankProgress, find_hung_rank

CHECK_EVERY_S = 2.0
PROBE = ".alerts"


@final
class StallWatch:
    """Watches the heartbeats of one start."""

    def __init__(self, run: RunDir, limits: HangLimits, *, no_progress_s: float, now_s: float) -> None:
        self._run, self._limits, self._no_progress_s = run, limits, no_progress_s
        self._ranks: dict[int, RankProgress] = {}
        self._stalled_s = 0.0
        """Seconds since rank 0 began a new iteration, without pauses."""
        self._iteration: tuple[int, int] | None = None
        """Process and iteration of rank 0."""
        self._checked_s = now_s

    def check(self, now_s: float) -> Iterator[Alert]:
        """The alerts at this time of the monotonic clock."""
        every_s = max(CHECK_EVERY_S, len(self._ranks) / WRITES_PER_S)
        if now_s - self._checked_s < every_s:
            return
        with suppress(OSError):
            (self._run.heartbeat / PROBE).write_text("\n")
        elapsed_s = min(now_s - self._checked_s, 2 * every_s)  # this process may have been stopped, or have waited
        self._checked_s = now_s
        for beat in heartbeat.read_all(self._run):
            self._ranks.setdefault(beat.rank, RankProgress(beat)).update(beat, elapsed_s)
        first = self._ranks[0].beat if 0 in self._ranks else None
        if (hung := find_hung_rank(self._ranks.values(), self._limits)) is not None:
            yield self._make_alert(AlertKind.hang, hung.render(), hung.beat, topic=HANG_TOPIC)
        yield from self._check_progress(first, elapsed_s)

    def _check_progress(self, beat: Beat | None, elapsed_s: float) -> Iterator[Alert]:
        iteration = None if beat is None else (beat.pid, beat.iteration)
        if iteration != self._iteration or (beat is not None and beat.phase in (Phase.pause, Phase.end)):
            self._iteration, self._stalled_s = iteration, 0.0
            return
        self._stalled_s += elapsed_s
        if 0 < self._no_progress_s <= self._stalled_s:
            where = "rank 0 has not written a heartbeat" if beat is None else f"rank 0 is in phase {beat.phase}"
            message = f"no new iteration for {self._stalled_s / 60:.0f} minutes; {where}"
            yield self._make_alert(AlertKind.no_progress, message, beat, topic="no progress")

    def _make_alert(self, kind: AlertKind, message: str, beat: Beat | None, *, topic: str) -> Alert:
        iteration = 0 if beat is None else beat.iteration
        return Alert(kind=kind, time=time.time(), iteration=iteration, message=message, topic=topic)
