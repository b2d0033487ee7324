"""Config section `checkpoint`: when checkpoints are saved, how many are kept, and snapshots in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from harness.config.errors import require, require_duration

AUTO = "auto"
DEFAULT_SHARED_DIR = "/dev/shm"


@dataclass(slots=True, kw_only=True)
class RingConfig:
    """Snapshots in host memory, for rewinds."""

    slots: int
    """Number of snapshots in host memory; 0: none. One more buffer is allocated for the snapshot being saved."""
    every_steps: int
    """Iterations between snapshots."""
    memory_gb: float | None
    """Host memory per machine for all its snapshots, in GB (1e9 bytes); null: half of the free memory."""
    shared_dir: str | None = "auto"
    """Directory in memory (tmpfs) for the snapshots, so that they outlive a killed process and the next start on the
    same machine resumes from them. auto: /dev/shm for ranks on CPU and with replicas, private memory for others: the
    cost on GPUs is not measured yet; null: private memory of the process, which ends with it."""
    replicas: int = 0
    """1: each rank also keeps the newest trusted snapshot of a partner rank on another node, for the case that a node
    is lost; needs two more buffers per rank. 0: none. Without effect on one node, and with parallel.replicate > 1,
    where the other replica holds the same state."""
    replica_gb_s: float | None = 1.0
    """Rate limit of a rank that sends its snapshot to its partner, in GB/s; null: none."""

    @property
    def shared_path(self) -> str | None:
        """The directory in memory; None: private memory."""
        return DEFAULT_SHARED_DIR if self.shared_dir == AUTO else self.shared_dir

    def __post_init__(self) -> None:
        message = f"must be 0 (none) or at least 2 (one is kept while the next is taken), got {self.slots}"
        require(self.slots == 0 or self.slots >= 2, "checkpoint.ring.slots", message)
        require(self.every_steps >= 1, "checkpoint.ring.every_steps", f"must be at least 1, got {self.every_steps}")
        valid = self.memory_gb is None or self.memory_gb > 0
        require(valid, "checkpoint.ring.memory_gb", f"must be positive or null, got {self.memory_gb}")
        require(self.replicas in (0, 1), "checkpoint.ring.replicas", f"must be 0 or 1, got {self.replicas}")
        can_send = self.replicas == 0 or (self.slots > 0 and self.shared_path is not None)
        message = "needs checkpoint.ring.slots of at least 2 and a checkpoint.ring.shared_dir"
        require(can_send, "checkpoint.ring.replicas", message)
        valid = self.replica_gb_s is None or self.replica_gb_s > 0
        require(valid, "checkpoint.ring.replica_gb_s", f"must be positive or null, got {self.replica_gb_s}")


@dataclass(slots=True, kw_only=True)
class CheckpointRemoteConfig:
    """Copies of the checkpoints in an object store."""

    url: str | None = None
    """Object store, such as s3://bucket/runs; checkpoints and run files go to URL/RUN_NAME, in the background. A start
    without a local run directory resumes from there. null: no upload."""
    keep: int = 3
    """Number of newest checkpoints that stay in the store; the newest good one and those of
    checkpoint.keep_every_steps always stay."""
    retry_s: float = 300.0
    """Seconds for which a start repeats failed requests; after that it exits with 75. An upload is repeated for as long
    as the run lives."""
    exit_wait_s: float = 600.0
    """Seconds for which the end of a run waits until everything is uploaded; `harness checkpoint upload` uploads the
    rest later."""

    def __post_init__(self) -> None:
        valid = self.url is None or "://" in self.url
        require(valid, "checkpoint.remote.url", f"must be a URL such as s3://bucket/runs, or null, got {self.url!r}")
        message = "must hold no user or password; the store's client reads them from the environment"
        require(self.url is None or "@" not in self.url, "checkpoint.remote.url", message)
        require(self.keep >= 1, "checkpoint.remote.keep", f"must be at least 1, got {self.keep}")
        for name in ("retry_s", "exit_wait_s"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"checkpoint.remote.{name}", f"must be 0 or more, and finite, got {value}")
            require_duration(value, f"checkpoint.remote.{name}")


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints on disk."""

    every_steps: int
    """Steps between checkpoints; 0: not by steps. A run that stops or ends always saves."""
    every_minutes: float | None
    """Minutes between checkpoints, by rank 0's clock; null: not by time. With every_steps, whichever is first."""
    keep: int
    """Number of newest checkpoints that stay on disk; the newest good one always stays."""
    keep_every_steps: int
    """The first checkpoint in each interval of this many steps is never deleted; 0: none."""
    keep_behind_steps: int = 0
    """A checkpoint at least this many steps older than the newest one stays on disk, for rollbacks; up to three are
    kept for it. 0: none. Should be at least sentinel.policy.rollback_margin_steps."""
    good_after_steps: int
    """Clean steps in a row after which a checkpoint counts as good."""
    retry_s: float = 300.0
    """Seconds for which reading a checkpoint is retried, with growing pauses, after an I/O error on any rank; 0: no
    retry. After that a start exits with 75, and a rollback tries an older checkpoint. Should be below
    launch.start_within_s: the launcher treats a longer start or restore as a hang."""
    ring: RingConfig
    remote: CheckpointRemoteConfig = field(default_factory=CheckpointRemoteConfig)

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_every_steps", "keep_behind_steps"):
            require(getattr(self, name) >= 0, f"checkpoint.{name}", f"must be 0 or more, got {getattr(self, name)}")
        for name in ("keep", "good_after_steps"):
            require(getattr(self, name) >= 1, f"checkpoint.{name}", f"must be at least 1, got {getattr(self, name)}")
        valid = self.every_minutes is None or 0 < self.every_minutes < math.inf
        require(valid, "checkpoint.every_minutes", f"must be positive or null, got {self.every_minutes}")
        require_duration(self.every_minutes or 0.0, "checkpoint.every_minutes", unit_s=60)
        valid = 0 <= self.retry_s < math.inf
        require(valid, "checkpoint.retry_s", f"must be 0 or more, and finite, got {self.retry_s}")
        require_duration(self.retry_s, "checkpoint.retry_s")
