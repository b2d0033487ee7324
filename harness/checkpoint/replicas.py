"""Copies of each rank's newest trusted snapshot in the memory of a partner rank on another node.

Why: when a node is lost, its memory is lost with it. The ranks that replace its ranks take their shards from the
partners and lose no more steps than after the death of one process.
How: each rank sends to one rank and keeps the snapshot of another (`find_neighbours`). A thread does it beside
training, over a process group of its own, in chunks and at a limited rate. All ranks submit the same jobs in the same
order. In a job they first agree on the newest snapshot that all of them hold, so that none of them decides alone what
to send. A partner has two buffers: the newest complete replica stays valid until the next one has arrived and its hash
is right. A snapshot that is overwritten while it is sent arrives with a wrong hash and is dropped.
Left out: replicas of replicas, and HSDP, where the other replica of the model already holds the same state.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

from harness.checkpoint import integrity
from harness.core.snapshot_files import SnapshotHeader, SnapshotSet
from harness.distributed.collectives import all_reduce_min
from harness.distributed.exchange import Neighbours, exchange_blocks, exchange_notes
from harness.distributed.host_memory import PinnedBlock
from harness.distributed.world import BackgroundGroup

NUM_BLOCKS = 2


def find_neighbours(nodes: Sequence[str], rank: int) -> Neighbours | None:
    """Whom a rank sends to and receives from; None if all ranks are on one node. `nodes` has the node of every rank.

    The ranks, sorted by node, are rotated by the size of the largest node. Both neighbours are then on other nodes,
    unless one node has more than half of all ranks.
    """
    if len(set(nodes)) < 2:
        return None
    order = sorted(range(len(nodes)), key=lambda each: (nodes[each], each))
    shift = max(list(nodes).count(node) for node in set(nodes))
    place = order.index(rank)
    return Neighbours(to=order[(place + shift) % len(order)], source=order[(place - shift) % len(order)])


def agree_on_newest(iterations: Collection[int], group: BackgroundGroup) -> int | None:
    """The newest of these iterations that every rank has, or None. Collective: all ranks must call."""
    before: float = float("inf")
    while True:
        mine = max((each for each in iterations if each < before), default=-1)
        before = all_reduce_min(mine, group)
        if before < 0:
            return None
        if all_reduce_min(int(before in iterations), group):
            return int(before)


@final
@dataclass(slots=True)
class ReplicaTransfer:
    """What one replica took."""

    num_bytes: int
    seconds: float
    is_intact: bool


@final
class ReplicaKeeper:
    """Sends this rank's snapshots to its partner and keeps those of another rank."""

    def __init__(
        self,
        neighbours: Neighbours,
        *,
        files: SnapshotSet,
        group: BackgroundGroup,
        num_bytes: int,
        max_bytes_per_s: float | None,
    ) -> None:
        self.group = group
        self.last: ReplicaTransfer | None = None
        self._neighbours = neighbours
        self._files = files
        self._max_bytes_per_s = max_bytes_per_s
        names = [f"replica-{index}" for index in range(NUM_BLOCKS)]
        self._blocks = {name: PinnedBlock(num_bytes, file=files.block(name)) for name in names}
        self._iterations: dict[str, int] = {}
        """Block name -> iteration of the replica that it holds."""

    @property
    def source(self) -> int:
        """The rank whose snapshots this rank keeps."""
        return self._neighbours.source

    def adopt(self, headers: dict[str, SnapshotHeader]) -> None:
        """Keep replicas that an earlier start left in the blocks."""
        self._iterations = {name: header.iteration for name, header in headers.items() if name in self._blocks}

    def begin(self) -> str:
        """Choose the block for the next replica and remove its header; the newest replica stays."""
        name = min(self._blocks, key=lambda each: self._iterations.get(each, -1))
        self._files.remove_header(name)
        self._iterations.pop(name, None)
        return name

    def swap(self, name: str, outgoing: PinnedBlock, sha256: str) -> str | None:
        """Send this rank's snapshot and receive the other one into a block; its hash, or None if it arrived damaged.

        Collective: all ranks must call.
        """
        begun_s = time.monotonic()
        expected = exchange_notes(sha256.encode(), self._neighbours, self.group).decode()
        block = self._blocks[name]
        exchange_blocks(
            outgoing.content, block.content, self._neighbours, self.group, max_bytes_per_s=self._max_bytes_per_s
        )
        seconds = time.monotonic() - begun_s
        is_intact = integrity.hash_buffer(block.view) == expected
        self.last = ReplicaTransfer(outgoing.content.numel(), seconds, is_intact)
        return expected if is_intact else None

    def finish(self, name: str, iteration: int) -> None:
        """Register a replica that has arrived and whose header is written."""
        self._iterations[name] = iteration

    def withdraw_from(self, iteration: int) -> None:
        """Remove the headers of replicas taken since this iteration."""
        for name, taken in list(self._iterations.items()):
            if taken >= iteration:
                self._files.remove_header(name)
                del self._iterations[name]
