"""Forecasts from the trends of probed signals: golden series, and properties under scaling, shifting and sampling."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from harness.core.events import Finding, PrecursorSignal
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.detect.precursor import (
    HORIZON_STEPS,
    LEAST_LEVEL_PROBES,
    UPDATE_FACTOR,
    WINDOW,
    PrecursorGuard,
    make_forecast,
)
from tests.sentinel.series import config, record

CFG = config()
Values = Callable[[int], float]


def observe(
    signal: str, values: Values, *, first: int = 0, last: int = 600, every: int = 10, loss: float = 2.0
) -> list[Finding]:
    """The findings of a series of probes of one layer group."""
    guard = PrecursorGuard()
    found: list[Finding] = []
    for step in range(first, last, every):
        fields: dict[str, Any] = {"attention_logits": {"blocks.0": 3.0}, "lr": 1e-3}
        found += guard.observe(record(step, loss, 1.0, **(fields | {signal: {"blocks.1": values(step)}})), CFG)
    return found


def growing(*, start: int = 200, level: float = 10.0, rate: float = 0.02, noise: float = 0.0, seed: int = 0) -> Values:
    """Flat until `start`, then a growth by `rate` per step."""
    random = Random(seed)

    def value(step: int) -> float:
        return level * math.exp(rate * max(0, step - start) + random.gauss(0, noise))

    return value


def test_a_growing_logit_is_found_with_its_group_and_a_forecast() -> None:
    (found,) = observe("attention_logits", growing())
    assert found.kind == "precursor"
    assert found.signal == PrecursorSignal.attention_logit
    assert found.groups == ["blocks.1"]
    assert found.cursors == []
    assert found.bound == CFG.logit_bound
    assert found.forecast_steps is not None
    reached = 200 + math.log(CFG.logit_bound / 10.0) / 0.02
    assert found.iteration < reached - 30
    assert found.iteration + found.forecast_steps == pytest.approx(reached, abs=12)
    assert found.message == (
        f"largest attention logit of blocks.1 rises: {found.value:.3g}, reaches 100 in about"
        f" {found.forecast_steps} steps"
    )


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_the_forecast_and_does_not_hide_the_trend(seed: int) -> None:
    (found,) = observe("attention_logits", growing(noise=0.1, seed=seed))
    assert 200 < found.iteration < 200 + math.log(10) / 0.02


@pytest.mark.parametrize("every", [5, 10, 20])
def test_fewer_probes_find_the_same_later(every: int) -> None:
    (found,) = observe("attention_logits", growing(rate=0.01), every=every)
    assert found.forecast_steps is not None
    reached = 200 + math.log(10) / 0.01
    assert found.iteration < reached
    assert found.iteration + found.forecast_steps == pytest.approx(reached, abs=40)


@pytest.mark.parametrize("factor", [1e-3, 7.0, 1e4])
def test_update_ratios_have_no_unit(factor: float) -> None:
    """Their bound is a multiple of their own level."""
    values = growing(noise=0.05)
    series = {step: values(step) for step in range(0, 600, 10)}
    plain = observe("group_update_ratios", lambda step: series[step])
    scaled = observe("group_update_ratios", lambda step: factor * series[step])
    assert len(plain) == 1
    assert [each.iteration for each in scaled] == [each.iteration for each in plain]
    assert scaled[0].value == pytest.approx(factor * plain[0].value)
    assert plain[0].bound == pytest.approx(UPDATE_FACTOR * 10.0, rel=0.2)


@pytest.mark.parametrize("shift", [10, 1000, 12340])
def test_a_later_start_shifts_the_finding(shift: int) -> None:
    (at_once,) = observe("attention_logits", growing(start=300), first=100)
    (later,) = observe("attention_logits", growing(start=300 + shift), first=100 + shift, last=600 + shift)
    assert later.iteration == at_once.iteration + shift
    assert later.forecast_steps == at_once.forecast_steps


@pytest.mark.parametrize(
    "values",
    [
        growing(rate=0.0),
        growing(rate=0.0, noise=0.4, level=40.0),
        growing(rate=-0.01),
        growing(rate=0.0, level=90.0, noise=0.05),
        growing(rate=0.004, level=1.0, start=0),
        lambda step: 2.0 + step / 40,
        lambda step: 13 - 12 * math.exp(-step / 60),
        lambda step: 3 + 29 / (1 + math.exp((150 - step) / 25)),
    ],
    ids=["flat", "noisy", "falling", "high", "slow", "linear", "learning", "learning late"],
)
def test_no_precursor_without_a_trend_that_reaches_the_bound(values: Values) -> None:
    assert observe("attention_logits", values) == []
    assert observe("fp8_underflow", lambda step: values(step) / 1000) == []


@pytest.mark.parametrize(
    ("signal", "level"), [("attention_logits", 40.0), ("group_update_ratios", 1e-3), ("fp8_underflow", 0.1)]
)
def test_noise_near_the_bound_raises_at_most_one_precursor_in_100_000_steps(signal: str, level: float) -> None:
    found = [
        observe(signal, growing(rate=0.0, level=level, noise=0.2, seed=seed), last=10_000, every=10)
        for seed in range(10)
    ]
    assert sum(map(len, found)) <= 1


def test_the_share_that_underflows_is_forecast() -> None:
    (found,) = observe("fp8_underflow", growing(level=0.01))
    assert found.signal == PrecursorSignal.fp8_underflow
    assert found.bound == CFG.fp8_underflow


def test_underflow_that_rises_in_stairs_is_forecast() -> None:
    """Recorded every 10 steps in a run with a growing outlier: one tensor of the group after another underflows."""
    stairs = [0.0026, 0.0071, 0.0036, 0.0112, 0.0325, 0.0293, 0.0995, 0.0818, 0.2404, 0.2979]
    (found,) = observe("fp8_underflow", lambda step: stairs[step // 10 - 20] if step >= 200 else 0.0002, last=300)
    assert found.iteration == 260
    assert found.forecast_steps is not None
    assert 10 <= found.forecast_steps <= 40


def test_one_odd_probe_raises_nothing_and_hides_nothing() -> None:
    flat, rising = growing(rate=0.0, level=30.0), growing()
    assert observe("attention_logits", lambda step: 400.0 if step == 300 else flat(step)) == []
    (found,) = observe("attention_logits", lambda step: 5.0 if step == 230 else rising(step))
    assert found.iteration < 200 + math.log(10) / 0.02


def test_a_finding_is_raised_once_and_again_after_the_rise_ended() -> None:
    assert len(observe("attention_logits", growing(), last=800)) == 1

    def twice(step: int) -> float:
        return growing(start=200)(step) if step < 320 else growing(start=500)(step)

    first, second = observe("attention_logits", twice, last=620)
    assert first.iteration < 320 < 500 < second.iteration


def test_values_that_are_not_finite_or_not_positive_are_left_out() -> None:
    odd = {230: math.nan, 240: math.inf, 250: 0.0}
    (found,) = observe("attention_logits", lambda step: odd.get(step, growing()(step)), last=320)
    assert 250 < found.iteration < 320
    assert observe("attention_logits", growing(), loss=math.nan) == []


def rates(step: int, *, warmup: int) -> float:
    return 1e-3 * min(1.0, (step + 1) / warmup)


def observe_update_ratios(rate: Values, *, expected_at: int | None = None) -> list[Finding]:
    """Update ratios that are in proportion to the learning rate."""
    detectors = Detectors(CFG)
    found: list[Finding] = []
    for step in range(0, 800, 10):
        if step == expected_at:
            detectors.expect_lr_change()
        fields = {"attention_logits": {"blocks.0": 3.0}, "group_update_ratios": {"blocks.1": 5 * rate(step)}}
        found += detectors.precursor.observe(record(step, 2.0, 1.0, lr=rate(step), **fields), CFG)
        if expected_at is not None and step >= expected_at:
            detectors.expect_lr_change()
    return found


def test_a_warm_up_is_no_trend_and_a_rate_that_rises_after_it_is() -> None:
    assert observe_update_ratios(lambda step: rates(step, warmup=500)) == []
    (found,) = observe_update_ratios(lambda step: rates(step, warmup=50) * growing(level=1.0, start=300)(step))
    assert 300 < found.iteration < 300 + math.log(UPDATE_FACTOR) / 0.02


def test_an_expected_change_of_the_learning_rate_is_no_trend() -> None:
    rising = growing(level=1e-3, start=300, rate=0.01)
    assert observe_update_ratios(rising)
    assert observe_update_ratios(rising, expected_at=300) == []


@pytest.mark.parametrize("beta2", [0.999, None])
def test_a_second_moment_that_forgets_the_first_gradients_is_no_trend(beta2: float | None) -> None:
    """Clean training whose first gradients are large: updates grow as Adam forgets them. A log without beta2 does not
    tell it from a rising learning rate."""
    guard, moment, found = PrecursorGuard(), 0.0, list[Finding]()
    for step in range(1, 3000):
        grad = 300.0 if step < 10 else 1.0
        moment = 0.999 * moment + 0.001 * grad**2
        ratio = 1e-3 * grad / math.sqrt(moment / (1 - 0.999**step))
        ratio *= math.exp(0.005 * min(step, 250))  # the gradients of the blocks grow too while the model learns
        if step % 10 == 1:
            fields = {"group_update_ratios": {"blocks.1": ratio}, "lr": 1e-3, "beta2": beta2}
            found += guard.observe(record(step, 2.0, grad, **fields), CFG)
    assert [each.signal for each in found] == ([] if beta2 else [PrecursorSignal.update_ratio])


@pytest.mark.parametrize(("beta2", "start"), [(0.95, 200), (0.999, 1200)])
def test_a_rate_that_rises_is_found_once_the_second_moment_is_filled(beta2: float, start: int) -> None:
    guard, found = PrecursorGuard(), list[Finding]()
    for step in range(0, start + 100, 10):
        fields = {"group_update_ratios": {"blocks.1": growing(start=start)(step)}, "lr": 1e-3, "beta2": beta2}
        found += guard.observe(record(step, 2.0, 1.0, **fields), CFG)
    (finding,) = found
    assert start < finding.iteration < start + math.log(UPDATE_FACTOR) / 0.02


def test_a_level_needs_probes() -> None:
    early = growing(start=100)
    assert observe("group_update_ratios", early, first=100, last=100 + 10 * (WINDOW + LEAST_LEVEL_PROBES - 1)) == []


def test_forecasts_end_at_the_horizon() -> None:
    def forecast(bound: float) -> float | None:
        line = make_forecast([(step, math.exp(0.01 * step)) for step in range(0, 60, 10)], bound)
        return None if line is None else line.steps

    assert forecast(math.exp(0.5 + 0.01 * HORIZON_STEPS)) == pytest.approx(HORIZON_STEPS)
    assert forecast(math.exp(0.51 + 0.01 * HORIZON_STEPS)) is None
    assert forecast(1.0) == 0


def test_the_state_survives_json() -> None:
    """A resumed run raises what an uninterrupted one raises."""
    whole, parts = Detectors(CFG), Detectors(CFG)
    found: dict[str, list[Finding]] = {"whole": [], "parts": []}
    for step in range(0, 400, 10):
        given = record(step, 2.0, 1.0, lr=1e-3, attention_logits={"blocks.1": growing()(step)})
        found["whole"] += whole.observe(given)
        found["parts"] += parts.observe(given)
        parts = Detectors.restore(CFG, json.loads(json.dumps(parts.state())))
    assert found["parts"] == found["whole"]
    assert [each.kind for each in found["whole"]] == ["precursor"]
