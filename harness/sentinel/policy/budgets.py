"""How much the policy may still do: a count of every kind of action, for the whole run and for a stretch of it.

Why: a cure that keeps failing must end in a halt, not in a loop that burns a cluster for a weekend.
How: the stretch is measured in net progress, the furthest step the run has ever reached. Steps that are trained again
after a restore move it not at all, so a run that turns in circles spends its budget without ever earning it back.
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
    """Of each kind of action, in the whole run."""
    recent: list[tuple[str, int]] = field(default_factory=list)
    """Kind of action and net progress when it was taken, oldest first; what is older than the window is dropped."""

    def spend(self, kind: ActionKind, *, progress: int) -> None:
        self.num_spent[kind] = self.num_spent.get(kind, 0) + 1
        self.recent = [*self._within(progress), (str(kind), progress)]

    def exhausted_reason(self, kind: ActionKind, *, progress: int) -> str | None:
        """Why there may be no further action of this kind; None: there may."""
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
        """How many of `kinds` were taken within the window, since the last of `last`."""
        num = 0
        for kind, _ in self._within(progress):
            num = 0 if kind in last else num + (kind in kinds)
        return num

    def refund(self, kind: ActionKind, *, num: int, progress: int) -> None:
        """The last `num` actions of a kind, as far as there were so many, were for nothing and do not count."""
        recent = self._within(progress)
        spent = [place for place, (each, _) in enumerate(recent) if each == kind][-num:] if num else []
        self.recent = [entry for place, entry in enumerate(recent) if place not in spent]
        self.num_spent[kind] = self.num_spent.get(kind, 0) - len(spent)

    def reset_window(self) -> None:
        """A person started the run again after a halt: the stretch begins anew, the counts of the run stay."""
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
