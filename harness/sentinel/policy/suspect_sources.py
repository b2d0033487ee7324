"""Which source of data the guilty batches share.

Why: one bad source poisons a run batch by batch; skipping them one at a time spends the budget and leaves the poison.
How: every step tells the mean loss of each source in its batch, over all ranks, so that every rank knows the same.
A source is blamed for a batch when it alone is not finite, or alone far above its own habit. It is guilty once the last
few guilty batches all blame it.
Left out: how many rows a source had in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Self, final

from harness.core.events import ReducedRecord

GAIN = 0.05
"""Weight of a new loss in a source's habit."""
LEAST_SEEN = 20
MOST_BLAMED = 64
MOST_UNSEEN = 50
"""Healthy steps without a row of a source after which it counts as switched off."""
FAR = 6.0
"""Mean deviations above its habit at which a source stands out."""


@final
@dataclass(slots=True)
class SuspectSources:
    loss_stats: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    """Source -> how often seen, mean loss, mean deviation."""
    blamed: list[tuple[str | None, int]] = field(default_factory=list)
    """For each guilty batch the source that stands out, if one does, and the net progress then; oldest first."""
    removed: list[str] = field(default_factory=list)
    unseen: dict[str, int] = field(default_factory=dict)
    """Source -> healthy steps since it was last in a batch."""

    def on_clean_record(self, record: ReducedRecord) -> None:
        """What a healthy step tells of its sources."""
        if record.source_losses:
            self.unseen = {name: num + 1 for name, num in self.unseen.items()} | dict.fromkeys(record.source_losses, 0)
        for name, loss in record.source_losses.items():
            if math.isfinite(loss):
                num, mean, deviation = self.loss_stats.get(name, (0, loss, 0.0))
                gain = max(GAIN, 1 / (num + 1))
                deviation += gain * (abs(loss - mean) - deviation)
                self.loss_stats[name] = (num + 1, mean + gain * (loss - mean), deviation)

    def source_of(self, record: ReducedRecord) -> str | None:
        """The one source that stands out in a batch; None where none or several do, or where there is only one."""
        outstanding = [name for name, loss in record.source_losses.items() if self._stands_out(name, loss)]
        return outstanding[0] if len(outstanding) == 1 and len(self._others(outstanding[0])) > 0 else None

    def blame(self, source: str | None, *, progress: int) -> None:
        self.blamed = [*self.blamed[1 - MOST_BLAMED :], (source, progress)]

    def shared_source(self, num: int, *, since: int) -> str | None:
        """The source that the last `num` guilty batches share, all since a net progress."""
        last = [source for source, progress in self.blamed[-num:] if progress >= since]
        guilty = last[0] if len(last) == num and len(set(last)) == 1 else None
        return guilty if guilty is not None and self._others(guilty) else None

    def clear_blame(self) -> None:
        """Whatever was blamed so far is dealt with."""
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
        """Sources besides this one that the run still sees; one that a phase switched off cannot take over."""
        return [name for name in self.loss_stats if name != source and self.unseen.get(name, 0) < MOST_UNSEEN]
