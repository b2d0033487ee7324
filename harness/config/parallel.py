"""Config sections `parallel` and `cluster`: sharding, compilation, and the hardware that a plan assumes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from harness.config.errors import require


class ActivationCheckpointing(StrEnum):
    none = "none"
    selective = "selective"
    full = "full"


class DeviceKind(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(slots=True, kw_only=True)
class ParallelConfig:
    device: DeviceKind
    """auto: cuda where there is one."""
    replicate: int
    """Copies of the sharded model (HSDP); 1: plain FSDP. Divides the number of ranks."""
    reshard_after_forward: bool | None
    """Free gathered weights after each block's forward: less memory, one more all-gather; null: where they would take
    more than a tenth of the device's memory."""
    activation_checkpointing: ActivationCheckpointing
    """none; selective: keep matrix products and attention, recompute the rest; full: keep block inputs only."""
    compile: bool
    """torch.compile each block (needs a C++ compiler on CPU)."""
    timeout_s: float
    """How long a collective may wait for a lost rank."""

    def __post_init__(self) -> None:
        require(self.replicate >= 1, "parallel.replicate", f"must be at least 1, got {self.replicate}")
        require(self.timeout_s > 0, "parallel.timeout_s", f"must be positive, got {self.timeout_s}")


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """What the machines can do; `harness plan` reckons with it."""

    peak_tflops: float | None
    """Dense bf16 rate of one device, the 100 % of MFU; null: known from the device's name, or no MFU."""
    memory_gb: float | None
    """Memory of one device, in GB (1e9 bytes); null: not known, and nothing is refused for it."""
    memory_gb_s: float | None = None
    """Bandwidth of that memory, in GB/s; null: in proportion to peak_tflops, as on an H200."""
    gpus_per_node: int | None
    """Devices of one machine; null: launch.nproc."""
    intra_node_gb_s: float | None
    """What one device sends to the others of its machine, one way, in GB/s."""
    inter_node_gb_s: float | None
    """What one device sends to other machines, one way, in GB/s."""
    price_per_gpu_hour: float | None
    """Any currency; null: costs are told in time alone."""

    def __post_init__(self) -> None:
        names = ("peak_tflops", "memory_gb", "memory_gb_s", "gpus_per_node", "intra_node_gb_s", "inter_node_gb_s")
        for name in (*names, "price_per_gpu_hour"):
            value = getattr(self, name)
            require(value is None or value > 0, f"cluster.{name}", f"must be positive or null, got {value}")
