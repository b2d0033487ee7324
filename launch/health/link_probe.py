"""Tests the links of one rank: exchanges a known pattern with each neighbour, over gloo or NCCL.

How: in each round (`launch.health.link_check`) two ranks send each other a pattern that depends on the sender, at the
same time, and compare every byte. The first exchange connects them and is not timed. A small exchange before each timed
one makes both begin together. Every wait ends at the deadline of the round: a link without an answer costs one round.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.distributed.exchange import LinkGroup, new_link_group, swap_blocks
from launch.health.link_check import LinkReport, RankPair, plan_rounds

ROUND_WITHIN_S = 10.0
GPU_BYTES, CPU_BYTES = 64 << 20, 2 << 20
NUM_EXCHANGES, NUM_SMALL_EXCHANGES = 5, 20
BLOCKING_DEVICES = ("cuda",)
"""Where an exchange without an answer blocks the later ones of its rank, whose other links are then not tested."""
GLOO_PLACE = re.compile(r"^\[[^]]*\] ")
"""Where gloo raised an error, in its own sources."""
MULTIPLIER = 0x1E3779B1
"""Odd, so that all words of a pattern differ."""


def probe_links(
    rank: int,
    nodes: Sequence[str],
    device: torch.device,
    *,
    gather: Callable[[bool], list[bool]],
    within_s: float = ROUND_WITHIN_S,
) -> list[LinkReport]:
    """Test all links of this rank; returns what this end saw. Collective: all ranks must call.

    `nodes` has the node of each rank, equal on all. `gather` collects a value of each rank in rank order, over other
    connections than those that are tested. It is called before each round. A round takes about `within_s` at most.
    """
    group = new_link_group(within_s, device)
    reports: list[LinkReport] = []
    is_blocked = False
    for pairs in plan_rounds(nodes):
        blocked = {other for other, is_other_blocked in enumerate(gather(is_blocked)) if is_other_blocked}
        deadline_s = time.monotonic() + within_s
        for pair in pairs:
            if rank in pair and not blocked.intersection(pair):
                reports.append(probe_link(rank, pair, device, group, deadline_s))
                is_blocked |= device.type in BLOCKING_DEVICES and reports[-1].gb_s == 0.0
    return reports


def probe_link(rank: int, pair: RankPair, device: torch.device, group: LinkGroup, deadline_s: float) -> LinkReport:
    """Exchange patterns with one neighbour."""
    peer = pair.high if rank == pair.low else pair.low
    num_bytes = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    incoming = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
    seconds: list[float] = []
    fault = ""
    try:
        for number in range(NUM_EXCHANGES + 1):
            outgoing, expected = (make_pattern(sender, number, num_bytes, device) for sender in (rank, peer))
            time_exchange(outgoing[:2], incoming[:2], peer, group, deadline_s)
            seconds.append(time_exchange(outgoing, incoming, peer, group, deadline_s))
            num_wrong = int((incoming.view(torch.uint8) != expected.view(torch.uint8)).sum())
            if num_wrong and not fault:
                fault = f"{num_wrong} of {num_bytes} bytes from rank {peer} arrived changed"
        small_s = [
            time_exchange(outgoing[:2], incoming[:2], peer, group, deadline_s) for _ in range(NUM_SMALL_EXCHANGES)
        ]
    except (RuntimeError, TimeoutError) as error:
        text = GLOO_PLACE.sub("", " ".join(str(error).split()))
        done = f"after {len(seconds)} exchanges" if seconds else "at the first exchange"
        reason = f"rank {rank} got no answer from rank {peer} {done}: {text}"
        return LinkReport(pair=pair, fault=f"{fault}; {reason}" if fault else reason)
    return LinkReport(
        pair=pair,
        fault=fault,
        gb_s=num_bytes / statistics.median(seconds[1:]) / 1e9,
        latency_us=statistics.median(small_s) * 1e6,
    )


def make_pattern(sender: int, number: int, num_bytes: int, device: torch.device) -> Tensor:
    """The block that a rank sends in one exchange; integer arithmetic, equal on all devices."""
    words = torch.arange(num_bytes // 4, dtype=torch.int32, device=device)
    return (words + (sender * (NUM_EXCHANGES + 1) + number)) * MULTIPLIER


def time_exchange(outgoing: Tensor, incoming: Tensor, peer: int, group: LinkGroup, deadline_s: float) -> float:
    """Seconds of one exchange."""
    incoming.zero_()
    if outgoing.device.type == "cuda":
        torch.cuda.synchronize(outgoing.device)
    began_s = time.perf_counter()
    swap_blocks(outgoing, incoming, peer, group, deadline_s=deadline_s)
    return time.perf_counter() - began_s
