"""Process groups and device meshes: this rank's place among all ranks.

How: a mesh of replicate x shard ranks, and the same mesh over gloo for tensors in host memory. With context parallelism
neighbouring ranks share their sequences: rank = data_rank * context + context_rank. FSDP shards over all of them.
Several ranks can share a GPU for a rehearsal. NCCL rejects two ranks of one machine with the same GPU, so each rank
gets a host identity of its own, and NCCL connects them over loopback sockets.
Left out: tensor and pipeline parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.config.errors import ConfigError
from harness.config.parallel import DeviceKind, ParallelConfig
from harness.distributed.torch_private.flight_recorder import record_collectives
from harness.distributed.torch_private.group_timeout import set_timeout

BackgroundGroup = dist.ProcessGroup
"""All ranks over gloo, for one background thread."""

ContextGroup = dist.ProcessGroup
"""The ranks that share their sequences."""

BACKGROUND_TIMEOUT_S = 3600.0
"""How long a background thread waits for another rank: as long as a slow disk may take."""

LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
"""Environment variable that torch reads when it creates a gloo group. With 1, a rank connects to a peer at its first
message to it; otherwise every rank connects to all others at once, in each group."""


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place among all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    replicate: int
    """Number of ranks that hold the same shard."""
    host_mesh: DeviceMesh
    """The same mesh over gloo, for copies in host memory."""
    background_group: dist.ProcessGroup
    """All ranks over gloo, for background threads: their collectives must not mix with those of training."""
    context: int = 1
    """Number of ranks that share each sequence."""
    context_group: ContextGroup | None = None
    """The ranks that share this rank's sequences, in the order of their context ranks; None if `context` is 1."""

    @property
    def context_rank(self) -> int:
        """Index of this rank among those that share its sequences."""
        return self.rank % self.context

    @property
    def data_rank(self) -> int:
        """Index of this rank's rows among the shares of the global batch; equal on all ranks of a context group."""
        return self.rank // self.context

    @property
    def num_data_ranks(self) -> int:
        """Number of different shares of the global batch."""
        return self.size // self.context

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def num_shards(self) -> int:
        """Number of different shards of the state."""
        return self.size // self.replicate

    @property
    def shard(self) -> int:
        """Index of the shard of the state that this rank holds."""
        return self.rank % self.num_shards

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that hold the shards of this replica, in the order of their shards."""
        return self.mesh.get_group("shard")

    @property
    def replica(self) -> int:
        """Index of this rank among those that hold the same shard."""
        return self.rank // self.num_shards

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same shard, in the order of their replicas. Only with `replicate` above 1."""
        return self.mesh.get_group("replicate")

    @property
    def is_first_on_host(self) -> bool:
        """Whether this is the first rank of its machine."""
        return rank_from_environment()[2] == 0

    @property
    def gpu_uuids(self) -> list[str]:
        """UUIDs of the GPUs that this process sees, in their order; empty on CPU, and for a GPU without one. Creates no
        CUDA context on them."""
        if self.device.type != "cuda":
            return []
        seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [str(getattr(gpu, "uuid", "")) for gpu in seen]


def rank_from_environment() -> tuple[int, int, int]:
    """(rank, world size, local rank) from torchrun's environment; (0, 1, 0) without torchrun."""
    environment = os.environ
    return (
        int(environment.get("RANK", "0")),
        int(environment.get("WORLD_SIZE", "1")),
        int(environment.get("LOCAL_RANK", "0")),
    )


def num_local_ranks() -> int:
    """Number of ranks on this machine, from torchrun's environment; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def connect(cfg: ParallelConfig, *, ranks_per_gpu: int = 1) -> World:
    """Join the process group and create the meshes.

    gloo's rings and trees use O(log world_size) peers per rank. Connecting lazily opens only those sockets.
    """
    os.environ.setdefault(LAZY_GLOO, "1")
    record_collectives()
    rank, size, local_rank = rank_from_environment()
    device = _device(cfg.device, local_rank, ranks_per_gpu)
    if ranks_per_gpu > 1:
        _share_gpu(device, rank, ranks_per_gpu)
    store = None if "MASTER_ADDR" in os.environ else dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=cfg.timeout_s),
        store=store,
        rank=rank if store else -1,
        world_size=size if store else -1,
        device_id=device if device.type == "cuda" else None,
    )
    shape: tuple[int, ...] = (size,)
    axes: tuple[str, ...] = ("shard",)
    if cfg.replicate > 1:
        shape, axes = (cfg.replicate, size // cfg.replicate), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=axes)
    host_mesh = mesh if device.type == "cpu" else init_device_mesh("cpu", shape, mesh_dim_names=axes)
    if cfg.replicate > 1:
        for group in (*mesh.get_all_groups(), *host_mesh.get_all_groups()):
            set_timeout(group, cfg.timeout_s)
        for group in host_mesh.get_all_groups():
            dist.all_reduce(torch.zeros(1), group=group)  # gloo keeps the old timeout for a group's first collective
    background_group = new_background_group(cfg.timeout_s)
    context_group = None
    if cfg.context > 1:
        timeout = timedelta(seconds=cfg.timeout_s)
        context_group, _ = dist.new_subgroups(cfg.context, timeout=timeout)  # type: ignore[no-untyped-call]
    return World(
        rank=rank,
        size=size,
        device=device,
        mesh=mesh,
        replicate=cfg.replicate,
        host_mesh=host_mesh,
        background_group=background_group,
        context=cfg.context,
        context_group=context_group,
    )


def new_background_group(timeout_s: float = 0.0) -> BackgroundGroup:
    """A gloo group of all ranks for one background thread. Collective: all ranks must call."""
    group: BackgroundGroup = dist.new_group(
        backend="gloo", timeout=timedelta(seconds=max(timeout_s, BACKGROUND_TIMEOUT_S))
    )
    return group


def node_from_environment() -> str:
    """Node of this rank, from torchrun's environment; "0" without torchrun."""
    return os.environ.get("GROUP_RANK", "0")


def _share_gpu(device: torch.device, rank: int, ranks_per_gpu: int) -> None:
    """Let NCCL treat this rank as a machine of its own, and limit it to its share of the GPU's memory."""
    if device.type != "cuda":
        raise ConfigError("launch.ranks_per_gpu", f"must be 1 on CPU, got {ranks_per_gpu}; use launch.nproc")
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_per_process_memory_fraction(1 / ranks_per_gpu, device)


def _device(kind: DeviceKind, local_rank: int, ranks_per_gpu: int) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if kind is DeviceKind.cpu or (kind is DeviceKind.auto and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise ConfigError("parallel.device", "must be cpu or auto: this machine has no CUDA device")
    index = local_rank // ranks_per_gpu
    num_gpus = torch.cuda.device_count()
    if index >= num_gpus:
        shared = f"{ranks_per_gpu} ranks on each of {num_gpus} GPUs"
        most = f"the {num_gpus} GPUs of this machine" if ranks_per_gpu == 1 else shared
        raise ConfigError("launch.nproc", f"must not exceed {most}, got at least {local_rank + 1}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def device_memory_bytes(*, ranks_per_gpu: int) -> int:
    """What this rank may use of its GPU; on CPU, this rank's share of the host's memory."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // ranks_per_gpu
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_local_ranks()


@contextmanager
def connected(cfg: ParallelConfig, *, ranks_per_gpu: int = 1) -> Iterator[World]:
    """Hold the process group while the block runs.

    After an exception the group is not destroyed: destroying waits for the other ranks, which may wait for this one,
    and the traceback would never be printed. The process is about to end anyway. A `ConfigError` is raised on all
    ranks, so all of them can leave in order, unless it is about data that only this rank reads.
    """
    world = connect(cfg, ranks_per_gpu=ranks_per_gpu)
    try:
        yield world
    except ConfigError as error:
        if may_wait_for_this_rank(error, world):
            raise
        error.is_shared = True
        disconnect()
        raise
    disconnect()


def may_wait_for_this_rank(error: ConfigError, world: World) -> bool:
    """Whether other ranks may wait in a collective for the rank that raises this error."""
    return error.is_of_one_rank and world.size > 1


def disconnect() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
