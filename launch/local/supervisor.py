"""Watches the ranks of this machine from outside: a loop that stands still for too long is taken for hung.

Why: a rank that hangs keeps all others waiting in a collective, where nobody complains before `parallel.timeout_s`, and
a stopped process complains never.
How: the heartbeat files of the ranks are read once a second, and time is counted from the last change that was seen, by
this machine's own clock and only while it could look and a small file of its own could be written: neither a clock that
jumps nor a file system that stalls, for reading or for writing, condemns anybody. A process that does not even write is
named a little before those that write and do not move, which are mostly its victims. Within `launch.hang_after_s` and
ten seconds the run is taken down; `launch.start_within_s` holds for a start, a restore and a save, which are one long
call.
Left out: ranks that have never written, because they have not opened the run yet: there `parallel.timeout_s` holds.
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

LOOK_EVERY_S = 1.0
WRITES_TO_WAIT_FOR = 3
"""With very many ranks each writes rarely; a healthy one seems to stand still from one write to the next."""
WRITE_WITHIN_S = 2.0
"""A file system that takes longer to write a few bytes stalls; the time until it is done does not count."""
VICTIMS_LATER_S = 5.0
"""How much longer a rank may stand still whose process is alive."""


@final
@dataclass(slots=True)
class Watched:
    """One rank, as it was last seen to change."""

    beat: Beat
    still_s: float = 0.0
    """Since its loop moved."""
    mute_s: float = 0.0
    """Since its process wrote."""

    def see(self, beat: Beat, elapsed_s: float) -> None:
        same = beat.pid == self.beat.pid
        moved = not same or (beat.beats, beat.phase) != (self.beat.beats, self.beat.phase)
        wrote = not same or beat.writes != self.beat.writes
        self.still_s = 0.0 if moved else self.still_s + elapsed_s
        self.mute_s = 0.0 if wrote else self.mute_s + elapsed_s
        self.beat = beat

    def is_hung(self, cfg: LaunchConfig) -> bool:
        hang_after_s = max(cfg.hang_after_s, WRITES_TO_WAIT_FOR * self.beat.every_s)
        patience_s = hang_after_s if self.beat.phase in MOVING else max(cfg.start_within_s, hang_after_s)
        if self.beat.exit_code is not None:  # it leaves, and writes no more
            return self.still_s > patience_s and is_alive(self.beat.pid)
        is_mute = self.mute_s > max(patience_s / 2, 2 * self.beat.every_s)
        return self.still_s > patience_s + (0.0 if is_mute else VICTIMS_LATER_S)

    def render(self) -> str:
        """One line about a rank that hangs."""
        beat = self.beat
        alive = f"its process (pid {beat.pid}) " + ("is silent too" if self.mute_s > 2 * beat.every_s else "is alive")
        return (
            f"rank {beat.rank} on {beat.host} has not moved for {self.still_s:.0f} s, "
            f"in iteration {beat.iteration + 1} ({beat.phase}); {alive}"
        )


def is_alive(pid: int) -> bool:
    """Whether a process of this machine is there and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@final
class Supervisor:
    def __init__(self, run: RunDir, ranks: range, cfg: LaunchConfig) -> None:
        self._run, self._ranks, self._cfg = run, ranks, cfg
        self._watched: dict[int, Watched] = {}
        self._looked_s = -math.inf
        self._writing: Thread | None = None
        for rank in ranks:  # of an earlier start
            with suppress(OSError):
                heartbeat.file_of(run, rank).unlink(missing_ok=True)

    def look(self, now_s: float) -> str | None:
        """Once a second, by the clock of the caller: a line about the rank that hangs, if one does."""
        if now_s - self._looked_s < LOOK_EVERY_S:
            return None
        elapsed_s = min(now_s - self._looked_s, 2 * LOOK_EVERY_S) if self._can_write() else 0.0
        hung = [watched for watched in self._seen(elapsed_s) if watched.is_hung(self._cfg)]
        self._looked_s = now_s
        if not hung:
            return None
        return max(hung, key=lambda each: (each.mute_s, -each.beat.iteration, -each.beat.rank)).render()

    def _can_write(self) -> bool:
        """Whether the file system takes a write. While a write stalls, no other is begun and nobody waits for it."""
        if self._writing is not None and self._writing.is_alive():
            return False
        self._writing = Thread(target=self._write, name="probe", daemon=True)
        self._writing.start()
        self._writing.join(timeout=WRITE_WITHIN_S)
        return not self._writing.is_alive()

    def _write(self) -> None:
        with suppress(OSError):
            probe_of(self._run, self._ranks).write_text("\n")

    def _seen(self, elapsed_s: float) -> Iterator[Watched]:
        for rank in self._ranks:
            beat = heartbeat.read(heartbeat.file_of(self._run, rank))
            if beat is not None:
                watched = self._watched.setdefault(rank, Watched(beat))
                watched.see(beat, elapsed_s)
            if rank in self._watched:
                yield self._watched[rank]


def probe_of(run: RunDir, ranks: range) -> Path:
    """What the supervisor of these ranks writes, to see whether it can."""
    return run.heartbeat / f".supervisor-{ranks.start:05d}"
