"""Tests of the split of a global batch: every row belongs to one rank, and every rank has the same number of slots."""

from __future__ import annotations

from itertools import product

import pytest

from harness.config.errors import ConfigError
from harness.config.schema import check_world
from harness.core.batch_shares import Sharing
from tests.composed import load

CASES = [
    Sharing(batch_size=batch, world_size=ranks, micro_batch_size=micro)
    for batch, ranks, micro in product(range(1, 25), range(1, 13), (None, 1, 2, 3, 5, 30))
    if batch >= ranks
]


def test_ranks_share_all_rows_in_order() -> None:
    for sharing in CASES:
        shares = [range(sharing.batch_size)[sharing.rows_of(rank)] for rank in range(sharing.world_size)]
        assert [row for share in shares for row in share] == list(range(sharing.batch_size))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert max(map(len, shares)) == sharing.largest_share


def test_every_rank_has_the_same_slots_and_each_row_counts_once() -> None:
    for sharing in CASES:
        size = sharing.micro_batch_slots
        assert size <= (sharing.micro_batch_size or size)
        assert sharing.num_slots < sharing.largest_share + sharing.num_micro_batches
        for rank in range(sharing.world_size):
            rows, is_padding = sharing.slots_of(rank)
            assert len(rows) == len(is_padding) == sharing.num_slots
            own = list(range(sharing.batch_size)[sharing.rows_of(rank)])
            assert [row for row, pads in zip(rows, is_padding, strict=True) if not pads] == own
            for first in range(0, sharing.num_slots, size):
                counted = {
                    row for row, pads in zip(rows[first:], is_padding[first : first + size], strict=False) if not pads
                }
                if counted:
                    assert set(rows[first : first + size]) == counted, "padding repeats a row of its micro-batch"
                else:
                    assert sharing.micro_batch_size == 1, "every other micro-batch has a row that counts"
                    assert rows[first] in own


def test_even_shares_have_no_padding() -> None:
    sharing = Sharing(batch_size=64, world_size=4, micro_batch_size=8)
    assert (sharing.num_micro_batches, sharing.micro_batch_slots) == (2, 8)
    assert sharing.slots_of(2) == (list(range(32, 48)), [False] * 16)


def test_uneven_shares_of_fewer_ranks() -> None:
    sharing = Sharing(batch_size=64, world_size=3, micro_batch_size=8)
    assert [sharing.rows_of(rank) for rank in range(3)] == [slice(0, 21), slice(21, 42), slice(42, 64)]
    assert (sharing.num_micro_batches, sharing.micro_batch_slots, sharing.num_slots) == (3, 8, 24)


def test_micro_batches_with_an_invalid_fp8_shape_are_rejected() -> None:
    overrides = ["precision=fp8_emulated", "train.sequence_length=8", "train.batch_size=8", "train.micro_batch_size=2"]
    cfg = load(overrides)
    check_world(cfg, 4)
    rule = r"must give micro-batches of a multiple of 16 tokens for precision=fp8"
    message = rf"^train\.micro_batch_size: {rule}, gives 1 sequences \(8 tokens\) on 8 ranks$"
    with pytest.raises(ConfigError, match=message):
        check_world(cfg, 8)
