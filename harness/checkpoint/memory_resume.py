"""Resumes from the newest snapshot in memory that every rank can reach.

How: each rank lists the snapshots in its files that qualify: same run, same number of ranks and shards, same config
and layout, from the newest start of the run, not newer than the log and not older than the newest checkpoint. The lists
are gathered, so every rank computes the same choice: the newest iteration of which every shard has a copy, and for each
rank the copy it takes, its own if it has one. Every copy is hashed before it is used. A copy with a wrong hash is
struck from the list on all ranks, and the choice is made again. Without a complete set, nothing is restored from
memory, and the caller loads from disk. A rank without a copy receives one from another rank in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, final

import torch

from harness.checkpoint import integrity
from harness.checkpoint.ring import Ring
from harness.checkpoint.shared_snapshots import SharedSnapshots
from harness.core.snapshot_files import SnapshotHeader
from harness.core.state import RunState
from harness.distributed.collectives import gather_results
from harness.distributed.exchange import receive_block, send_block
from harness.distributed.host_memory import map_block


@final
class SnapshotCopy(NamedTuple):
    """A copy of one shard's snapshot that a rank can read."""

    rank: int
    """The rank that can read it."""
    shard: int
    iteration: int
    block: str
    """Path of the block on that rank's machine."""
    sha256: str = ""


@final
class SnapshotSources(NamedTuple):
    """The snapshot to resume from, and for each rank the copy it takes."""

    iteration: int
    copies: list[SnapshotCopy]


@final
class SnapshotBounds(NamedTuple):
    """Which snapshots qualify; rank 0 knows it and tells all."""

    start: str
    """Id of the newest start of the run."""
    oldest: int
    """Iteration of the newest checkpoint on disk."""
    newest: int
    """Last iteration in the log."""


@final
class RestoredSnapshot(NamedTuple):
    state: RunState
    fetched: list[int]
    """Ranks whose shard came from another rank's memory."""


def choose_sources(copies: Iterable[SnapshotCopy], shards: Sequence[int]) -> SnapshotSources | None:
    """The newest iteration of which every shard has a copy, and each rank's source; `shards` has each rank's shard."""
    by_iteration: dict[int, dict[int, list[SnapshotCopy]]] = {}
    for copy in copies:
        by_iteration.setdefault(copy.iteration, {}).setdefault(copy.shard, []).append(copy)
    complete = [iteration for iteration, held in by_iteration.items() if held.keys() >= set(shards)]
    if not complete:
        return None
    held = by_iteration[max(complete)]
    return SnapshotSources(max(complete), [_choose_copy(held[shard], rank=rank) for rank, shard in enumerate(shards)])


def _choose_copy(copies: list[SnapshotCopy], *, rank: int) -> SnapshotCopy:
    """This rank's own copy, else one of another rank; ranks that need the same shard take it from different ones."""
    own = [copy for copy in copies if copy.rank == rank]
    others = sorted(copies)
    return min(own) if own else others[rank % len(others)]


def load_newest_snapshot(ring: Ring, bounds: SnapshotBounds) -> RestoredSnapshot | None:
    """Restore the newest snapshot in memory that every rank can reach; None if there is none. Collective.

    The tensors are unchanged if nothing is restored.
    """
    shared = ring.shared
    if shared is None:
        return None
    headers = qualifying_headers(shared, bounds)
    sources = _agree_on_sources(shared, headers)
    if sources is None:
        return None
    rank = shared.world.rank
    mine = sources.copies[rank]
    name = _choose_slot(ring, shared, sources)
    block, is_in_place = ring.slot(name).block, mine.block == _path_of(shared, name)
    if not is_in_place:
        shared.files.remove_header(name)
    _move_shards(block.content, shared, sources, is_in_place=is_in_place)
    if not all(gather_results(lambda: is_in_place or integrity.hash_buffer(block.view) == mine.sha256)):
        return None
    first = sources.copies[0]
    known = gather_results(lambda: headers[first.block] if first.rank == rank else None)
    header = next(header for header in known if header is not None)
    own = replace(header, shard=shared.world.shard, layout=shared.layouts[rank], sha256=mine.sha256)
    shared.adopt(ring.slot(name), own)
    state = ring.adopt(name, RunState(**header.state))
    return RestoredSnapshot(state, [taker for taker, copy in enumerate(sources.copies) if copy.rank != taker])


def qualifying_headers(shared: SharedSnapshots, bounds: SnapshotBounds) -> dict[str, SnapshotHeader]:
    """Path -> header of the snapshots that this rank can read and that the run may resume from."""
    world = shared.world
    found = {
        str(files.block(name)): header
        for files in [shared.files, *shared.rest]
        for name, header in files.headers().items()
    }
    return {
        path: header
        for path, header in found.items()
        if (header.world_size, header.num_shards) == (world.size, world.num_shards)
        and header.shard in range(world.num_shards)
        and (header.config, header.layout) == (shared.config, shared.layouts[header.shard])
        and header.num_bytes == shared.num_bytes == _size_of(path)
        and bounds.start in header.starts
        and bounds.oldest <= header.iteration <= bounds.newest
    }


def _size_of(path: str) -> int:
    """Bytes of a block; 0 if it is gone. One rank must not raise while the others wait for its list."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def _agree_on_sources(shared: SharedSnapshots, headers: dict[str, SnapshotHeader]) -> SnapshotSources | None:
    """Choose copies and verify them until every chosen copy is intact; None if no complete set is left."""
    world = shared.world
    intact: dict[str, bool] = {}

    def list_copies() -> list[SnapshotCopy]:
        return [
            SnapshotCopy(world.rank, header.shard, header.iteration, path, header.sha256)
            for path, header in headers.items()
            if intact.get(path, True)
        ]

    def verify(copies: Iterable[SnapshotCopy]) -> bool:
        paths = {copy.block for copy in copies if copy.rank == world.rank}
        for path in paths - intact.keys():
            try:
                with memoryview(map_block(Path(path), shared.num_bytes)) as view:
                    intact[path] = integrity.hash_buffer(view) == headers[path].sha256
            except OSError:
                intact[path] = False
        return all(intact[path] for path in paths)

    shards = [rank % world.num_shards for rank in range(world.size)]
    while True:
        copies = [copy for held in gather_results(list_copies) for copy in held]
        sources = choose_sources(copies, shards)
        if sources is None:
            return None
        if all(gather_results(lambda chosen=sources: verify(chosen.copies))):  # type: ignore[misc]
            return sources


def _path_of(shared: SharedSnapshots, name: str) -> str:
    return str(shared.files.block(name))


def _choose_slot(ring: Ring, shared: SharedSnapshots, sources: SnapshotSources) -> str:
    """The slot to restore from: the one that holds this rank's copy, else one that no other rank reads."""
    rank = shared.world.rank
    served = {copy.block for copy in sources.copies if copy.rank == rank}
    places = {_path_of(shared, name): name for name in ring.slot_names()}
    mine = sources.copies[rank]
    if mine.rank == rank and mine.block in places:
        return places[mine.block]
    return next(name for path, name in places.items() if path not in served)


def _move_shards(target: torch.Tensor, shared: SharedSnapshots, sources: SnapshotSources, *, is_in_place: bool) -> None:
    """Bring this rank's copy into `target`, and send others theirs; all ranks go through the same list."""
    rank, group = shared.world.rank, shared.world.background_group
    for taker, copy in enumerate(sources.copies):
        if copy.rank == rank and not (taker == rank and is_in_place):
            block = torch.frombuffer(map_block(Path(copy.block), shared.num_bytes), dtype=torch.uint8)
            if taker == rank:
                target.copy_(block)
            else:
                send_block(block, taker, group)
        elif taker == rank and copy.rank != rank:
            receive_block(target, copy.rank, group)
