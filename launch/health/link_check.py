"""Which links between neighbouring ranks to test, and which of them or of the nodes failed. Pure; needs no torch.

Why: a bad cable, switch port or adapter corrupts or delays messages, and an all-reduce does not say where.
How: the ranks of a node form a ring, and so do the ranks with the same local index of all nodes, so that every adapter
is used. In each round disjoint pairs of ranks test their links (`launch.health.link_probe`). All ranks collect all
reports and come to the same result.
Of two ends, a test cannot say which is at fault. A link between nodes is reported with both ends and blames neither.
A node is blamed if its links to two other nodes fail, unless most nodes would be: then the network is at fault. A link
between two ranks of one node blames that node. A link is slow compared with links of the same kind.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple, final

from launch.slurm.node_exclusion import HealthProblem

MIN_BANDWIDTH_FRACTION = 0.5
"""Of the median of links of the same kind; a slower link is reported."""
MAX_LATENCY_FACTOR = 10.0
"""Times the median of links of the same kind."""
MIN_LINKS = 3
"""Fewer links of a kind are not compared: of two, either may be the odd one."""


class RankPair(NamedTuple):
    """The two ends of a link; `low` is the lower rank."""

    low: int
    high: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """One link, as one of its ends saw it, or both."""

    pair: RankPair
    fault: str = ""
    """What failed; empty if all blocks arrived unchanged."""
    gb_s: float = 0.0
    """In each direction, both at once."""
    latency_us: float = 0.0
    """Of an exchange of eight bytes."""


def plan_rounds(nodes: Sequence[str]) -> list[list[RankPair]]:
    """Rounds of disjoint pairs of ranks; `nodes` has the node of each rank.

    Rings inside the nodes come first, then rings through all nodes.
    """
    by_node: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        by_node[node].append(rank)
    across = [[rank for rank in ranks if rank is not None] for ranks in zip_longest(*by_node.values())]
    return merge_rounds(map(plan_ring, by_node.values())) + merge_rounds(map(plan_ring, across))


def plan_ring(members: Sequence[int]) -> list[list[RankPair]]:
    """The links of a ring in rounds of disjoint pairs: the even ones, the odd ones, the last of an odd ring."""
    count = len(members)
    pairs = [RankPair(*sorted((members[index], members[(index + 1) % count]))) for index in range(count)]
    if count < 3:
        return [pairs[:1]] if count == 2 else []
    if count % 2:
        return [pairs[:-1:2], pairs[1:-1:2], pairs[-1:]]
    return [pairs[::2], pairs[1::2]]


def merge_rounds(rings: Iterable[list[list[RankPair]]]) -> list[list[RankPair]]:
    """Run rings without a common member at the same time."""
    return [[pair for pairs in rounds for pair in pairs] for rounds in zip_longest(*rings, fillvalue=list[RankPair]())]


def merge_reports(reports: Iterable[LinkReport]) -> list[LinkReport]:
    """One report for each link from those of its ends: all faults, the lower bandwidth, the higher latency."""
    merged: dict[RankPair, LinkReport] = {}
    for report in reports:
        before = merged.get(report.pair, report)
        faults = dict.fromkeys(fault for fault in (before.fault, report.fault) if fault)
        merged[report.pair] = LinkReport(
            pair=report.pair,
            fault="; ".join(faults),
            gb_s=min(before.gb_s, report.gb_s),
            latency_us=max(before.latency_us, report.latency_us),
        )
    return [merged[pair] for pair in sorted(merged)]


def mark_slow_links(links: Sequence[LinkReport], nodes: Sequence[str]) -> list[LinkReport]:
    """The same links; those that are much slower than others of their kind have a fault."""
    kinds: dict[object, list[LinkReport]] = defaultdict(list)
    kind_of = classify_links(nodes)
    for link in links:
        if not link.fault:
            kinds[kind_of(link.pair)].append(link)
    marked = {link.pair: link for link in links}
    for same in kinds.values():
        if len(same) < MIN_LINKS:
            continue
        gb_s = statistics.median(link.gb_s for link in same)
        latency_us = statistics.median(link.latency_us for link in same)
        for link in same:
            if link.gb_s < MIN_BANDWIDTH_FRACTION * gb_s:
                fault = f"{link.gb_s:.3g} GB/s, {link.gb_s / gb_s:.0%} of the median of {len(same)} links"
            elif link.latency_us > MAX_LATENCY_FACTOR * latency_us:
                fault = f"latency {link.latency_us:.0f} us, the median of {len(same)} links is {latency_us:.0f} us"
            else:
                continue
            marked[link.pair] = replace(link, fault=fault)
    return list(marked.values())


def classify_links(nodes: Sequence[str]) -> Callable[[RankPair], object]:
    """Links with an equal kind should be equally fast: all between nodes, or the same two positions inside a node."""
    counts: dict[str, int] = defaultdict(int)
    positions = []
    for node in nodes:
        positions.append(counts[node])
        counts[node] += 1
    return lambda pair: (
        (positions[pair.low], positions[pair.high]) if nodes[pair.low] == nodes[pair.high] else "between nodes"
    )


class LinkJudgement(NamedTuple):
    """What the links of a job say about its nodes."""

    problems: list[HealthProblem]
    """The nodes to blame, then failed links with both ends; the job must not start."""
    warnings: list[str]
    """Slow links that blame no node."""


def judge_links(links: Sequence[LinkReport], nodes: Sequence[str], *, is_speed_reliable: bool = True) -> LinkJudgement:
    """Find the nodes to blame and the links that failed.

    A slow link is a warning unless it helps to blame a node: no other choice of nodes would avoid it. If speeds are not
    reliable, because ranks share cores with other programs, slow links blame no node.
    """
    marked = [link for link in mark_slow_links(links, nodes) if link.fault]
    broken = {link.pair for link in links if link.fault}
    failed = [link for link in marked if is_speed_reliable or link.pair in broken]
    blamed = blame_nodes([(nodes[link.pair.low], nodes[link.pair.high]) for link in failed], nodes)
    judgement = LinkJudgement([HealthProblem(node, text) for node, text in blamed.items()], [])
    for link in marked:
        low, high = nodes[link.pair.low], nodes[link.pair.high]
        ends = f"rank {link.pair.low} ({low}) and rank {link.pair.high} ({high})"
        text = f"link between {ends}: {link.fault}"
        if link.pair in broken or (is_speed_reliable and not blamed.keys().isdisjoint((low, high))):
            judgement.problems.append(HealthProblem(low, text, blames=False))
        else:
            judgement.warnings.append(text)
    return judgement


def blame_nodes(failed: Sequence[tuple[str, str]], nodes: Sequence[str]) -> dict[str, str]:
    """Nodes that are at fault by the two ends of all failed links, each with the reason."""
    peers: dict[str, set[str]] = {node: set() for node in nodes}
    for low, high in failed:
        peers[low].add(high)
        peers[high].add(low)
    inside = {node: "links between its own ranks failed" for node in peers if node in peers[node]}
    outside = {
        node: f"its links to {' and '.join(sorted(others - {node}))} failed"
        for node, others in peers.items()
        if len(others - {node}) > 1
    }
    return inside | (outside if 2 * len(outside) <= len(peers) else {})


def describe_links(links: Sequence[LinkReport]) -> str:
    """The slowest link in a few words."""
    slowest, latest = min(link.gb_s for link in links), max(link.latency_us for link in links)
    return f"{len(links)} links, at least {slowest:.3g} GB/s, at most {latest:.0f} us"
