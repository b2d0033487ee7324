"""Is the state damaged, or is the data different? What the held-out loss says, and what it should be.

Why: a high training loss alone cannot tell broken weights from new data. The loss on fixed held-out rows can: the rows
never change, so it rises only where the weights got worse.
How: the loss on these rows is measured as the run starts and when a checkpoint is taken. At an incident the newest
measurement from before its onset is the clean level. Since then the model has learned: where the training loss fell
between the measurement and the onset, the held-out loss should have fallen as much. Without that correction the fast
descent early in a run would hide damage.
Left out: forgetting. A model that trained on other data alone for long is worse on the held-out rows; that counts as
damage, and the ladder is climbed as it would be without a check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, final

from harness.core.events import HeldOutMeasured
from harness.sentinel.policy.lineage import Lineage

NUM_LEVEL = 9
"""Training losses whose median is the level."""
WINDOWS = (9, 25, 50)
"""Numbers of training losses whose medians are compared between a measurement and an onset. The least fall counts: few
losses are noisy, many lag behind a steep descent."""
MOST_MEASURED = 64


class Measurement(NamedTuple):
    iteration: int
    step: int
    loss: float
    train_losses: list[float]
    """Medians of the last training losses then, of each of `WINDOWS`; the held-out loss itself before there are any."""


@final
@dataclass(slots=True)
class HeldOutLevel:
    measured: list[Measurement] = field(default_factory=list)
    """On the present branch, oldest first."""

    def add(self, event: HeldOutMeasured, lineage: Lineage) -> None:
        """The held-out loss was measured; what is not finite is no level."""
        if math.isfinite(event.loss):
            levels = [lineage.level_before(event.iteration + 1, num) for num in WINDOWS]
            known = [event.loss if level is None else level for level in levels]
            now = Measurement(event.iteration, event.step, event.loss, known)
            self.measured = [*self.measured[1 - MOST_MEASURED :], now]

    def drop_after(self, step: int) -> None:
        """The run stands at an earlier step again."""
        self.measured = [each for each in self.measured if each.step <= step]

    def expected(self, onset: int, lineage: Lineage) -> float | None:
        """The held-out loss of a healthy state at an onset; None where it was not measured before. The update before
        the onset may have done the damage, so the measurement must be from before that one."""
        clean = next((each for each in reversed(self.measured) if each.iteration < onset - 1 or each.step == 0), None)
        if clean is None:
            return None
        levels = [lineage.level_before(onset, num) for num in WINDOWS]
        falls = [now - then for now, then in zip(levels, clean.train_losses, strict=True) if now is not None]
        return clean.loss + min(0.0, max(falls, default=0.0))

    def state(self) -> list[Any]:
        return [list(each) for each in self.measured]

    @classmethod
    def restore(cls, state: list[Any]) -> Self:
        return cls([Measurement(*each) for each in state])


def is_at_level(loss: float | None, expected: float | None, *, tolerance: float) -> bool:
    """Whether a held-out loss is that of a healthy state."""
    return loss is not None and expected is not None and loss <= expected * (1 + tolerance)
