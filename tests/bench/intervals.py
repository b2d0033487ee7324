"""Medians with an error bar: the percentile bootstrap, with a fixed seed so that a table can be printed again."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

NUM_RESAMPLES = 2000
COVERAGE = 0.9
MIN_SAMPLES = 5
"""With fewer samples the range is reported instead of an interval."""


class Estimate(NamedTuple):
    median: float
    low: float
    high: float
    num_samples: int

    @property
    def has_interval(self) -> bool:
        return self.num_samples >= MIN_SAMPLES

    def scaled(self, factor: float) -> Estimate:
        return Estimate(self.median * factor, self.low * factor, self.high * factor, self.num_samples)


def estimate(samples: Sequence[float]) -> Estimate:
    """The median and its 90 % bootstrap interval; the range of the samples if there are fewer than five."""
    if len(samples) < MIN_SAMPLES:
        return Estimate(statistics.median(samples), min(samples), max(samples), len(samples))
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(samples, k=len(samples))) for _ in range(NUM_RESAMPLES))
    tail = (1 - COVERAGE) / 2
    low, high = medians[int(tail * NUM_RESAMPLES)], medians[int((1 - tail) * NUM_RESAMPLES) - 1]
    return Estimate(statistics.median(samples), low, high, len(samples))
