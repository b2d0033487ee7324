"""Reads the event log and the system samples of a run once for all sinks.

Sinks that keep up read the same chunks, which are parsed once. A sink that is behind, because its server was down,
reads the log from its own position until it reaches a boundary of the shared chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import final

from harness.core.events import SystemSampled
from harness.core.rundir import RunDir
from harness.telemetry import system_sampler
from harness.telemetry.event_log import Chunk, read_chunk, tail

RECENT_CHUNKS = 4
TAIL_BYTES = 16 * 1024
MOST_MACHINES = 16
"""System samples are sent for this many machines, the ones with the lowest ranks; the files hold all of them."""


@final
class LogTail:
    """The log of one run; its methods may be called from several threads."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._lock = Lock()
        self._recent: deque[Chunk] = deque(maxlen=RECENT_CHUNKS)
        self._newest: dict[Path, tuple[tuple[int, int, int], float]] = {}
        """File of samples -> its identity and size when it was last read, and the time of its newest sample."""

    def read(self, offset: int) -> Chunk | None:
        """The events from byte `offset` on; None if there is no further whole line."""
        with self._lock:
            shared = next((chunk for chunk in self._recent if chunk.start == offset), None)
            if shared is not None:
                return shared
            boundaries = [place for chunk in self._recent for place in (chunk.start, chunk.end) if place > offset]
            chunk = read_chunk(self._run.events, offset, min(boundaries, default=None))
            if chunk is not None and not boundaries:
                self._recent.append(chunk)
            return chunk

    def samples_after(self, sampled: Mapping[str, float]) -> list[SystemSampled]:
        """System samples after the ones that a sink has got (rank -> time of the last), machine by machine."""
        found: list[SystemSampled] = []
        ranks = {path: path.stem.removeprefix("rank-") for path in sorted(self._run.system.glob("rank-*.jsonl"))}
        known = [(path, int(rank)) for path, rank in ranks.items() if rank.isdecimal()]  # a user may keep copies there
        for path, rank in known[:MOST_MACHINES]:
            since = sampled.get(str(rank), float("-inf"))
            with self._lock:
                found += self._samples_of(path, since)
        return found

    def _samples_of(self, path: Path, since: float) -> list[SystemSampled]:
        status = path.stat()
        identity = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._newest.get(path)
        if known is not None and known == (identity, since):
            return []
        samples = [event for event in tail(path, TAIL_BYTES) if isinstance(event, SystemSampled)]
        if status.st_size > TAIL_BYTES and all(sample.time != since for sample in samples):
            samples = system_sampler.read(path)
        self._newest[path] = (identity, samples[-1].time if samples else since)
        return samples[num_until(samples, since) :]


def num_until(samples: Sequence[SystemSampled], since: float) -> int:
    """How many samples of a file a sink has got whose last one is of time `since`.

    Times fall where the clock was set back, so the place in the file decides. The sample itself is gone if the file was
    thinned out or has lost its end. Then the later times are new, and if there are none, what follows the last fall.
    """
    times = [sample.time for sample in samples]
    for place in reversed(range(len(times))):
        if times[place] == since:
            return place + 1
    later = next((place for place, time in enumerate(times) if time > since), len(times))
    falls = [place for place in range(1, len(times)) if times[place] < times[place - 1]]
    return falls[-1] if later == len(times) and falls else later
