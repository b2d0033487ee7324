"""The simulation of rendezvous and restart, with two simulated nodes beside node 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core import event_json
from harness.core.events import EndCause, RunRestarted
from tests.bench.rendezvous import RUN, Timing, measure, render_row


@pytest.mark.full
def test_three_nodes_join_and_restart(tmp_path: Path) -> None:
    timing = measure(24, tmp_path)
    assert (timing.num_ranks, timing.num_nodes) == (24, 3)
    assert timing.num_messages == 2 * len(("hello", "go", "failure", "stopped", "decision")) + 1, "one rank failed"
    assert 0 < timing.failure_s < timing.restart_s < timing.total_s
    assert min(timing.join_s, timing.store_s, timing.node_0_s) > 0
    (restarted,) = event_json.read(tmp_path / RUN / "events.jsonl")
    assert isinstance(restarted, RunRestarted), "node 0 has decided as in a run"
    assert (restarted.reason, restarted.cause) == ("rank 16 was killed by SIGKILL", EndCause.killed_rank)


def test_growth_is_compared_with_the_logarithm_and_the_number_of_ranks() -> None:
    small = Timing(16, 2, 0.1, 0.01, 0.2, 0.3, 0.1, 6)
    large = Timing(256, 32, 0.1, 0.01, 0.5, 1.0, 0.25, 156)
    assert render_row(small, None) == "| 16 | 2 | 0.100 | 0.010 | 0.200 | 0.300 | 0.100 | 6 |  |"
    assert render_row(large, small).endswith("| 156 | 3.0, 2.0, 16 |")
