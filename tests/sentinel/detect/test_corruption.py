"""Tests of the corruption guard: a difference is repeated twice, then it is transient or lasting."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.core.events import Finding, FindingKind, RunStarted, StepRecord
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.sentinel import Sentinel
from tests.composed import load
from tests.sentinel.series import config, record

F = FindingKind
Check = tuple[int, list[int]]
"""Distance to the rank whose rows were computed, and the ranks that differ."""


def make_record(step: int, check: Check | None) -> StepRecord:
    facts: dict[str, Any] = {}
    if check is not None:
        distance, ranks = check
        facts = {"recomputed": distance, "corrupted_ranks": ranks, "refused": bool(ranks)}
        if ranks:
            facts |= {"corrupted": "output of blocks.3", "corrupted_groups": ["blocks.3"]}
    return record(step, 3.0, 1.0, **facts)


def watch_checks(*checks: Check | None) -> tuple[list[Finding], Detectors]:
    """The findings of consecutive steps; the detectors go through JSON after each, as in a checkpoint."""
    detectors, found = Detectors(config()), list[Finding]()
    for step, check in enumerate(checks):
        found += detectors.observe(make_record(step, check))
        detectors = Detectors.restore(config(), json.loads(json.dumps(detectors.state())))
    return found, detectors


def observe_checks(detectors: Detectors, checks: list[Check]) -> list[Finding]:
    return [found for step, check in enumerate(checks) for found in detectors.observe(make_record(step, check))]


def summarize(findings: list[Finding]) -> list[tuple[str, int, list[int]]]:
    return [(str(finding.kind), finding.step, finding.ranks) for finding in findings]


def test_clean_checks_find_nothing() -> None:
    found, detectors = watch_checks((0, []), None, (1, []), (0, []), (2, []))
    assert found == []
    assert not detectors.corruption.is_repeating


def test_an_error_that_does_not_come_back_is_transient() -> None:
    found, detectors = watch_checks((0, []), (0, [2]), None, (1, []), (0, []), (0, []))
    assert summarize(found) == [(F.corruption, 1, [2]), (F.corruption_passed, 4, [2])]
    assert found[0].groups == ["blocks.3"]
    assert found[0].cursors == [], "no batch is blamed"
    assert "rank 2: output of blocks.3 differs" in found[0].message
    assert not detectors.corruption.is_repeating


def test_the_check_is_repeated_until_two_repetitions_are_reported() -> None:
    assert watch_checks((0, [2]))[1].corruption.is_repeating
    assert watch_checks((0, [2]), None, (0, []))[1].corruption.is_repeating
    assert not watch_checks((0, [2]), None, (0, []), (1, []))[1].corruption.is_repeating


@pytest.mark.parametrize("repeats", [[(0, [2]), (1, [1, 2])], [(0, []), (1, [1, 2])], [(1, []), (0, [2])]])
def test_an_error_that_comes_back_lasts_and_began_after_the_last_clean_check(repeats: list[Check]) -> None:
    found, _ = watch_checks((0, []), (1, []), None, (0, [2]), *repeats)
    assert summarize(found) == [(F.corruption, 3, [2]), (F.corrupting_rank, 5, [2])]
    assert found[1].onset == 1, "the last clean check on own rows was step 0"


def test_repetitions_narrow_down_the_ranks() -> None:
    found, _ = watch_checks((1, [4, 5]), (0, [5]), (3, [2, 5]))
    assert summarize(found) == [(F.corruption, 0, [4, 5]), (F.corrupting_rank, 2, [5])]


def test_an_error_that_a_rank_repeats_began_after_the_last_clean_comparison_with_others() -> None:
    found, _ = watch_checks((1, []), (0, []), (2, [0, 1]), (0, []), (1, [0, 1]))
    assert summarize(found) == [(F.corruption, 2, [0, 1]), (F.corrupting_rank, 4, [0, 1])]
    assert found[1].onset == 1, "a clean check on own rows proves nothing"
    assert "rank 0 or 1" in found[1].message


def test_a_rank_that_fails_alone_twice_lasts_however_long_it_takes() -> None:
    clean: list[Check] = [(1, []), (0, [])]
    found, _ = watch_checks((0, [2]), *clean, (0, []), (0, [3]), *clean, (0, [2]), *clean)
    expected = [F.corruption, F.corruption_passed, F.corruption, F.corruption_passed, F.corruption, F.corrupting_rank]
    assert [finding.kind for finding in found] == expected
    assert found[-1].ranks == [2]


def restart(detectors: Detectors, machines: dict[str, list[int]]) -> Detectors:
    """The detectors of the next start, from a checkpoint."""
    restored = Detectors.restore(config(), json.loads(json.dumps(detectors.state())))
    restored.on_start(machines)
    return restored


@pytest.mark.parametrize(
    ("machines", "kind"),
    [
        ({"a": [0, 1], "b": [2, 3]}, F.corrupting_rank),
        ({"c": [0, 1], "b": [2, 3]}, F.corrupting_rank),
        ({"a": [0, 1], "c": [2, 3]}, F.corruption_passed),
        ({"b": [0, 1], "a": [2, 3]}, F.corruption_passed),
        ({}, F.corrupting_rank),
    ],
)
def test_an_earlier_difference_counts_while_the_rank_stays_on_its_machine(
    machines: dict[str, list[int]], kind: FindingKind
) -> None:
    """A log without machines, of an older version, tells nothing."""
    detectors = restart(Detectors(config()), {"a": [0, 1], "b": [2, 3]})
    checks: list[Check] = [(0, [2]), (1, []), (0, [])]
    assert [finding.kind for finding in observe_checks(detectors, checks)] == [F.corruption, F.corruption_passed]
    found = observe_checks(restart(detectors, machines), checks)
    assert [finding.kind for finding in found] == [F.corruption, kind]


def test_a_machine_is_new_after_a_start_without_its_ranks() -> None:
    checks: list[Check] = [(0, [2]), (1, []), (0, [])]
    detectors = restart(Detectors(config()), {"a": [0, 1], "b": [2, 3]})
    observe_checks(detectors, checks)
    for machines in ({"a": [0, 1]}, {"a": [0, 1], "c": [2, 3]}):
        detectors = restart(detectors, machines)
    assert observe_checks(detectors, checks)[-1].kind is F.corruption_passed


def test_a_check_is_not_repeated_on_another_machine() -> None:
    detectors = restart(Detectors(config()), {"a": [0, 1], "b": [2, 3]})
    observe_checks(detectors, [(0, [2])])
    assert restart(detectors, {"c": [0, 1], "b": [2, 3]}).corruption.is_repeating
    moved = restart(detectors, {"a": [0, 1], "c": [2, 3]})
    assert not moved.corruption.is_repeating
    assert [finding.kind for finding in observe_checks(moved, [(0, [2]), (1, [])])] == [F.corruption]


def test_a_difference_of_a_checkpoint_of_an_older_version_belongs_to_an_unknown_machine() -> None:
    old = Detectors(config()).state()
    old["corruption"] = {"failed_ranks": [2]}
    detectors = Detectors.restore(config(), old)
    detectors.on_start({"a": [0, 1, 2]})
    assert observe_checks(detectors, [(0, [2]), (1, []), (0, [])])[-1].kind is F.corruption_passed


def test_a_rollback_to_a_checkpoint_of_an_earlier_start_does_not_bring_a_difference_back() -> None:
    def start(machine: str) -> RunStarted:
        return RunStarted(time=0.0, iteration=3, world_size=3, num_steps=9, step=3, machines={machine: [0, 1, 2]})

    checks: list[Check] = [(0, [2]), (1, []), (0, [])]
    sentinel = Sentinel.start(load().sentinel)
    sentinel.on_run_started(start("a"))
    observe_checks(sentinel.detectors, checks)
    memory = json.loads(json.dumps(sentinel.memory()))
    sentinel.on_run_started(start("b"))
    sentinel.rewind(memory)
    assert observe_checks(sentinel.detectors, checks)[-1].kind is F.corruption_passed
    sentinel.on_run_started(start("a"))
    sentinel.rewind(memory)
    assert observe_checks(sentinel.detectors, checks)[-1].kind is F.corrupting_rank
