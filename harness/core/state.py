"""Where a run stands: the few numbers that, with the weights and moments, decide everything that follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class RunState:
    step: int = 0
    """Updates applied. The device counts too and is right; the host learns of a refusal `lag` iterations late."""
    iteration: int = 0
    """Attempts, replays included; never goes back."""
    cursor: int = 0
    """The next batch index to consume."""
    given_back: int = 0
    """How many of the batches that the ledger gives back at this cursor have been consumed."""
    tokens: int = 0
    """Tokens consumed."""
    generation: int = 0
    """Rewinds and rollbacks behind this run."""

    refused_in_row: int = 0
    """Updates refused since the last one that was applied."""
    lr_factor: float = 1.0
    """What an operator multiplies the learning rate with."""
    sentinel: dict[str, Any] = field(default_factory=dict)
    """What the detectors and the policy remember of the records up to here, in a snapshot or on disk; plain data."""

    def advance(self, *, next_cursor: int, given_back: int = 0, tokens: int) -> None:
        """One iteration was issued; until its record says otherwise, its update counts as applied."""
        self.step += 1
        self.iteration += 1
        self.cursor, self.given_back = next_cursor, given_back
        self.tokens += tokens

    def correct_step(self, *, refused: bool) -> None:
        """What the record of an iteration says of its update; a refused one was not applied after all."""
        self.step -= refused
        self.refused_in_row = self.refused_in_row + 1 if refused else 0

    def return_to(self, earlier: RunState) -> None:
        """The weights are those of an earlier state again. Attempts go on counting, and the operator's word stands."""
        self.step, self.cursor, self.tokens = earlier.step, earlier.cursor, earlier.tokens
        self.given_back, self.refused_in_row = earlier.given_back, earlier.refused_in_row
        self.generation += 1
