"""Run state: the few numbers that, with the weights and moments, determine the rest of the run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True, kw_only=True)
class RunState:
    """Host copy of the counters of a run; part of every snapshot and checkpoint."""

    step: int = 0
    """Updates applied. The device holds the exact count; the host sees a rejection `lag` iterations late."""
    iteration: int = 0
    """Attempted updates, replays included; never decreases."""
    cursor: int = 0
    """The next batch index to consume."""
    given_back: int = 0
    """How many of the batches that the ledger gives back at this cursor have been consumed."""
    tokens: int = 0
    """Tokens consumed."""
    generation: int = 0
    """Rewinds and rollbacks so far."""

    refused_in_row: int = 0
    """Updates rejected since the last applied one."""
    lr_factor: float = 1.0
    """Operator's factor on the learning rate."""
    sentinel: dict[str, Any] = field(default_factory=dict)
    """State of the detectors and the policy, as plain data, in a snapshot or on disk."""

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as in state.json. `dataclasses.asdict` would copy the sentinel's state at every depth."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def advance(self, *, next_cursor: int, given_back: int = 0, tokens: int) -> None:
        """Count one issued iteration. Its update counts as applied until its record arrives."""
        self.step += 1
        self.iteration += 1
        self.cursor, self.given_back = next_cursor, given_back
        self.tokens += tokens

    def correct_step(self, *, refused: bool) -> None:
        """Correct the step count by the record of an iteration: a rejected update was not applied."""
        self.step -= refused
        self.refused_in_row = self.refused_in_row + 1 if refused else 0

    def return_to(self, earlier: RunState) -> None:
        """Take the counters of an earlier state after a restore. `iteration` and `lr_factor` keep their values."""
        self.step, self.cursor, self.tokens = earlier.step, earlier.cursor, earlier.tokens
        self.given_back, self.refused_in_row = earlier.given_back, earlier.refused_in_row
        self.generation += 1
