"""Finds the data source that the bad batches have in common.

Why: skipping the batches of one bad source one at a time spends the skip budget and leaves the source in the mixture.
How: each record holds the mean loss of each source in its batch, over all ranks, so every rank has the same numbers. A
source is blamed for a batch if it is the only one that is not finite or far above its own usual loss. It is guilty once
the last few bad batches all blame it.
Left out: the number of rows of a source in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Self, final

from harness.core.events import ReducedRecord

GAIN = 0.05
"""Weight of a new loss in the moving averages of a source."""
LEAST_SEEN = 20
MOST_BLAMED = 64
MOST_UNSEEN = 50
"""Clean steps without a row of a source after which it counts as switched off."""
FAR = 6.0
"""Mean deviations above its usual loss at which a source stands out."""


@final
@dataclass(slots=True)
class SuspectSources:
    loss_stats: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    """Source -> number of losses, mean loss, mean absolute deviation."""
    blamed: list[tuple[str | None, int]] = field(default_factory=list)
    """For each bad batch the source that stands out, if any, and the net progress at that time; oldest first."""
    removed: list[str] = field(default_factory=list)
    unseen: dict[str, int] = field(default_factory=dict)
    """Source -> clean steps since it was last in a batch."""

    def on_clean_record(self, record: ReducedRecord) -> None:
        """Update the usual loss of each source in a clean step."""
        if record.source_losses:
            self.unseen = {name: num + 1 for name, num in self.unseen.items()} | dict.fromkeys(record.source_losses, 0)
        for name, loss in record.source_losses.items():
            if math.isfinite(loss):
                num, mean, deviation = self.loss_stats.get(name, (0, loss, 0.0))
                gain = max(GAIN, 1 / (num + 1))
                deviation += gain * (abs(loss - mean) - deviation)
                self.loss_stats[name] = (num + 1, mean + gain * (loss - mean), deviation)

    def source_of(self, record: ReducedRecord) -> str | None:
        """The only source that stands out in a batch; None if none or several do, or if there is only one source."""
        outstanding = [name for name, loss in record.source_losses.items() if self._stands_out(name, loss)]
        return outstanding[0] if len(outstanding) == 1 and len(self._others(outstanding[0])) > 0 else None

    def blame(self, source: str | None, *, progress: int) -> None:
        self.blamed = [*self.blamed[1 - MOST_BLAMED :], (source, progress)]

    def shared_source(self, num: int, *, since: int) -> str | None:
        """The source that the last `num` bad batches share, all since net progress `since`; None if there is none."""
        last = [source for source, progress in self.blamed[-num:] if progress >= since]
        guilty = last[0] if len(last) == num and len(set(last)) == 1 else None
        return guilty if guilty is not None and self._others(guilty) else None

    def clear_blame(self) -> None:
        """Forget which sources were blamed."""
        self.blamed = []

    def remove(self, source: str) -> None:
        self.removed.append(source)
        self.loss_stats.pop(source, None)
        self.unseen.pop(source, None)
        self.clear_blame()

    def state(self) -> dict[str, Any]:
        return {
            "habits": {name: list(habit) for name, habit in self.loss_stats.items()},
            "blamed": [list(entry) for entry in self.blamed],
            "removed": list(self.removed),
            "unseen": dict(self.unseen),
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        loss_stats = {name: (num, mean, deviation) for name, (num, mean, deviation) in state["habits"].items()}
        blamed = [(source, progress) for source, progress in state["blamed"]]
        return cls(loss_stats, blamed, list(state["removed"]), dict(state.get("unseen", {})))

    def _stands_out(self, name: str, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        num, mean, deviation = self.loss_stats.get(name, (0, 0.0, 0.0))
        return num >= LEAST_SEEN and loss > mean + FAR * deviation

    def _others(self, source: str) -> list[str]:
        """Other sources that are still in the mixture; one that a data phase switched off cannot take over."""
        return [name for name in self.loss_stats if name != source and self.unseen.get(name, 0) < MOST_UNSEEN]
