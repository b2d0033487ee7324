"""Publishes the ring's trusted snapshots in shared memory, for a later start on this machine or a partner's node.

How: the blocks of the ring are files in a tmpfs (`harness.core.snapshot_files`), so publishing copies nothing: a thread
hashes the newest trusted snapshot and writes its header. Before a slot is overwritten, distrusted or discarded, its
header is removed; the lock keeps the thread from writing it back. With `checkpoint.ring.replicas` the same thread then
sends the snapshot to the partner (`harness.checkpoint.replicas`).
All ranks share their snapshots or none does: if the tmpfs of one machine is full, one line says so, and the ring is
private memory as without sharing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from threading import Lock
from typing import Never, final

from harness.checkpoint import integrity
from harness.checkpoint.replicas import ReplicaKeeper, agree_on_newest, find_neighbours
from harness.checkpoint.ring_cost import num_replica_buffers
from harness.checkpoint.slot import Slot, are_finite
from harness.checkpoint.writer_thread import WriterThread
from harness.config.checkpoint import AUTO, RingConfig
from harness.core import snapshot_files
from harness.core.snapshot_files import SnapshotHeader, SnapshotSet, slot_name
from harness.core.state import RunState
from harness.core.stderr_lines import print_warning
from harness.distributed.collectives import gather_results
from harness.distributed.host_memory import PinnedBlock
from harness.distributed.world import World, new_background_group, node_from_environment

BYTES_PER_GB = 1e9
MAX_STARTS = 16
"""Starts that a header remembers."""
CLOSE_WAIT_S = 60.0


@final
class SharedSnapshots:
    """This rank's snapshots in shared memory."""

    def __init__(
        self, folder: Path, files: SnapshotSet, rest: list[SnapshotSet], *, cfg: RingConfig, world: World, config: str
    ) -> None:
        self.lock = Lock()
        """Guards the flags of the ring's slots, and the headers."""
        self.folder, self.files, self.rest = folder, files, rest
        self.world = world
        self.config = config
        self.layouts: list[str] = []
        """Digest of the layout of every rank's tensors."""
        self.num_bytes = 0
        self.keeper: ReplicaKeeper | None = None
        self.starts: list[str] = []
        self._cfg = cfg
        nodes = gather_results(node_from_environment)
        self._neighbours = find_neighbours(nodes, world.rank)
        self.num_replica_buffers = num_replica_buffers(cfg, num_nodes=len(set(nodes)), replicate=world.replicate)
        self._published: dict[int, SnapshotHeader] = {}
        """Iteration -> header, of the snapshots of this process."""
        self._num_withdrawals = 0
        """The same on all ranks."""
        self._last_sent: tuple[int, int] | None = None
        """Withdrawals at the submission, and iteration, of the last snapshot that was sent; the same on all ranks."""
        self._has_warned = False
        self._thread: WriterThread[Never] = WriterThread("snapshot publisher")

    def allocate(self, num_bytes: int, num_slots: int, *, layout: str) -> list[PinnedBlock] | None:
        """The blocks of the ring; None on all ranks if those of one rank do not fit. Collective.

        All ranks' blocks have the size of the largest one, so that any rank can keep the snapshot of any other.
        """
        sizes, self.layouts = zip(*gather_results(lambda: (num_bytes, layout)), strict=True)  # type: ignore[assignment]
        self.num_bytes = max(sizes)
        blocks: list[PinnedBlock] = []

        def map_blocks() -> None:
            for index in range(num_slots):
                file = self.files.block(slot_name(index))
                blocks.append(PinnedBlock(self.num_bytes, file=file))
            if self.num_replica_buffers:
                assert self._neighbours is not None
                rate = self._cfg.replica_gb_s
                self.keeper = ReplicaKeeper(
                    self._neighbours,
                    files=self.files,
                    group=group,
                    num_bytes=self.num_bytes,
                    max_bytes_per_s=None if rate is None else rate * BYTES_PER_GB,
                )

        group = new_background_group() if self.num_replica_buffers else self.world.background_group
        if problem := first_problem(map_blocks):
            blocks.clear()
            self.keeper = None
            self.remove()
            report_private(problem, self.world)
            return None
        return blocks

    def held_bytes(self) -> int:
        """Memory of this machine that the run's files already take and that this start reuses."""
        return snapshot_files.held_bytes(self.folder)

    def submit(self, slots: Sequence[Slot]) -> None:
        """Publish the newest trusted snapshot in the background. All ranks must submit at the same iterations."""
        list(self._thread.drain_events())  # raises what a job raised
        mark = self._num_withdrawals
        self._thread.submit(lambda: self._run_job(slots, mark))

    def withdraw(self, slot: Slot) -> None:
        """Remove the header of a slot; the caller holds the lock."""
        self.files.remove_header(slot.name)
        self._published.pop(slot.state.iteration, None)

    def withdraw_replicas(self, iteration: int) -> None:
        """Remove the headers of replicas taken since this iteration; the caller holds the lock."""
        self._num_withdrawals += 1
        if self.keeper is not None:
            self.keeper.withdraw_from(iteration)

    def begin_start(self, start: str, kept: int | None) -> None:
        """Register a new start of the run. Snapshots of iteration `kept` get its id, all others are withdrawn."""
        self.starts = [start]
        for name, header in self.files.headers().items():
            if header.iteration != kept or not self._write_header(name, add_start(header, start)):
                self.files.remove_header(name)
        self._published = {taken: add_start(header, start) for taken, header in self._published.items()}
        if self.keeper is not None:
            self.keeper.adopt(self.files.headers())
        self.drop_rest()

    def adopt(self, slot: Slot, header: SnapshotHeader) -> None:
        """Publish a slot that was filled from a snapshot of an earlier start."""
        if self._write_header(slot.name, header):
            self._published[header.iteration] = header

    def drop_rest(self) -> None:
        """Remove the sets of ranks that are not on this machine any more."""
        while self.rest:
            left = self.rest.pop()
            snapshot_files.remove_tree(left.path)
            left.release()

    def header_of(self, state: RunState, sha256: str) -> SnapshotHeader:
        """The header of a snapshot of this rank."""
        return SnapshotHeader(
            shard=self.world.shard,
            num_shards=self.world.num_shards,
            world_size=self.world.size,
            config=self.config,
            layout=self.layouts[self.world.rank],
            starts=self.starts,
            iteration=state.iteration,
            num_bytes=self.num_bytes,
            sha256=sha256,
            state=state.as_dict(),
        )

    def wait(self) -> None:
        """Block until all submitted jobs are done; for measurements and tests."""
        self._thread.wait()

    def clear(self) -> None:
        """Withdraw everything: the run needs no snapshot any more. The files are removed when the set is closed."""
        self._thread.wait(CLOSE_WAIT_S)
        with self.lock:
            for name in self.files.headers():
                self.files.remove_header(name)
            self._published.clear()

    def remove(self) -> None:
        """Remove all files of this rank."""
        self.drop_rest()
        snapshot_files.remove_tree(self.files.path)
        self.close()

    def close(self) -> None:
        """Release the files; blocks without a published snapshot are removed."""
        self._thread.wait(CLOSE_WAIT_S)
        self._thread.close()
        self.files.release()
        for left in self.rest:
            left.release()
        snapshot_files.remove_if_empty(self.folder)

    def _run_job(self, slots: Sequence[Slot], mark: int) -> list[Never]:
        """Runs in the thread. An error costs this snapshot, not the run."""
        self._publish_newest(slots)
        if self.keeper is not None:
            try:
                self._replicate(slots, self.keeper, mark)
            except (OSError, RuntimeError) as error:  # gloo raises RuntimeError when a peer is gone
                self._warn(f"snapshots are no longer sent to the partner: {' '.join(str(error).split())}")
                self.keeper = None
        return []

    def _publish_newest(self, slots: Sequence[Slot]) -> None:
        with self.lock:
            trusted = (slot for slot in slots if slot.is_trusted)
            slot = max(trusted, key=lambda each: each.state.iteration, default=None)
            if slot is None or slot.state.iteration in self._published:
                return
            state = slot.state
        slot.wait()
        sha256 = integrity.hash_buffer(slot.block.view)
        if not are_finite(slot.tensors.values()):
            return
        header = self.header_of(state, sha256)
        with self.lock:
            if slot.is_trusted and slot.state is state and self._write_header(slot.name, header):
                self._published[state.iteration] = header

    def _replicate(self, slots: Sequence[Slot], keeper: ReplicaKeeper, mark: int) -> None:
        """Swap the newest snapshot that all ranks have published with the neighbours.

        `mark`: number of withdrawals when the job was submitted. What arrives after another one is dropped.
        """
        with self.lock:
            published = [slot for slot in slots if slot.is_trusted and slot.state.iteration in self._published]
            held = {slot.state.iteration: (slot, self._published[slot.state.iteration]) for slot in published}
        iteration = agree_on_newest(held, keeper.group)
        if iteration is None or (mark, iteration) == self._last_sent:
            return
        self._last_sent = mark, iteration
        slot, header = held[iteration]
        with self.lock:
            name = keeper.begin()
            slot.is_sending = True
        try:
            sha256 = keeper.swap(name, slot.block, header.sha256)
        finally:
            slot.is_sending = False
        source = keeper.source
        with self.lock:
            if sha256 is not None and mark == self._num_withdrawals:
                shard, layout = source % self.world.num_shards, self.layouts[source]
                arrived = replace(header, shard=shard, layout=layout, sha256=sha256)
                if self._write_header(name, arrived):
                    keeper.finish(name, header.iteration)

    def _write_header(self, name: str, header: SnapshotHeader) -> bool:
        """Write a header; False if there is no room for it. The snapshot is then not published."""
        try:
            self.files.write_header(name, header)
        except OSError as error:
            self._warn(f"cannot publish a snapshot in {self.folder}: {error.strerror}")
            return False
        return True

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            print_warning(message)
        self._has_warned = True


def add_start(header: SnapshotHeader, start: str) -> SnapshotHeader:
    """The header of a snapshot that belongs to the history of another start too."""
    return replace(header, starts=[*header.starts, start][-MAX_STARTS:])


def open_shared(cfg: RingConfig, run: Path, *, world: World, config: str) -> SharedSnapshots | None:
    """Claim this rank's files in shared memory; None on all ranks if sharing is off or one rank cannot. Collective.

    A rank prefers the files that a rank with the same shard left behind. Only when all ranks have chosen, the others
    take what is left.
    """
    is_off = cfg.shared_path is None or (cfg.shared_dir == AUTO and not cfg.replicas and world.device.type == "cuda")
    if is_off or not cfg.slots:
        return None
    assert cfg.shared_path is not None
    folder = snapshot_files.snapshot_folder(cfg.shared_path, run)
    claimed: list[SnapshotSet] = []
    rest: list[SnapshotSet] = []

    def claim_own() -> None:
        snapshot_files.unlock_leftovers(folder)
        snapshot_files.create_folder(folder, run)
        if world.is_first_on_host:
            snapshot_files.remove_abandoned(folder.parent)
        claimed.extend(filter(None, [snapshot_files.claim_own(folder, world.shard)]))

    def claim_any() -> None:
        if not claimed:
            claimed.append(snapshot_files.claim_any(folder))

    problem = first_problem(claim_own) or first_problem(claim_any)
    problem = problem or first_problem(lambda: rest.extend(claim_useful(folder, world)))
    if problem:
        for files in claimed:
            files.release()
        report_private(problem, world)
        return None
    return SharedSnapshots(folder, claimed[0], rest, cfg=cfg, world=world, config=config)


def claim_useful(folder: Path, world: World) -> list[SnapshotSet]:
    """Claim the sets that no rank took and that hold snapshots of as many ranks and shards; remove all others."""
    useful = []
    for files in snapshot_files.claim_rest(folder):
        sizes = {(header.world_size, header.num_shards) for header in files.headers().values()}
        if (world.size, world.num_shards) in sizes:
            useful.append(files)
        else:
            snapshot_files.remove_tree(files.path)
            files.release()
    return useful


def first_problem(work: Callable[[], None]) -> str:
    """Run `work` on every rank; the `OSError` of the lowest rank that had one, with its host; empty if none had one."""

    def attempt() -> str:
        try:
            work()
        except OSError as error:
            return f"{gethostname()}: {error}"
        return ""

    return next(filter(None, gather_results(attempt)), "")


def report_private(problem: str, world: World) -> None:
    """Say once that snapshots are not shared."""
    if world.is_first:
        line = f"snapshots stay in private memory and end with their process: {problem}"
        print_warning(f"{line}; checkpoint.ring.shared_dir=null silences this")
