"""Blocks travel between ranks whole, in chunks, and no faster than allowed."""

from __future__ import annotations

import time

import pytest
import torch

from harness.distributed.exchange import (
    Neighbours,
    exchange_blocks,
    exchange_notes,
    receive_block,
    send_block,
)
from harness.distributed.world import connect, new_background_group
from tests.distributed.cases import tiny
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

NUM_BYTES = 2500
CHUNK_BYTES = 1000
RATE = 25_000.0


def block_of(rank: int) -> torch.Tensor:
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


def swap_in_a_cycle() -> tuple[bool, str, float, bool]:
    world = connect(tiny().parallel)
    group = new_background_group()
    neighbours = Neighbours(to=(world.rank + 1) % world.size, source=(world.rank - 1) % world.size)
    incoming = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    begun_s = time.monotonic()
    exchange_blocks(block_of(world.rank), incoming, neighbours, group, max_bytes_per_s=RATE, chunk_bytes=CHUNK_BYTES)
    seconds = time.monotonic() - begun_s
    note = exchange_notes(f"{world.rank:x}".encode() * 64, neighbours, group).decode()
    last, target = world.size - 1, torch.zeros(NUM_BYTES, dtype=torch.uint8)
    if world.rank == last:
        send_block(block_of(last), 0, group, chunk_bytes=CHUNK_BYTES)
    if world.rank == 0:
        receive_block(target, last, group, chunk_bytes=CHUNK_BYTES)
    fetched = world.rank != 0 or torch.equal(target, block_of(last))
    return torch.equal(incoming, block_of(neighbours.source)), note, seconds, fetched


def test_blocks_arrive_whole_and_no_faster_than_allowed(ranks: Pool) -> None:
    results = ranks.run(2, swap_in_a_cycle)
    assert [is_equal for is_equal, _, _, _ in results] == [True] * 2
    assert [note for _, note, _, _ in results] == [str(source) * 64 for source in (1, 0)]
    assert all(seconds >= NUM_BYTES / RATE for _, _, seconds, _ in results)
    assert all(fetched for _, _, _, fetched in results)
