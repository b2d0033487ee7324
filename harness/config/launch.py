"""Config section `launch`: local ranks, Slurm jobs or Kubernetes manifests, hang detection, requeue limits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from harness.config.errors import require, require_duration


class LaunchKind(StrEnum):
    """Where the ranks run."""

    local = "local"
    slurm = "slurm"
    k8s = "k8s"


class Workload(StrEnum):
    """Kind of the Kubernetes object that runs the pods."""

    jobset = "jobset"
    trainjob = "trainjob"


@dataclass(slots=True, kw_only=True)
class SlurmConfig:
    """Slurm resources, and when a job that ended is requeued."""

    partition: str | None
    """Partition (queue) of the job; null: the default of the cluster."""
    account: str | None
    """Account that the job is charged to; null: the user's default."""
    qos: str | None
    """Quality of service of the job; null: the user's default."""
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
    """Check every node before each start: devices, memory, disk, clocks, GEMMs, an all-reduce, links; false if the
    cluster does this itself."""
    exclude_hours: float = 24.0
    """Hours since its last fault for which a node is not used that failed the health check twice, hung twice or has
    other faults (docs/operations.md); 0: never. Also without Slurm."""
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
        require_duration(self.warn_s, "launch.slurm.warn_s")
        if self.time_minutes is not None:
            require_duration(self.time_minutes, "launch.slurm.time_minutes", unit_s=60)
            message = f"must be less than launch.slurm.time_minutes ({60 * self.time_minutes} s), got {self.warn_s}"
            require(self.warn_s < 60 * self.time_minutes, "launch.slurm.warn_s", message)
        require(self.max_requeues >= 0, "launch.slurm.max_requeues", f"must be 0 or more, got {self.max_requeues}")
        require(self.max_stalled >= 1, "launch.slurm.max_stalled", f"must be at least 1, got {self.max_stalled}")
        require(self.exclude_hours >= 0, "launch.slurm.exclude_hours", f"must be 0 or more, got {self.exclude_hours}")
        require_duration(self.exclude_hours, "launch.slurm.exclude_hours", unit_s=3600)
        require(self.max_excluded >= 0, "launch.slurm.max_excluded", f"must be 0 or more, got {self.max_excluded}")


@dataclass(slots=True, kw_only=True)
class KubernetesConfig:
    """What a Kubernetes manifest needs besides the resources and limits of `launch.slurm`."""

    workload: Workload = Workload.jobset
    """jobset: a JobSet; trainjob: a Kubeflow TrainJob with a runtime of its own."""
    image: str | None = None
    """Container image with Python, torch and this package."""
    claim: str | None = None
    """PersistentVolumeClaim (ReadWriteMany) that all pods mount: runs and data are on it."""
    mount: str = "/workspace"
    """Where the claim is mounted; the working directory of the run, so relative paths are on the claim."""
    namespace: str | None = None
    """Namespace of all objects; null: that of kubectl."""
    queue: str | None = None
    """Local queue of Kueue; null: none."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource name of the GPUs of a node."""
    node_selector: list[str] = field(default_factory=list)
    """Labels of the nodes that may run the pods, as launch.k8s.node_selector=['gpu=h100']."""
    env: list[str] = field(default_factory=list)
    """Further environment variables of the pods, as launch.k8s.env=['NCCL_DEBUG=INFO']; never credentials, which belong
    into a Secret."""

    def __post_init__(self) -> None:
        valid = self.mount.startswith("/") and self.mount != "/" and ":" not in self.mount
        require(valid, "launch.k8s.mount", f"must be an absolute path without a colon, not /, got {self.mount!r}")
        for name, label in (("namespace", self.namespace), ("queue", self.queue), ("claim", self.claim)):
            valid = label is None or re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", label) is not None
            message = f"must consist of lower-case letters, digits, - and ., or be null, got {label!r}"
            require(valid, f"launch.k8s.{name}", message)
        for name, pattern in (("node_selector", r"[\w./-]+=[\w.-]*"), ("env", r"[A-Za-z_]\w*=.*")):
            for item in getattr(self, name):
                valid = re.fullmatch(pattern, item, re.ASCII) is not None
                require(valid, f"launch.k8s.{name}", f"must be a list of 'NAME=VALUE', got {item!r}")


@dataclass(slots=True, kw_only=True)
class LaunchConfig:
    """How the ranks of a run are started and supervised."""

    kind: LaunchKind
    """local: this machine, now; slurm: a job; k8s: a manifest for Kubernetes."""
    nproc: int | None
    """Ranks per machine; null: one per GPU, or 2 on CPU."""
    ranks_per_gpu: int
    """Ranks that share one GPU, to rehearse a run of many ranks on few GPUs: NCCL treats each rank as a machine of its
    own and connects them over loopback. Each rank may allocate its share of the memory. Collectives are slow. One
    machine only; 1: every rank has a GPU of its own."""
    threads: int | None
    """CPU threads per rank; null: the cores of the machine divided by its ranks."""
    nodes: int
    """Number of machines."""
    min_nodes: int | None
    """Smallest number of machines with which the run continues after others are lost; null: all. The global batch stays
    the same: its sequences are split over fewer ranks, unevenly if they do not divide. The remaining ranks must not
    outnumber train.batch_size and must be a multiple of parallel.replicate."""
    spares: int = 0
    """Machines beyond `nodes` that join the run and wait. One of them replaces a machine that is lost, or that is out
    because of its faults, within seconds and with the same ranks. 0: none. Needs at least two nodes."""
    replace_running: bool = False
    """Replace a machine that the sentinel named (see docs/operations.md) while the run is healthy, by a restart right
    after a checkpoint; false: only at the next restart after a failure."""
    dry_run: bool
    """Print the job script (slurm) or the manifest (k8s), and submit nothing."""
    hang_after_s: float
    """Seconds without progress of a rank's loop after which the rank counts as hung, at least; `hang_steps` makes it
    longer for long steps. Within ten more seconds the rank is reported, and all ranks are stopped on all machines and
    restarted from the newest checkpoint. Must be shorter than parallel.timeout_s, after which the waiting ranks fail
    without knowing which rank hung. A machine that stops responding is given up after the same time, but at most 30 s.
    Never shorter than three intervals of the heartbeat files (1 s; above 100 ranks num_ranks / 100 s): 492 s for
    16,384 ranks."""
    hang_steps: float
    """The time limit of a rank that makes no progress is at least this multiple of its slowest recent step, up to nine
    tenths of parallel.timeout_s."""
    start_within_s: float
    """Time limit, in seconds, of phases that may take longer: the rendezvous of the machines, a start up to the end of
    its first iteration (reading a checkpoint, compiling), a save that waits for its disk, restoring a checkpoint. The
    end of a run may take longer by its waits for evaluation, post-mortems, sinks and uploads."""
    max_restarts: int = 3
    """Restarts of all ranks inside the job, after a rank died, hung or raised: the run ends after this many in a row
    without a new step, or within `restart_window`. It also ends if a rank raises the same error at the same step twice.
    An invalid config, a halt, a stop request and a lost machine that nothing replaces (`spares`, `min_nodes`) are not
    answered with a restart. 0: never restart."""
    restart_window: float = 300.0
    """Seconds in which at most `max_restarts` restarts may happen, with or without new steps."""
    at_once: int | None
    """Concurrent runs of a sweep on this machine; null: as its cores or GPUs allow."""
    slurm: SlurmConfig
    k8s: KubernetesConfig = field(default_factory=KubernetesConfig)

    def __post_init__(self) -> None:
        for name in ("nproc", "threads", "min_nodes", "at_once"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"launch.{name}", f"must be at least 1 or null, got {value}")
        require(self.nodes >= 1, "launch.nodes", f"must be at least 1, got {self.nodes}")
        require(self.ranks_per_gpu >= 1, "launch.ranks_per_gpu", f"must be at least 1, got {self.ranks_per_gpu}")
        message = f"must be 1 with launch.nodes={self.nodes}: ranks that share a GPU connect over loopback"
        require(self.ranks_per_gpu == 1 or self.nodes == 1, "launch.ranks_per_gpu", message)
        if self.min_nodes is not None:
            message = f"must not exceed launch.nodes={self.nodes}, got {self.min_nodes}"
            require(self.min_nodes <= self.nodes, "launch.min_nodes", message)
        require(self.spares >= 0, "launch.spares", f"must be 0 or more, got {self.spares}")
        message = f"must be 0 with launch.nodes=1, got {self.spares}: a single machine cannot be replaced"
        require(self.spares == 0 or self.nodes > 1, "launch.spares", message)
        require(self.max_restarts >= 0, "launch.max_restarts", f"must be 0 or more, got {self.max_restarts}")
        for name in ("hang_after_s", "hang_steps", "start_within_s", "restart_window"):
            value = getattr(self, name)
            require(value > 0, f"launch.{name}", f"must be positive, got {value}")
            if name != "hang_steps":
                require_duration(value, f"launch.{name}")

    @property
    def is_elastic(self) -> bool:
        """Whether the run may continue without one of its machines."""
        return self.spares > 0 or (self.min_nodes is not None and self.min_nodes < self.nodes)
