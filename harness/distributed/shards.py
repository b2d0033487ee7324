"""Reads and writes this rank's shard of a DTensor, and builds a host-memory DTensor of the same placement."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from harness.distributed.world import World


def write_local(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of `full` into a parameter, sharded or not."""
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


def local_rows(tensor: Tensor) -> Tensor:
    """The numbers of the rows of a tensor, sharded or not, that are in this rank's shard; on the host."""
    rows = torch.arange(tensor.shape[0], device="cpu")
    if not isinstance(tensor, DTensor):
        return rows
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "FSDP2 shards rows"
            parts, index = rows.chunk(tensor.device_mesh.size(axis)), tensor.device_mesh.get_local_rank(axis)
            rows = parts[index] if index < len(parts) else rows[:0]
    return rows


def first_element(tensor: Tensor) -> int:
    """Index in the whole tensor, in row-major order, of the first element of this rank's shard; 0 for an empty one."""
    rows = local_rows(tensor) if tensor.ndim else torch.zeros(1)
    return int(rows[0]) * prod(tensor.shape[1:]) if len(rows) else 0


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_on_host(tensor: Tensor, part: Tensor, *, world: World) -> Tensor:
    """A tensor in host memory that is sharded like `tensor` and whose shard on this rank is `part`."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, world.host_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
