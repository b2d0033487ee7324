"""The spike score: how often the loss of a run leaps, as one number that compares runs.

Why: two settings may end at the same loss, and one of them have come there by luck.
How: the published measure (OLMo 2): the share of steps whose loss lies more than seven standard deviations above the
mean of the 1,000 steps before. All finite losses are part of the window, those of refused updates and of spikes too, so
a level that stays up soon counts as usual. A loss that is not finite counts as a spike and never enters a window.
The first steps are compared with as many as there are, once there are `FEWEST_ROWS`; those before are not judged.
Left out: spikes that come slowly. For those there are the incidents of the run's own sentinel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW_ROWS = 1000
FEWEST_ROWS = 100
SIGMAS = 7.0
ROWS_AT_ONCE = 4096
"""Windows are copied; so many of them take 33 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeScore:
    num_spikes: int
    num_judged: int
    """Steps that had enough others before them."""

    @property
    def share(self) -> float | None:
        """None: the run was too short to be judged."""
        return self.num_spikes / self.num_judged if self.num_judged else None


def spike_score(losses: Sequence[float]) -> SpikeScore:
    """The score of a run's training losses, one a step, in their order."""
    values = np.asarray(losses, dtype=np.float64)
    is_finite = np.isfinite(values)
    usual = values[is_finite]
    num_before = np.cumsum(is_finite) - is_finite
    broken = int((~is_finite & (num_before >= FEWEST_ROWS)).sum())
    return SpikeScore(
        num_spikes=int((usual > bounds(usual)).sum()) + broken,
        num_judged=int((num_before >= FEWEST_ROWS).sum()),
    )


def bounds(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each value must exceed to be a spike; infinite where too few came before it."""
    out = np.full(len(values), np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        for place in range(FEWEST_ROWS, min(WINDOW_ROWS, len(values))):
            out[place] = bound(values[:place])
        if len(values) > WINDOW_ROWS:
            windows = np.lib.stride_tricks.sliding_window_view(values[:-1], WINDOW_ROWS)
            for first in range(0, len(windows), ROWS_AT_ONCE):
                part = windows[first : first + ROWS_AT_ONCE]
                place = WINDOW_ROWS + first
                out[place : place + len(part)] = part.mean(axis=1) + SIGMAS * part.std(axis=1)
    return np.where(np.isnan(out), np.inf, out)


def bound(window: NDArray[np.float64]) -> float:
    return float(window.mean() + SIGMAS * window.std())
