"""Detects a lasting slowdown (slow), names the ranks that cause it, and detects its end (speed_recovered).

How: the speed is in tokens per second, because the batch may grow (`train.batch_size_warmup`); in steps per second if
a log has no batch sizes. The median of the last rows is compared with a level that slow rows do not change, so a single
late step raises nothing and a slow decline does not shift the level. The ranks are named by the seconds in the per-rank
slots: device seconds if kernels are timed, else host seconds.
Left out: actions. A slow run computes the right numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import final

from harness.core.events import Finding, FindingKind, RankSpread, ReducedRecord
from harness.sentinel.detect.guards import FAR_SIGMAS, make_finding, rank_distances

SLOW_FACTOR, RECOVERED_FACTOR = 1.6, 1.25
"""Multiples of the usual step time: above the first a run is slow, below the second it has recovered."""
SLOW_ROWS, LEAST_SLOW_S, ACCEPTED_ROWS, SPEED_GAIN = 10, 1.0, 1000, 0.01
"""Rows of the median, and its minimum duration in seconds; slow rows after which their speed becomes the usual one;
weight of a row in the usual speed."""
BUSY_SHARE, MANY_RANKS = 0.5, 4
"""Share of the step that a late host is busy; number of ranks from which the median identifies the late one."""


@final
@dataclass(slots=True)
class SpeedGuard:
    """Raises `slow` when the speed drops below its level and stays there, `speed_recovered` when it is back."""

    speed: float = 0.0
    """Level of the log speed in `unit`, from the median step time over ranks."""
    count: int = 0
    """Rows averaged in the level."""
    slow: int = 0
    """Rows since `slow` was raised; 0 if it is not raised."""
    recent: list[float] = field(default_factory=list)
    """Logarithms of the last speeds, oldest first."""
    unit: str = ""
    """Unit of the speeds; the level restarts if it changes."""
    recent_s: list[float] = field(default_factory=list)
    """Step times of the rows in `recent`, in seconds."""

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        """Compare the median of the last rows with the level, which slow rows do not change."""
        num, unit = (record.batch_tokens, "tokens/s") if record.batch_tokens else (1, "steps/s")
        speed = num / record.median_step_s if record.median_step_s > 0 else 0.0
        if not (speed > 0 and math.isfinite(speed)):
            return
        if unit != self.unit:
            self.unit, self.recent, self.recent_s = unit, [], []
            self.count, self.slow, self.speed = 0, 0, math.log(speed)
        self.recent = [*self.recent[1 - SLOW_ROWS :], math.log(speed)]
        self.recent_s = [*self.recent_s[1 - SLOW_ROWS :], record.median_step_s]
        now, usual = median(self.recent), self.speed
        is_known = self.count > SLOW_ROWS
        lasts = sum(self.recent_s) >= LEAST_SLOW_S
        if self.slow:
            self.slow += 1
            if now > usual - math.log(RECOVERED_FACTOR):
                message = f"{math.exp(now):.4g} {unit} after {self.slow} slow steps, usually {math.exp(usual):.4g}"
                bound = usual - math.log(RECOVERED_FACTOR)
                yield _make_speed_finding(FindingKind.speed_recovered, record, now, bound, message)
                self.slow = 0
            elif self.slow > ACCEPTED_ROWS:
                self.slow, self.speed = 0, now
        elif is_known and lasts and now < usual - math.log(SLOW_FACTOR):
            self.slow = 1
            message = f"{math.exp(now):.4g} {unit} over the last {SLOW_ROWS} steps, usually {math.exp(usual):.4g}"
            finding = _make_speed_finding(FindingKind.slow, record, now, usual - math.log(SLOW_FACTOR), message)
            finding.ranks = late_ranks(record)
            yield finding
        else:
            self.count += 1
            self.speed += max(1.0 / self.count, SPEED_GAIN) * (self.recent[-1] - usual)


def _make_speed_finding(kind: FindingKind, record: ReducedRecord, value: float, bound: float, message: str) -> Finding:
    """A finding about the speed, given in logarithms; no batch is blamed."""
    finding = make_finding(kind, record, math.exp(value), math.exp(bound), message)
    finding.cursors = []
    return finding


def late_ranks(record: ReducedRecord) -> list[int]:
    """Ranks that the others wait for: by device time, or else by host time."""
    return _late_devices(record.ranks.get("device_time_s")) or _late_hosts(record)


def _late_hosts(record: ReducedRecord) -> list[int]:
    """Ranks far from the median host time; with too few ranks for a median, those whose host is busy for most of the
    step while other hosts are not."""
    known = rank_distances(record.ranks.get("step_time_s"))
    far = [rank for rank, value, sigmas in known if sigmas > FAR_SIGMAS and value > 0]
    busy = [rank for rank, value, _ in known if value > BUSY_SHARE * record.median_step_s > 0]
    return far or (busy if len(busy) < len(known) else [])


def _late_devices(spread: RankSpread | None) -> list[int]:
    """Ranks whose device takes `SLOW_FACTOR` times the median; with few ranks, times the fastest."""
    known = rank_distances(spread)
    if spread is None or not known:
        return []
    usual = min(value for _, value, _ in known) if len(known) < MANY_RANKS else spread["median"]
    return [rank for rank, value, _ in known if value > SLOW_FACTOR * max(usual, 1e-12)]
