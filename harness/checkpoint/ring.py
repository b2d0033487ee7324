"""The ring: the last snapshots of this rank's part of the state, in host memory, ready to rewind to.

Why: a bad update that slipped through is undone in a second from memory; from disk it takes minutes, and everything
since the last checkpoint.
How: each slot is one block of page-locked memory, allocated once. A snapshot is copied on a side stream while the next
forward pass runs, and the next update waits for it on the device; the host waits for nothing. What the host knows of
that moment is completed when the report of the same iteration comes back (`Slot.settle`). A slot is a target only once
every step up to it was judged clean, and one clean step was computed from it (`trust`): an update that breaks the
weights is first seen in the step after it. The newest target is never overwritten by an untried snapshot.
All ranks take and judge at the same iterations; before a rewind they agree on the slot and that all of them hold it.
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
from harness.distributed.collectives import minimum, together
from harness.distributed.shards import like_on_host, local
from harness.distributed.world import World, num_local_ranks

BYTES_PER_GB = 1e9


@final
@dataclass(slots=True)
class Slot:
    """One snapshot, or room for one."""

    block: PinnedBlock
    tensors: dict[str, Tensor]
    """This rank's part of every tensor."""
    whole: dict[str, Tensor]
    """The same memory as sharded tensors, which is what a checkpoint is written from."""
    copied: torch.cuda.Event | None
    state: RunState = field(default_factory=RunState)
    is_taken: bool = False
    is_complete: bool = False
    """Every step up to it has reported."""
    is_trusted: bool = False
    """Every step up to it was judged clean, and one computed from it; then it is also taken and settled."""
    is_saving: bool = False
    """It is being saved and must stay as it is."""
    _is_finite: bool | None = None

    def complete(self, *, step: int, refused_in_row: int, sentinel: dict[str, Any] | None = None) -> None:
        """Complete what the host knew with what the reports up to the same iteration say."""
        self.state = replace(self.state, step=step, refused_in_row=refused_in_row, sentinel=sentinel or {})
        self.is_complete = True

    def wait(self) -> None:
        """Until the copy is complete."""
        if self.copied is not None:
            self.copied.synchronize()  # sync: whoever reads a snapshot on the host waits for it; a step never does

    @property
    def is_finite(self) -> bool:
        """Whether every number of this rank's part is; looked at once, on the host, by whoever needs to know."""
        if self._is_finite is None:
            self.wait()
            floats = [part for part in self.tensors.values() if part.is_floating_point() and part.numel()]
            extremes = (torch.stack(torch.aminmax(part)) for part in floats)
            self._is_finite = all(bool(each.isfinite().all()) for each in extremes)  # sync: none, in host memory
        return self._is_finite

    def begin(self, state: RunState) -> None:
        """A new snapshot takes the place of the old one."""
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
            whole={name: like_on_host(tensors[name], part, world=world) for name, part in parts.items()},
            copied=torch.cuda.Event() if self._on_gpu else None,  # type: ignore[no-untyped-call]
        )

    def take_snapshot(self, state: RunState) -> Slot:
        """Begin to copy the state into a slot; on a GPU it is there before the next update."""
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
        torch._foreach_copy_(list(slot.tensors.values()), list(self._live.values()), non_blocking=True)

    def finish_copy(self) -> None:
        """What changes the state comes after this: the device first finishes the snapshot that is on its way."""
        if self._copying is not None and self._copying.copied is not None:
            torch.cuda.current_stream().wait_event(self._copying.copied)
        self._copying = None

    def find_incomplete(self, iteration: int) -> Slot | None:
        """The snapshot of an iteration whose report has just come, if one was taken."""
        waiting = (slot for slot in self._slots if slot.is_taken and not slot.is_complete)
        return next((slot for slot in waiting if slot.state.iteration == iteration), None)

    def trust(self, iteration: int) -> None:
        """The update of this iteration was judged clean, and so was every one before it."""
        for slot in self._slots:
            if slot.is_taken and slot.is_complete and slot.state.iteration < iteration:
                slot.is_trusted = True

    def distrust(self, iteration: int) -> None:
        """Something may have gone wrong at this iteration: until it is trusted again, nothing since is a target."""
        for slot in self._slots:
            if slot.state.iteration >= iteration:
                slot.is_trusted = False

    def discard_from(self, iteration: int) -> None:
        """The run goes on from before this iteration: what was taken since never was."""
        for slot in self._slots:
            if slot.state.iteration >= iteration:
                slot.is_taken = slot.is_trusted = slot.is_saving = False

    def agree_on_target(self, *, before: int) -> Slot | None:
        """The newest target from before an iteration that every rank holds, or None; all ranks must ask."""
        while True:
            mine = self._newest_target(before)
            before = minimum(-1 if mine is None else mine.state.iteration)
            held = next((slot for slot in self._targets() if slot.state.iteration == before), None)
            if before < 0 or minimum(int(held is not None)):
                return held

    def restore(self, slot: Slot) -> RunState:
        """Put a snapshot back in place, bit for bit; returns where the run stood."""
        assert slot.is_complete, "only a whole snapshot can be restored"
        slot.wait()
        self.finish_copy()
        torch._foreach_copy_(list(self._live.values()), list(slot.tensors.values()), non_blocking=True)
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
        """Where the next snapshot goes: an empty slot, else the oldest; never one being saved or the newest target."""
        trusted = [slot for slot in self._slots if slot.is_trusted]
        kept = max(trusted, key=lambda slot: slot.state.iteration, default=None) if len(self._slots) > 1 else None
        free = [slot for slot in self._slots if not slot.is_saving and slot is not kept]
        assert free, "wait for the save before taking another snapshot"
        return min(free, key=lambda slot: slot.state.iteration if slot.is_taken else -1)


def check_budget(num_bytes: int, *, cfg: RingConfig) -> None:
    """Refuse a ring that does not fit in the memory of some machine, on all ranks alike, before anything is taken."""
    machines = together(lambda: (num_bytes * num_local_ranks(), num_local_ranks(), free_bytes()))
    each, ranks = max((each, ranks) for each, ranks, _ in machines)
    free = min(free for _, _, free in machines)
    allowed = free / 2 if cfg.memory_gb is None else cfg.memory_gb * BYTES_PER_GB
    needed = each * num_buffers(cfg)
    if needed <= allowed:
        return
    fitting = int(allowed // each)
    message = (
        f"{cfg.slots} snapshots and the one being saved take {num_buffers(cfg)} x {each / BYTES_PER_GB:.3g} GB on a "
        f"machine with {ranks} ranks, {needed / BYTES_PER_GB:.3g} GB of host memory; allowed are "
        f"{allowed / BYTES_PER_GB:.3g} GB{' (half of what is free)' if cfg.memory_gb is None else ''}, "
    )
    message += (
        f"enough for checkpoint.ring.slots={fitting - 1 if fitting > 2 else 0}" if fitting else "not enough for one"
    )
    raise ConfigError("checkpoint.ring.memory_gb", message)
