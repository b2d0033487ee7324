"""The choice of the snapshot to resume from, and of the rank that each rank gets it from."""

from __future__ import annotations

import pytest

from harness.checkpoint.memory_resume import SnapshotCopy, choose_sources
from harness.checkpoint.replicas import find_neighbours


def copy(rank: int, shard: int, iteration: int, block: str = "slot-0") -> SnapshotCopy:
    return SnapshotCopy(rank, shard, iteration, block)


def test_the_newest_iteration_that_every_shard_has_is_chosen() -> None:
    copies = [copy(0, 0, 30), copy(0, 0, 20), copy(1, 1, 20), copy(1, 1, 10), copy(0, 0, 10)]
    chosen = choose_sources(copies, [0, 1])
    assert chosen is not None
    assert (chosen.iteration, chosen.copies) == (20, [copy(0, 0, 20), copy(1, 1, 20)])


def test_without_a_complete_set_nothing_is_chosen() -> None:
    assert choose_sources([], [0]) is None
    assert choose_sources([copy(0, 0, 10), copy(1, 1, 20)], [0, 1]) is None


def test_a_rank_prefers_its_own_copy_to_the_partners() -> None:
    copies = [copy(0, 1, 20, "replica-0"), copy(1, 0, 20, "replica-0"), copy(0, 0, 20), copy(1, 1, 20)]
    chosen = choose_sources(copies, [0, 1])
    assert chosen is not None
    assert chosen.copies == [copy(0, 0, 20), copy(1, 1, 20)]


def test_the_partners_copy_replaces_a_missing_one() -> None:
    copies = [copy(0, 0, 20), copy(0, 1, 20, "replica-1"), copy(1, 1, 10), copy(0, 0, 10)]
    chosen = choose_sources(copies, [0, 1])
    assert chosen is not None
    assert (chosen.iteration, chosen.copies[1]) == (20, copy(0, 1, 20, "replica-1"))


def test_ranks_of_a_lost_replica_spread_over_the_others() -> None:
    """HSDP with three replicas of two shards; the ranks of the last one have nothing."""
    copies = [copy(rank, rank % 2, 20) for rank in range(4)]
    chosen = choose_sources(copies, [0, 1, 0, 1, 0, 1])
    assert chosen is not None
    assert [each.rank for each in chosen.copies] == [0, 1, 2, 3, 0, 3]
    assert [each.shard for each in chosen.copies] == [0, 1, 0, 1, 0, 1]


def test_the_order_of_the_lists_does_not_matter() -> None:
    copies = [copy(rank, shard, 20, f"b{rank}{shard}") for rank in range(3) for shard in range(4)]
    assert choose_sources(copies, [0, 1, 2, 3]) == choose_sources(copies[::-1], [0, 1, 2, 3])


@pytest.mark.parametrize(
    "nodes",
    [["0", "1"], ["0", "0", "1", "1"], ["a", "b", "a", "b", "c", "c"], ["0", "1", "1", "2"], ["0"] * 8 + ["1"] * 8],
)
def test_partners_are_on_other_nodes_and_every_rank_has_one(nodes: list[str]) -> None:
    found = [find_neighbours(nodes, rank) for rank in range(len(nodes))]
    for rank, neighbours in enumerate(found):
        assert neighbours is not None
        assert nodes[neighbours.to] != nodes[rank]
        receiver = found[neighbours.to]
        assert receiver is not None
        assert receiver.source == rank
    assert sorted(each.to for each in found if each) == list(range(len(nodes)))


def test_there_is_no_partner_on_one_node() -> None:
    assert find_neighbours(["0", "0", "0"], 1) is None
