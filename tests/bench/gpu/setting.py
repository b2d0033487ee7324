"""What all rows of a table have in common: the shape, the batch, how long they run, and whether they are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import final

from harness.config.compose import load
from harness.config.schema import Config
from tests.bench.clock import LEAD_STEPS, WARMUP_STEPS

BATCH_SIZES = {"3b": 4, "7b": 1}
"""Sequences of 4096 tokens that fit on one GPU of 140 GB without recomputation; eight of the smaller models."""
PROBE_EVERY = 10
REFILL_STEPS = 1
"""Before the run-up of a turn: they take the memory again that was given back after the last turn."""
LEAST_SCHEDULE = 100


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    model: str
    sequence_length: int
    batch_size: int
    rounds: int
    steps: int
    """Of a round."""
    is_compiled: bool
    num_pairings: int = 1
    """How many rows a contender takes turns with."""

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch_size * self.sequence_length

    @property
    def num_steps(self) -> int:
        """That one side makes at most."""
        return WARMUP_STEPS + self.num_pairings * self.rounds * (REFILL_STEPS + LEAD_STEPS + self.steps)

    @cache  # noqa: B019  (there are as many as models)
    def config(self, *overrides: str) -> Config:
        """As this harness is told of it; every round has the same number of probes."""
        return load(
            [
                "+experiment=1b_bf16",
                f"model={self.model}",
                f"train.batch_size={self.batch_size}",
                f"train.sequence_length={self.sequence_length}",
                f"train.num_steps={max(LEAST_SCHEDULE, 2 * self.num_steps)}",
                f"parallel.compile={str(self.is_compiled).lower()}",
                f"sentinel.probe_every={min(PROBE_EVERY, self.steps)}",
                "checkpoint.ring.slots=0",
                *overrides,
            ]
        )
