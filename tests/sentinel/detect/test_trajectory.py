"""Tests of the trajectory after a spike: moves, recovery, types."""

from __future__ import annotations

import pytest

from harness.sentinel.detect.trajectory import RecoveryTrend, classify_trajectory, has_recovered, has_turned


class TestRecoveryTrend:
    def follow(self, *losses: float, sigma: float = 0.1) -> RecoveryTrend:
        """A trend after these losses at 11, 12, ... with a level of 3."""
        trend = RecoveryTrend(moved_at=10)
        for at, loss in enumerate(losses, start=11):
            trend.follow(loss, at, level=3.0, sigma=sigma)
        return trend

    def test_the_first_loss_is_no_move(self) -> None:
        assert self.follow(9.0) == RecoveryTrend(value=9.0, moved_at=10, direction=0)

    @pytest.mark.parametrize(("loss", "direction"), [(9.75, 0), (9.76, 1), (8.25, 0), (8.24, -1)])
    def test_a_move_exceeds_one_and_a_half_sigmas(self, loss: float, direction: int) -> None:
        trend = self.follow(9.0, loss, sigma=0.5)
        assert trend.direction == direction
        assert trend.moved_at == (12 if direction else 10)

    @pytest.mark.parametrize(("loss", "direction"), [(52.0, 0), (51.99, -1), (54.0, 0), (54.01, 1)])
    def test_a_move_exceeds_a_fiftieth_of_the_height(self, loss: float, direction: int) -> None:
        assert self.follow(53.0, loss, sigma=0.5).direction == direction

    def test_small_moves_add_up(self) -> None:
        trend = self.follow(*(4.0 - 0.04 * place for place in range(10)), sigma=0.1)
        assert (trend.direction, trend.moved_at) == (-1, 19), "the fifth and the ninth loss are moves"

    def test_a_fall_is_a_recovery_while_it_is_young(self) -> None:
        falling = self.follow(9.0, 8.0)
        assert falling.is_recovering(16, patience=5)
        assert not falling.is_recovering(17, patience=5)
        assert not self.follow(8.0, 9.0).is_recovering(12, patience=5)
        assert not self.follow(9.0).is_recovering(12, patience=5), "it did not move yet"


@pytest.mark.parametrize(
    ("peak", "loss", "sigma", "answer"),
    [(5.0, 4.5, 0.1, False), (5.0, 4.49, 0.1, True), (5.0, 4.0, 0.5, False), (5.0, 3.99, 0.5, True)],
)
def test_a_spike_has_turned_after_a_quarter_of_its_height_and_two_sigmas(
    peak: float, loss: float, sigma: float, answer: bool
) -> None:
    assert has_turned(level=3.0, sigma=sigma, peak=peak, loss=loss) is answer


def test_half_a_sigma_above_the_level_is_recovered() -> None:
    assert has_recovered(level=3.0, sigma=0.5, loss=3.25)
    assert not has_recovered(level=3.0, sigma=0.5, loss=3.26)


@pytest.mark.parametrize(
    ("loss", "is_rising", "spike_type"),
    [
        (2.25, True, 1),
        (2.26, False, 2),
        (3.0, False, 2),
        (3.01, False, 3),
        (2.9, True, 3),
        (2.49, True, 2),
    ],
)
def test_types_of_spikes(loss: float, is_rising: bool, spike_type: int) -> None:
    """Level 2, sigma 0.5, peak 3.5; it has turned below 2.5."""
    given = {"level": 2.0, "sigma": 0.5, "peak": 3.5}
    assert classify_trajectory(**given, loss=loss, is_rising=is_rising) == spike_type
