"""Where a run stands: the few numbers that, with the weights and moments, decide everything that follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class RunState:
    step: int = 0
    """Updates applied. The device counts too and is right; the host learns of a refusal `lag` iterations late."""
    iteration: int = 0
    """Attempts, replays included; never goes back."""
    cursor: int = 0
    """The next batch index to consume."""
    tokens: int = 0
    """Tokens consumed."""
    generation: int = 0
    """Rewinds and rollbacks behind this run."""

    def advance(self, *, next_cursor: int, tokens: int) -> None:
        """One iteration was issued; until its record says otherwise, its update counts as applied."""
        self.step += 1
        self.iteration += 1
        self.cursor = next_cursor
        self.tokens += tokens

    def take_back_refused(self) -> None:
        """A record came back refused: its update was not applied after all."""
        self.step -= 1
