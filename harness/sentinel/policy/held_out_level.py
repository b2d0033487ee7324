"""Predicts the held-out loss of a healthy state, to tell damaged weights from new data.

Why: a high training loss cannot tell damaged weights from new data. The loss on fixed held-out rows can: the rows never
change, so it rises only if the weights got worse.
How: the held-out loss is measured at the start of the run and at each checkpoint. At an incident the newest measurement
before its onset is the clean level, minus the fall of the training loss since then. Without that correction the fast
descent early in a run would hide damage. The window after a planned change is left out of the fall: easier data lowers
the training loss, not that of the held-out rows.
Left out: forgetting. A model that trained on other data for long is worse on the held-out rows; that counts as damage,
and the ladder is climbed as it would be without a check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, final

from harness.core.events import HeldOutMeasured, ReducedRecord
from harness.sentinel.policy.lineage import Lineage

NUM_LEVEL = 9
"""Number of training losses whose median is the level."""
WINDOWS = (9, 25, 50)
"""Numbers of training losses whose medians are compared between a measurement and an onset. The smallest fall counts: a
short window is noisy, a long one lags behind a steep descent."""
MOST_MEASURED = 64
MOST_EDGES = 128


class Measurement(NamedTuple):
    iteration: int
    step: int
    loss: float
    train_losses: list[float]
    """Median of the last training losses at that time, for each of `WINDOWS`; the held-out loss if there was none."""


class WindowEdge(NamedTuple):
    """The first record in the window after a planned change, or the first one behind it."""

    iteration: int
    step: int
    begins: bool
    train_losses: list[float | None]
    """Median of the training losses before it, for each of `WINDOWS`; None if there was none."""


@final
@dataclass(slots=True)
class HeldOutLevel:
    measured: list[Measurement] = field(default_factory=list)
    """On the present lineage, oldest first."""
    edges: list[WindowEdge] = field(default_factory=list)
    """Of the windows on the present lineage, oldest first; begin and end alternate."""
    rows: str = ""
    """Hash of the rows that were measured; empty: by an older version."""

    def on_record(self, record: ReducedRecord, lineage: Lineage) -> None:
        """Store where windows after planned changes begin and end."""
        if record.in_planned_change != (bool(self.edges) and self.edges[-1].begins):
            levels = [lineage.level_before(record.iteration, num) for num in WINDOWS]
            edge = WindowEdge(record.iteration, record.step, record.in_planned_change, levels)
            self.edges = [*self.edges[1 - MOST_EDGES :], edge]

    def use_rows(self, rows: str) -> None:
        """Drop the measurements of other rows: a resume with other data, another number of ranks or another
        micro-batch measures other rows."""
        if rows != self.rows:
            self.measured, self.rows = [], rows

    def add(self, event: HeldOutMeasured, lineage: Lineage) -> None:
        """Store a measurement; one that is not finite is ignored."""
        if math.isfinite(event.loss):
            levels = [lineage.level_before(event.iteration + 1, num) for num in WINDOWS]
            known = [event.loss if level is None else level for level in levels]
            now = Measurement(event.iteration, event.step, event.loss, known)
            self.measured = [*self.measured[1 - MOST_MEASURED :], now]

    def drop_after(self, step: int) -> None:
        """Drop the measurements and the edges after `step`, which a restore undid."""
        self.measured = [measurement for measurement in self.measured if measurement.step <= step]
        self.edges = [edge for edge in self.edges if edge.step <= step]

    def expected(self, onset: int, lineage: Lineage) -> float | None:
        """The held-out loss of a healthy state at an onset; None if there is no earlier measurement. The update before
        the onset may have done the damage, so the measurement must precede that update."""
        clean = self.newest_before(onset - 1)
        if clean is None:
            return None
        return clean.loss + min(0.0, max(self._rises(clean, onset, lineage), default=0.0))

    def newest_before(self, iteration: int) -> Measurement | None:
        """The newest measurement before an iteration; one at step 0 is before all."""
        newest_first = reversed(self.measured)
        return next((each for each in newest_first if each.iteration < iteration or each.step == 0), None)

    def _rises(self, clean: Measurement, onset: int, lineage: Lineage) -> list[float]:
        """By how much the training loss rose between a measurement and an onset outside of the windows after planned
        changes, for each of `WINDOWS`; negative if it fell. A window without losses is left out."""
        since: Sequence[float | None] | None = clean.train_losses
        spans = []
        for edge in self.edges:
            if edge.iteration > onset:
                break
            if edge.iteration <= clean.iteration:
                since = None if edge.begins else clean.train_losses
            elif edge.begins:
                spans += [(since, edge.train_losses)] if since is not None else []
                since = None
            else:
                since = edge.train_losses
        if since is not None:
            spans.append((since, [lineage.level_before(onset, num) for num in WINDOWS]))
        rises = []
        for place in range(len(WINDOWS)):
            ends = [(then[place], now[place]) for then, now in spans]
            known = [now - then for then, now in ends if now is not None and then is not None]
            rises += [sum(known)] if known else []
        return rises

    def state(self) -> list[Any]:
        return [list(measurement) for measurement in self.measured]

    def state_of_edges(self) -> list[Any]:
        return [list(edge) for edge in self.edges]

    @classmethod
    def restore(cls, measured: list[Any], edges: list[Any], rows: str = "") -> Self:
        return cls([Measurement(*entry) for entry in measured], [WindowEdge(*entry) for entry in edges], rows)


def is_at_level(loss: float | None, expected: float | None, *, tolerance: float) -> bool:
    """Whether a held-out loss is that of a healthy state: at most `tolerance` (a share) above the expected one."""
    return loss is not None and expected is not None and loss <= expected * (1 + tolerance)
