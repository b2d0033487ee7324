"""The snapshot ring: the last snapshots of this rank's shards in pinned host memory, to rewind to.

Why: undoing a bad update takes a second from memory. From disk it takes minutes and loses every step since the last
checkpoint.
How: each slot is one pinned block, allocated once. A snapshot is a device-to-host copy on a side stream during the next
forward pass; the next update waits for it on the device, the host never waits. The run state of a slot is completed
when the step report of the same iteration arrives (`Slot.complete`). A slot becomes a rewind target (`trust`) once
every step up to it was clean and one clean step was computed from it, because an update that breaks the weights shows
only in the step after it. The newest target is never overwritten by an untrusted snapshot.
All ranks take and trust snapshots at the same iterations. Before a rewind they agree on a slot that all of them hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from harness.checkpoint.host_memory import PinnedBlock, align_up, free_bytes
from harness.checkpoint.ring_cost import num_buffers
from harness.config.checkpoint import RingConfig
from harness.config.errors import ConfigError
from harness.core.state import RunState
from harness.distributed.collectives import all_reduce_min, gather_results
from harness.distributed.shards import like_on_host, local
from harness.distributed.torch_private.foreach import foreach_copy_
from harness.distributed.world import World, num_local_ranks

BYTES_PER_GB = 1e9


@final
@dataclass(slots=True)
class Slot:
    """Memory for one snapshot, empty or filled."""

    block: PinnedBlock
    tensors: dict[str, Tensor]
    """This rank's part of every tensor."""
    sharded: dict[str, Tensor]
    """The same memory as DTensors; checkpoints are written from these."""
    copied: torch.cuda.Event | None
    state: RunState = field(default_factory=RunState)
    is_taken: bool = False
    is_complete: bool = False
    """The reports of all steps up to it have arrived."""
    is_trusted: bool = False
    """Every step up to it and one step computed from it were clean; implies is_taken and is_complete."""
    is_saving: bool = False
    """It is being written to disk and must not be overwritten."""
    _is_finite: bool | None = None

    def complete(self, *, step: int, refused_in_row: int, sentinel: dict[str, Any] | None = None) -> None:
        """Fill in the parts of the run state that come from the reports up to this iteration."""
        self.state = replace(self.state, step=step, refused_in_row=refused_in_row, sentinel=sentinel or {})
        self.is_complete = True

    def wait(self) -> None:
        """Block the host until the device-to-host copy has finished."""
        if self.copied is not None:
            self.copied.synchronize()  # sync: only readers of a snapshot wait for its copy; a step never does

    @property
    def is_finite(self) -> bool:
        """Whether all values of this rank's shards are finite; computed once, on the host, on first use."""
        if self._is_finite is None:
            self.wait()
            floats = [part for part in self.tensors.values() if part.is_floating_point() and part.numel()]
            extremes = (torch.stack(torch.aminmax(part)) for part in floats)
            self._is_finite = all(bool(pair.isfinite().all()) for pair in extremes)  # sync: none, in host memory
        return self._is_finite

    def begin(self, state: RunState) -> None:
        """Reset the slot for a new snapshot."""
        self.state = replace(state)
        self.is_taken, self.is_complete, self.is_trusted, self._is_finite = True, False, False, None


@final
class Ring:
    def __init__(self, tensors: Mapping[str, Tensor], *, cfg: RingConfig, world: World) -> None:
        self._live = {name: local(tensor.detach()) for name, tensor in tensors.items()}
        self._on_gpu = world.device.type == "cuda"
        self._stream = torch.cuda.Stream(world.device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._copying: Slot | None = None
        num_bytes = sum(align_up(part.nbytes) for part in self._live.values())
        check_budget(num_bytes, cfg=cfg)
        self._slots = [self._new_slot(tensors, num_bytes, world) for _ in range(num_buffers(cfg))]

    def _new_slot(self, tensors: Mapping[str, Tensor], num_bytes: int, world: World) -> Slot:
        block = PinnedBlock(num_bytes, pinned=self._on_gpu)
        parts = {name: block.like(part) for name, part in self._live.items()}
        return Slot(
            block=block,
            tensors=parts,
            sharded={name: like_on_host(tensors[name], part, world=world) for name, part in parts.items()},
            copied=torch.cuda.Event() if self._on_gpu else None,  # type: ignore[no-untyped-call]
        )

    def take_snapshot(self, state: RunState) -> Slot:
        """Start copying the state into a slot; on a GPU the copy finishes before the next update."""
        slot = self._next_slot()
        slot.begin(state)
        if self._stream is None:
            self._copy(slot)
            return slot
        assert slot.copied is not None
        self.finish_copy()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(slot)
            slot.copied.record(self._stream)
        self._copying = slot
        return slot

    def _copy(self, slot: Slot) -> None:
        foreach_copy_(list(slot.tensors.values()), list(self._live.values()), non_blocking=True)

    def finish_copy(self) -> None:
        """Make the current stream wait for the running copy; call before anything changes the state."""
        if self._copying is not None and self._copying.copied is not None:
            torch.cuda.current_stream().wait_event(self._copying.copied)
        self._copying = None

    def find_incomplete(self, iteration: int) -> Slot | None:
        """The snapshot of this iteration, if one was taken and its report was still missing."""
        waiting = (slot for slot in self._slots if slot.is_taken and not slot.is_complete)
        return next((slot for slot in waiting if slot.state.iteration == iteration), None)

    def trust(self, iteration: int) -> None:
        """Trust all complete snapshots from before this iteration: it and all before it were clean."""
        for slot in self._slots:
            if slot.is_taken and slot.is_complete and slot.state.iteration < iteration:
                slot.is_trusted = True

    def distrust(self, iteration: int) -> None:
        """Withdraw trust from snapshots taken since this iteration, which is under suspicion."""
        for slot in self._slots:
            if slot.state.iteration >= iteration:
                slot.is_trusted = False

    def discard_from(self, iteration: int) -> None:
        """Discard snapshots taken since this iteration; the run has rolled back to before it."""
        for slot in self._slots:
            if slot.state.iteration >= iteration:
                slot.is_taken = slot.is_trusted = slot.is_saving = False

    def agree_on_target(self, *, before: int) -> Slot | None:
        """The newest target from before an iteration that every rank holds, or None. Collective: all ranks must
        call."""
        while True:
            mine = self._newest_target(before)
            before = all_reduce_min(-1 if mine is None else mine.state.iteration)
            held = next((slot for slot in self._targets() if slot.state.iteration == before), None)
            if before < 0 or all_reduce_min(int(held is not None)):
                return held

    def restore(self, slot: Slot) -> RunState:
        """Copy a snapshot back, bit for bit; returns its run state."""
        assert slot.is_complete, "only a complete snapshot can be restored"
        slot.wait()
        self.finish_copy()
        foreach_copy_(list(self._live.values()), list(slot.tensors.values()), non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()  # sync: a rewind is rare, and the slot may be written to next
        return replace(slot.state)

    def close(self) -> None:
        for slot in self._slots:
            slot.wait()
            slot.block.release()

    def _targets(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.is_trusted and slot.is_finite]

    def _newest_target(self, before: int) -> Slot | None:
        earlier = [slot for slot in self._targets() if slot.state.iteration < before]
        return max(earlier, key=lambda slot: slot.state.iteration, default=None)

    def _next_slot(self) -> Slot:
        """The slot to overwrite: an empty one, else the oldest; never one being saved or the newest target."""
        trusted = [slot for slot in self._slots if slot.is_trusted]
        kept = max(trusted, key=lambda slot: slot.state.iteration, default=None) if len(self._slots) > 1 else None
        free = [slot for slot in self._slots if not slot.is_saving and slot is not kept]
        assert free, "wait for the save before taking another snapshot"
        return min(free, key=lambda slot: slot.state.iteration if slot.is_taken else -1)


def check_budget(num_bytes: int, *, cfg: RingConfig) -> None:
    """Raise on all ranks, before anything is allocated, if the ring does not fit into some machine's memory."""
    machines = gather_results(lambda: (num_bytes * num_local_ranks(), num_local_ranks(), free_bytes()))
    snapshot_bytes, ranks = max((snapshot_bytes, ranks) for snapshot_bytes, ranks, _ in machines)
    free = min(free for _, _, free in machines)
    allowed = free / 2 if cfg.memory_gb is None else cfg.memory_gb * BYTES_PER_GB
    needed = snapshot_bytes * num_buffers(cfg)
    if needed <= allowed:
        return
    fitting = int(allowed // snapshot_bytes)
    message = (
        f"{cfg.slots} snapshots and the one being saved need {num_buffers(cfg)} x "
        f"{snapshot_bytes / BYTES_PER_GB:.3g} GB on a machine with {ranks} ranks, "
        f"{needed / BYTES_PER_GB:.3g} GB of host memory; allowed are "
        f"{allowed / BYTES_PER_GB:.3g} GB{' (half of the free memory)' if cfg.memory_gb is None else ''}, "
    )
    message += (
        f"enough for checkpoint.ring.slots={fitting - 1 if fitting > 2 else 0}" if fitting else "not enough for one"
    )
    raise ConfigError("checkpoint.ring.memory_gb", message)
