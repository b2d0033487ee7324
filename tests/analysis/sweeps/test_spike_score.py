"""The spike score, by hand and against its definition written out."""

from __future__ import annotations

import math
import random

import pytest

from harness.analysis.sweeps.spike_score import FEWEST_ROWS, WINDOW_ROWS, SpikeScore, spike_score

CALM = [1.0, 3.0] * (WINDOW_ROWS // 2)
"""Mean 2, standard deviation 1."""


def by_definition(losses: list[float]) -> SpikeScore:
    before: list[float] = []
    num_spikes = num_judged = 0
    for loss in losses:
        window = before[-WINDOW_ROWS:]
        if len(window) >= FEWEST_ROWS:
            num_judged += 1
            mean = sum(window) / len(window)
            sigma = math.sqrt(sum((value - mean) ** 2 for value in window) / len(window))
            num_spikes += not math.isfinite(loss) or loss > mean + 7 * sigma
        if math.isfinite(loss):
            before.append(loss)
    return SpikeScore(num_spikes=num_spikes, num_judged=num_judged)


@pytest.mark.parametrize(("loss", "num_spikes"), [(9.0, 0), (9.001, 1), (-100.0, 0), (math.nan, 1), (math.inf, 1)])
def test_spike_is_seven_sigma_above_the_window(loss: float, num_spikes: int) -> None:
    assert spike_score([*CALM, loss]) == SpikeScore(num_spikes=num_spikes, num_judged=WINDOW_ROWS + 1 - FEWEST_ROWS)


def test_losses_before_the_window_are_ignored() -> None:
    assert spike_score([1e6, *CALM, 9.001]).num_spikes == 1
    assert spike_score([1e6, *CALM[1:], 9.001]).num_spikes == 0


def test_short_run_has_no_score() -> None:
    assert spike_score([]).share is None
    assert spike_score([2.0] * FEWEST_ROWS).share is None
    assert spike_score([2.0] * FEWEST_ROWS + [3.0]).share == 1.0
    assert spike_score([2.0] * FEWEST_ROWS + [math.nan, 2.0, 2.0, 2.0]).share == 0.25


def test_score_equals_its_definition() -> None:
    source = random.Random(0)
    losses = [3.0 - index / 4000 + source.gauss(0.0, 0.05) for index in range(2600)]
    for index in (50, 150, 400, 999, 1000, 1001, 1800, 2300, 2599):
        losses[index] += source.uniform(0.2, 3.0)
    for index in (20, 700, 2400):
        losses[index] = math.nan
    expected = by_definition(losses)
    assert expected == SpikeScore(num_spikes=7, num_judged=2499)
    assert spike_score(losses) == expected


def test_huge_losses_do_not_raise() -> None:
    assert spike_score([*CALM, 1e300, 1e300, *CALM]).num_spikes == 1
