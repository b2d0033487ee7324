"""Which links are tested, and which nodes their failures blame."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from launch.health.link_check import (
    LinkReport,
    RankPair,
    judge_links,
    mark_slow_links,
    merge_reports,
    plan_ring,
    plan_rounds,
)

FOUR_BY_TWO = ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]


def pairs_of(rounds: list[list[RankPair]]) -> list[tuple[int, int]]:
    return [(pair.low, pair.high) for pairs in rounds for pair in pairs]


@pytest.mark.parametrize("count", range(12))
def test_a_ring_is_tested_in_rounds_of_disjoint_pairs(count: int) -> None:
    rounds = plan_ring(range(count))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)), "a rank has one partner in a round"
    neighbours = {tuple(sorted((rank, (rank + 1) % count))) for rank in range(count)} if count > 1 else set()
    assert sorted(pairs_of(rounds)) == sorted(neighbours), "each link once"
    assert len(rounds) == (0 if count < 2 else 1 if count == 2 else 2 + count % 2)


def test_rounds_use_every_adapter_of_every_node() -> None:
    rounds = plan_rounds(FOUR_BY_TWO)
    assert [pairs_of([pairs]) for pairs in rounds] == [
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 2), (4, 6), (1, 3), (5, 7)],
        [(2, 4), (0, 6), (3, 5), (1, 7)],
    ]
    assert plan_rounds(["n1"]) == []
    assert pairs_of(plan_rounds(["a", "b", "a"])) == [(0, 2), (0, 1)], "nodes of different sizes, in any order"


def test_both_ends_make_one_report() -> None:
    pair, other = RankPair(0, 1), RankPair(1, 2)
    merged = merge_reports(
        [
            LinkReport(pair=other, gb_s=3.0, latency_us=5.0),
            LinkReport(pair=pair, gb_s=1.0, latency_us=9.0),
            LinkReport(pair=pair, gb_s=2.0, latency_us=10.0, fault="changed"),
        ]
    )
    assert merged == [
        LinkReport(pair=pair, gb_s=1.0, latency_us=10.0, fault="changed"),
        LinkReport(pair=other, gb_s=3.0, latency_us=5.0),
    ]


def links_of(nodes: Sequence[str], *failed: tuple[int, int], slow: Sequence[tuple[int, int]] = ()) -> list[LinkReport]:
    return [
        LinkReport(
            pair=pair, fault="broken" if pair in failed else "", gb_s=4.0 if pair in slow else 10.0, latency_us=20.0
        )
        for pairs in plan_rounds(nodes)
        for pair in pairs
    ]


ONE_EACH = ["n1", "n2", "n3", "n4", "n5"]


@pytest.mark.parametrize(
    ("nodes", "failed", "blamed"),
    [
        (ONE_EACH, [], []),
        (ONE_EACH, [(1, 2)], []),
        (ONE_EACH, [(1, 2), (2, 3)], ["n3"]),
        (ONE_EACH, [(0, 4), (0, 1)], ["n1"]),
        (ONE_EACH, [(0, 1), (2, 3)], []),
        (ONE_EACH, [(0, 1), (1, 2), (2, 3)], ["n2", "n3"]),
        (ONE_EACH, [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)], []),
        (["n1", "n2"], [(0, 1)], []),
        (["n1", "n2", "n3"], [(0, 1), (1, 2)], ["n2"]),
        (FOUR_BY_TWO, [(0, 2), (1, 3)], []),
        (FOUR_BY_TWO, [(0, 2), (3, 5)], ["n2"]),
        (FOUR_BY_TWO, [(4, 5)], ["n3"]),
        (["n1", "n1"], [(0, 1)], ["n1"]),
    ],
    ids=[
        "none",
        "either end of one link may be at fault",
        "two links of one node",
        "the ring has no end",
        "two links without a common node",
        "two nodes of five",
        "the whole network",
        "two nodes have one link",
        "three nodes",
        "both adapters, but only one other node",
        "two adapters, two other nodes",
        "a link inside a node",
        "a link inside the only node",
    ],
)
def test_who_is_blamed(nodes: list[str], failed: list[tuple[int, int]], blamed: list[str]) -> None:
    problems, warnings = judge_links(links_of(nodes, *failed), nodes)
    assert [problem.node for problem in problems if problem.blames] == blamed
    named = [problem.text for problem in problems if not problem.blames]
    assert sorted(named) == sorted(
        f"link between rank {low} ({nodes[low]}) and rank {high} ({nodes[high]}): broken" for low, high in failed
    ), "every failed link is reported with both ends"
    assert warnings == []


def test_why_a_node_is_blamed() -> None:
    nodes = ["n1", "n1", "n2", "n2", "n3", "n3"]
    texts = [problem.text for problem in judge_links(links_of(nodes, (0, 1)), nodes).problems if problem.blames]
    assert texts == ["links between its own ranks failed"]
    texts = [problem.text for problem in judge_links(links_of(nodes, (2, 4), (1, 3)), nodes).problems if problem.blames]
    assert texts == ["its links to n1 and n3 failed"]


SLOW = "link between rank 1 (n2) and rank 2 (n3): 4 GB/s, 40% of the median of 5 links"


def test_a_slow_link_is_compared_with_links_of_its_kind() -> None:
    assert judge_links(links_of(ONE_EACH, slow=[(1, 2)]), ONE_EACH) == ([], [SLOW])
    assert judge_links(links_of(["n1", "n2"], slow=[(0, 1)]), ["n1", "n2"]) == ([], []), "nothing to compare with"
    inside = [link.pair for link in mark_slow_links(links_of(FOUR_BY_TWO, slow=[(2, 3)]), FOUR_BY_TWO) if link.fault]
    assert inside == [(2, 3)]
    every_node = [(low, low + 1) for low in range(0, 8, 2)]
    assert judge_links(links_of(FOUR_BY_TWO, slow=every_node), FOUR_BY_TWO) == ([], []), (
        "slower by design, on all nodes"
    )


def test_slow_links_to_two_nodes_blame_a_node() -> None:
    links = links_of(ONE_EACH, slow=[(1, 2), (2, 3)])
    problems, warnings = judge_links(links, ONE_EACH)
    blamed, *named = problems
    assert (blamed.node, blamed.blames) == ("n3", True)
    assert sorted((problem.node, problem.blames) for problem in named) == [("n2", False), ("n3", False)]
    assert warnings == []
    problems, warnings = judge_links(links, ONE_EACH, is_speed_reliable=False)
    assert (problems, len(warnings)) == ([], 2), "ranks that share cores are not equally fast"
    mixed = judge_links(links_of(ONE_EACH, (0, 1), slow=[(1, 2)]), ONE_EACH, is_speed_reliable=False)
    assert [problem.blames for problem in mixed.problems] == [False], "only the broken one"


def test_a_late_link_is_a_slow_link() -> None:
    links = links_of(ONE_EACH)
    links[0] = LinkReport(pair=links[0].pair, gb_s=10.0, latency_us=201.0)
    (warning,) = judge_links(links, ONE_EACH).warnings
    assert warning.endswith(": latency 201 us, the median of 5 links is 20 us")
