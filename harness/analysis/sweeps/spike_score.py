"""Computes the spike score of a run: the share of steps with a loss spike.

Why: two settings may end at the same loss although one of them was unstable on the way.
How: as published for OLMo 2: the share of steps whose loss is more than seven standard deviations above the mean of the
1,000 steps before. The window holds all finite losses, also those of rejected updates and of spikes, so a lasting
higher level soon counts as usual. A non-finite loss counts as a spike and never enters a window. Early steps have
shorter windows; steps with fewer than `FEWEST_ROWS` before them are not scored.
Left out: slow spikes. The incidents of the sentinel cover them.
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
"""Windows copied at once; they take 33 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeScore:
    num_spikes: int
    num_judged: int
    """Steps with at least `FEWEST_ROWS` finite losses before them."""

    @property
    def share(self) -> float | None:
        """Spikes over scored steps; None: the run was too short."""
        return self.num_spikes / self.num_judged if self.num_judged else None


def spike_score(losses: Sequence[float]) -> SpikeScore:
    """The spike score of a run's training losses, one for each step, in order."""
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
    """Bound that each value must exceed to be a spike; Inf if too few values come before it."""
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
