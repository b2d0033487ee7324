"""Config section `launch`: local ranks or Slurm jobs, hang detection, requeue limits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from harness.config.errors import require


class LaunchKind(StrEnum):
    """Where the ranks run."""

    local = "local"
    slurm = "slurm"


@dataclass(slots=True, kw_only=True)
class SlurmConfig:
    """Slurm resources, and when a job that ended is requeued."""

    partition: str | None
    account: str | None
    qos: str | None
    time_minutes: int | None
    """Time limit of one job, in minutes; null: that of the partition."""
    gpus_per_node: int | None
    """GPUs to request per node; null: none, for clusters that allocate whole nodes."""
    cpus_per_node: int | None
    """CPU cores to request per node; null: the default of the partition, often one core."""
    memory_gb: float | None
    """Host memory to request per node, in GB (1e9 bytes); 0: all of it; null: the default of the partition."""
    options: list[str]
    """Further options of sbatch, one per item: launch.slurm.options=['--constraint=h100']."""
    warn_s: int
    """Seconds before the time limit at which a job gets the signal to save and stop."""
    max_requeues: int
    """Requeues in a row without a newer checkpoint after which a job ends, whatever ended its starts; 0: never requeue.
    A newer checkpoint resets the count, so a run that makes progress is never ended by it."""
    max_stalled: int
    """The same limit for starts that ended without a newer checkpoint because of the run itself: it crashed, or stopped
    without saving. Node failures (health check, node death) do not count here."""
    health: bool
    """Check every node before each start: devices, memory, disk, clocks, a small all-reduce; false if the cluster does
    this itself."""
    exclude_hours: float = 24.0
    """Hours since its last failure for which a node is excluded that failed the health check twice; 0: never."""
    max_excluded: int = 4
    """Maximum number of excluded nodes; always fewer than would prevent the job from starting."""

    def __post_init__(self) -> None:
        for name in ("time_minutes", "gpus_per_node", "cpus_per_node"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"launch.slurm.{name}", f"must be at least 1 or null, got {value}")
        valid = self.memory_gb is None or 0 <= self.memory_gb < math.inf
        require(valid, "launch.slurm.memory_gb", f"must be 0 (all) or more, or null, got {self.memory_gb}")
        for option in self.options:
            message = f"must be a list of options that start with -- and contain no space, got {option!r}"
            require(re.fullmatch(r"--[a-z][\w-]*(=\S+)?", option) is not None, "launch.slurm.options", message)
        require(self.warn_s >= 1, "launch.slurm.warn_s", f"must be at least 1, got {self.warn_s}")
        require(self.max_requeues >= 0, "launch.slurm.max_requeues", f"must be 0 or more, got {self.max_requeues}")
        require(self.max_stalled >= 1, "launch.slurm.max_stalled", f"must be at least 1, got {self.max_stalled}")
        require(self.exclude_hours >= 0, "launch.slurm.exclude_hours", f"must be 0 or more, got {self.exclude_hours}")
        require(self.max_excluded >= 0, "launch.slurm.max_excluded", f"must be 0 or more, got {self.max_excluded}")


@dataclass(slots=True, kw_only=True)
class LaunchConfig:
    """How the ranks of a run are started and supervised."""

    kind: LaunchKind
    """local: this machine, now; slurm: a job."""
    nproc: int | None
    """Ranks per machine; null: one per GPU, or 2 on CPU."""
    threads: int | None
    """CPU threads per rank; null: the cores of the machine divided by its ranks."""
    nodes: int
    """Number of machines."""
    min_nodes: int | None
    """Smallest number of machines with which the run continues after others are lost; null: all. The global batch stays
    the same: its sequences are split over fewer ranks, unevenly if they do not divide. The remaining ranks must not
    outnumber train.batch_size and must be a multiple of parallel.replicate."""
    dry_run: bool
    """Print what would be submitted, and submit nothing."""
    hang_after_s: float
    """Seconds without progress of a rank's loop after which the rank counts as hung. Within ten more seconds it is
    reported, and the run is terminated on all machines and restarted from its newest checkpoint. Must be longer than
    the longest step, and shorter than parallel.timeout_s, after which the waiting ranks fail without knowing which rank
    hung. A machine that stops responding is given up after the same time, but at most 30 s. Never shorter than three
    intervals of the heartbeat files (1 s; above 100 ranks num_ranks / 100 s): 492 s for 16,384 ranks."""
    start_within_s: float
    """Time limit, in seconds, of phases that may take longer: the rendezvous of the machines, a start up to the end of
    its first iteration (reading a checkpoint, compiling), a save that waits for its disk, restoring a checkpoint."""
    at_once: int | None
    """Concurrent runs of a sweep on this machine; null: as its cores or GPUs allow."""
    slurm: SlurmConfig

    def __post_init__(self) -> None:
        for name in ("nproc", "threads", "min_nodes", "at_once"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"launch.{name}", f"must be at least 1 or null, got {value}")
        require(self.nodes >= 1, "launch.nodes", f"must be at least 1, got {self.nodes}")
        if self.min_nodes is not None:
            message = f"must not exceed launch.nodes={self.nodes}, got {self.min_nodes}"
            require(self.min_nodes <= self.nodes, "launch.min_nodes", message)
        for name in ("hang_after_s", "start_within_s"):
            value = getattr(self, name)
            require(value > 0, f"launch.{name}", f"must be positive, got {value}")
