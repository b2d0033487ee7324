"""When a rank counts as hung, from its heartbeats: the rule of the launcher's supervisor and of the alerts.

Time since the last change is counted by the observer's own clock, because the clocks of two machines differ and jump. A
process that does not write at all is reported a little before those that write but make no progress, which are mostly
its victims.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from harness.config.launch import LaunchConfig
from harness.telemetry.heartbeat import MOVING, Beat

MIN_WRITES = 3
"""With thousands of ranks each writes rarely; a healthy one shows no progress between two writes."""
SHARE_OF_TIMEOUT = 0.9
"""The hung rank must be reported before the collectives of the others fail."""
ALIVE_EXTRA_S = 5.0
"""Extra time for a rank whose process still writes."""


@final
@dataclass(frozen=True, slots=True)
class HangLimits:
    """Seconds without progress after which a rank counts as hung."""

    cfg: LaunchConfig
    timeout_s: float = math.inf
    """Of a collective: `parallel.timeout_s`."""

    def limit_s(self, beat: Beat) -> float:
        """The limit follows the rank's own step time; a save, a restore and a start have their own.

        At the end of a run rank 0 waits for other processes, and ranks that have ended wait for rank 0.
        """
        of_steps_s = min(self.cfg.hang_steps * beat.slowest_step_s, SHARE_OF_TIMEOUT * self.timeout_s)
        limit_s = max(self.cfg.hang_after_s, of_steps_s, MIN_WRITES * beat.every_s)
        return limit_s if beat.phase in MOVING else max(self.cfg.start_within_s, limit_s) + beat.end_wait_s


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

    def is_hung(self, limits: HangLimits) -> bool:
        limit_s = limits.limit_s(self.beat)
        if self.beat.exit_code is not None:  # it is exiting and writes no more
            return self.stalled_s > limit_s and is_alive(self.beat.host, self.beat.pid)
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


def is_alive(host: str, pid: int) -> bool:
    """Whether a process exists on this machine and is no zombie; False for one of another machine."""
    if host != socket.gethostname():
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def find_hung_rank(ranks: Iterable[RankProgress], limits: HangLimits) -> RankProgress | None:
    """The rank that most likely hangs and keeps the others waiting; None if no rank counts as hung."""
    hung = [progress for progress in ranks if progress.is_hung(limits)]
    return max(hung, key=lambda rank: (rank.silent_s, -rank.beat.iteration, -rank.beat.rank), default=None)
