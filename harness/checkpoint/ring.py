"""The snapshot ring: the last snapshots of this rank's shards in pinned host memory, to rewind to.

Why: undoing a bad update takes a second from memory. From disk it takes minutes and loses every step since the last
checkpoint.
How: each slot is one pinned block, allocated once; a thread allocates the memory while the run starts. A snapshot is a
device-to-host copy on a side stream during the next forward pass; the next update waits for it on the device, the host
never waits. The run state of a slot is completed when the step report of the same iteration arrives (`Slot.complete`).
A slot becomes a rewind target (`trust`) once every step up to it was clean and one clean step was computed from it,
because an update that breaks the weights shows only in the step after it. The newest target is never overwritten by an
untrusted snapshot.
All ranks take and trust snapshots at the same iterations. Before a rewind they agree on a slot that all of them hold.
Trusted snapshots can be shared with later starts and other nodes (`harness.checkpoint.shared_snapshots`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import Lock, Thread
from typing import Any, final

import torch
from torch import Tensor

from harness.checkpoint.ring_cost import num_buffers
from harness.checkpoint.shared_snapshots import SharedSnapshots
from harness.checkpoint.slot import Slot
from harness.config.checkpoint import RingConfig
from harness.config.errors import ConfigError
from harness.core.memory_limits import free_bytes
from harness.core.snapshot_files import slot_name
from harness.core.state import RunState
from harness.distributed.collectives import all_reduce_min, gather_results
from harness.distributed.host_memory import PinnedBlock, align_up
from harness.distributed.shards import like_on_host, local
from harness.distributed.torch_private.foreach import foreach_copy_
from harness.distributed.world import World, num_local_ranks

BYTES_PER_GB = 1e9


@final
class Ring:
    def __init__(
        self, tensors: Mapping[str, Tensor], *, cfg: RingConfig, world: World, shared: SharedSnapshots | None = None
    ) -> None:
        self._live = {name: local(tensor.detach()) for name, tensor in tensors.items()}
        self._on_gpu = world.device.type == "cuda"
        self._stream = torch.cuda.Stream(world.device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._copying: Slot | None = None
        self._unpublished: list[int] = []
        """Iterations of snapshots that were taken and not submitted since; the same on all ranks."""
        self._submitted: list[int] = []
        """Iterations of the last snapshots that were submitted; the same on all ranks."""
        num_bytes = sum(align_up(part.nbytes) for part in self._live.values())
        num_slots = num_buffers(cfg)
        num_replicas = 0 if shared is None else shared.num_replica_buffers
        reused_bytes = 0 if shared is None else shared.held_bytes()
        check_budget(num_bytes, cfg=cfg, num_replicas=num_replicas, reused_bytes=reused_bytes)
        blocks: Sequence[PinnedBlock] | None = None
        if shared is not None:
            layout = layout_digest(self._live)
            blocks = shared.allocate(num_bytes, num_slots, layout=layout)
        self.shared = None if blocks is None else shared
        """Access to the snapshots of other processes; None: the ring is private."""
        self._lock: AbstractContextManager[bool] = Lock() if self.shared is None else self.shared.lock
        """Guards the flags of the slots against the thread that publishes them."""
        blocks = blocks or [PinnedBlock(num_bytes) for _ in range(num_slots)]

        def as_sharded(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: like_on_host(tensors[name], part, world=world) for name, part in parts.items()}

        self._slots = [self._new_slot(as_sharded, slot_name(index), block) for index, block in enumerate(blocks)]
        self._allocation = Thread(target=allocate_pages, args=(blocks,), name="snapshot memory", daemon=True)
        if self._on_gpu:
            self._allocation.start()

    def _new_slot(
        self, as_sharded: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], name: str, block: PinnedBlock
    ) -> Slot:
        return Slot(
            name=name,
            block=block,
            tensors={name: block.like(part) for name, part in self._live.items()},
            as_sharded=as_sharded,
            copied=torch.cuda.Event() if self._on_gpu else None,  # type: ignore[no-untyped-call]
        )

    def pin(self) -> None:
        """Pin the slots, so that copies do not block the host. The first call waits until their memory is allocated."""
        if self._on_gpu:
            self._allocation.join()
            for slot in self._slots:
                slot.block.pin()

    def take_snapshot(self, state: RunState) -> Slot:
        """Start copying the state into a slot; on a GPU the copy finishes before the next update."""
        self.pin()
        slot = self._next_slot()
        with self._lock:
            self._withdraw(slot)
            slot.begin(state)
        self._unpublished.append(state.iteration)
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

    def hold_snapshot(self, state: RunState, *, sentinel: dict[str, Any]) -> Slot:
        """Snapshot a state whose reports have all been processed, and keep it until `release`."""
        slot = self.take_snapshot(state)
        slot.complete(step=state.step, refused_in_row=state.refused_in_row, sentinel=sentinel)
        slot.is_held = True
        return slot

    def release(self, slot: Slot) -> None:
        """Allow a slot that was held to be overwritten."""
        slot.is_held = False

    @property
    def num_slots(self) -> int:
        return len(self._slots)

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
        with self._lock:
            for slot in self._slots:
                if slot.is_taken and slot.is_complete and slot.state.iteration < iteration:
                    slot.is_trusted = True
        self._submit(iteration)

    def _submit(self, iteration: int) -> None:
        """Publish the newest trusted snapshot if one was taken since the last time.

        The choice follows from iterations alone, not from this rank's slots: with replicas, a submission is a
        collective.
        """
        due = [taken for taken in self._unpublished if taken < iteration]
        if due:
            self._unpublished = [taken for taken in self._unpublished if taken >= iteration]
            self._submitted = [*self._submitted, *due][-len(self._slots) :]
            if self.shared is not None:
                self.shared.submit(self._slots)

    def distrust(self, iteration: int) -> None:
        """Withdraw trust from snapshots taken since this iteration, which is under suspicion."""
        with self._lock:
            for slot in self._slots:
                if slot.state.iteration >= iteration:
                    self._withdraw(slot)
                    slot.is_trusted = False
        self._unsubmit(iteration)

    def discard_from(self, iteration: int) -> None:
        """Discard snapshots taken since this iteration; the run has rolled back to before it."""
        with self._lock:
            for slot in self._slots:
                if slot.state.iteration >= iteration:
                    self._withdraw(slot)
                    slot.is_taken = slot.is_trusted = slot.is_saving = False
        self._unsubmit(iteration)
        self._unpublished = [taken for taken in self._unpublished if taken < iteration]

    def withdraw_from(self, iteration: int) -> None:
        """Withdraw shared snapshots taken since this iteration: no later start may resume from them. They stay in the
        ring."""
        with self._lock:
            for slot in self._slots:
                if slot.state.iteration >= iteration:
                    self._withdraw(slot)
        self._unsubmit(iteration)

    def _withdraw(self, slot: Slot) -> None:
        if self.shared is not None:
            self.shared.withdraw(slot)

    def _unsubmit(self, iteration: int) -> None:
        """Submit snapshots taken since this iteration again once they are trusted again."""
        if self.shared is not None and self._submitted and self._submitted[-1] >= iteration:
            with self._lock:
                self.shared.withdraw_replicas(iteration)
        again = [taken for taken in self._submitted if taken >= iteration]
        self._submitted = [taken for taken in self._submitted if taken < iteration]
        self._unpublished = sorted({*again, *self._unpublished})

    def adopt(self, name: str, state: RunState) -> RunState:
        """Take the content of a shared block as a trusted snapshot, and restore it."""
        slot = self.slot(name)
        with self._lock:
            slot.adopt(state)
        return self.restore(slot)

    def slot(self, name: str) -> Slot:
        """The slot of a shared block."""
        return next(slot for slot in self._slots if slot.name == name)

    def slot_names(self) -> list[str]:
        return [slot.name for slot in self._slots]

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
        self.pin()
        self.finish_copy()
        foreach_copy_(list(self._live.values()), list(slot.tensors.values()), non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()  # sync: a rewind is rare, and the slot may be written to next
        return replace(slot.state)

    def end_sharing(self) -> None:
        """Withdraw all shared snapshots: the last state is on disk, or the run was halted."""
        if self.shared is not None:
            self.shared.clear()

    def close(self) -> None:
        if self._on_gpu:
            self._allocation.join()
        for slot in self._slots:
            slot.wait()
            slot.block.release()
        if self.shared is not None:
            self.shared.close()

    def _targets(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.is_trusted and slot.is_finite]

    def _newest_target(self, before: int) -> Slot | None:
        earlier = [slot for slot in self._targets() if slot.state.iteration < before]
        return max(earlier, key=lambda slot: slot.state.iteration, default=None)

    def _next_slot(self) -> Slot:
        """The slot to overwrite: an empty one, else the oldest; never one being saved or held, or the newest target."""
        trusted = [slot for slot in self._slots if slot.is_trusted]
        kept = max(trusted, key=lambda slot: slot.state.iteration, default=None) if len(self._slots) > 1 else None
        free = [slot for slot in self._slots if not slot.is_saving and not slot.is_held and slot is not kept]
        assert free, "wait for the save before taking another snapshot"
        free = [slot for slot in free if not slot.is_sending] or free
        return min(free, key=lambda slot: slot.state.iteration if slot.is_taken else -1)


def allocate_pages(blocks: Sequence[PinnedBlock]) -> None:
    for block in blocks:
        block.allocate_pages()


def layout_digest(parts: Mapping[str, Tensor]) -> str:
    """Digest of name, dtype and shape of every tensor, in order."""
    described = [(name, str(part.dtype), tuple(part.shape)) for name, part in parts.items()]
    return hashlib.sha256(repr(described).encode()).hexdigest()


def check_budget(num_bytes: int, *, cfg: RingConfig, num_replicas: int = 0, reused_bytes: int = 0) -> None:
    """Raise on all ranks, before anything is allocated, if the ring does not fit into some machine's memory.

    `num_replicas`: buffers for a partner's snapshots. `reused_bytes`: what an earlier start left on this machine.
    """
    machines = gather_results(lambda: (num_bytes * num_local_ranks(), num_local_ranks(), free_bytes() + reused_bytes))
    snapshot_bytes, ranks = max((snapshot_bytes, ranks) for snapshot_bytes, ranks, _ in machines)
    free = min(free for _, _, free in machines)
    allowed = free / 2 if cfg.memory_gb is None else cfg.memory_gb * BYTES_PER_GB
    num_needed = num_buffers(cfg) + num_replicas
    needed = snapshot_bytes * num_needed
    if needed <= allowed:
        return
    fitting = int(allowed // snapshot_bytes) - num_replicas
    saved = f"the one being saved and {num_replicas} of a partner" if num_replicas else "the one being saved"
    message = (
        f"{cfg.slots} snapshots{',' if num_replicas else ' and'} {saved} need {num_needed} x "
        f"{snapshot_bytes / BYTES_PER_GB:.3g} GB on a machine with {ranks} ranks, "
        f"{needed / BYTES_PER_GB:.3g} GB of host memory; allowed are "
        f"{allowed / BYTES_PER_GB:.3g} GB{' (half of the free memory)' if cfg.memory_gb is None else ''}, "
    )
    message += (
        f"enough for checkpoint.ring.slots={fitting - 1 if fitting > 2 else 0}" if fitting > 0 else "not enough for one"
    )
    raise ConfigError("checkpoint.ring.memory_gb", message)
