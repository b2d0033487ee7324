"""Tracks the window in which an fp8 run computes in bf16 instead.

Why: values that underflow in fp8 today may fit a thousand steps later, and bf16 only costs speed. So a run returns to
fp8 by itself, and each further window is twice as long.
How: a fold over the actions of the log. The window is counted in iterations, which never go back, and a restore does
not change it; so it survives a restart.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self, final

from harness.core.events import Action


@final
@dataclass(slots=True)
class PrecisionFallback:
    is_on: bool = False
    until: int | None = None
    """The last iteration of the window; None: to the end of the run."""
    incident: int = 0
    """The incident it belongs to; 0: an operator's command."""

    def on_action(self, action: Action) -> None:
        """GEMMs run in another precision from now on."""
        self.is_on, self.until, self.incident = not action.in_fp8, action.until, action.incident

    def on_failure(self) -> None:
        """The precision could not be changed."""
        self.is_on, self.until = False, None

    def is_over(self, issued: int) -> bool:
        """Whether the window ended with iteration `issued`, the last one issued."""
        return self.is_on and self.until is not None and issued >= self.until

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        return cls(**state)


def fallback_iterations(iterations: int, *, num_before: int) -> int:
    """Length of the next window, after `num_before` windows."""
    return int(iterations * 2**num_before)
