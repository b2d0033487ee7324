"""Which nodes are left out of the next start: at the second failure, for a stated time, never too many."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import compose
from harness.config.errors import ConfigError
from harness.config.launch import SlurmConfig
from launch.slurm.node_exclusion import Complaint, Exclusion, Failure, bearable, blamed, excluded, from_json, still

NOW = 1_000_000.0
HOUR_S = 3600.0


COMPOSED = compose.load(["launch=slurm"]).launch.slurm


def limits(hours: float = 2.0, most: int = 2) -> SlurmConfig:
    return replace(COMPOSED, exclude_hours=hours, max_excluded=most)


LIMITS = limits()


def nodes(failures: list[Failure], cfg: SlurmConfig = LIMITS) -> list[str]:
    return [exclusion.node for exclusion in excluded(failures, now=NOW, limits=cfg)]


def failed(node: str, *ages_s: float) -> list[Failure]:
    return [Failure(NOW - age_s, node, f"fault {number}") for number, age_s in enumerate(ages_s, start=1)]


def test_the_second_failure_excludes() -> None:
    assert nodes([]) == nodes(failed("n1", 10.0)) == nodes([*failed("n1", 10.0), *failed("n2", 5.0)]) == []
    assert nodes(failed("n1", 10.0, 0.0)) == ["n1"]
    (exclusion,) = excluded(failed("n1", 700.0, 600.0), now=NOW, limits=LIMITS)
    assert exclusion == Exclusion(node="n1", reason="fault 2", num_failures=2, until=NOW - 600.0 + 2 * HOUR_S)
    (shuffled,) = excluded(reversed(failed("n1", 700.0, 600.0)), now=NOW, limits=LIMITS)
    assert shuffled == exclusion


def test_an_exclusion_expires() -> None:
    assert nodes(failed("n1", 1.9 * HOUR_S, 1.8 * HOUR_S)) == ["n1"]
    assert nodes(failed("n1", 2 * HOUR_S, 60.0)) == [], "the first failure is too old to count"
    assert nodes(failed("n1", 2 * HOUR_S - 1, 60.0)) == ["n1"]
    assert nodes(failed("n1", 60.0, 0.0), limits(hours=0.0)) == [], "0: never"
    (exclusion,) = excluded(failed("n1", 60.0, 0.0), now=NOW, limits=LIMITS)
    assert still([exclusion], now=exclusion.until - 1) == [exclusion]
    assert still([exclusion], now=exclusion.until) == []


def test_the_worst_nodes_are_excluded_and_no_more_than_allowed() -> None:
    failures = [
        *failed("often", 900.0, 800.0, 700.0),
        *failed("lately", 60.0, 30.0),
        *failed("before", 90.0, 80.0),
    ]
    assert nodes(failures) == ["often", "lately"]
    assert nodes(failures, limits(most=1)) == ["often"]
    assert nodes(failures, limits(most=0)) == []
    assert nodes(failures, limits(most=9)) == ["often", "lately", "before"]
    assert nodes([*failed("b", 1.0, 1.0), *failed("a", 1.0, 1.0)]) == ["a", "b"]


def test_never_so_many_that_the_job_cannot_start() -> None:
    found = excluded([*failed("n1", 9.0, 8.0, 7.0), *failed("n2", 5.0, 4.0)], now=NOW, limits=LIMITS)
    asked: list[list[str]] = []

    def can_start(without: list[str], *, most: int) -> bool:
        asked.append(without)
        return len(without) <= most

    assert [each.node for each in bearable(found, lambda without: can_start(without, most=2))] == ["n1", "n2"]
    assert [each.node for each in bearable(found, lambda without: can_start(without, most=1))] == ["n1"]
    assert bearable(found, lambda without: can_start(without, most=0)) == []
    assert asked[-2:] == [["n1", "n2"], ["n1"]], "without any exclusion there is nothing to ask"
    assert bearable([], lambda _: pytest.fail("asked for nothing")) == []


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 5 * HOUR_S)), max_size=30),
    st.integers(0, 3),
)
def test_what_is_excluded_failed_twice_within_the_time(raw: list[tuple[str, float]], most: int) -> None:
    failures = [Failure(NOW - age_s, node, "") for node, age_s in raw]
    found = excluded(failures, now=NOW, limits=limits(most=most))
    assert len(found) <= most
    for exclusion in found:
        counted = [each for each in failures if each.node == exclusion.node and each.time + 2 * HOUR_S > NOW]
        assert len(counted) == exclusion.num_failures >= 2
        assert exclusion.until > NOW


def test_only_a_fault_of_its_own_blames_a_node() -> None:
    complaints = [
        Complaint("n1", "GPU 3 has 2 uncorrected ECC errors"),
        Complaint("n1", "has 7 GPUs, 8 are wanted"),
        Complaint("n2", "no all-reduce with the others: timed out", blames=False),
    ]
    noise = "srun: error: n3: task 2: Exited with exit code 69\nnode n4: harness: health: node n5: not so\n"
    log = noise + "".join(f"{complaint.render()}\n" for complaint in complaints)
    assert blamed(log) == {"n1": "GPU 3 has 2 uncorrected ECC errors"}
    assert blamed("") == {}
    assert complaints[2].render() == "harness: health: seen from node n2: no all-reduce with the others: timed out"


def test_it_is_one_line_and_goes_through_a_file() -> None:
    (exclusion,) = excluded(failed("n1", 60.0, 0.0), now=NOW, limits=LIMITS)
    assert from_json([asdict(exclusion)]) == (exclusion,)
    line = exclusion.render()
    assert line.startswith("node n1 is excluded until 1970-01-12 ")
    assert line.endswith(": failed 2 health checks, last: fault 2")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"hours": -0.5}, r"launch\.slurm\.exclude_hours: must be 0 or more, got -0\.5"),
        ({"most": -1}, r"launch\.slurm\.max_excluded: must be 0 or more, got -1"),
    ],
)
def test_limits_are_checked(words: dict[str, float], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        limits(**words)  # type: ignore[arg-type]


def test_the_usual_limits_are_sound() -> None:
    assert (COMPOSED.exclude_hours, COMPOSED.max_excluded) == (24.0, 4)
