"""Runs that do not learn, and slow or low starts that are not reported."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from harness.core.events import Finding, FindingKind, StepRecord
from harness.sentinel.detect.detectors import Detectors
from tests.sentinel.series import config, record

CFG = config()
Curve = Callable[[int], float]


def rows_of(curve: Curve, *, num: int = 1500, warmup: int = 20, lr: float = 0.3, every: int = 1) -> list[StepRecord]:
    return [
        record(step, curve(step) * (1 + 0.01 * math.sin(7.0 * step)), lr=lr * min(1.0, step / warmup))
        for step in range(1, num + 1, every)
    ]


def unlearned(rows: list[StepRecord], detectors: Detectors | None = None) -> list[Finding]:
    detectors = detectors or Detectors(CFG)
    return [finding for row in rows for finding in detectors.observe(row) if finding.kind is FindingKind.never_learned]


def at_frequencies(step: int) -> float:
    """Falls to the loss of the token frequencies and stays there."""
    return 3.2 + 2.4 * math.exp(-step / 15)


def barely_falling(step: int) -> float:
    """As measured at a learning rate a hundred times too high, while the schedule lowers it: 3 % in 200 steps."""
    return 3.0 + 0.3 * math.exp(-step / 600) + 2.3 * math.exp(-step / 15)


def untouched(step: int) -> float:
    return 5.6 + 0.1 * math.exp(-step / 5)


def slow_and_decayed(step: int) -> float:
    """As measured at a learning rate of 3e-5 that a short schedule lowers: half of the fall comes late, then little."""
    return 3.4 + 1.5 * math.exp(-step / 180) + 0.6 * math.exp(-step / 15)


def healthy(step: int) -> float:
    return 1.2 + 4.4 * math.exp(-step / 60)


@pytest.mark.parametrize(
    ("curve", "first", "last"), [(at_frequencies, 520, 580), (barely_falling, 520, 580), (untouched, 300, 360)]
)
@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_loss_that_stays_high_after_the_warm_up_is_reported_once(
    curve: Curve, first: int, last: int, every: int
) -> None:
    (finding,) = unlearned(rows_of(curve, every=every))
    assert first <= finding.step <= last
    assert "learning rate (peak 0.3) is probably too high" in finding.message
    assert finding.bound == pytest.approx(0.5 * rows_of(curve)[0].loss)
    assert finding.value == pytest.approx(curve(finding.step), rel=0.02)


@pytest.mark.parametrize("initial", [4.9, 5.1])
def test_a_run_is_judged_if_it_starts_above_five_nats(initial: float) -> None:
    rows = rows_of(lambda _step: initial, num=700)
    rows[0].loss = initial
    assert len(unlearned(rows)) == (initial > 5)


@pytest.mark.parametrize(
    "rows",
    [
        rows_of(healthy),
        rows_of(lambda step: 5.6 - step / 600, lr=1e-5),
        rows_of(slow_and_decayed, lr=3e-5),
        rows_of(slow_and_decayed, lr=3e-5, warmup=40),
        rows_of(at_frequencies, warmup=1400),
        rows_of(lambda _step: 2.1),
        rows_of(at_frequencies)[20:],
        rows_of(lambda step: 3.2 * math.exp(-max(0, step - 400) / 500) + 2.4 * math.exp(-step / 15)),
    ],
    ids=[
        "healthy",
        "small lr",
        "decayed small lr",
        "decayed small lr, longer warm-up",
        "long warm-up",
        "fine-tuning",
        "begins late",
        "short plateau",
    ],
)
def test_slow_starts_and_low_starts_are_not_reported(rows: list[StepRecord]) -> None:
    assert unlearned(rows) == []


def test_a_run_that_falls_back_to_its_initial_loss_is_reported() -> None:
    rows = rows_of(lambda step: healthy(step) if step < 900 else 5.5, num=1600)
    (finding,) = unlearned(rows)
    assert 1150 <= finding.step <= 1250


def test_without_learning_rates_only_a_loss_that_never_fell_is_reported() -> None:
    def without_rates(curve: Curve) -> list[StepRecord]:
        rows = rows_of(curve, num=4000, every=5)
        for row in rows:
            row.lr = math.nan
        return rows

    assert unlearned(without_rates(at_frequencies)) == []
    (finding,) = unlearned(without_rates(untouched))
    assert 2200 <= finding.step <= 2260
    assert "not logged" in finding.message


def test_the_state_survives_a_restart() -> None:
    rows, detectors = rows_of(at_frequencies), Detectors(CFG)
    assert unlearned(rows[:333], detectors) == []
    restored = Detectors.restore(CFG, detectors.state())
    assert unlearned(rows[333:], restored) == unlearned(rows)


def test_a_fall_that_came_late_is_learning() -> None:
    """A quarter of the whole fall, measured from the first two blocks after the warm-up."""

    def levels(late: float) -> Curve:
        return lambda step: 6.0 if step == 1 else 4.0 + late if step <= 150 else 4.0

    def falls(late: float) -> int:
        rows = [record(step, levels(late)(step), lr=0.3 * min(1.0, step / 20)) for step in range(1, 901)]
        return len(unlearned(rows))

    assert falls(0.49) == 1
    assert falls(0.51) == 0


def test_the_first_blocks_begin_after_the_warm_up() -> None:
    detectors = Detectors(CFG)
    rows = rows_of(lambda step: 6.0 if step <= 300 else 4.0, num=600, warmup=260)
    unlearned(rows[:260], detectors)
    assert detectors.learning.first_blocks == []
    unlearned(rows[260:], detectors)
    assert detectors.learning.first_blocks == pytest.approx([4.0, 4.0], rel=0.02)


def test_a_loss_that_rose_first_and_fell_back_is_reported() -> None:
    """As measured at a learning rate of 1: the loss rises to 17 and falls back to that of the token frequencies."""

    def rose(step: int) -> float:
        return 5.6 if step == 1 else 3.5 + 13.0 * math.exp(-(((step - 100) / 60) ** 2))

    (finding,) = unlearned(rows_of(rose))
    assert 520 <= finding.step <= 580


@pytest.mark.parametrize(("first", "num"), [(10, 1), (11, 0)])
def test_a_log_is_judged_if_it_begins_in_the_first_ten_steps(first: int, num: int) -> None:
    assert len(unlearned(rows_of(untouched)[first - 1 :])) == num


def test_an_untouched_loss_is_reported_200_steps_after_the_warm_up() -> None:
    rows = rows_of(untouched, warmup=100)
    rows[0].lr = math.inf
    (finding,) = unlearned(rows)
    assert (finding.step, finding.cursors) == (300, [])
    assert "peak 0.3" in finding.message


def test_a_run_that_learns_later_can_be_reported_again() -> None:
    found = unlearned(rows_of(lambda step: 5.5 if step < 600 or step > 1200 else 1.2, num=2000))
    assert len(found) == 2
    assert found[0].step < 600
    assert found[1].step > 1200
