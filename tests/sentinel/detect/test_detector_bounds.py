"""The bounds and row counts at which each finding is raised."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from harness.core.events import Finding, FindingKind, StepRecord
from harness.optim.schedule import schedule_table
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.detect.fp8_range import RangeGuard
from harness.sentinel.detect.guards import STUCK_ROWS, RateGuard, ScaleGuard, rank_distances
from harness.sentinel.detect.loss_curve import loud_ranks, slow_change
from tests import composed
from tests.sentinel.series import config, kinds, record

CFG = config()
SPREAD = 0.25
"""Of blocks; sums of it are exact."""
LARGE = math.log(1.5)


def watch(rows: list[StepRecord]) -> list[Finding]:
    detectors = Detectors(CFG)
    return [finding for row in rows for finding in detectors.observe(row)]


class TestSlowChange:
    """8 blocks make the floor, 12 the ceiling before them."""

    def test_a_slow_change_needs_nine_blocks(self) -> None:
        rising = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
        assert slow_change(rising, SPREAD) == ""
        assert slow_change([0.0, *rising], SPREAD) == "divergence"

    @pytest.mark.parametrize(("rise", "shown"), [(0.5, ""), (0.5625, "level_shift")])
    def test_a_floor_two_spreads_above_the_ceiling_is_a_shift(self, rise: float, shown: str) -> None:
        assert slow_change([0.0] * 12 + [rise] * 8, SPREAD) == shown

    def test_a_shift_needs_all_blocks_of_floor_and_ceiling(self) -> None:
        flat = [0.0] * 11 + [0.375] * 8
        assert slow_change(flat, 0.125) == ""
        assert slow_change([0.0, *flat], 0.125) == "level_shift"

    @pytest.mark.parametrize("place", range(12, 20))
    def test_each_block_of_the_floor_counts(self, place: int) -> None:
        means = [0.0] * 12 + [0.375] * 8
        means[place] = 0.25
        assert slow_change(means, 0.125) == ""

    @pytest.mark.parametrize("place", range(12))
    def test_each_block_of_the_ceiling_counts(self, place: int) -> None:
        means = [0.0] * 12 + [0.375] * 8
        means[place] = 0.125
        assert slow_change(means, 0.125) == ""
        assert slow_change([9.0, *([0.0] * 12 + [0.375] * 8)], 0.125) == "level_shift", "older ones do not"

    @pytest.mark.parametrize(("num", "shown"), [(3, ""), (4, "divergence"), (5, "")])
    def test_four_blocks_far_above_all_before_diverge(self, num: int, shown: str) -> None:
        """It shows once, with the fourth."""
        assert slow_change([0.0] * 12 + [LARGE + 0.01] * num, 10.0) == shown

    @pytest.mark.parametrize(("height", "shown"), [(LARGE, ""), (LARGE + 1e-9, "divergence")])
    def test_far_above_means_fifty_percent_above(self, height: float, shown: str) -> None:
        assert slow_change([-1.0] * 10 + [0.0] + [height] * 4, 10.0) == shown

    def test_one_low_block_among_the_four_is_a_recovery(self) -> None:
        assert slow_change([0.0] * 12 + [1.0, 1.0, 0.1, 1.0], 10.0) == ""

    @pytest.mark.parametrize(
        ("rising", "shown"),
        [
            ([0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125], "divergence"),
            ([0.25, 0.375, 0.3125, 0.625, 0.75, 0.875, 1.0, 1.125], "divergence"),
            ([0.25, 0.375, 0.3125, 0.625, 0.5, 0.875, 1.0, 1.125], ""),
            ([0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.125, 1.0], ""),
            ([0.25, 0.26, 0.27, 0.28, 0.29, 0.30, 0.31, 1.125], ""),
            ([0.25, 0.26, 0.27, 0.28, 0.4375, 0.5, 0.6, 1.125], ""),
            ([0.25, 0.26, 0.27, 0.28, 0.4376, 0.5, 0.6, 1.125], "divergence"),
            ([0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.95, 1.0], ""),
            ([0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.95, 1.001], "divergence"),
        ],
        ids=[
            "all rise",
            "one falls",
            "two fall",
            "the last falls",
            "only the last is high",
            "half way at the bound",
            "half way above it",
            "three spreads",
            "more than three",
        ],
    )
    def test_eight_blocks_that_rise_diverge(self, rising: list[float], shown: str) -> None:
        assert slow_change([0.25, 0.25, *rising], SPREAD) == shown

    @pytest.mark.parametrize(("before", "shown"), [(0.25, "divergence"), (0.5, "")])
    def test_rising_blocks_must_exceed_all_before_them(self, before: float, shown: str) -> None:
        rising = [0.25, 0.375, 0.5, 0.625, 0.76, 0.875, 1.0, 1.125]
        assert slow_change([before, 0.0, *rising], SPREAD) == shown

    @staticmethod
    def creeping(step: float, *, earlier: float = 0.0, num: int = 40) -> list[float]:
        """Twenty blocks, then four groups of five, each a little higher than the one before."""
        return ([earlier] * 20 + [step * quarter for quarter in (0, 1, 2, 3) for _ in range(5)])[40 - num :]

    @pytest.mark.parametrize(
        ("step", "earlier", "num", "shown"),
        [
            (0.1875, 0.0, 40, ""),
            (0.1876, 0.0, 40, "divergence"),
            (0.1876, 0.0, 39, ""),
            (0.1876, 0.37, 40, "divergence"),
            (0.1876, 0.38, 40, ""),
        ],
        ids=["at the bound", "above it", "too few blocks", "above the earlier half", "not above it"],
    )
    def test_a_slow_creep_over_forty_blocks_diverges(self, step: float, earlier: float, num: int, shown: str) -> None:
        means = self.creeping(step, earlier=earlier, num=num)
        assert slow_change(means, SPREAD) == shown

    @pytest.mark.parametrize("place", range(20))
    def test_one_high_block_of_the_earlier_half_is_enough_against_a_creep(self, place: int) -> None:
        means = self.creeping(0.1876)
        means[place] = 0.5
        assert slow_change(means, SPREAD) == ""

    def test_each_quarter_of_a_creep_must_rise(self) -> None:
        for first in (20, 25, 30, 35):
            means = self.creeping(0.1876)
            means[first : first + 5] = [0.28] * 5
            assert slow_change(means, SPREAD) == "", first


class TestLoudRanks:
    def find_loud(self, worst: list[list[float]], *, median: float = 1.0, grad_norm: float = 40.0) -> list[int]:
        ranks: dict[str, Any] = {"grad_norm": {"median": median, "spread": 1.0, "worst": worst}}
        return loud_ranks(record(1, 3.0, grad_norm, ranks=ranks))

    def test_a_loud_rank_has_half_of_the_norm_and_ten_times_the_smallest(self) -> None:
        assert self.find_loud([[7, 20.0], [3, 40.0]]) == [3, 7]
        assert self.find_loud([[3, 19.99]]) == [], "less than half of it"
        assert self.find_loud([[3, 20.0]], median=2.0) == [], "exactly ten times the median"
        assert self.find_loud([[3, 20.01]], median=2.0) == [3]
        assert self.find_loud([[3, 20.0], [5, 1.0]], median=9.0) == [3], "the smallest may be one that is listed"
        assert loud_ranks(record(1, 3.0, 40.0)) == []


class TestGuards:
    @pytest.mark.parametrize(
        ("value", "spread", "sigmas"),
        [(3.0, 0.5, 2.0), (3.0, 0.0, 25.0), (1.0, 0.5, 2.0), (2.0, 0.0, 0.0)],
        ids=["of the spread", "at least 2 % of the median", "below", "equal"],
    )
    def test_distances_of_ranks(self, value: float, spread: float, sigmas: float) -> None:
        ((rank, shown, distance),) = rank_distances(
            {"median": 2.0, "spread": spread, "worst": [[4, value], [5, math.nan]]}
        )
        assert (rank, shown) == (4, value)
        assert distance == pytest.approx(sigmas)

    def test_ranks_without_a_median_have_no_distance(self) -> None:
        assert rank_distances(None) == []
        assert rank_distances({"median": math.nan, "spread": 0.5, "worst": [[4, 3.0]]}) == []
        ((_, _, distance),) = rank_distances({"median": 0.0, "spread": 0.0, "worst": [[4, 1e-12]]})
        assert distance == pytest.approx(1.0)

    @pytest.mark.parametrize(("value", "found"), [(5.0, []), (5.001, ["rank_outlier"])])
    def test_eight_sigmas_for_five_rows(self, value: float, found: list[str]) -> None:
        spread: dict[str, Any] = {"loss": {"median": 1.0, "spread": 0.5, "worst": [[2, value]]}}
        assert kinds(watch([record(step, 3.0, ranks=spread) for step in range(5)])) == found
        assert watch([record(step, 3.0, ranks=spread) for step in range(4)]) == []

    @pytest.mark.parametrize(
        ("name", "value", "sigma", "found"),
        [
            ("loss", 2.0, 0.01, []),
            ("loss", 2.001, 0.01, ["rank_outlier"]),
            ("loss", 2.5, 0.075, []),
            ("loss", 2.501, 0.075, ["rank_outlier"]),
            ("grad_norm", 10.0, 0.1, []),
            ("grad_norm", 10.001, 0.1, ["rank_outlier"]),
        ],
    )
    def test_twenty_sigmas_and_a_multiple_of_the_median_at_once(
        self, name: str, value: float, sigma: float, found: list[str]
    ) -> None:
        spread: dict[str, Any] = {name: {"median": 1.0, "spread": sigma, "worst": [[2, value]]}}
        assert kinds(watch([record(1, 3.0, 0.5, ranks=spread)])) == found

    def test_a_row_without_the_outlier_starts_the_count_again(self) -> None:
        far: dict[str, Any] = {"loss": {"median": 1.0, "spread": 0.1, "worst": [[2, 1.95]]}}
        near: dict[str, Any] = {"loss": {"median": 1.0, "spread": 0.1, "worst": [[2, 1.1]]}}
        rows = [record(step, 3.0, ranks=near if step in (4, 9) else far) for step in range(14)]
        assert watch(rows) == []
        assert [finding.step for finding in watch([*rows, record(14, 3.0, ranks=far)])] == [14]

    def test_another_rank_starts_the_count_again_and_each_is_raised_once(self) -> None:
        def far(rank: int) -> dict[str, Any]:
            return {"loss": {"median": 1.0, "spread": 0.1, "worst": [[rank, 1.95]]}}

        rows = [record(step, 3.0, ranks=far(1 if step < 7 else 3)) for step in range(20)]
        assert [(finding.step, finding.ranks) for finding in watch(rows)] == [(4, [1]), (11, [3])]

    @pytest.mark.parametrize(("scale", "found"), [(1.0, []), (0.999, ["scale_collapse"])])
    def test_a_loss_scale_below_one(self, scale: float, found: list[str]) -> None:
        assert kinds(watch([record(1, 3.0, loss_scale=scale)])) == found

    def test_a_loss_scale_that_five_overflows_do_not_move(self) -> None:
        stuck = [record(1, 3.0, math.inf, loss_scale=64.0, refused=True) for _ in range(6)]
        assert kinds(watch(stuck[:5])) == ["nonfinite"], "the first sets it, four find it unmoved"
        found = watch(stuck)
        assert (kinds(found), found[1].value, found[1].bound) == (["nonfinite", "scale_collapse"], 64.0, 1.0)
        moved = [*stuck[:5], record(1, 3.0, math.inf, loss_scale=32.0, refused=True), *stuck[:4]]
        assert kinds(watch(moved)) == ["nonfinite"]
        applied = [*stuck[:5], record(2, 3.0, 0.3, loss_scale=64.0), *stuck[:4]]
        assert "scale_collapse" not in kinds(watch(applied))

    @pytest.mark.parametrize(
        ("norm", "found"), [(20.0, []), (20.01, ["weight_drift"]), (5.0, []), (4.99, ["weight_drift"])]
    )
    def test_weights_that_more_than_double_or_halve(self, norm: float, found: list[str]) -> None:
        assert kinds(watch([record(100, 3.0, param_norm=10.0), record(300, 3.0, param_norm=norm)])) == found

    def test_weights_are_compared_within_200_steps_and_from_step_100_on(self) -> None:
        assert watch([record(100, 3.0, param_norm=10.0), record(301, 3.0, param_norm=30.0)]) == []
        assert watch([record(99, 3.0, param_norm=10.0), record(150, 3.0, param_norm=30.0)]) == []
        (finding,) = watch([record(100, 3.0, param_norm=10.0), record(150, 3.0, param_norm=30.0)])
        assert (finding.value, finding.bound, finding.groups) == (3.0, 2.0, ["all"])

    def test_weight_norms_are_stored_every_twenty_steps(self) -> None:
        sparse = [
            record(100, 3.0, param_norm=10.0),
            record(119, 3.0, param_norm=6.0),
            record(302, 3.0, param_norm=13.0),
        ]
        assert watch(sparse) == [], "19 steps after the last one nothing is kept"
        kept = [record(100, 3.0, param_norm=10.0), record(120, 3.0, param_norm=6.0), record(302, 3.0, param_norm=13.0)]
        assert kinds(watch(kept)) == ["weight_drift"]

    def test_weights_of_the_same_step_are_not_compared(self) -> None:
        """As after a restart at a step that was probed before."""
        assert watch([record(120, 3.0, param_norm=10.0), record(120, 3.0, param_norm=30.0)]) == []

    def test_drift_is_raised_once_for_each_group_until_it_ends(self) -> None:
        def of(step: int, **norms: float) -> StepRecord:
            return record(step, 3.0, group_param_norms=norms)

        rows = [of(100, a=1.0, b=1.0), of(110, a=2.5, b=1.0), of(115, a=2.6, b=1.0), of(118, a=2.6, b=4.0)]
        assert [(each.step, each.groups, each.value) for each in watch(rows)] == [(110, ["a"], 2.5), (118, ["b"], 4.0)]
        again = [*rows[:2], of(112, a=1.5, b=1.0), of(114, a=3.0, b=1.0)]
        assert [each.step for each in watch(again)] == [110, 114]

    def test_a_drift_finding_states_the_group_that_changed_most(self) -> None:
        rows = [
            record(step, 3.0, group_param_norms=norms)
            for step, norms in ((100, {"a": 1.0, "b": 1.0, "c": 1.0}), (110, {"a": 2.5, "b": 4.0, "c": 3.0}))
        ]
        (finding,) = watch(rows)
        assert (finding.groups, finding.value) == (["a", "b", "c"], 4.0)
        assert finding.message == "weight norm of b changed by a factor of 4.00 within 200 steps"

    def test_lr_jumps_are_detected_from_the_twentieth_row_on(self) -> None:
        def rates(num: int) -> list[StepRecord]:
            return [record(step, 3.0, lr=1e-3) for step in range(num)] + [record(num, 3.0, lr=2e-3)]

        assert watch(rates(19)) == []
        (finding,) = watch(rates(20))
        assert (finding.kind, finding.value, finding.bound) == (FindingKind.lr_jump, 2e-3, 1e-3)

    @pytest.mark.parametrize(
        ("rate", "found"),
        [(0.8, []), (0.79, ["lr_jump"]), (1.25, []), (1.26, ["lr_jump"])],
    )
    def test_a_jump_is_a_tenth_of_the_peak_and_a_fifth_of_the_value(self, rate: float, found: list[str]) -> None:
        rows = [record(step, 3.0, lr=1.0) for step in range(30)]
        assert kinds(watch([*rows, record(30, 3.0, lr=rate), record(31, 3.0, lr=rate)])) == found
        decayed = [record(step, 3.0, lr=max(0.08, 1.0 - 0.01 * step)) for step in range(200)]
        assert watch([*decayed, record(200, 3.0, lr=0.17)]) == [], "less than a tenth of the peak"
        assert kinds(watch([*decayed, record(200, 3.0, lr=0.19)])) == ["lr_jump"]

    @pytest.mark.parametrize(("following", "is_jump"), [(0.25, False), (0.26, True), (0.5, True), (1.0, True)])
    def test_a_fall_is_a_jump_unless_the_rate_falls_on(self, following: float, is_jump: bool) -> None:
        rows = [*(record(step, 3.0, lr=1.0) for step in range(30)), record(30, 3.0, lr=0.5)]
        assert watch(rows) == []
        findings = watch([*rows, record(31, 3.0, lr=following)])
        assert kinds(findings) == ["lr_jump"] * is_jump
        assert [(each.iteration, each.onset, each.value, each.bound) for each in findings] == [
            (31, 30, 0.5, 1.0)
        ] * is_jump
        assert watch([*rows, record(25, 3.0, lr=1.0)]) == [], "a restore undid the fall"
        detectors = Detectors(CFG)
        assert [detectors.observe(row) for row in rows] == [[]] * len(rows)
        stored = Detectors.restore(CFG, json.loads(json.dumps(detectors.state())))
        assert kinds(stored.observe(record(31, 3.0, lr=following))) == ["lr_jump"] * is_jump

    @pytest.mark.parametrize("num_steps", [21, 22, 23, 24, 30, 60])
    @pytest.mark.parametrize(
        "overrides",
        [
            (),
            ("optim.schedule=linear",),
            *(("optim=adamw_wsd", "optim.warmup_steps=10", f"optim.decay_steps={num}") for num in (1, 2, 4, 8)),
        ],
    )
    def test_a_short_schedule_has_no_jumps(self, overrides: tuple[str, ...], num_steps: int) -> None:
        optim = composed.load([*overrides, f"train.num_steps={num_steps}"]).optim
        table = schedule_table(optim, num_steps=num_steps)
        assert watch([record(step, 3.0, lr=optim.lr * float(table[step])) for step in range(num_steps)]) == []

    def test_a_learning_rate_of_an_earlier_step_is_no_jump(self) -> None:
        rows = [record(step, 3.0, lr=1.0) for step in range(30)]
        assert watch([*rows, record(10, 3.0, lr=0.5), record(11, 3.0, lr=0.5)]) == []
        assert watch([*rows, record(29, 3.0, lr=0.5)]) == []

    def test_an_expected_lr_change_may_take_fifty_rows(self) -> None:
        def jumps_after(num: int) -> list[str]:
            detectors = Detectors(CFG)
            rows = [record(step, 3.0, lr=1.0) for step in range(30 + num)] + [record(30 + num, 3.0, lr=2.0)]
            before = [finding for row in rows[:30] for finding in detectors.observe(row)]
            detectors.expect_lr_change()
            return kinds(before + [finding for row in rows[30:] for finding in detectors.observe(row)])

        assert jumps_after(49) == []
        assert jumps_after(50) == ["lr_jump"]

    def test_512_fingerprints_are_stored(self) -> None:
        rows = [record(step, 3.0, fingerprint=str(step), cursor=step) for step in range(512)]
        (finding,) = watch([*rows, record(512, 3.0, fingerprint="0", cursor=512)])
        assert (finding.value, finding.bound, finding.cursors) == (512, 0, [0, 512])
        rows.append(record(512, 3.0, fingerprint="512", cursor=512))
        assert watch([*rows, record(513, 3.0, fingerprint="0", cursor=513)]) == []
        assert kinds(watch([*rows, record(513, 3.0, fingerprint="1", cursor=513)])) == ["duplicate_batch"]

    def test_nonfinite_names_the_weights_first(self) -> None:
        rows = [record(1, 3.0, math.inf, group_param_norms={"a": math.nan, "b": 1.0}, group_grad_norms={"c": math.inf})]
        (finding,) = watch(rows)
        assert (finding.groups, finding.value, finding.bound) == (["a"], math.inf, math.inf)
        (finding,) = watch([record(1, 3.0, -math.inf, group_grad_norms={"c": math.inf})])
        assert (finding.groups, finding.value) == (["c"], -math.inf)
        (finding,) = watch([record(1, -math.inf, math.inf)])
        assert finding.value == -math.inf

    def test_nonfinite_is_raised_again_after_a_finite_row(self) -> None:
        rows = [record(step, math.nan if step in (1, 2, 4) else 3.0, 0.5) for step in range(6)]
        assert [finding.step for finding in watch(rows)] == [1, 4]

    def test_data_that_differs_is_raised_for_each_rank_once(self) -> None:
        differing = [{"rows": [1]}, {"rows": [1, 2]}, {"plan": [1]}, {"rows": [1]}]
        rows = [record(step, 3.0, other_data=what) for step, what in enumerate(differing)]
        assert [(finding.step, finding.ranks, finding.value) for finding in watch(rows)] == [
            (0, [1], 1),
            (1, [2], 1),
            (2, [1], 1),
            (3, [1], 1),
        ]

    def test_the_rate_rises_from_the_second_row_on(self) -> None:
        guard = RateGuard()
        for step, rate, rising in ((0, 1e-4, False), (1, 2e-4, True), (2, 2e-4, False)):
            assert guard.observe(record(step, 3.0, lr=rate)) == []
            assert guard.rising is rising

    def test_rejected_finite_updates_are_no_overflows(self) -> None:
        rows = [record(step, 3.0, 9.0, refused=True, loss_scale=64.0) for step in range(3 * STUCK_ROWS)]
        guard = ScaleGuard()
        assert [found for row in rows for found in guard.observe(row)] == []
        broken = [record(step, math.nan, math.nan, refused=True, loss_scale=64.0) for step in range(3 * STUCK_ROWS)]
        assert [found for row in broken for found in guard.observe(row)] == [], "the loss does not depend on the scale"
        applied = [record(step, 3.0, math.inf, loss_scale=64.0) for step in range(3 * STUCK_ROWS)]
        assert [found for row in applied for found in guard.observe(row)] == []

    def test_a_scale_of_one_that_does_not_move_is_stuck_and_not_below_one(self) -> None:
        rows = [record(step, 3.0, math.inf, refused=True, loss_scale=1.0) for step in range(STUCK_ROWS + 1)]
        guard = ScaleGuard()
        found = [list(guard.observe(row)) for row in rows]
        assert [len(each) for each in found] == [0] * STUCK_ROWS + [1]
        assert found[-1][0].message == f"loss scale 1 did not change in {STUCK_ROWS} overflows"


class TestMoments:
    @pytest.mark.parametrize(
        ("facts", "found"),
        [
            ({"square_ratio": 4.0}, []),
            ({"square_ratio": 4.01}, ["v_stale"]),
            ({"v_norm": 10.0}, []),
            ({"v_norm": 10.01}, ["v_stale"]),
            ({"v_norm": 0.3}, []),
            ({"v_norm": 0.299}, ["optimizer_reset"]),
            ({"v_norm": 0.99 * 0.5, "beta2": 0.5}, []),
            ({"v_norm": 0.98 * 0.5, "beta2": 0.5}, ["optimizer_reset"]),
            ({"v_norm": math.inf}, []),
        ],
    )
    def test_bounds_of_the_second_moment(self, facts: dict[str, Any], found: list[str]) -> None:
        known = [record(step, 3.0, v_norm=1.0, beta2=facts.get("beta2")) for step in (100, 101, 102)]
        assert kinds(watch([*known, record(103, 3.0, **facts)])) == found

    def test_moments_are_checked_from_step_100_on(self) -> None:
        assert watch([record(98, 3.0, v_norm=1.0), record(99, 3.0, v_norm=0.1, square_ratio=9.0)]) == []
        found = watch([record(99, 3.0, v_norm=1.0), record(100, 3.0, v_norm=0.1, square_ratio=9.0)])
        assert kinds(found) == ["v_stale", "optimizer_reset"]
        assert [(finding.value, finding.bound) for finding in found] == [(9.0, 4.0), (0.1, 0.3)]

    def test_a_burst_is_raised_once_while_it_lasts(self) -> None:
        rows = [record(100 + step, 3.0, square_ratio=5.0 if step in (1, 2, 4) else 1.0) for step in range(6)]
        assert [finding.step for finding in watch(rows)] == [101, 104]


class TestRangeGuard:
    """By default 25 % of the values of a group may underflow, and 50 % of the tensors of a role may saturate."""

    def find(self, *probes: tuple[dict[str, float], dict[str, float]], **facts: Any) -> list[Finding]:
        """Findings of probes ten iterations apart, each with the underflow of groups and the saturation of roles."""
        guard, found = RangeGuard(), list[Finding]()
        for place, (underflow, saturated) in enumerate(probes):
            health: dict[str, Any] = {role: {"saturated": share} for role, share in saturated.items()}
            row = record(10 * place + 1, **{"loss": 3.0, "fp8": health, "fp8_underflow": underflow, **facts})
            found += guard.observe(row, CFG)
        return found

    @pytest.mark.parametrize(("share", "num"), [(0.25, 0), (0.2501, 1)])
    def test_underflow_above_a_quarter(self, share: float, num: int) -> None:
        assert len(self.find(({"a": share}, {}))) == num

    @pytest.mark.parametrize(("share", "num"), [(0.5, 0), (0.5001, 1)])
    def test_saturation_above_a_half(self, share: float, num: int) -> None:
        assert len(self.find(({}, {"gradients": share}))) == num

    @pytest.mark.parametrize(("share", "num"), [(0.125, 2), (0.1251, 1)])
    def test_underflow_at_half_of_its_bound_is_clean(self, share: float, num: int) -> None:
        assert len(self.find(({"a": 0.3}, {}), ({"a": share}, {}), ({"a": 0.3}, {}))) == num

    @pytest.mark.parametrize(("share", "num"), [(0.25, 2), (0.2501, 1)])
    def test_saturation_at_half_of_its_bound_is_clean(self, share: float, num: int) -> None:
        assert len(self.find(({}, {"a": 0.6}), ({}, {"a": share}), ({}, {"a": 0.6}))) == num

    def test_a_share_that_is_not_raised_must_exceed_the_whole_bound(self) -> None:
        (first, second) = self.find(({"a": 0.3, "b": 0.2}, {}), ({"a": 0.3, "b": 0.3}, {}))
        assert (first.groups, second.groups) == (["a"], ["b"]), "0.2 of b was within the bound"

    def test_the_largest_shares_come_first_and_four_are_named(self) -> None:
        shares = {"a": 0.3, "b": 0.9, "c": 0.5, "d": 0.6, "e": 0.4, "f": 0.1}
        (finding,) = self.find((shares, {}))
        assert (finding.groups, finding.value, finding.bound) == (["b", "d", "c", "e", "a"], 0.9, 0.25)
        assert finding.message == "90% of the values of b, d, c, e and 1 more underflow to zero in fp8, above 25%"
        del shares["a"]
        (finding,) = self.find((shares, {}))
        assert finding.message == "90% of the values of b, d, c, e underflow to zero in fp8, above 25%"

    def test_saturation_alone_states_its_own_bound(self) -> None:
        (finding,) = self.find(({"a": 0.1}, {"weights": 0.6, "gradients": 0.75}))
        assert (finding.groups, finding.value, finding.bound) == ([], 0.75, 0.5)
        assert finding.message == "75% of the tensors of gradients, weights saturate in fp8, above 50%"

    def test_the_onset_follows_the_last_clean_probe(self) -> None:
        clean, high = {"a": 0.1}, {"a": 0.3}
        assert [each.onset for each in self.find((high, {}))] == [1]
        assert [each.onset for each in self.find((clean, {}), (high, {}))] == [2]
        found = self.find((clean, {}), (high, {}), (clean | {"b": 0.3}, {}), (high, {}))
        assert [each.onset for each in found] == [2, 2, 2], "a probe with another finding is not clean"
        found = self.find((clean, {}), (high, {}), ({"a": 0.2}, {}), ({"a": 0.2, "b": 0.3}, {}))
        assert [each.onset for each in found] == [2, 2], "nor is one with a share that is not clean again"

    @pytest.mark.parametrize("facts", [{"loss": math.inf}, {"grad_norm": math.inf}, {"loss": math.nan}])
    def test_a_nonfinite_step_raises_no_fp8_range(self, facts: dict[str, float]) -> None:
        assert self.find(({"a": 0.9}, {"weights": 0.9}), **facts) == []

    def test_infinite_loss_and_gradient_norm_of_the_same_sign_raise_no_fp8_range(self) -> None:
        assert self.find(({"a": 0.9}, {}), loss=math.inf, grad_norm=math.inf) == []

    def test_a_step_without_a_probe_changes_nothing(self) -> None:
        guard = RangeGuard(raised=["a"], clean_until=7)
        assert list(guard.observe(record(9, 3.0, in_fp8=True), CFG)) == []
        assert (guard.raised, guard.clean_until) == (["a"], 7)
        assert list(guard.observe(record(9, 3.0, in_fp8=False), CFG)) == []
        assert (guard.raised, guard.clean_until) == ([], 9)
