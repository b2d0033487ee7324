"""Config section `profile`: a profile of a few steps of a fresh run. `harness ctl RUN profile` needs none of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.config.errors import require

MOST_PROFILED_STEPS = 100
"""A trace of one step of a large model has tens of megabytes."""


@dataclass(slots=True, kw_only=True)
class ProfileConfig:
    """Which steps are profiled from the start."""

    at_step: int | None = None
    """First step to profile, into profiles/ of the run directory; null: none. Each update that is rejected before makes
    it one step earlier. A running run is profiled by `harness ctl RUN profile`."""
    num_steps: int = 3
    """Steps to profile."""
    ranks: list[int] = field(default_factory=list)
    """Ranks to profile; empty: all."""

    def __post_init__(self) -> None:
        valid = self.at_step is None or self.at_step >= 1
        require(valid, "profile.at_step", f"must be null (none) or at least 1, got {self.at_step}")
        message = f"must be 1 to {MOST_PROFILED_STEPS}, got {self.num_steps}"
        require(1 <= self.num_steps <= MOST_PROFILED_STEPS, "profile.num_steps", message)
        require(all(rank >= 0 for rank in self.ranks), "profile.ranks", f"must be 0 or more, got {list(self.ranks)}")


def require_ranks(key: str, ranks: Sequence[int], world_size: int) -> None:
    """Raise `ConfigError` unless all these ranks exist."""
    unknown = [rank for rank in ranks if not 0 <= rank < world_size]
    require(not unknown, key, f"no rank {', '.join(map(str, unknown))}; the run has ranks 0 to {world_size - 1}")
