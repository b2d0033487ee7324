"""Step time: finds a run that became slower and stays so, names the ranks it waits for, and says when it is over.

How: the median of the last rows is compared with a level that learns nothing from slow rows, so neither a single late
step nor a slow decline hides a lasting one. The rank is named by the seconds that each rank put into its own slot: of
its device where kernels are timed, of its host otherwise.
Left out: acting on it. A slow run computes the right numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import final

from harness.core.events import Finding, FindingKind, RankSpread, ReducedRecord
from harness.sentinel.detect.guards import FAR_SIGMAS, found_now, outlying

SLOW_FACTOR, RECOVERED_FACTOR = 1.6, 1.25
"""Times the usual step time: from where a run is slow, and to where it must fall to be so no more."""
SLOW_ROWS, LEAST_SLOW_S, ACCEPTED_ROWS, SPEED_GAIN = 10, 1.0, 1000, 0.01
"""Rows, and seconds, over which a step time is a median; slow rows after which theirs is the usual one; weight of a row
in the usual one."""
BUSY_SHARE, MANY_RANKS = 0.5, 4
"""Share of a step that a late host works; ranks from which on a median says which one is late."""


@final
@dataclass(slots=True)
class SpeedGuard:
    """Step time against its own level: raises `slow` when it rises and stays, `speed_recovered` when it is back."""

    speed: float = 0.0
    """Level of the speed in natural logarithms: steps per second, by the step time that all ranks share."""
    count: int = 0
    """Rows that the level is a mean of."""
    slow: int = 0
    """Rows since `slow` was raised; 0: it is not."""
    recent: list[float] = field(default_factory=list)
    """Logarithms of the last speeds, oldest first."""
    unit: str = ""
    """Of the speeds; the level starts again where it changes."""

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        """Compares the median of the last rows with the level, which learns nothing from slow rows."""
        speed = 1.0 / record.median_step_s if record.median_step_s > 0 else 0.0
        if not (speed > 0 and math.isfinite(speed)):
            return
        if (unit := "steps/s") != self.unit:
            self.unit, self.recent, self.count, self.slow, self.speed = unit, [], 0, 0, math.log(speed)
        self.recent = [*self.recent[1 - SLOW_ROWS :], math.log(speed)]
        now, usual = median(self.recent), self.speed
        is_known = self.count > SLOW_ROWS
        lasts = sum(math.exp(-each) for each in self.recent) >= LEAST_SLOW_S
        if self.slow:
            self.slow += 1
            if now > usual - math.log(RECOVERED_FACTOR):
                words = f"{math.exp(now):.4g} {unit} again, {math.exp(usual):.4g} is usual, after {self.slow} rows"
                yield _of_speed(FindingKind.speed_recovered, record, now, usual - math.log(RECOVERED_FACTOR), words)
                self.slow = 0
            elif self.slow > ACCEPTED_ROWS:
                self.slow, self.speed = 0, now
        elif is_known and lasts and now < usual - math.log(SLOW_FACTOR):
            self.slow = 1
            words = f"{math.exp(now):.4g} {unit}, {math.exp(usual):.4g} is usual, over {SLOW_ROWS} rows"
            finding = _of_speed(FindingKind.slow, record, now, usual - math.log(SLOW_FACTOR), words)
            finding.ranks = late_ranks(record)
            yield finding
        else:
            self.count += 1
            self.speed += max(1.0 / self.count, SPEED_GAIN) * (self.recent[-1] - usual)


def _of_speed(kind: FindingKind, record: ReducedRecord, value: float, bound: float, words: str) -> Finding:
    """A finding on the speed, given in logarithms; no batch is to blame."""
    finding = found_now(kind, record, math.exp(value), math.exp(bound), words)
    finding.cursors = []
    return finding


def late_ranks(record: ReducedRecord) -> list[int]:
    """Ranks that the others wait for: first by the time of their device, then by that of their host."""
    return _outstanding(record.ranks.get("device_time_s")) or _late_hosts(record)


def _late_hosts(record: ReducedRecord) -> list[int]:
    """Far from the median or, where there are too few ranks for one, those whose own work takes most of the step while
    that of others does not."""
    known = outlying(record.ranks.get("step_time_s"))
    far = [rank for rank, value, sigmas in known if sigmas > FAR_SIGMAS and value > 0]
    busy = [rank for rank, value, _ in known if value > BUSY_SHARE * record.median_step_s > 0]
    return far or (busy if len(busy) < len(known) else [])


def _outstanding(spread: RankSpread | None) -> list[int]:
    """Ranks that take `SLOW_FACTOR` times as long as most others; where few ranks are known, as the fastest of them."""
    known = outlying(spread)
    if spread is None or not known:
        return []
    usual = min(value for _, value, _ in known) if len(known) < MANY_RANKS else spread["median"]
    return [rank for rank, value, _ in known if value > SLOW_FACTOR * max(usual, 1e-12)]
