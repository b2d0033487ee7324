"""The machine: who the ranks are, and every collective the harness makes by itself.

Why: communication can be counted when it lives in one file; that of the sharded model is `harness.distributed.fsdp`'s.
How: a mesh of replicate x shard ranks, and the same again over gloo for what lies in host memory.
Left out: tensor, pipeline and context parallelism.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from harness.config.schema import ConfigError, DeviceKind, ParallelConfig

T = TypeVar("T")

ASIDE_TIMEOUT_S = 3600.0
"""How long a thread beside training waits for another rank: as long as a slow disk may take."""

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
    """Ranks that hold the same shard."""
    host_mesh: DeviceMesh
    """The same mesh for copies in host memory."""
    aside: dist.ProcessGroup
    """All ranks again, over gloo: what a thread beside training may talk on."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def rank_from_environment() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun tells them; one lonely rank without torchrun."""
    environment = os.environ
    return (
        int(environment.get("RANK", "0")),
        int(environment.get("WORLD_SIZE", "1")),
        int(environment.get("LOCAL_RANK", "0")),
    )


def num_local_ranks() -> int:
    """Ranks on this machine, as torchrun tells; one without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def connect(cfg: ParallelConfig) -> World:
    """Join the process group and lay out the mesh.

    gloo's rings and trees talk to O(log world) peers. Connecting lazily opens those sockets and no others.
    """
    os.environ.setdefault(LAZY_GLOO, "1")
    rank, size, local_rank = rank_from_environment()
    device = _device(cfg.device, local_rank)
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
    aside = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(cfg.timeout_s, ASIDE_TIMEOUT_S)))
    return World(
        rank=rank, size=size, device=device, mesh=mesh, replicate=cfg.replicate, host_mesh=host_mesh, aside=aside
    )


def _device(kind: DeviceKind, local_rank: int) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if kind is DeviceKind.cpu or (kind is DeviceKind.auto and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise ConfigError("parallel.device", "cuda was asked for, but torch sees no GPU; use auto or cpu")
    if local_rank >= torch.cuda.device_count():
        message = f"{local_rank + 1} ranks on this machine, but it has {torch.cuda.device_count()} GPUs"
        raise ConfigError("launch.nproc", message)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def device_memory_bytes() -> int:
    """All that this rank's device has; of the host's memory its share."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_local_ranks()


@contextmanager
def connected(cfg: ParallelConfig) -> Iterator[World]:
    """The process group, for as long as the block runs.

    It is not destroyed after an exception: that waits for the other ranks, which may wait for this one, and nobody
    would learn why it died. The process is about to end. A `ConfigError` is raised on all ranks alike: all of them
    leave in order.
    """
    world = connect(cfg)
    try:
        yield world
    except ConfigError:
        disconnect()
        raise
    disconnect()


def disconnect() -> None:
    """Leave the process group, in order when the others still answer."""
    if dist.is_initialized():
        dist.destroy_process_group()


def write_local(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's part of `full` into a parameter, sharded or not."""
    with torch.no_grad():
        if not isinstance(parameter, DTensor):
            parameter.copy_(full)
            return
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                parts = full.chunk(mesh.size(axis), dim=placement.dim)
                index = mesh.get_local_rank(axis)
                full = parts[index] if index < len(parts) else full.narrow(placement.dim, 0, 0)
        parameter.to_local().copy_(full)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_on_host(tensor: Tensor, part: Tensor, *, world: World) -> Tensor:
    """A tensor whose part on this rank is `part`, in host memory, and which is sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, world.host_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def all_reduce_sum(vector: Tensor) -> Tensor:
    """Sum over all ranks, in place."""
    dist.all_reduce(vector, op=dist.ReduceOp.SUM)
    return vector


def minimum(value: int) -> int:
    """The least over all ranks, by way of the hosts."""
    box = torch.tensor(value)
    dist.all_reduce(box, op=dist.ReduceOp.MIN)
    return int(box)  # sync: it lies in host memory


def broadcast(value: T) -> T:
    """Rank 0's value, on every rank."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]  # type: ignore[no-any-return]


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Do something on every rank of a group; the results in rank order, or on every rank the first failure of any."""
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _outcome_of(work), group=group)
    for each in outcomes:
        if isinstance(each, Exception):
            raise each
    return outcomes


def jointly(work: Callable[[], T]) -> T:
    """Do something on every rank and return this rank's own result; raises on every rank the first failure of any."""
    done: list[T] = []
    together(lambda: done.append(work()))
    return done[0]


def from_first(work: Callable[[], T]) -> T:
    """Do something on rank 0; its result, or its failure, on every rank."""
    outcome = broadcast(_outcome_of(work) if dist.get_rank() == 0 else None)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome  # type: ignore[return-value]


@contextmanager
def entered(manager: AbstractContextManager[T]) -> Iterator[T]:
    """Enter a context on all ranks, or raise on all of them."""
    with ExitStack() as stack:
        yield jointly(lambda: stack.enter_context(manager))


def _outcome_of(work: Callable[[], T]) -> T | Exception:
    """The result, or the exception in a form that another process can read."""
    try:
        return work()
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return RuntimeError(f"{type(error).__name__}: {error}")
        return error
