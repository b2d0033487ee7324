"""Tracks which iterations led to the present weights, across rewinds, rollbacks and restarts.

Why: steps go back at a restore, iterations never do. "Before step 900" and "before batch 1200 was consumed" must be
converted to iterations to select a snapshot or a checkpoint.
How: a root is an (iteration, step) at which the run started or was restored. Between two roots a step takes at least
one iteration, so `root iteration + steps` is a lower bound for the iteration that reached a step; rejected updates only
make it more conservative. The records of the last `MEMORY_ITERATIONS` are stored; a restore drops the undone ones.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import islice, takewhile
from statistics import linear_regression, median
from typing import Any, NamedTuple, Self, final

from harness.core.events import ReducedRecord

MEMORY_ITERATIONS = 1024
NUM_LEVEL = 50
"""Losses before an onset that define its normal level and sigma."""
LEAST_LEVEL = 10
MAD_TO_SIGMA = 1.4826
SMALLEST_SIGMA = 1e-6


class SeenStep(NamedTuple):
    iteration: int
    step: int
    cursor: int
    loss: float | None
    """None if the update was rejected or the loss is not finite."""
    grad_norm: float | None = None
    """None like the loss, and in states that were saved without it."""


class NormalLoss(NamedTuple):
    level: float
    sigma: float


@final
@dataclass(slots=True)
class Lineage:
    seen: deque[SeenStep] = field(default_factory=lambda: deque(maxlen=MEMORY_ITERATIONS))
    roots: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """Iteration and step of each start or restore, oldest first; both ascend."""
    newest_forgotten: int = -1
    """The highest batch index of the records that are no longer stored; -1: none."""

    def add(self, record: ReducedRecord) -> None:
        applied = not record.refused and math.isfinite(record.loss)
        values = (record.loss, record.grad_norm) if applied else (None, None)
        if self.seen and len(self.seen) == self.seen.maxlen:
            self.newest_forgotten = max(self.newest_forgotten, self.seen[0].cursor)
        self.seen.append(SeenStep(record.iteration, record.step, record.cursor, *values))

    def restart_at(self, iteration: int, step: int) -> None:
        """The run continues from `step`; the next iteration trains from there.

        Of the records of that step only that of the update that reached it stays. Those behind it were rejected: they
        did no harm, and most are undone.
        """
        self.roots = [root for root in self.roots if root[1] < step] + [(iteration, step)]
        kept = (seen for seen in self.seen if seen.step < step or (seen.step == step and seen.loss is not None))
        self.seen = deque(kept, maxlen=self.seen.maxlen)
        if not self.seen:
            self.newest_forgotten = -1  # the forgotten records may be undone too

    def last_seen(self, iteration: int) -> SeenStep | None:
        """The stored record of an iteration, or the last one before it."""
        return next((seen for seen in reversed(self.seen) if seen.iteration <= iteration), None)

    def consumed_at(self, first: int, last: int) -> int | None:
        """The first stored iteration that consumed one of these batches. Batches that are given back are consumed
        after others with higher indices."""
        return next((seen.iteration for seen in self.seen if first <= seen.cursor <= last), None)

    def newest_batch(self, iteration: int) -> SeenStep:
        """The record with the highest batch index among the stored ones up to an iteration."""
        return max((seen for seen in self.seen if seen.iteration <= iteration), key=lambda seen: seen.cursor)

    def lowest_batch(self) -> int:
        """The lowest stored batch index."""
        return min(seen.cursor for seen in self.seen)

    def before_step(self, step: int) -> int:
        """An iteration such that every state before it precedes `step`; 0 if there is none."""
        for root_iteration, root_step in reversed(self.roots):
            if root_step < step:
                return root_iteration + step - root_step
        return 0

    def normal_before(self, before: int) -> NormalLoss | None:
        """Level and sigma of the loss before an iteration; None with fewer than `LEAST_LEVEL` losses."""
        losses = [seen.loss for seen in self.seen if seen.loss is not None and seen.iteration < before][-NUM_LEVEL:]
        if len(losses) < LEAST_LEVEL:
            return None
        level = median(losses)
        return NormalLoss(level, MAD_TO_SIGMA * median(abs(loss - level) for loss in losses))

    def level_before(self, iteration: int, num: int) -> float | None:
        """Median of at most `num` losses before an iteration; None if there is none."""
        before = (seen.loss for seen in reversed(self.seen) if seen.loss is not None and seen.iteration < iteration)
        losses = list(islice(before, num))
        return median(losses) if losses else None

    def grad_level(self) -> float | None:
        """Median of the last gradient norms of applied updates; None with fewer than `LEAST_LEVEL`."""
        known = (seen.grad_norm for seen in reversed(self.seen) if seen.grad_norm is not None)
        norms = list(islice(known, NUM_LEVEL))
        return median(norms) if len(norms) >= LEAST_LEVEL else None

    def level_since(self, iteration: int, num: int) -> float | None:
        """Median of at most `num` last losses since an iteration; None if there is none."""
        losses = [seen.loss for seen in self.seen if seen.loss is not None and seen.iteration >= iteration]
        return median(losses[-num:]) if losses else None

    def recent_loss(self, num: int, *, since: int) -> float | None:
        """Median of the last `num` losses; None with fewer losses since iteration `since`."""
        losses = self._recent_losses(num, since=since)
        return median(losses) if len(losses) == num else None

    def recent_rise(self, num: int, *, since: int) -> float:
        """Rise within the last `num` losses since iteration `since`, from their older half to their newer one."""
        losses, half = self._recent_losses(num, since=since), num // 2
        return median(losses[:half]) - median(losses[-half:]) if len(losses) == num else 0.0

    def fall_in_errors(self, *, since: int, sigma: float) -> float:
        """Slope of a line through the losses since an iteration: how many of its standard errors it falls."""
        losses = self._recent_losses(MEMORY_ITERATIONS, since=since)
        if len(losses) < 3:
            return 0.0
        times = range(len(losses), 0, -1)
        error = max(sigma, SMALLEST_SIGMA) * math.sqrt(12.0 / len(losses) ** 3)
        return -linear_regression(times, losses).slope / error

    def _recent_losses(self, num: int, *, since: int) -> list[float]:
        """At most `num` losses since iteration `since`, newest first."""
        since_then = takewhile(lambda seen: seen.iteration >= since, reversed(self.seen))
        return list(islice((seen.loss for seen in since_then if seen.loss is not None), num))

    def state(self) -> dict[str, Any]:
        return {
            "seen": [list(seen) for seen in self.seen],
            "roots": [list(root) for root in self.roots],
            "forgotten": self.newest_forgotten,
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        """Restore from `state()`; one of an older version does not say what was forgotten."""
        seen = deque((SeenStep(*entry) for entry in state["seen"]), maxlen=MEMORY_ITERATIONS)
        before = seen[0].cursor - 1 if seen else -1
        roots = [(iteration, step) for iteration, step in state["roots"]]
        return cls(seen, roots, state.get("forgotten", before))
