"""Labels for training logs: which rows belong to an event, by one rule that sees the whole log.

The rule works in hindsight on the logarithm of the loss. It needs rows of the future, so no detector can use it:
1. The level of a row is the median of the 401 rows around it. The median of a curve that only falls is its middle
   value, so a steep start does not count as a deviation.
2. The spread is 1.4826 times the median absolute deviation from that level over the 1,001 rows around the row.
3. An event is a stretch in which the median of seven rows lies more than 3 spreads above the level and which reaches 6
   spreads. Stretches at most 20 rows apart are one event. Its onset and end are its first and last row above 3 spreads.
4. Consecutive rows with a loss that is not finite are an event of their own.
5. A row outside every event whose loss or gradient norm is more than 6 spreads above its own level is an outlier: an
   odd batch that did no lasting damage. Trainers differ on whether to skip it, so an alarm on it is counted separately,
   neither as a hit nor as a false alarm.

Events that begin in the first 50 rows are left out (the loss of the first steps rises in some logs), and so are alarms
near them. Rules 1 to 4 and their numbers were fixed on the tuning logs before they were run on a held-out log.
Not found by this rule: a permanent rise of the level, which looks the same as harder data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

LEVEL_ROWS, SPREAD_ROWS, LASTING_ROWS = 200, 500, 3
"""Rows on each side of the middle one."""
EVENT_SPREADS, PEAK_SPREADS = 3.0, 6.0
JOINED_ROWS, STARTUP_ROWS = 20, 50
MIN_SPREAD = 1e-3
"""In nats of the logarithm: 0.1 % of the loss."""
MAD_TO_SIGMA = 1.4826

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Labels:
    events: tuple[tuple[int, int], ...]
    """First and last row of each."""
    startup: tuple[tuple[int, int], ...]
    """Events that begin in the first rows; nothing is scored there."""
    outliers: tuple[int, ...]


def label(losses: Sequence[float], grad_norms: Sequence[float] = ()) -> Labels:
    is_nonfinite = ~np.isfinite(np.asarray(losses, dtype=np.float64))
    rows, heights = heights_above_level(losses)
    stretches = [(int(rows[first]), int(rows[last])) for first, last in find_stretches(heights)]
    norm_rows, norm_heights = heights_above_level(grad_norms)
    far = {*rows[heights > PEAK_SPREADS].tolist(), *norm_rows[norm_heights > PEAK_SPREADS].tolist()}
    inside = {row for first, last in stretches for row in range(first, last + 1)}
    return Labels(
        events=tuple(sorted([*join(np.flatnonzero(is_nonfinite), 1), *(s for s in stretches if s[0] >= STARTUP_ROWS)])),
        startup=tuple(stretch for stretch in stretches if stretch[0] < STARTUP_ROWS),
        outliers=tuple(sorted(far - inside)),
    )


def heights_above_level(values: Sequence[float]) -> tuple[NDArray[np.int64], Floats]:
    """Rows with a finite value, and how many spreads each lies above its level."""
    array = np.asarray(values, dtype=np.float64)
    rows = np.flatnonzero(np.isfinite(array))
    if len(rows) <= 2 * LASTING_ROWS:
        return rows[:0], array[:0]
    logs = np.log(np.maximum(array[rows], np.finfo(np.float64).tiny))
    residuals = logs - centred_median(logs, LEVEL_ROWS)
    return rows, residuals / np.maximum(MAD_TO_SIGMA * spread_around(np.abs(residuals)), MIN_SPREAD)


def find_stretches(heights: Floats) -> Iterator[tuple[int, int]]:
    """First and last row of each stretch that stays above its level."""
    if not len(heights):
        return
    lasting = np.flatnonzero(centred_median(heights, LASTING_ROWS) > EVENT_SPREADS)
    for first, last in join(lasting, JOINED_ROWS):
        around = np.arange(max(0, first - LASTING_ROWS), min(len(heights), last + LASTING_ROWS + 1))
        above = around[heights[around] > EVENT_SPREADS]
        if heights[above].max() >= PEAK_SPREADS:
            yield int(above[0]), int(above[-1])


def centred_median(values: Floats, half_width: int) -> Floats:
    """Median over each row and `half_width` rows on either side; near the ends, over as many as both sides have."""
    num = len(values)
    medians = np.empty(num)
    half = min(half_width, (num - 1) // 2)
    medians[half : num - half] = np.median(sliding_window_view(values, 2 * half + 1), axis=1)
    for row in range(half):
        medians[row] = np.median(values[: 2 * row + 1])
        medians[num - 1 - row] = np.median(values[num - 1 - 2 * row :])
    return medians


def spread_around(deviations: Floats) -> Floats:
    """Centred median with whole windows only: rows near an end take the value of the nearest whole window."""
    half = min(SPREAD_ROWS, (len(deviations) - 1) // 2)
    medians = np.median(sliding_window_view(deviations, 2 * half + 1), axis=1)
    return np.pad(medians, (half, len(deviations) - half - len(medians)), mode="edge")


def join(rows: NDArray[np.int64], max_distance: int) -> list[tuple[int, int]]:
    """First and last of rows that are at most `max_distance` from the next."""
    if not len(rows):
        return []
    parts = np.split(rows, np.flatnonzero(np.diff(rows) > max_distance) + 1)
    return [(int(part[0]), int(part[-1])) for part in parts]
