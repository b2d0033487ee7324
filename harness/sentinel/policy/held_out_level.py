"""Predicts the held-out loss of a healthy state, to tell damaged weights from new data.

Why: a high training loss cannot tell damaged weights from new data. The loss on fixed held-out rows can: the rows never
change, so it rises only if the weights got worse.
How: the held-out loss is measured at the start of the run and at each checkpoint. At an incident the newest measurement
before its onset is the clean level, minus the fall of the training loss since then. Without that correction the fast
descent early in a run would hide damage.
Left out: forgetting. A model that trained on other data for long is worse on the held-out rows; that counts as damage,
and the ladder is climbed as it would be without a check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, final

from harness.core.events import HeldOutMeasured
from harness.sentinel.policy.lineage import Lineage

NUM_LEVEL = 9
"""Number of training losses whose median is the level."""
WINDOWS = (9, 25, 50)
"""Numbers of training losses whose medians are compared between a measurement and an onset. The smallest fall counts: a
short window is noisy, a long one lags behind a steep descent."""
MOST_MEASURED = 64


class Measurement(NamedTuple):
    iteration: int
    step: int
    loss: float
    train_losses: list[float]
    """Median of the last training losses at that time, for each of `WINDOWS`; the held-out loss if there was none."""


@final
@dataclass(slots=True)
class HeldOutLevel:
    measured: list[Measurement] = field(default_factory=list)
    """On the present lineage, oldest first."""

    def add(self, event: HeldOutMeasured, lineage: Lineage) -> None:
        """Store a measurement; one that is not finite is ignored."""
        if math.isfinite(event.loss):
            levels = [lineage.level_before(event.iteration + 1, num) for num in WINDOWS]
            known = [event.loss if level is None else level for level in levels]
            now = Measurement(event.iteration, event.step, event.loss, known)
            self.measured = [*self.measured[1 - MOST_MEASURED :], now]

    def drop_after(self, step: int) -> None:
        """Drop the measurements after `step`, which a restore undid."""
        self.measured = [measurement for measurement in self.measured if measurement.step <= step]

    def expected(self, onset: int, lineage: Lineage) -> float | None:
        """The held-out loss of a healthy state at an onset; None if there is no earlier measurement. The update before
        the onset may have done the damage, so the measurement must precede that update."""
        newest_first = reversed(self.measured)
        clean = next((each for each in newest_first if each.iteration < onset - 1 or each.step == 0), None)
        if clean is None:
            return None
        levels = [lineage.level_before(onset, num) for num in WINDOWS]
        falls = [now - then for now, then in zip(levels, clean.train_losses, strict=True) if now is not None]
        return clean.loss + min(0.0, max(falls, default=0.0))

    def state(self) -> list[Any]:
        return [list(measurement) for measurement in self.measured]

    @classmethod
    def restore(cls, state: list[Any]) -> Self:
        return cls([Measurement(*entry) for entry in state])


def is_at_level(loss: float | None, expected: float | None, *, tolerance: float) -> bool:
    """Whether a held-out loss is that of a healthy state: at most `tolerance` (a share) above the expected one."""
    return loss is not None and expected is not None and loss <= expected * (1 + tolerance)
