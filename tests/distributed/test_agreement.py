"""All ranks take the same branches, whatever one of them alone sees; ranks that part are named and halt."""

from __future__ import annotations

import pytest

from harness.events import FindingKind
from tests.distributed import agreement
from tests.distributed.agreement import GUILTY, LOCAL, OF_ALL_RANKS, SPOILS, Trace
from tests.distributed.pool import Pool


@pytest.fixture(scope="module")
def traces(ranks: Pool) -> list[dict[str, Trace]]:
    """Every case on four ranks, in one process group."""
    return ranks.run(4, agreement.every_case)


def test_every_finding_has_a_case() -> None:
    assert {*SPOILS, *OF_ALL_RANKS} == set(FindingKind)


@pytest.mark.parametrize("kind", list(FindingKind))
def test_what_one_rank_alone_brings_about_all_ranks_find_and_answer_alike(
    traces: list[dict[str, Trace]], kind: FindingKind
) -> None:
    first = traces[0][kind]
    assert kind in [found for found, _ in first.found]
    for trace in traces:
        assert trace[kind] == first, "the same findings, actions, probes and digests"
        assert trace[kind].parted == []


@pytest.mark.parametrize("name", list(LOCAL))
def test_what_one_rank_alone_knows_decides_nothing(traces: list[dict[str, Trace]], name: str) -> None:
    for trace in traces:
        assert trace[name] == traces[0][name]
        assert (trace[name].found, trace[name].actions, trace[name].parted) == ([], [], [])


@pytest.mark.parametrize("name", ["probe", "fp8", "step", "save", "a finding"])
def test_ranks_that_part_are_named_by_all(traces: list[dict[str, Trace]], name: str) -> None:
    for trace in traces:
        (digests,) = trace[f"parted by {name}"].parted
        assert sorted(digests.values(), key=len) == [[GUILTY], [0, 1, 3]]
        assert len(trace[f"parted by {name}"].branches) <= 4, "by the record of that step or of the next"
