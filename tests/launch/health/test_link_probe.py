"""Links between real ranks over gloo: unchanged, changed, and without an answer."""

from __future__ import annotations

import time
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from harness.distributed.collectives import gather_results
from harness.distributed.world import connect
from launch.health import link_probe
from launch.health.link_check import LinkReport, RankPair, judge_links, merge_reports
from tests.distributed.cases import tiny
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

NODES = ["n1", "n2", "n3"]
WITHIN_S = 60.0
SHORT_S = 3.0
make_pattern = link_probe.make_pattern


class ProbedLinks(NamedTuple):
    """Result of one rank."""

    links: list[LinkReport]
    seconds: float
    problems: list[str]


def probe(bad_rank: int, absent_rank: int, within_s: float = WITHIN_S, blocking: tuple[str, ...] = ()) -> ProbedLinks:
    """Test the links of three nodes; one rank damages a byte of what it sends, or one does not answer."""
    world = connect(tiny().parallel)

    def damage(sender: int, number: int, num_bytes: int, device: torch.device) -> Tensor:
        pattern = make_pattern(sender, number, num_bytes, device)
        if sender == bad_rank == world.rank and number == 3:
            pattern.view(torch.uint8)[1000] ^= 1
        return pattern

    def do_not_answer(_rank: int, pair: RankPair, *_: object) -> LinkReport:
        return LinkReport(pair=pair)

    with (
        patch.object(link_probe, "make_pattern", damage),
        patch.object(link_probe, "BLOCKING_DEVICES", blocking),
        patch.object(link_probe, "probe_link", do_not_answer if world.rank == absent_rank else link_probe.probe_link),
    ):
        began_s = time.monotonic()
        seen = link_probe.probe_links(
            world.rank, NODES, world.device, gather=lambda value: gather_results(lambda: value), within_s=within_s
        )
    links = merge_reports(link for reports in gather_results(lambda: seen) for link in reports)
    problems = [problem.render() for problem in judge_links(links, NODES, is_speed_reliable=False).problems]
    return ProbedLinks(links, time.monotonic() - began_s, problems)


def test_healthy_links_are_measured(ranks: Pool) -> None:
    """Speed is compared elsewhere: three ranks on two cores are not equally fast."""
    results = ranks.run(3, probe, -1, -1)
    assert [link.pair for link in results[0].links] == [(0, 1), (0, 2), (1, 2)]
    assert all(link.gb_s > 0.0 and link.latency_us > 0.0 and not link.fault for link in results[0].links)
    assert [result.links for result in results] == [results[0].links] * 3, "all ranks have the same result"


def test_a_changed_byte_is_found_on_each_link_of_the_sender(ranks: Pool) -> None:
    results = ranks.run(3, probe, 1, -1)
    assert results[0].problems[:1] == ["harness: health: node n2: its links to n1 and n3 failed"]
    changed = "1 of 2097152 bytes from rank 1 arrived changed"
    assert results[0].problems[1:3] == [
        f"harness: health: seen from node n1: link between rank 0 (n1) and rank 1 (n2): {changed}",
        f"harness: health: seen from node n2: link between rank 1 (n2) and rank 2 (n3): {changed}",
    ]


def test_a_rank_that_does_not_answer_costs_no_more_than_the_deadlines(ranks: Pool) -> None:
    results = ranks.run(3, probe, -1, 2, SHORT_S)
    for result in results:
        assert result.seconds < 3 * SHORT_S + 20.0, "three rounds, and a slow machine"
        assert result.problems[0] == "harness: health: node n3: its links to n1 and n2 failed"
        assert "rank 0 got no answer from rank 2 at the first exchange: " in result.problems[1]
        assert "rank 1 got no answer from rank 2 at the first exchange: " in result.problems[2]
    assert [result.problems for result in results] == [results[0].problems] * 3


def test_a_blocked_rank_fails_one_link_only(ranks: Pool) -> None:
    """As with NCCL: the links that a blocked rank cannot test any more are not failures of their nodes."""
    results = ranks.run(3, probe, -1, 2, SHORT_S, ("cpu",))
    for result in results:
        (problem,) = result.problems
        assert problem.startswith(
            "harness: health: seen from node n2: link between rank 1 (n2) and rank 2 (n3): rank 1 got"
        )
        assert [link.pair for link in result.links] == [(0, 1), (1, 2)]
