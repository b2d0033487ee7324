"""Follows the loss after a spike: whether it still falls, and the type of the spike once it is over.

Why: most spikes recover by themselves, some within ten steps and some over hundreds. A spike that keeps falling is
recovering, however slowly; one that stopped falling above its level, or never fell, needs a restore.
How: a move of the loss counts if it exceeds the noise. `RecoveryTrend` stores the value, the time and the direction of
the last move. Small fluctuations around that value are no move, so the last move of a plateau grows old.

| type | trajectory |
|---|---|
| 1 recovered | back within half a sigma of the level before the spike, after ten steps or after hundreds |
| 2 lingering | fell from its peak but stays above the level, or stays above it by less than `LARGE_RISE` |
| 3 divergent | not finite, or did not fall from its peak and still rises or stays far above the level |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

RECOVERED_SIGMAS = 0.5
"""A loss up to this many sigmas above the level before the spike has recovered."""
TURNED, TURNED_SIGMAS = 0.25, 2.0
"""A spike has turned once it fell by this share of its height and by this many sigmas."""
LARGE_RISE = 0.5
"""Share of the level. A loss that stays higher above it, and near its peak, is divergent."""
SMALLEST_MOVE, MOVE_SIGMAS = 0.02, 1.5
"""A move exceeds this share of the height of the spike and this many sigmas."""


@final
@dataclass(slots=True)
class RecoveryTrend:
    """The last move of the smoothed loss of a spike."""

    value: float | None = None
    """The smoothed loss at the last move."""
    moved_at: int = 0
    """Iteration or step of the last move; of the start before the first one."""
    direction: int = 0
    """Of the last move: -1 a fall, 1 a rise, 0 before the first move."""

    def follow(self, loss: float, at: int, *, level: float, sigma: float) -> None:
        """Add a value of the smoothed loss; `level` and `sigma` are those before the spike."""
        if self.value is None:
            self.value = loss
            return
        smallest = max(MOVE_SIGMAS * sigma, SMALLEST_MOVE * (self.value - level))
        if abs(loss - self.value) > smallest:
            self.direction = -1 if loss < self.value else 1
            self.value, self.moved_at = loss, at

    def is_recovering(self, at: int, *, patience: int) -> bool:
        """Whether the last move was a fall, and not longer ago than `patience`."""
        return self.direction < 0 and at - self.moved_at < patience


def has_turned(*, level: float, sigma: float, peak: float, loss: float) -> bool:
    """Whether the loss fell from its peak by a good share of its height."""
    return peak - loss > max(TURNED * (peak - level), TURNED_SIGMAS * sigma)


def has_recovered(*, level: float, sigma: float, loss: float) -> bool:
    """Whether a smoothed loss is back at the level before the spike."""
    return loss <= level + RECOVERED_SIGMAS * sigma


def classify_trajectory(*, level: float, sigma: float, peak: float, loss: float, is_rising: bool) -> int:
    """The type of a spike with finite losses: 1 recovered, 2 lingering, 3 divergent. `loss` is its last smoothed loss,
    `peak` its highest."""
    if has_recovered(level=level, sigma=sigma, loss=loss):
        return 1
    is_high = is_rising or loss > (1 + LARGE_RISE) * level
    return 3 if is_high and not has_turned(level=level, sigma=sigma, peak=peak, loss=loss) else 2
