"""Which nodes the next start excludes: after the second failure, for a limited time, never too many."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config.errors import ConfigError
from harness.config.launch import SlurmConfig
from launch.slurm.node_exclusion import (
    NUM_FAULTS,
    HealthProblem,
    NodeExclusion,
    NodeFault,
    NodeFaultKind,
    choose_exclusions,
    drop_expired,
    exclusions_from_json,
    find_out_nodes,
    limit_exclusions,
    parse_blamed_nodes,
)
from tests import composed

NOW = 1_000_000.0
HOUR_S = 3600.0


COMPOSED = composed.load(["launch=slurm"]).launch.slurm


def limits(hours: float = 2.0, most: int = 2) -> SlurmConfig:
    return replace(COMPOSED, exclude_hours=hours, max_excluded=most)


LIMITS = limits()


def nodes(failures: list[NodeFault], cfg: SlurmConfig = LIMITS) -> list[str]:
    return [exclusion.node for exclusion in choose_exclusions(failures, now=NOW, limits=cfg)]


def make_failures(node: str, *ages_s: float) -> list[NodeFault]:
    return [NodeFault(NOW - age_s, node, f"fault {number}") for number, age_s in enumerate(ages_s, start=1)]


def test_the_second_failure_excludes() -> None:
    assert (
        nodes([])
        == nodes(make_failures("n1", 10.0))
        == nodes([*make_failures("n1", 10.0), *make_failures("n2", 5.0)])
        == []
    )
    assert nodes(make_failures("n1", 10.0, 0.0)) == ["n1"]
    (exclusion,) = choose_exclusions(make_failures("n1", 700.0, 600.0), now=NOW, limits=LIMITS)
    assert exclusion == NodeExclusion(
        node="n1", reason="fault 2", num_failures=2, until=NOW - 600.0 + 2 * HOUR_S, since=NOW - 600.0
    )
    (shuffled,) = choose_exclusions(reversed(make_failures("n1", 700.0, 600.0)), now=NOW, limits=LIMITS)
    assert shuffled == exclusion


def test_an_exclusion_expires() -> None:
    assert nodes(make_failures("n1", 1.9 * HOUR_S, 1.8 * HOUR_S)) == ["n1"]
    assert nodes(make_failures("n1", 2 * HOUR_S, 60.0)) == [], "the first failure is too old to count"
    assert nodes(make_failures("n1", 2 * HOUR_S - 1, 60.0)) == ["n1"]
    assert nodes(make_failures("n1", 60.0, 0.0), limits(hours=0.0)) == [], "0 disables exclusion"
    (exclusion,) = choose_exclusions(make_failures("n1", 60.0, 0.0), now=NOW, limits=LIMITS)
    assert drop_expired([exclusion], now=exclusion.until - 1) == [exclusion]
    assert drop_expired([exclusion], now=exclusion.until) == []


@pytest.mark.parametrize(
    ("kind", "num_needed"),
    [
        (NodeFaultKind.lost, 1),
        (NodeFaultKind.corrupting, 1),
        (NodeFaultKind.hung, 2),
        (NodeFaultKind.health, 2),
        (NodeFaultKind.outlier, 2),
        (NodeFaultKind.slow, 2),
    ],
)
def test_faults_of_each_kind_until_a_node_is_out(kind: NodeFaultKind, num_needed: int) -> None:
    faults = [NodeFault(NOW - age_s, "n1", "fault", kind, "logs/a") for age_s in (20.0, 10.0)]
    others = [NodeFault(NOW - 5.0, "n1", "other", other) for other in NodeFaultKind if NUM_FAULTS[other] == 2]
    for count in (1, 2):
        found = find_out_nodes([*faults[:count], *others], now=NOW, hours=2.0)
        expected = [("n1", kind)] if count >= num_needed or kind in [each.kind for each in others] else []
        assert [(exclusion.node, exclusion.kind) for exclusion in found] == expected, count
    (exclusion,) = find_out_nodes(faults, now=NOW, hours=2.0)
    assert (exclusion.num_failures, exclusion.since, exclusion.evidence) == (2, NOW - 10.0, "logs/a")
    assert find_out_nodes(faults, now=NOW, hours=0.0) == []


def test_a_lost_node_is_out_until_it_returns_and_the_second_time_for_longer() -> None:
    lost = NodeFault(NOW - 60.0, "n1", "is gone", NodeFaultKind.lost)
    (exclusion,) = find_out_nodes([lost], now=NOW, hours=2.0)
    assert " is excluded until it joins again and passes its health check, or 1970-" in exclusion.render()
    (corrupting,) = find_out_nodes([lost._replace(kind=NodeFaultKind.corrupting)], now=NOW, hours=2.0)
    assert corrupting.render().startswith("node n1 is excluded until 1970-")
    assert corrupting.render().endswith(": is gone")
    back = lost._replace(returned=NOW - 30.0)
    assert find_out_nodes([back], now=NOW, hours=2.0) == []
    (exclusion,) = find_out_nodes([back, back._replace(time=NOW - 20.0)], now=NOW, hours=2.0)
    assert exclusion.render().startswith("node n1 is excluded until 1970-")
    assert exclusion.render().endswith(": is gone (2 times lost)")


def test_a_node_is_named_with_its_worst_fault() -> None:
    faults = [NodeFault(NOW - 9.0, "n1", str(kind), kind) for kind in reversed(NodeFaultKind) for _ in range(2)]
    for kind in NodeFaultKind:
        assert [each.kind for each in find_out_nodes(faults, now=NOW, hours=2.0)] == [kind]
        faults = [fault for fault in faults if fault.kind is not kind]


def test_the_worst_nodes_are_excluded_and_no_more_than_allowed() -> None:
    failures = [
        *make_failures("often", 900.0, 800.0, 700.0),
        *make_failures("lately", 60.0, 30.0),
        *make_failures("before", 90.0, 80.0),
    ]
    assert nodes(failures) == ["often", "lately"]
    assert nodes(failures, limits(most=1)) == ["often"]
    assert nodes(failures, limits(most=0)) == []
    assert nodes(failures, limits(most=9)) == ["often", "lately", "before"]
    assert nodes([*make_failures("b", 1.0, 1.0), *make_failures("a", 1.0, 1.0)]) == ["a", "b"]


def test_never_so_many_that_the_job_cannot_start() -> None:
    found = choose_exclusions(
        [*make_failures("n1", 9.0, 8.0, 7.0), *make_failures("n2", 5.0, 4.0)], now=NOW, limits=LIMITS
    )
    queries: list[list[str]] = []

    def can_start(without: list[str], *, most: int) -> bool:
        queries.append(without)
        return len(without) <= most

    assert [item.node for item in limit_exclusions(found, lambda without: can_start(without, most=2))] == ["n1", "n2"]
    assert [item.node for item in limit_exclusions(found, lambda without: can_start(without, most=1))] == ["n1"]
    assert limit_exclusions(found, lambda without: can_start(without, most=0)) == []
    assert queries[-2:] == [["n1", "n2"], ["n1"]], "without an exclusion Slurm is not queried"
    assert limit_exclusions([], lambda _: pytest.fail("asked without an exclusion")) == []


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 5 * HOUR_S)), max_size=30),
    st.integers(0, 3),
)
def test_excluded_nodes_failed_twice_within_the_time(raw: list[tuple[str, float]], most: int) -> None:
    failures = [NodeFault(NOW - age_s, node, "") for node, age_s in raw]
    found = choose_exclusions(failures, now=NOW, limits=limits(most=most))
    assert len(found) <= most
    for exclusion in found:
        counted = [item for item in failures if item.node == exclusion.node and item.time + 2 * HOUR_S > NOW]
        assert len(counted) == exclusion.num_failures >= 2
        assert exclusion.until > NOW


def test_only_its_own_fault_blames_a_node() -> None:
    problems = [
        HealthProblem("n1", "GPU 3 has 2 uncorrected ECC errors"),
        HealthProblem("n1", "has 7 GPUs, expected 8"),
        HealthProblem("n2", "all-reduce failed: timed out", blames=False),
    ]
    noise = "srun: error: n3: task 2: Exited with exit code 69\nnode n4: harness: health: node n5: not so\n"
    log = noise + "".join(f"{problem.render()}\n" for problem in problems)
    assert parse_blamed_nodes(log) == {"n1": "GPU 3 has 2 uncorrected ECC errors"}
    assert parse_blamed_nodes("") == {}
    assert problems[2].render() == "harness: health: seen from node n2: all-reduce failed: timed out"


def test_an_exclusion_is_one_line_and_survives_json() -> None:
    (exclusion,) = choose_exclusions(make_failures("n1", 60.0, 0.0), now=NOW, limits=LIMITS)
    assert exclusions_from_json([asdict(exclusion)]) == (exclusion,)
    line = exclusion.render()
    assert line.startswith("node n1 is excluded until 1970-01-12 ")
    assert line.endswith(": failed 2 health checks, last: fault 2")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"hours": -0.5}, r"launch\.slurm\.exclude_hours: must be 0 or more, got -0\.5"),
        ({"most": -1}, r"launch\.slurm\.max_excluded: must be 0 or more, got -1"),
    ],
)
def test_limits_are_checked(changes: dict[str, float], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        limits(**changes)  # type: ignore[arg-type]


def test_default_limits() -> None:
    assert (COMPOSED.exclude_hours, COMPOSED.max_excluded) == (24.0, 4)
