"""Config section `launch`: local ranks or Slurm jobs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from harness.config.errors import require


class LaunchKind(StrEnum):
    local = "local"
    slurm = "slurm"


@dataclass(slots=True, kw_only=True)
class SlurmConfig:
    """What is asked of Slurm, and when a job that ended may begin again."""

    partition: str | None
    account: str | None
    qos: str | None
    time_minutes: int | None
    """Time limit of one job; null: the partition's."""
    gpus_per_node: int | None
    """null: none is asked for, as on a cluster that hands out whole nodes."""
    cpus_per_node: int | None
    """null: what the partition gives to a task that does not ask, often one core."""
    memory_gb: float | None
    """Host memory of a node, in GB (1e9 bytes); 0: all of it; null: the partition's default."""
    options: list[str]
    """Further options of sbatch, one a word: launch.slurm.options=['--constraint=h100']."""
    warn_s: int
    """Seconds before its time is up at which a job is told to save and leave."""
    max_requeues: int
    """Requeues in a row without a newer checkpoint after which a job ends, whatever ended its starts; 0: never requeue.
    A newer checkpoint resets the count, so that a run that advances is never ended by it."""
    max_stalled: int
    """The same limit for starts that the run itself spent without a newer checkpoint: it crashed, or left unsaved.
    Starts that a node failed (health check, node death) do not count here."""
    health: bool
    """Look at every node before each start: devices, memory, disk, clocks, a small all-reduce; false where the cluster
    does so itself."""
    exclude_hours: float = 24.0
    """A node that failed the health check twice is excluded for so many hours since its last failure; 0: never."""
    max_excluded: int = 4
    """Most nodes excluded at a time; never so many that the job could not start."""

    def __post_init__(self) -> None:
        for name in ("time_minutes", "gpus_per_node", "cpus_per_node"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"launch.slurm.{name}", f"must be at least 1 or null, got {value}")
        valid = self.memory_gb is None or 0 <= self.memory_gb < math.inf
        require(valid, "launch.slurm.memory_gb", f"must be 0 (all) or more, or null, got {self.memory_gb}")
        for option in self.options:
            message = f"each is one word that begins with --, got {option!r}"
            require(re.fullmatch(r"--[a-z][\w-]*(=\S+)?", option) is not None, "launch.slurm.options", message)
        require(self.warn_s >= 1, "launch.slurm.warn_s", f"must be at least 1, got {self.warn_s}")
        require(self.max_requeues >= 0, "launch.slurm.max_requeues", f"must be 0 or more, got {self.max_requeues}")
        require(self.max_stalled >= 1, "launch.slurm.max_stalled", f"must be at least 1, got {self.max_stalled}")
        require(self.exclude_hours >= 0, "launch.slurm.exclude_hours", f"must be 0 or more, got {self.exclude_hours}")
        require(self.max_excluded >= 0, "launch.slurm.max_excluded", f"must be 0 or more, got {self.max_excluded}")


@dataclass(slots=True, kw_only=True)
class LaunchConfig:
    kind: LaunchKind
    """local: this machine, now; slurm: a job."""
    nproc: int | None
    """Ranks on one machine; null: one a GPU, or 2 on CPU."""
    threads: int | None
    """CPU threads of one rank; null: the machine's cores shared out."""
    nodes: int
    """Machines."""
    min_nodes: int | None
    """With how few the run may go on where others are gone; null: all. The global batch stays what it is: its sequences
    are shared out again, unevenly where they do not divide. Must leave no more ranks than train.batch_size, and a
    multiple of parallel.replicate."""
    dry_run: bool
    """Print what would be submitted, and submit nothing."""
    hang_after_s: float
    """A rank whose loop has not moved for so long is taken for hung: within ten seconds more it is named, and the run
    is taken down on all machines, to begin again from its newest checkpoint. Longer than the longest step; shorter than
    parallel.timeout_s, after which the ranks that wait for it give up without knowing whom they waited for. A machine
    that is not heard of is given up after as long, or after 30 s where that is less. Never shorter than three intervals
    of the heartbeat files (1 s; above 100 ranks num_ranks / 100 s): 492 s for 16,384 ranks."""
    start_within_s: float
    """What may take longer: the machines' gathering, a start up to the end of its first iteration (reading a
    checkpoint, compiling), a save that waits for its disk, going back to a checkpoint."""
    at_once: int | None
    """Runs of a sweep at the same time on this machine; null: as its cores or GPUs allow."""
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
