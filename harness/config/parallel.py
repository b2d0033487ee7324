"""Config sections `parallel` and `cluster`: sharding, compilation, and the hardware that `harness plan` assumes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from harness.config.errors import require

MOST_TIMEOUT_S = 1e8
"""Three years; torch does not take much more."""


class ActivationCheckpointing(StrEnum):
    """Which activations are recomputed in the backward pass."""

    none = "none"
    selective = "selective"
    full = "full"


class DeviceKind(StrEnum):
    """Device of the ranks."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(slots=True, kw_only=True)
class ParallelConfig:
    """Sharding, recomputation and compilation."""

    device: DeviceKind
    """auto: cuda if available, else cpu."""
    replicate: int
    """Replicas of the sharded model (HSDP); 1: plain FSDP. Must divide the number of ranks."""
    context: int = 1
    """Ranks that share each sequence (context parallelism); 1: every rank computes whole sequences. Must divide the
    number of ranks of a replica; twice its value must divide train.sequence_length."""
    reshard_after_forward: bool | None
    """Free gathered weights after each block's forward: less memory, one more all-gather; null: only if they would take
    more than a tenth of the device's memory."""
    activation_checkpointing: ActivationCheckpointing
    """none; selective: keep the outputs of matmuls and attention, recompute the rest; full: keep only block inputs."""
    activation_offload: bool = False
    """Keep the activations that the blocks save for backward in pinned host memory meanwhile; the device holds those of
    about two blocks. Exact. Combines with activation_checkpointing: with full, only the blocks' inputs are copied."""
    compile: bool
    """torch.compile each block (needs a C++ compiler on CPU)."""
    timeout_s: float
    """Seconds after which a collective fails that waits for a lost rank."""

    def __post_init__(self) -> None:
        require(self.replicate >= 1, "parallel.replicate", f"must be at least 1, got {self.replicate}")
        require(self.context >= 1, "parallel.context", f"must be at least 1, got {self.context}")
        message = "must be false with activation_checkpointing=selective and compile=false: torch keeps the selected "
        message += "tensors outside autograd, where they cannot be moved; use none or full, or compile=true"
        is_selective = self.activation_checkpointing is ActivationCheckpointing.selective
        require(
            not (self.activation_offload and is_selective and not self.compile), "parallel.activation_offload", message
        )
        message = f"must be positive, and at most {MOST_TIMEOUT_S:g}, got {self.timeout_s:g}"
        require(0 < self.timeout_s <= MOST_TIMEOUT_S, "parallel.timeout_s", message)


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """The hardware, as assumed by MFU and `harness plan`."""

    peak_tflops: float | None
    """Dense bf16 TFLOP/s of one device, the 100 % of MFU; null: from the device's name, else no MFU."""
    memory_gb: float | None
    """Memory of one device, in GB (1e9 bytes); null: unknown, and no plan is rejected for its memory."""
    memory_gb_s: float | None = None
    """Memory bandwidth of one device, in GB/s; null: in proportion to peak_tflops, as on an H200."""
    gpus_per_node: int | None
    """Devices per machine; null: launch.nproc."""
    intra_node_gb_s: float | None
    """Bandwidth from one device to the others of its machine, one way, in GB/s."""
    inter_node_gb_s: float | None
    """Bandwidth from one device to other machines, one way, in GB/s."""
    host_gb_s: float | None = None
    """Bandwidth between one device and host memory, one way, in GB/s."""
    price_per_gpu_hour: float | None
    """Price per GPU and hour, in any currency; null: costs are shown as time only."""

    def __post_init__(self) -> None:
        names = ("peak_tflops", "memory_gb", "memory_gb_s", "gpus_per_node", "intra_node_gb_s", "inter_node_gb_s")
        for name in (*names, "host_gb_s", "price_per_gpu_hour"):
            value = getattr(self, name)
            require(value is None or value > 0, f"cluster.{name}", f"must be positive or null, got {value}")
