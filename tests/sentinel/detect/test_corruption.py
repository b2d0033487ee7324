"""Tests of the corruption guard: a difference is repeated twice, then it is transient or lasting."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.core.events import Finding, FindingKind, StepRecord
from harness.sentinel.detect.detectors import Detectors
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
