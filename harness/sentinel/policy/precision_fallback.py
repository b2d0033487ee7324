"""The fallback of a run in fp8: since when, for whom and until when it computes in bf16 instead.

Why: what does not fit into fp8 today may fit in a thousand steps, and bf16 costs speed and nothing else. So a run goes
back to fp8 by itself, and one that must leave it again and again stays away twice as long each time.
How: it is a fold over the actions of the log. It is counted in iterations, which never go back, and does not come back
with older weights; a restart inside the window therefore finds it as it was.
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
    """The last iteration of the window; None: the end of the run."""
    incident: int = 0
    """That it answers; 0: a person's order."""

    def on_action(self, action: Action) -> None:
        """Products are taken in another precision from now on."""
        self.is_on, self.until, self.incident = not action.in_fp8, action.until, action.incident

    def on_failure(self) -> None:
        """The run cannot compute in another precision."""
        self.is_on, self.until = False, None

    def is_over(self, issued: int) -> bool:
        """Whether the window ended with the iterations that were issued."""
        return self.is_on and self.until is not None and issued >= self.until

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        return cls(**state)


def fallback_iterations(iterations: int, *, num_before: int) -> int:
    """How many iterations the next window has, after so many."""
    return int(iterations * 2**num_before)
