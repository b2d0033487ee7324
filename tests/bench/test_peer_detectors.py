"""Each peer's rule on short series whose alarms were derived by hand from the peer's source."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tests.bench.peer_detectors import (
    MissingGradNormsError,
    OutlierDetector,
    Rule,
    levanter,
    llm_c,
    llm_foundry,
    megatron,
    olmo_core,
    past_mean_std,
    torchtitan,
    zclip,
)
from tests.bench.training_logs import TrainingLog

NAN = math.nan
ALTERNATING = [1.0, 3.0] * 64
"""128 values with mean 2; standard deviation 1 (n) or 1.0039 (n - 1)."""


def alarms(rule: Rule, losses: Sequence[float], norms: Sequence[float] = ()) -> list[int]:
    return list(rule(TrainingLog("log", tuple(range(len(losses))), tuple(losses), tuple(norms))))


def test_past_mean_and_deviation_exclude_the_value_itself() -> None:
    means, stds = past_mean_std([1.0, 2.0, 4.0, 4.0], window=2, ddof=1)
    assert means[2:].tolist() == [1.5, 3.0]
    assert stds[2:].tolist() == pytest.approx([math.sqrt(0.5), math.sqrt(2.0)])


@pytest.mark.parametrize(("loss", "expected"), [(8.02, []), (8.03, [128])])
def test_olmo_core_divides_by_n_minus_1(loss: float, expected: list[int]) -> None:
    assert alarms(olmo_core, [*ALTERNATING, loss]) == expected  # 2 + 6 * 1.0039 = 8.0236


def test_olmo_core_starts_at_the_64th_step() -> None:
    assert alarms(olmo_core, [*ALTERNATING[:62], 100.0, 2.0]) == []
    assert alarms(olmo_core, [*ALTERNATING[:63], 100.0]) == [63]


def test_olmo_core_accepts_a_jump_after_four_skips() -> None:
    """With three values of 100 in the window the bound is 93.8, with four it is 107.9."""
    assert alarms(olmo_core, [*ALTERNATING, *[100.0] * 20]) == [128, 129, 130, 131]


def test_olmo_core_skips_128_steps_after_a_nan() -> None:
    losses = ALTERNATING * 4
    losses[200] = NAN
    assert alarms(olmo_core, losses) == list(range(200, 329))


def test_olmo_core_raises_on_an_early_nan_when_it_collects_metrics() -> None:
    losses = ALTERNATING * 2
    losses[10] = NAN
    assert alarms(olmo_core, losses) == [14, *range(63, 139)]
    assert alarms(olmo_core, [NAN, 1.0]) == [0]


def test_olmo_core_checks_norms_if_there_are_any() -> None:
    losses = [*ALTERNATING, 2.0]
    assert alarms(olmo_core, losses, [*ALTERNATING, 8.03]) == [128]
    assert alarms(olmo_core, losses) == []


@pytest.mark.parametrize(("norm", "expected"), [(7.99, []), (8.02, [128])])
def test_levanter_divides_by_n(norm: float, expected: list[int]) -> None:
    assert alarms(levanter, [*ALTERNATING, 2.0], [*ALTERNATING, norm]) == expected


def test_levanter_starts_after_64_values() -> None:
    losses = [*ALTERNATING[:63], 100.0]
    assert alarms(levanter, losses, [1.0] * 64) == []
    losses = [*ALTERNATING[:64], 100.0]
    assert alarms(levanter, losses, [1.0] * 65) == [64]


@pytest.mark.parametrize(("norm", "expected"), [(1.000005, []), (1.000007, [128])])
def test_levanter_has_a_minimum_deviation(norm: float, expected: list[int]) -> None:
    assert alarms(levanter, [*ALTERNATING, 2.0], [*[1.0] * 128, norm]) == expected


def test_levanter_skips_128_steps_after_a_nan_norm() -> None:
    norms = ALTERNATING * 4
    norms[200] = NAN
    assert alarms(levanter, ALTERNATING * 4, norms) == list(range(200, 329))


def test_z_score_of_llm_c_includes_the_value_itself() -> None:
    """If k of 128 values are equal outliers, z = sqrt((128 - k) / k)."""
    detector = OutlierDetector()
    assert all(math.isnan(detector.update(1.0)) for _ in range(128))
    assert detector.update(1.0) == 0.0
    assert [detector.update(2.0) for _ in range(3)] == pytest.approx([math.sqrt((128 - k) / k) for k in (1, 2, 3)])


def test_llm_c_skips_two_steps_of_a_jump() -> None:
    """The z-scores are 11.3, 7.9 and 6.5."""
    assert alarms(llm_c, [*[1.0] * 128, *[2.0] * 20]) == [128, 129]
    assert alarms(llm_c, [1.0] * 148, [*[1.0] * 128, *[2.0] * 20]) == [128, 129]


def test_llm_c_has_no_alarm_until_its_window_is_full() -> None:
    assert alarms(llm_c, [*[1.0] * 127, 2.0]) == []


def test_llm_c_has_no_alarm_after_a_nan() -> None:
    assert alarms(llm_c, [*[1.0] * 50, NAN, *[1.0] * 500, 100.0]) == []


def test_llm_foundry_alarms_on_the_fifth_loss_at_twice_the_mean() -> None:
    """The mean grows by 0.02 a row: 3 is twice of it or more until it is 1.5, at row 125."""
    assert alarms(llm_foundry, [*[1.0] * 100, *[3.0] * 40]) == list(range(104, 126))


def test_llm_foundry_counts_in_a_row() -> None:
    assert alarms(llm_foundry, [*[1.0] * 100, *[3.0] * 4, 1.0, *[3.0] * 4, *[1.0] * 30]) == []


def test_window_of_llm_foundry_is_5_percent_of_the_run() -> None:
    spike = [*[1.0] * 150, *[5.0] * 10]
    assert alarms(llm_foundry, [*spike, *[1.0] * 1840]) == list(range(154, 160))
    assert alarms(llm_foundry, [*spike, *[1.0] * 3840]) == []


def test_cap_of_llm_foundry_stays_at_10() -> None:
    assert alarms(llm_foundry, [11.0] * 300) == list(range(199, 300))
    assert alarms(llm_foundry, [*[5.0] * 100, *[6.0] * 300]) == []


def test_llm_foundry_ignores_nan() -> None:
    assert alarms(llm_foundry, [*[1.0] * 150, *[NAN] * 150]) == []


@pytest.mark.parametrize(("loss", "expected"), [(19.9, []), (20.0, [101])])
def test_megatron_takes_ten_times_the_largest_of_100(loss: float, expected: list[int]) -> None:
    assert alarms(megatron, [50.0, *[1.0] * 99, 2.0, loss]) == expected  # the first iteration is not validated


def test_megatron_checks_nan_separately() -> None:
    assert alarms(megatron, [NAN, *[1.0] * 4, NAN, math.inf, 1.0]) == [5, 6]


def test_megatron_does_not_count_nan_as_a_sample() -> None:
    assert alarms(megatron, [1.0, NAN, *[1.0] * 99, 10.0, 100.0]) == [1, 102]


def test_torchtitan_stops_on_non_finite_values() -> None:
    assert alarms(torchtitan, [1.0, NAN, 100.0, -math.inf], [1.0, 1.0, 1.0, 1.0]) == [1, 3]
    assert alarms(torchtitan, [1.0, 1.0], [1.0, math.inf]) == [1]


WARM_UP = [*[1.0, 3.0] * 12, 2.0]
"""25 norms with mean 2 and variance 0.96."""


@pytest.mark.parametrize(("norm", "expected"), [(4.44, []), (4.46, [25])])
def test_zclip_clips_above_2_5_deviations(norm: float, expected: list[int]) -> None:
    assert alarms(zclip, [1.0] * 26, [*WARM_UP, norm]) == expected  # 2 + 2.5 * 0.9798 = 4.4495


@pytest.mark.parametrize(("norm", "expected"), [(4.4443, [25]), (4.4448, [25, 26])])
def test_zclip_updates_its_mean_with_the_clipped_norm(norm: float, expected: list[int]) -> None:
    """A norm of z = 10 enters as 2.6124: mean 2.0184, variance 0.9418, so the next is clipped above 4.4445."""
    assert alarms(zclip, [1.0] * 27, [*WARM_UP, 11.79797, norm]) == expected


def test_zclip_does_not_clip_during_its_warm_up() -> None:
    assert alarms(zclip, [1.0] * 25, [*WARM_UP[:24], 100.0]) == []


def test_zclip_never_clips_again_after_a_nan() -> None:
    assert alarms(zclip, [1.0] * 60, [*WARM_UP, NAN, *[2.0] * 33, 100.0]) == []


@pytest.mark.parametrize("rule", [zclip, levanter])
def test_rules_about_norms_need_norms(rule: Rule) -> None:
    with pytest.raises(MissingGradNormsError):
        alarms(rule, ALTERNATING)
