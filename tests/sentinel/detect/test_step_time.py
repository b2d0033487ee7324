"""When a run counts as slow, and which ranks are late."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.core.events import Finding, ReducedRecord
from harness.sentinel.detect.step_time import SpeedGuard, late_ranks
from tests.sentinel.series import record


def watch(seconds: list[float], guard: SpeedGuard | None = None) -> list[Finding]:
    guard = SpeedGuard() if guard is None else guard
    rows = [record(step, 3.0, median_step_s=each) for step, each in enumerate(seconds)]
    return [finding for row in rows for finding in guard.observe(row)]


def steps(seconds: list[float]) -> list[tuple[str, int]]:
    return [(str(finding.kind), finding.step) for finding in watch(seconds)]


USUAL = [1.0] * 300
"""So many rows that the first slow ones hardly move the level."""


@pytest.mark.parametrize(("factor", "found"), [(1.58, []), (1.7, [("slow", 305)])])
def test_slow_is_1_6_times_the_usual_in_the_median_of_ten_rows(factor: float, found: list[tuple[str, int]]) -> None:
    assert steps([*USUAL, *[factor] * 12]) == found


def test_five_slow_rows_of_ten_are_a_median_half_way() -> None:
    assert steps([*USUAL, *[4.0] * 5]) == [("slow", 304)]
    assert steps([*USUAL, *[2.5] * 5]) == [], "the geometric mean of both, below 1.6"
    assert steps([*USUAL, *[4.0] * 4]) == []


def test_the_usual_step_time_is_known_after_eleven_rows() -> None:
    assert steps([1.0] * 4 + [4.0] * 30) == [("slow", 11)]
    assert steps([1.0] * 10 + [4.0] * 30) == [("slow", 15)]


@pytest.mark.parametrize(("usual", "found"), [(0.04, []), (0.05, ["slow"])])
def test_ten_rows_that_take_less_than_a_second_are_not_slow(usual: float, found: list[str]) -> None:
    assert [kind for kind, _ in steps([usual] * 300 + [2.1 * usual] * 12)] == found


@pytest.mark.parametrize(("factor", "is_over"), [(1.32, False), (1.24, True)])
def test_a_slowdown_ends_at_1_25_times_the_usual(factor: float, is_over: bool) -> None:
    seen = steps([*USUAL, *[2.0] * 12, *[factor] * 12])
    assert seen == [("slow", 305), *([("speed_recovered", 317)] if is_over else [])]


def test_findings_report_steps_per_second() -> None:
    slow, over = watch([*USUAL, *[4.0] * 10, *[1.0] * 10])
    usual = 4 ** (0.99**4 - 1)
    """After four slow rows, each of which has a weight of 0.01."""
    assert [slow.value, slow.bound] == pytest.approx([0.5, usual / 1.6])
    assert slow.message == "0.5 steps/s over the last 10 steps, usually 0.9468"
    assert [over.value, over.bound, over.step] == pytest.approx([1.0, usual / 1.25, 315])
    assert over.message == "1 steps/s after 12 slow steps, usually 0.9468"
    assert slow.cursors == over.cursors == []


def test_slow_rows_do_not_change_the_level_for_1000_rows() -> None:
    assert steps([*USUAL, *[2.0] * 1000, *[1.0] * 6]) == [("slow", 305), ("speed_recovered", 1305)]
    assert steps([*USUAL, *[2.0] * 1010, *[1.0] * 20]) == [("slow", 305)], "after 1000 rows they are"
    assert steps([*USUAL, *[2.0] * 1010, *[4.0] * 6]) == [("slow", 305), ("slow", 1315)]


def test_the_usual_step_time_is_a_mean_of_a_hundred_rows() -> None:
    guard = SpeedGuard()
    watch([1.0] * 200 + [1.5], guard)

    assert guard.speed == pytest.approx(0.01 * math.log(1 / 1.5))
    guard = SpeedGuard()
    watch([1.0, 2.0, 4.0], guard)
    assert guard.speed == pytest.approx(math.log(1 / 2)), "of few rows, their geometric mean"


def watch_growing_batch(factor: float) -> list[Finding]:
    """The batch is twice as large from step 200 on; a step then takes so many times the seconds."""
    rows = [record(step, 3.0, median_step_s=1.0, batch_tokens=1000) for step in range(200)]
    rows += [record(step, 3.0, median_step_s=factor, batch_tokens=2000) for step in range(200, 400)]
    guard = SpeedGuard()
    return [finding for row in rows for finding in guard.observe(row)]


def test_a_larger_batch_that_takes_longer_is_not_slow() -> None:
    assert watch_growing_batch(2.0) == []


def test_a_step_that_slows_down_more_than_its_batch_grows_is_slow() -> None:
    (slow,) = watch_growing_batch(4.0)
    assert (slow.kind, slow.step) == ("slow", 205)
    assert slow.message == "500 tokens/s over the last 10 steps, usually 966.6"


def test_a_log_without_batch_sizes_is_judged_by_steps_per_second() -> None:
    """Its level starts again at the first row with a batch size, as after the resume of an old checkpoint."""
    guard = SpeedGuard()
    watch([1.0] * 300, guard)
    rows = [record(step, 3.0, median_step_s=4.0, batch_tokens=1000) for step in range(300, 330)]
    assert [finding for row in rows for finding in guard.observe(row)] == []
    assert guard.unit == "tokens/s"
    assert guard.speed == pytest.approx(math.log(250))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_step_without_a_time_is_ignored(seconds: float) -> None:
    guard = SpeedGuard()
    assert watch([seconds] * 3, guard) == []
    assert guard == SpeedGuard()


def named(median_step_s: float = 1.0, **spreads: tuple[float, float, list[list[float]]]) -> list[int]:
    ranks: dict[str, Any] = {
        name: {"median": median, "spread": spread, "worst": worst} for name, (median, spread, worst) in spreads.items()
    }
    row: ReducedRecord = record(1, 3.0, median_step_s=median_step_s, ranks=ranks)
    return late_ranks(row)


def test_a_device_that_takes_1_6_times_as_long_is_late() -> None:
    four = [[0, 1.0], [1, 1.0], [2, 1.0]]
    assert named(device_time_s=(1.0, 0.1, [[3, 1.6], *four])) == []
    assert named(device_time_s=(1.0, 0.1, [[3, 1.61], *four])) == [3]
    assert named(device_time_s=(0.5, 0.1, [[3, 1.0], *four])) == [3, 0, 1, 2], "of many, against the median"
    assert named(device_time_s=(0.5, 0.1, [[3, 1.0], [0, 1.0], [1, 1.0]])) == [], "of three, against the fastest"
    assert named(device_time_s=(0.5, 0.1, [[3, 1.7], [0, 1.0], [1, 1.0]])) == [3]
    assert named(device_time_s=(0.0, 0.0, [[3, 1.0], [0, 0.0], [1, 0.0]])) == [3]
    assert named() == []
    assert named(device_time_s=(math.nan, 0.1, [[3, 1.0]])) == []
    assert named(device_time_s=(1.0, 0.1, [[3, math.nan]])) == []
    assert named(device_time_s=(0.0, 0.0, [[3, 1e-13], [0, 0.0]])) == [], "rounding"


def test_a_host_far_from_the_others_is_late() -> None:
    near = [[0, 0.01], [1, 0.01]]
    assert named(step_time_s=(0.01, 0.01, [[3, 0.09], *near])) == []
    assert named(step_time_s=(0.01, 0.01, [[3, 0.091], *near])) == [3]
    assert named(step_time_s=(0.1, 0.01, [[3, 0.0], [0, 0.1]])) == [], "one that works less is not"


def test_with_few_hosts_those_busy_for_half_of_the_step_are_late_unless_all_are() -> None:
    assert named(step_time_s=(0.3, 0.2, [[0, 0.02], [1, 0.51]])) == [1]
    assert named(step_time_s=(0.3, 0.2, [[0, 0.02], [1, 0.5]])) == []
    assert named(step_time_s=(0.5, 0.2, [[0, 0.52], [1, 0.51]])) == []
    assert named(0.0, step_time_s=(0.3, 0.2, [[0, 0.02], [1, 0.51]])) == [], "not without a step time"
    assert named(step_time_s=(0.3, 0.2, [[0, 0.02], [1, 0.51]]), device_time_s=(1.0, 0.1, [[0, 2.0], [1, 1.0]])) == [0]
