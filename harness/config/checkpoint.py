"""Config section `checkpoint`: when checkpoints are saved, how many are kept, snapshots in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.config.errors import require


@dataclass(slots=True, kw_only=True)
class RingConfig:
    slots: int
    """Snapshots in host memory a run can rewind to; 0: none. One buffer more is held for what is being saved."""
    every_steps: int
    """Iterations between snapshots."""
    memory_gb: float | None
    """Host memory of one machine that all its snapshots may take, in GB (1e9 bytes); null: half of what is free."""

    def __post_init__(self) -> None:
        message = f"must be 0 (none) or at least 2, one to keep while the next is taken, got {self.slots}"
        require(self.slots == 0 or self.slots >= 2, "checkpoint.ring.slots", message)
        require(self.every_steps >= 1, "checkpoint.ring.every_steps", f"must be at least 1, got {self.every_steps}")
        valid = self.memory_gb is None or self.memory_gb > 0
        require(valid, "checkpoint.ring.memory_gb", f"must be positive or null, got {self.memory_gb}")


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    every_steps: int
    """Steps between checkpoints; 0: none by steps. A run that stops or ends always saves."""
    every_minutes: float | None
    """Minutes between checkpoints, by rank 0's clock; null: none by the clock. With every_steps, whichever is first."""
    keep: int
    """How many of the newest checkpoints stay on disk; the newest good one always does."""
    keep_every_steps: int
    """The first checkpoint in every so many steps stays for ever; 0: none."""
    good_after_steps: int
    """Clean steps in a row that must follow before a checkpoint counts as good."""
    retry_s: float = 300.0
    """Seconds for which reading a checkpoint is retried, with growing pauses, after an I/O error on any rank; 0: not at
    all. Then a start exits with 75, and a rollback tries an older checkpoint. Must be below launch.start_within_s to be
    of use: the launcher takes a longer start or restore for a hang."""
    ring: RingConfig

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_every_steps"):
            require(getattr(self, name) >= 0, f"checkpoint.{name}", f"must be 0 or more, got {getattr(self, name)}")
        for name in ("keep", "good_after_steps"):
            require(getattr(self, name) >= 1, f"checkpoint.{name}", f"must be at least 1, got {getattr(self, name)}")
        valid = self.every_minutes is None or 0 < self.every_minutes < math.inf
        require(valid, "checkpoint.every_minutes", f"must be positive or null, got {self.every_minutes}")
        valid = 0 <= self.retry_s < math.inf
        require(valid, "checkpoint.retry_s", f"must be 0 or more seconds, and finite, got {self.retry_s}")
