"""The common settings of all rows of a table: model shape, batch, number of steps, and compilation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import final

from harness.config.compose import load
from harness.config.schema import Config
from tests.bench.clock import RUN_UP_STEPS, WARMUP_STEPS

BATCH_SIZES = {"3b": 4, "7b": 1}
"""Sequences of 4096 tokens that fit on one GPU of 140 GB without recomputation; eight of the smaller models."""
PROBE_EVERY = 10
REALLOCATION_STEPS = 1
"""Steps before the run-up of a block: they allocate the memory that was freed after the last block."""
MIN_SCHEDULE_STEPS = 100


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    model: str
    sequence_length: int
    batch_size: int
    rounds: int
    steps: int
    """Steps of a round."""
    is_compiled: bool
    num_pairings: int = 1
    """How many rows a contender alternates with."""

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch_size * self.sequence_length

    @property
    def num_steps(self) -> int:
        """The largest number of steps that one side runs."""
        return WARMUP_STEPS + self.num_pairings * self.rounds * (REALLOCATION_STEPS + RUN_UP_STEPS + self.steps)

    @cache  # noqa: B019  (one instance per model)
    def config(self, *overrides: str) -> Config:
        """The config of this harness; every round has the same number of probes."""
        return load(
            [
                "+experiment=1b_bf16",
                f"model={self.model}",
                f"train.batch_size={self.batch_size}",
                f"train.sequence_length={self.sequence_length}",
                f"train.num_steps={max(MIN_SCHEDULE_STEPS, 2 * self.num_steps)}",
                f"parallel.compile={str(self.is_compiled).lower()}",
                f"sentinel.probe_every={min(PROBE_EVERY, self.steps)}",
                "checkpoint.ring.slots=0",
                *overrides,
            ]
        )
