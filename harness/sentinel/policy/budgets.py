"""Counts the actions of each kind, per run and per window, and limits them.

Why: a cure that keeps failing must end in a halt, not in a loop that burns a cluster for a weekend.
How: the window is measured in net progress, the highest step the run ever reached. Retraining after a restore is no
progress, so a run that loops spends its budget and never earns it back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Self, final

from harness.config.sentinel import BudgetConfig, BudgetsConfig
from harness.core.events import ActionKind


@final
@dataclass(slots=True)
class Budgets:
    cfg: BudgetsConfig
    window_steps: int
    num_spent: dict[str, int] = field(default_factory=dict)
    """Kind of action -> count in the whole run."""
    recent: list[tuple[str, int]] = field(default_factory=list)
    """Kind of action and net progress at that time, within the window; oldest first."""

    def spend(self, kind: ActionKind, *, progress: int) -> None:
        self.num_spent[kind] = self.num_spent.get(kind, 0) + 1
        self.recent = [*self._within(progress), (str(kind), progress)]

    def exhausted_reason(self, kind: ActionKind, *, progress: int) -> str | None:
        """Why no further action of this kind is allowed; None if it is."""
        limit = self._limit(kind)
        num_recent = sum(spent == kind for spent, _ in self._within(progress))
        if num_recent >= limit.per_window:
            return f"budget spent: {num_recent} x {kind} within {self.window_steps} steps of progress"
        if self.num_spent.get(kind, 0) >= limit.per_run:
            return f"budget spent: {limit.per_run} x {kind} in this run"
        return None

    def allows(self, kind: ActionKind, *, progress: int) -> bool:
        return self.exhausted_reason(kind, progress=progress) is None

    def num_since(self, kinds: Collection[ActionKind], *, last: Collection[ActionKind], progress: int) -> int:
        """Number of actions of `kinds` within the window, since the last action of one of the kinds `last`."""
        num = 0
        for kind, _ in self._within(progress):
            num = 0 if kind in last else num + (kind in kinds)
        return num

    def refund(self, kind: ActionKind, *, num: int, progress: int) -> None:
        """Uncount the last `num` actions of a kind within the window, or all of them if there are fewer."""
        recent = self._within(progress)
        spent = [index for index, (spent_kind, _) in enumerate(recent) if spent_kind == kind][-num:] if num else []
        self.recent = [entry for index, entry in enumerate(recent) if index not in spent]
        self.num_spent[kind] = self.num_spent.get(kind, 0) - len(spent)

    def reset_window(self) -> None:
        """Clear the window after an operator restarted a halted run; the counts of the run stay."""
        self.recent = []

    def state(self) -> dict[str, Any]:
        return {"num_spent": dict(self.num_spent), "recent": [list(entry) for entry in self.recent]}

    @classmethod
    def restore(cls, cfg: BudgetsConfig, window_steps: int, state: dict[str, Any]) -> Self:
        recent = [(kind, progress) for kind, progress in state["recent"]]
        return cls(cfg, window_steps, dict(state["num_spent"]), recent)

    def _within(self, progress: int) -> list[tuple[str, int]]:
        return [entry for entry in self.recent if progress - entry[1] < self.window_steps]

    def _limit(self, kind: ActionKind) -> BudgetConfig:
        limit = getattr(self.cfg, kind.value)
        assert isinstance(limit, BudgetConfig)
        return limit
