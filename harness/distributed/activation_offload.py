"""Keeps saved activations of the blocks in host memory between forward and backward.

Why: activations are most of the memory of a step with long sequences, and a block's are not read again until its
backward pass. The link to the host is idle meanwhile.
How: while a block runs its forward pass, hooks of autograd (`saved_tensors_hooks`) get every tensor that it saves. Each
is copied to pinned host memory on a side stream. The device copy is freed when the block after the next one starts; by
then the copy has had a whole block's time, and the compute stream waits for the rest. In backward, the first request
for a tensor of a block starts the copies of the block before it, so they run while this block computes. So the device
holds the activations of about two blocks. The newest blocks are still on the device when backward begins, and the last
one is never copied.
Values are copied bit for bit, with their strides: results do not change. Weights are left alone, because FSDP2 gathers
them again in backward; so are rotary tables, integers, small tensors, and views with gaps.
With activation checkpointing, only what it keeps is saved and copied: with `full` the inputs of the blocks. With
`selective`, blocks must be compiled: otherwise torch keeps the selected tensors outside autograd.
Host buffers are allocated in the first step and used again. Nothing waits on the host.
On a CPU the copies are made too, without a stream: slower and without use, but the same code for tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from harness.distributed.host_memory import PinnedBlock

LEAST_BYTES = 1 << 16
"""Smaller tensors stay on the device: statistics of norms and the like."""


@final
@dataclass(slots=True, eq=False)
class _Saved:
    """A tensor of a block: on the device, in host memory, or both."""

    group: _Group
    device_copy: Tensor | None
    host_copy: Tensor
    """A view of a host buffer with the strides of the original."""
    num_uses: int = 1
    """How many saved tensors of autograd it stands for; those that are still to be unpacked."""
    fetched: torch.cuda.Event | None = None
    """The end of the copy back to the device."""


@final
@dataclass(slots=True, eq=False)
class _Group:
    """All saved tensors of one block in one forward pass."""

    before: _Group | None
    """The block before it."""
    block: nn.Module
    tables: tuple[Tensor, ...]
    left_alone: frozenset[int] | None = None
    """Addresses of the storages of weights and tables; None until the first tensor is saved."""
    saved: dict[Any, _Saved] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None
    """The end of all copies to the host."""
    in_backward: bool = False


@final
class ActivationOffload:
    """The saved activations of the blocks of one model."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self._num_blocks = num_blocks
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._newest: _Group | None = None
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        """Host buffers that no block uses, by size."""
        self._used: list[Tensor] = []
        self._blocks: list[PinnedBlock] = []
        """All host buffers, which are pinned for as long as this exists."""
        self.host_bytes = 0
        """Host memory of all buffers."""

    @contextmanager
    def saving(self, number: int, block: nn.Module, tables: Iterable[Tensor]) -> Iterator[None]:
        """The forward pass of a block. `tables`: tensors that all blocks share."""
        if number == 0:
            self._begin_pass()
        if not torch.is_grad_enabled():
            yield
            return
        before = self._newest
        if before is not None and before.before is not None:
            self._free_device_copies(before.before)
        if number == self._num_blocks - 1:
            yield
            return
        group = _Group(before, block, tuple(tables))
        with saved_tensors_hooks(partial(self._pack, group), self._unpack):
            yield
        if self._side is not None:
            group.copied = self._side.record_event()
        self._newest = group

    def _begin_pass(self) -> None:
        """Take back all host buffers: the backward pass of the last forward pass has ended, or will not come."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)
        self._newest = None
        for buffer in self._used:
            self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)
        self._used.clear()

    def _pack(self, group: _Group, tensor: Tensor) -> Tensor | _Saved:
        if group.left_alone is None:  # FSDP2 has gathered the weights by now
            kept = (*group.tables, *group.block.parameters())
            group.left_alone = frozenset(each.untyped_storage().data_ptr() for each in kept)
        if not self._is_worth_copying(tensor) or tensor.untyped_storage().data_ptr() in group.left_alone:
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if (known := group.saved.get(key)) is not None:
            known.num_uses += 1
            return known
        host_copy = self._take_buffer(tensor).as_strided(tensor.shape, tensor.stride())
        if self._side is None:
            host_copy.copy_(tensor.detach())
        else:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
                host_copy.copy_(tensor.detach(), non_blocking=True)
        group.saved[key] = _Saved(group, tensor.detach(), host_copy)
        return group.saved[key]

    def _unpack(self, packed: Tensor | _Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        group = packed.group
        if not group.in_backward:
            group.in_backward = True
            for each in () if group.before is None else group.before.saved.values():
                self._fetch(each)
        self._fetch(packed)
        if packed.fetched is not None:
            torch.cuda.current_stream(self._device).wait_event(packed.fetched)
        tensor = packed.device_copy
        assert tensor is not None
        packed.num_uses -= 1
        if packed.num_uses <= 0:
            packed.device_copy = None
        return tensor

    def _fetch(self, saved: _Saved) -> None:
        """Copy a tensor back to the device, if it is not there."""
        if saved.device_copy is not None:
            return
        host = saved.host_copy
        device_copy = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
        if self._side is None:
            device_copy.copy_(host)
        else:
            self._side.wait_stream(torch.cuda.current_stream(self._device))  # its memory may still be in use there
            with torch.cuda.stream(self._side):
                device_copy.copy_(host, non_blocking=True)
            saved.fetched = self._side.record_event()
        saved.device_copy = device_copy

    def _free_device_copies(self, group: _Group) -> None:
        """Free the device memory of a block whose copies are in host memory when the compute stream gets there."""
        if group.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(group.copied)
        for each in group.saved.values():
            each.device_copy = None

    def _is_worth_copying(self, tensor: Tensor) -> bool:
        is_number = tensor.dtype.is_floating_point or tensor.dtype is torch.uint8  # fp8 is saved as uint8
        return is_number and tensor.device == self._device and tensor.nbytes >= LEAST_BYTES and _is_dense(tensor)

    def _take_buffer(self, tensor: Tensor) -> Tensor:
        free = self._free.get((tensor.numel(), tensor.dtype))
        if free:
            buffer = free.pop()
        else:
            block = PinnedBlock(tensor.nbytes)
            if self._side is not None:
                block.pin()
            self._blocks.append(block)
            buffer = block.content.view(tensor.dtype)
            self.host_bytes += buffer.nbytes
        self._used.append(buffer)
        return buffer


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps and overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
