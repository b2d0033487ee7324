"""The bounds at which the parts of the policy change their result."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from harness.config.sentinel import AllowedActions, BudgetConfig
from harness.core.events import (
    Action,
    ActionKind,
    FindingKind,
    HeldOutMeasured,
    PrecursorSignal,
    RunStarted,
    StepRecord,
)
from harness.sentinel.detect.trajectory import RecoveryTrend
from harness.sentinel.policy.budgets import Budgets
from harness.sentinel.policy.held_out_level import HeldOutLevel, is_at_level
from harness.sentinel.policy.lineage import Lineage
from harness.sentinel.policy.open_incident import IncidentVerdict, OpenIncident, Rung
from harness.sentinel.policy.policy import Policy
from harness.sentinel.policy.policy_state import PolicyState
from harness.sentinel.policy.precision_fallback import PrecisionFallback, fallback_iterations
from harness.sentinel.policy.responses import (
    Rejections,
    Response,
    has_broken_weights,
    has_excessive_gradient,
    has_finite_update,
    is_overflow,
)
from harness.sentinel.policy.restore_scope import excluded_batches, restore_bound
from harness.sentinel.policy.suspect_sources import SuspectSources
from tests.sentinel.cluster import CFG
from tests.sentinel.policy_runs import LAG, Run, finding, outcome, record

EXACT = replace(CFG, accept_rise_nats=0.5)
"""A float holds this bound exactly."""
SKIP, REWIND, COOL = ActionKind.skip, ActionKind.rewind, ActionKind.cool


class TestBudgets:
    def budgets(self, *, per_window: int = 2, per_run: int = 3) -> Budgets:
        return Budgets(replace(CFG.budgets, skip=BudgetConfig(per_window=per_window, per_run=per_run)), window_steps=10)

    def test_the_budget_of_a_window(self) -> None:
        budgets = self.budgets()
        budgets.spend(SKIP, progress=5)
        assert budgets.allows(SKIP, progress=5)
        budgets.spend(SKIP, progress=6)
        assert budgets.exhausted_reason(SKIP, progress=14) == "budget spent: 2 x skip within 10 steps of progress"
        assert budgets.allows(SKIP, progress=15), "the first one is 10 steps behind"
        assert budgets.allows(REWIND, progress=6), "other kinds have budgets of their own"

    def test_the_budget_of_a_run(self) -> None:
        budgets = self.budgets()
        for progress in (0, 100, 200):
            assert budgets.allows(SKIP, progress=progress)
            budgets.spend(SKIP, progress=progress)
        assert budgets.exhausted_reason(SKIP, progress=300) == "budget spent: 3 x skip in this run"

    def test_restores_are_counted_since_the_last_cure_within_the_window(self) -> None:
        budgets = self.budgets()
        for kind, progress in ((REWIND, 0), (REWIND, 5), (SKIP, 6), (COOL, 7), (REWIND, 8), (ActionKind.rollback, 9)):
            budgets.spend(kind, progress=progress)
        restores = (REWIND, ActionKind.rollback)
        assert budgets.num_since(restores, last=(COOL,), progress=9) == 2
        assert budgets.num_since(restores, last=(), progress=9) == 4
        assert budgets.num_since(restores, last=(), progress=10) == 3, "the first is out of the window"
        assert budgets.num_since(restores, last=(COOL,), progress=18) == 1

    @pytest.mark.parametrize(("num", "left"), [(0, 3), (1, 2), (2, 1), (5, 0)])
    def test_a_refund_uncounts_the_last_actions(self, num: int, left: int) -> None:
        budgets = self.budgets(per_window=9, per_run=9)
        for progress in (1, 2, 3):
            budgets.spend(SKIP, progress=progress)
        budgets.spend(REWIND, progress=3)
        budgets.refund(SKIP, num=num, progress=4)
        assert budgets.num_spent == {"skip": left, "rewind": 1}
        assert budgets.recent == [("skip", progress) for progress in (1, 2, 3)[:left]] + [("rewind", 3)]

    def test_a_refund_without_spending_changes_nothing(self) -> None:
        budgets = self.budgets()
        budgets.refund(SKIP, num=2, progress=4)
        assert budgets.allows(SKIP, progress=4)
        assert budgets.num_spent == {"skip": 0}

    def test_the_run_budget_stays_when_the_window_is_reset(self) -> None:
        budgets = self.budgets()
        for progress in (1, 2):
            budgets.spend(SKIP, progress=progress)
        budgets.reset_window()
        assert budgets.allows(SKIP, progress=2)
        budgets.spend(SKIP, progress=2)
        assert not budgets.allows(SKIP, progress=50)


class TestSuspectSources:
    def sources_seen(self, num: int = 20, **losses: float) -> SuspectSources:
        """Sources with so many losses each and a mean deviation of about 0.1."""
        suspects = SuspectSources()
        for place in range(num):
            noise = 0.1 if place % 2 else -0.1
            suspects.on_clean_record(record(place, sources={name: loss + noise for name, loss in losses.items()}))
        return suspects

    def source_of(self, suspects: SuspectSources, **losses: float) -> str | None:
        return suspects.source_of(record(99, sources=losses))

    def test_a_source_far_above_its_usual_loss_stands_out(self) -> None:
        suspects = self.sources_seen(web=3.0, code=1.0)
        num, mean, deviation = suspects.loss_stats["code"]
        assert num == 20
        assert mean == pytest.approx(1.0, abs=0.02)
        assert deviation == pytest.approx(0.1, abs=0.02)
        assert self.source_of(suspects, web=3.0, code=mean + 6 * deviation) is None
        assert self.source_of(suspects, web=3.0, code=mean + 6.01 * deviation) == "code"
        assert self.source_of(suspects, web=9.0, code=9.0) is None, "if both stand out, neither is blamed"

    def test_a_source_can_stand_out_after_twenty_steps(self) -> None:
        assert self.source_of(self.sources_seen(19, web=3.0, code=1.0), web=3.0, code=9.0) is None
        assert self.source_of(self.sources_seen(20, web=3.0, code=1.0), web=3.0, code=9.0) == "code"
        assert self.source_of(self.sources_seen(1, web=3.0, code=1.0), web=3.0, code=math.nan) == "code"

    def test_usual_losses_are_moving_averages(self) -> None:
        suspects = SuspectSources()
        suspects.on_clean_record(record(0, sources={"web": 2.0}))
        assert suspects.loss_stats["web"] == (1, 2.0, 0.0)
        suspects.on_clean_record(record(1, sources={"web": 4.0}))
        assert suspects.loss_stats["web"] == (2, 3.0, 1.0), "the mean of two"
        for place in range(2, 20):
            suspects.on_clean_record(record(place, sources={"web": 3.0}))
        _, mean, deviation = suspects.loss_stats["web"]
        suspects.on_clean_record(record(20, sources={"web": mean + 1.0}))
        num, now, spread = suspects.loss_stats["web"]
        assert num == 21
        assert now == pytest.approx(mean + 0.05)
        assert spread == pytest.approx(deviation + 0.05 * (1.0 - deviation))
        suspects.on_clean_record(record(21, sources={"web": math.inf}))
        assert suspects.loss_stats["web"] == (num, now, spread)

    def test_the_only_source_is_never_blamed(self) -> None:
        suspects = self.sources_seen(web=3.0)
        assert self.source_of(suspects, web=math.nan) is None
        suspects.blame("web", progress=5)
        assert suspects.shared_source(1, since=0) is None

    @pytest.mark.parametrize(("num", "source"), [(49, "code"), (50, None)])
    def test_a_source_that_is_not_seen_for_fifty_steps_cannot_take_over(self, num: int, source: str | None) -> None:
        suspects = self.sources_seen(web=3.0, code=1.0)
        for place in range(num):
            suspects.on_clean_record(record(place, sources={"code": 1.0}))
        assert self.source_of(suspects, code=math.nan) == source
        for place in range(60):
            suspects.on_clean_record(record(place))
        assert self.source_of(suspects, code=math.nan) == source, "records without sources do not count"

    def test_the_last_bad_batches_share_a_source(self) -> None:
        suspects = self.sources_seen(web=3.0, code=1.0)
        for source, progress in (("web", 1), ("code", 4), ("code", 5)):
            suspects.blame(source, progress=progress)
        assert suspects.shared_source(2, since=4) == "code"
        assert suspects.shared_source(2, since=5) is None, "one of them is too long ago"
        assert suspects.shared_source(3, since=0) is None
        assert suspects.shared_source(4, since=0) is None
        suspects.blame(None, progress=6)
        assert suspects.shared_source(1, since=0) is None
        suspects.clear_blame()
        assert suspects.blamed == []

    def test_a_source_that_was_removed_is_forgotten(self) -> None:
        suspects = self.sources_seen(web=3.0, code=1.0)
        suspects.blame("code", progress=1)
        suspects.remove("code")
        assert (suspects.removed, suspects.blamed, [*suspects.loss_stats], [*suspects.unseen]) == (
            ["code"],
            [],
            ["web"],
            ["web"],
        )
        suspects.remove("never seen")
        assert suspects.removed == ["code", "never seen"]

    def test_64_bad_batches_are_stored(self) -> None:
        suspects = SuspectSources()
        for progress in range(70):
            suspects.blame("web", progress=progress)
        assert [progress for _, progress in suspects.blamed] == [*range(6, 70)]


def make_record(**facts: Any) -> StepRecord:
    return replace(record(7, refused=True), **facts)


class TestSymptoms:
    @pytest.mark.parametrize(
        ("facts", "answer"),
        [
            ({"loss_scale": 1.0, "grad_norm": math.inf}, True),
            ({"loss_scale": 0.99, "grad_norm": math.inf}, False),
            ({"loss_scale": None, "grad_norm": math.inf}, False),
            ({"loss_scale": 8.0, "grad_norm": 1.0}, False),
            ({"loss_scale": 8.0, "grad_norm": math.inf, "loss": math.nan}, False),
        ],
    )
    def test_an_overflow_of_the_loss_scale(self, facts: dict[str, Any], answer: bool) -> None:
        assert is_overflow(make_record(**facts)) is answer

    def test_predicates_of_a_record(self) -> None:
        assert has_finite_update(make_record())
        assert not has_finite_update(make_record(loss=math.nan))
        assert not has_finite_update(make_record(grad_norm=math.inf))
        bounded = make_record(grad_norm=2.0, bounds={"grad_norm": 2.0})
        assert not has_excessive_gradient(bounded, None)
        assert has_excessive_gradient(make_record(grad_norm=2.01, bounds={"grad_norm": 2.0}), None)
        assert not has_excessive_gradient(make_record(grad_norm=1e9), None)
        assert not has_excessive_gradient(bounded, 0.05)
        assert has_excessive_gradient(bounded, 0.0499), "far above its level, though below a bound that is still wide"
        assert not has_excessive_gradient(make_record(grad_norm=40.0), 1.0)
        assert not has_broken_weights(make_record())
        assert not has_broken_weights(make_record(param_norm=1.0, group_param_norms={"a": 2.0}))
        assert has_broken_weights(make_record(param_norm=math.nan))
        assert not has_broken_weights(make_record(param_norm=math.nan, changed_ranks=[1])), "another finding names it"
        assert has_broken_weights(make_record(param_norm=1.0, group_param_norms={"a": 2.0, "b": math.inf}))

    def test_the_gradient_level_is_that_of_applied_updates(self) -> None:
        lineage = Lineage()
        for place in range(9):
            lineage.add(replace(record(place), grad_norm=2.0))
        for place in (9, 10):
            lineage.add(replace(record(place, refused=True), grad_norm=90.0))
        assert lineage.grad_level() is None, "too few"
        lineage.add(replace(record(11), grad_norm=3.0))
        assert lineage.grad_level() == 2.0
        for place in range(12, 62):
            lineage.add(replace(record(place), grad_norm=4.0))
        assert Lineage.restore(lineage.state()).grad_level() == 4.0
        old = {"seen": [[1, 1, 0, 3.0]] * 20, "roots": [[0, 0]]}
        assert Lineage.restore(old).grad_level() is None, "an older state has no gradient norms"

    def test_rejections_in_a_row(self) -> None:
        rejections = Rejections()
        rows = [record(place, refused=place in (2, 3, 5)) for place in range(6)]
        assert [rejections.add(row) for row in rows] == [False, False, True, True, False, True]
        assert (rejections.num_in_row, rejections.since) == (1, 5)
        rejections.add(record(6, refused=True))
        assert (rejections.num_in_row, rejections.since) == (2, 5)

    def test_overflows_count_as_rejections_only_after_64_of_them(self) -> None:
        rejections = Rejections()
        overflow = make_record(loss_scale=8.0, grad_norm=math.inf)
        assert not any(rejections.add(overflow) for _ in range(64))
        assert rejections.num_in_row == 0
        assert rejections.add(overflow)
        assert rejections.num_in_row == 1
        rejections.add(record(9))
        assert not rejections.add(overflow), "an applied update starts the count again"


class TestResponse:
    @pytest.mark.parametrize(
        ("facts", "answered"),
        [
            ({"exclude": [4, 6]}, True),
            ({"exclude": [5, 5]}, True),
            ({"exclude": [6, 9]}, False),
            ({"give_back": [[1, 2], [5, 5]]}, True),
            ({"give_back": [[1, 4]]}, False),
            ({}, False),
        ],
    )
    def test_a_skip_answers_for_its_batches(self, facts: dict[str, Any], answered: bool) -> None:
        assert Response(Rung.skip, 1, "", batch=5).is_answered_by(action(SKIP, **facts)) is answered

    def test_what_is_owed_without_a_restore(self) -> None:
        rejected = Response(Rung.rewind, 1, "", check_first=True, batch=5).without_restore()
        assert (rejected.rung, rejected.check_first) == (Rung.skip, False)
        assert Response(Rung.rewind, 1, "", leaves_fp8=True).without_restore().rung is Rung.watch
        assert Response(Rung.none, 1, "", leaves_fp8=True).without_restore().rung is Rung.none

    def test_only_the_clip_answers_for_the_logits_and_any_cure_for_fp8(self) -> None:
        kinds = (SKIP, ActionKind.watch, ActionKind.qk_clip, ActionKind.precision, ActionKind.swap, COOL)
        clip, cure = Response(Rung.watch, 1, "", clips_logits=True), Response(Rung.none, 1, "", leaves_fp8=True)
        assert [kind for kind in kinds if clip.is_answered_by(action(kind))] == [ActionKind.qk_clip]
        assert [kind for kind in kinds if cure.is_answered_by(action(kind))] == [*kinds[3:]]


class TestHeldOutLevel:
    def lineage(self, losses: list[float]) -> Lineage:
        lineage = Lineage()
        for place, loss in enumerate(losses, start=1):
            lineage.add(record(place, loss=loss))
        return lineage

    def measured(self, *, iteration: int, step: int, loss: float = 3.0) -> HeldOutMeasured:
        return HeldOutMeasured(time=0.0, iteration=iteration, step=step, loss=loss)

    def test_the_newest_measurement_before_the_update_before_the_onset_counts(self) -> None:
        lineage, held_out = self.lineage([3.0] * 30), HeldOutLevel()
        for iteration, loss in ((5, 3.3), (10, 3.2), (20, 3.1)):
            held_out.add(self.measured(iteration=iteration, step=iteration, loss=loss), lineage)
        assert held_out.expected(22, lineage) == 3.1
        assert held_out.expected(21, lineage) == 3.2, "the update of iteration 20 may have done the damage"
        assert held_out.expected(6, lineage) is None
        held_out.drop_after(10)
        assert held_out.expected(30, lineage) == 3.2
        held_out.drop_after(9)
        assert held_out.expected(30, lineage) == 3.3

    def test_the_measurement_at_the_start_counts_for_every_onset(self) -> None:
        lineage, held_out = self.lineage([3.0] * 3), HeldOutLevel()
        held_out.add(self.measured(iteration=0, step=0, loss=9.0), lineage)
        assert held_out.expected(1, lineage) == 9.0

    def test_a_nonfinite_measurement_is_ignored(self) -> None:
        held_out = HeldOutLevel()
        held_out.add(self.measured(iteration=1, step=1, loss=math.nan), self.lineage([3.0] * 3))
        assert held_out.measured == []

    def test_the_expected_loss_falls_by_the_smallest_fall_of_the_training_loss(self) -> None:
        falling = self.lineage([5.0] * 60 + [4.0] * 60)
        held_out = HeldOutLevel()
        held_out.add(self.measured(iteration=60, step=60, loss=6.0), falling)
        assert held_out.expected(121, falling) == 5.0
        assert held_out.expected(85, falling) == 6.0, "the median of 50 losses has not fallen yet"
        assert held_out.expected(87, falling) == 5.0
        rising = self.lineage([4.0] * 60 + [5.0] * 60)
        held_out = HeldOutLevel()
        held_out.add(self.measured(iteration=60, step=60, loss=6.0), rising)
        assert held_out.expected(121, rising) == 6.0, "a rise of the training loss does not raise the expected one"

    def followed(self, losses: list[float], *, planned: range) -> tuple[Lineage, HeldOutLevel]:
        """A run with one measurement, after iteration 60, and a window after a planned change."""
        lineage, held_out = Lineage(), HeldOutLevel()
        for iteration, loss in enumerate(losses, start=1):
            now = replace(record(iteration, loss=loss), in_planned_change=iteration in planned)
            lineage.add(now)
            held_out.on_record(now, lineage)
            if iteration == 60:
                held_out.add(self.measured(iteration=60, step=60, loss=6.0), lineage)
        return lineage, HeldOutLevel.restore(
            json.loads(json.dumps(held_out.state())), json.loads(json.dumps(held_out.state_of_edges()))
        )

    def test_a_fall_in_the_window_after_a_planned_change_lowers_nothing(self) -> None:
        """The training loss falls by 0.5 before the window, by 2 where it begins, and by 0.25 after it."""
        losses = [5.0] * 60 + [4.5] * 60 + [2.5] * 60 + [2.25] * 60
        lineage, held_out = self.followed(losses, planned=range(121, 171))
        assert held_out.expected(120, lineage) == 5.5
        assert held_out.expected(150, lineage) == 5.5, "within the window"
        assert held_out.expected(181, lineage) == 5.5, "just after it"
        assert held_out.expected(241, lineage) == 5.25, "the fall after it counts"
        held_out.drop_after(165)
        assert held_out.expected(241, lineage) == 5.5, "after a restore into the window its end is not reached yet"
        held_out.drop_after(110)
        assert held_out.expected(120, lineage) == 5.5
        assert held_out.edges == []

    def test_a_measurement_in_the_window_is_compared_from_its_end_on(self) -> None:
        losses = [5.0] * 60 + [3.0] * 60 + [2.5] * 60
        lineage, held_out = self.followed(losses, planned=range(41, 91))
        assert held_out.expected(85, lineage) == 6.0
        assert held_out.expected(121, lineage) == 6.0
        assert held_out.expected(181, lineage) == 5.5

    def test_64_measurements_are_stored(self) -> None:
        lineage, held_out = self.lineage([3.0] * 5), HeldOutLevel()
        for iteration in range(70):
            held_out.add(self.measured(iteration=iteration, step=iteration), lineage)
        assert [each.iteration for each in held_out.measured] == [*range(6, 70)]

    @pytest.mark.parametrize(
        ("loss", "expected", "answer"), [(4.5, 4.0, True), (4.51, 4.0, False), (None, 4.0, False), (4.0, None, False)]
    )
    def test_a_held_out_loss_at_its_level(self, loss: float | None, expected: float | None, answer: bool) -> None:
        assert is_at_level(loss, expected, tolerance=0.125) is answer


class TestLineage:
    def lineage(self, num: int = 20) -> Lineage:
        lineage = Lineage()
        for place in range(1, num + 1):
            lineage.add(record(place, cursor=100 + place, loss=float(place), refused=place % 5 == 0))
        return lineage

    def test_last_seen_is_the_record_at_or_before_an_iteration(self) -> None:
        lineage = self.lineage()
        assert lineage.last_seen(0) is None
        seen = lineage.last_seen(7)
        assert seen is not None
        assert (seen.iteration, seen.cursor, seen.loss) == (7, 107, 7.0)
        last = lineage.last_seen(99)
        assert last is not None
        assert (last.iteration, last.loss) == (20, None)

    def test_the_iteration_that_consumed_a_batch(self) -> None:
        lineage = self.lineage()
        assert [lineage.consumed_at(*batches) for batches in ((0, 200), (107, 108), (120, 120))] == [1, 7, 20]
        assert lineage.consumed_at(121, 200) is lineage.consumed_at(0, 100) is None

    def test_levels_around_an_iteration(self) -> None:
        lineage = self.lineage()
        assert lineage.level_before(5, 2) == 3.5
        assert lineage.level_before(5, 99) == 2.5
        assert lineage.level_before(1, 2) is None
        assert lineage.level_since(17, 2) == 18.5
        assert lineage.level_since(17, 99) == 18.0
        assert lineage.level_since(20, 2) is None
        assert lineage.recent_loss(3, since=17) == 18.0
        assert lineage.recent_loss(4, since=17) is None
        assert lineage.recent_loss(2, since=16) == 18.5

    def test_normal_loss_needs_ten_losses(self) -> None:
        lineage = self.lineage()
        assert lineage.normal_before(12) is None
        normal = lineage.normal_before(13)
        assert normal is not None
        assert normal.level == 6.5
        assert normal.sigma == pytest.approx(1.4826 * 3.0)

    def test_normal_loss_uses_the_last_fifty_losses(self) -> None:
        lineage = Lineage()
        for place in range(1, 101):
            lineage.add(record(place, loss=float(place)))
        normal = lineage.normal_before(101)
        assert normal is not None
        assert normal.level == 75.5
        assert normal.sigma == pytest.approx(1.4826 * 12.5)

    def test_steps_are_converted_to_iterations_across_restores(self) -> None:
        lineage = self.lineage()
        assert (lineage.before_step(0), lineage.before_step(1), lineage.before_step(8)) == (0, 1, 8)
        lineage.restart_at(30, 8)
        assert lineage.before_step(8) == 8
        assert lineage.before_step(9) == 31
        lineage.restart_at(40, 8)
        assert lineage.roots == [(0, 0), (40, 8)]
        assert lineage.before_step(9) == 41
        assert [seen.step for seen in lineage.seen] == [1, 2, 3, 4, 5, 6, 7, 8]

    def test_1024_iterations_are_stored(self) -> None:
        lineage = self.lineage(1030)
        assert (lineage.seen[0].iteration, len(lineage.seen)) == (7, 1024)
        assert len(Lineage.restore(lineage.state()).seen) == 1024


class TestPrecisionFallback:
    def test_a_window_ends_with_its_last_iteration(self) -> None:
        fallback = PrecisionFallback(is_on=True, until=20, incident=3)
        assert not fallback.is_over(19)
        assert fallback.is_over(20)
        assert not PrecisionFallback(is_on=True, until=None).is_over(10**9)
        assert not PrecisionFallback(is_on=False, until=20).is_over(99)
        fallback.on_failure()
        assert (fallback.is_on, fallback.until, fallback.incident) == (False, None, 3)

    def test_each_window_is_twice_as_long(self) -> None:
        assert [fallback_iterations(10, num_before=num) for num in range(4)] == [10, 20, 40, 80]


def seen(num: int = 60) -> Lineage:
    lineage = Lineage()
    for place in range(1, num + 1):
        lineage.add(record(place, cursor=place + 9))
    return lineage


def open_incident(**facts: Any) -> OpenIncident:
    given: dict[str, Any] = {"number": 1, "onset": 40, "onset_step": 40, "end_step": 40, "kinds": ["loss_spike"]}
    return OpenIncident(**given | facts)


class TestScope:
    """Batch 49 is that of iteration 40; `CFG` has 2 neighbours, a margin of 10 steps and a window of 12 batches."""

    @pytest.mark.parametrize(
        ("rung", "facts", "batches"),
        [
            (Rung.rewind, {}, [48, 49]),
            (Rung.wide, {}, [46, 51]),
            (Rung.rollback, {}, [42, 55]),
            (Rung.cure, {}, [42, 55]),
            (Rung.rollback, {"without_margin": True}, [48, 55]),
            (Rung.rewind, {"cursors": [47, 52]}, [47, 52]),
            (Rung.rewind, {"cursors": [37, 61]}, [37, 61]),
            (Rung.rewind, {"cursors": [36, 62]}, [48, 49]),
            (Rung.rewind, {"onset": 1}, [10, 10]),
            (Rung.wide, {"onset": 2}, [10, 13]),
            (Rung.rewind, {"kinds": ["lr_jump"]}, []),
            (Rung.rewind, {"kinds": ["lr_jump"], "target_step": 3}, [48, 49]),
            (Rung.rewind, {"onset": 0}, []),
        ],
    )
    def test_batches_that_are_excluded(self, rung: Rung, facts: dict[str, Any], batches: list[int]) -> None:
        assert excluded_batches(open_incident(**facts), rung, lineage=seen(), cfg=CFG) == batches

    @pytest.mark.parametrize(
        ("rung", "facts", "exclude", "iteration"),
        [
            (Rung.rewind, {}, [], 40),
            (Rung.rewind, {}, [48, 49], 39),
            (Rung.rewind, {}, [52, 53], 40),
            (Rung.wide, {}, [], 40),
            (Rung.rollback, {}, [], 30),
            (Rung.rollback, {"without_margin": True}, [], 40),
            (Rung.rewind, {"target_step": 25}, [], 25),
            (Rung.rewind, {"target_step": 25, "is_passed": True}, [], 25),
            (Rung.rewind, {"target_step": 25, "without_margin": True}, [], 25),
            (Rung.rewind, {"target_step": 25, "is_passed": True, "without_margin": True}, [], 40),
        ],
    )
    def test_the_iteration_that_the_restored_state_must_precede(
        self, rung: Rung, facts: dict[str, Any], exclude: list[int], iteration: int
    ) -> None:
        assert restore_bound(open_incident(**facts), rung, exclude, lineage=seen(), cfg=CFG) == iteration


class TestOpenIncident:
    def test_rejected_batches_are_given_back_in_ranges(self) -> None:
        rejected = open_incident()
        for batch in (9, 3, 4, 5, 9, 7):
            rejected.add_rejected(cursor=batch, loss=3.0, grad_norm=1.0, is_excessive=batch == 9)
        assert rejected.rejected_batches == [[3, 5], [7, 7], [9, 9]]
        assert rejected.num_excessive == 2
        shown = []
        for batch in (11, 12):
            rejected.add_rejected(cursor=batch, loss=3.0, grad_norm=1.0, is_excessive=True)
            shown.append(rejected.looks_like_data)
        assert shown == [True, False], "3 of 7, then 4 of 8 have a gradient norm above its bound"
        assert open_incident().looks_like_data

    def test_a_state_without_new_kinds_counts_all_kinds_as_new(self) -> None:
        """As an older version saved it: what it knew of the state still rules a check out."""
        state = OpenIncident(number=1, onset=5, onset_step=5, end_step=6, kinds=["lr_jump"]).state()
        del state["new_kinds"]
        restored = OpenIncident.restore(state)
        assert restored.new_kinds == ["lr_jump"]
        assert not restored.may_be_checked

    def test_64_rejected_batches_are_stored(self) -> None:
        rejected = open_incident()
        for batch in range(70):
            rejected.add_rejected(cursor=batch, loss=3.0, grad_norm=1.0, is_excessive=False)
        assert rejected.rejected_batches == [[6, 69]]

    @pytest.mark.parametrize(("gap", "onset"), [(8, 40), (9, 57)])
    def test_a_finding_nine_clean_steps_after_a_rejection_moves_the_onset(self, gap: int, onset: int) -> None:
        later = open_incident(kinds=["refusal"], end_step=48, cursors=[1])
        later.add_finding("loss_spike", onset=57, onset_step=48 + gap, step=60, cursors=[5, 6])
        assert (later.onset, later.kinds, later.end_step) == (onset, ["refusal", "loss_spike"], 60)
        assert later.cursors == ([1, 5, 6] if gap == 8 else [5, 6])
        later.add_finding("loss_spike", onset=57, onset_step=57, step=60, cursors=[6, 7])
        assert later.cursors[-3:] == [5, 6, 7]

    def test_an_earlier_onset_replaces_the_onset_and_a_later_one_does_not(self) -> None:
        moved = open_incident()
        moved.add_finding("grad_spike", onset=38, onset_step=37, step=39, cursors=[])
        assert (moved.onset, moved.onset_step, moved.end_step) == (38, 37, 40)
        moved.add_finding("grad_spike", onset=39, onset_step=38, step=45, cursors=[])
        assert (moved.onset, moved.onset_step, moved.end_step, moved.kinds) == (
            38,
            37,
            45,
            ["loss_spike", "grad_spike"],
        )

    def evaluate(self, losses: list[float], iteration: int, **facts: Any) -> IncidentVerdict | None:
        """A watch that began at iteration 41, after a level of 3."""
        given: dict[str, Any] = {"level": 3.0, "sigma": 0.5, "watched_since": 41, "watched_until": 61}
        given["trend"] = RecoveryTrend(moved_at=41)
        lineage = Lineage()
        for place, loss in enumerate([3.0] * 40 + losses, start=1):
            lineage.add(record(place, loss=loss))
        return open_incident(**given | facts).evaluate_watch(lineage, iteration, cfg=EXACT)

    def test_back_to_half_a_sigma_is_recovered(self) -> None:
        assert self.evaluate([3.25] * 9, 49) is IncidentVerdict.recovered
        assert self.evaluate([3.26] * 9, 49) is None
        assert self.evaluate([3.25] * 8, 48) is None, "nine losses are needed"

    def test_a_watch_without_losses_lingers_at_its_end(self) -> None:
        assert self.evaluate([3.0] * 3, 60) is None
        assert self.evaluate([3.0] * 3, 61) is IncidentVerdict.lingering

    @pytest.mark.parametrize(("iteration", "verdict"), [(52, None), (53, IncidentVerdict.stuck)])
    def test_a_large_spike_that_does_not_fall_is_stuck_after_the_patience(
        self, iteration: int, verdict: IncidentVerdict | None
    ) -> None:
        assert self.evaluate([5.0] * 12, iteration) is verdict

    def test_a_small_rise_without_a_cause_is_accepted_at_the_end_of_the_watch(self) -> None:
        assert self.evaluate([3.5] * 20, 60) is None
        assert self.evaluate([3.5] * 21, 61) is IncidentVerdict.accepted
        assert self.evaluate([3.51] * 21, 61) is IncidentVerdict.stuck
        assert self.evaluate([3.5] * 21, 61, kinds=["grad_spike", "loss_spike"]) is IncidentVerdict.stuck

    @pytest.mark.parametrize(("peak_at", "verdict"), [(49, IncidentVerdict.stuck), (50, None)])
    def test_the_patience_with_a_spike_that_stopped_rising_starts_at_its_peak(
        self, peak_at: int, verdict: IncidentVerdict | None
    ) -> None:
        trend = RecoveryTrend(value=9.0, moved_at=peak_at, direction=1)
        assert self.evaluate([9.0] * 21, 61, watched_until=99, peak=9.0, trend=trend) is verdict

    def test_a_spike_that_makes_a_new_high_after_the_patience_is_stuck(self) -> None:
        trend = RecoveryTrend(value=9.0, moved_at=57, direction=1)
        assert self.evaluate([9.0] * 18, 58, peak=9.0, trend=trend) is IncidentVerdict.stuck
        assert self.evaluate([9.0] * 18, 58, peak=9.0, trend=replace(trend, moved_at=56)) is None

    def test_a_spike_that_rises_within_the_recent_losses_is_stuck(self) -> None:
        trend = RecoveryTrend(value=9.0, moved_at=52, direction=1)
        for rise, verdict in ((1.5, None), (1.51, IncidentVerdict.stuck)):
            losses = [9.0] * 10 + [9.0 + rise] * 4
            assert self.evaluate(losses, 54, peak=9.0, trend=replace(trend)) is verdict

    def test_a_spike_that_falls_slowly_is_not_stuck(self) -> None:
        """Its last move is old, and it has not fallen by a quarter, but a line through its losses still falls."""
        for fall, verdict in ((0.015, None), (0.014, IncidentVerdict.stuck)):
            losses = [9.0 - fall * place for place in range(24)]
            trend = RecoveryTrend(value=9.0, moved_at=41)
            assert self.evaluate(losses, 64, watched_until=99, peak=9.0, trend=trend) is verdict

    def test_a_watch_is_prolonged_by_a_fall_of_a_quarter_only_while_the_loss_falls(self) -> None:
        trend, facts = RecoveryTrend(value=7.4, moved_at=55, direction=-1), {"sigma": 0.1, "peak": 9.0}
        assert self.evaluate([7.4] * 30, 61, **facts, trend=replace(trend)) is None
        is_high = self.evaluate([7.49] * 30, 61, **facts, last_height=5.98, trend=replace(trend))
        assert is_high is IncidentVerdict.lingering, "a fall of 1.49, and a quarter of 6 is 1.5"
        assert self.evaluate([7.4] * 30, 61, **facts, trend=replace(trend, moved_at=49)) is IncidentVerdict.lingering

    def test_the_watch_of_a_halving_spike_is_prolonged(self) -> None:
        assert self.evaluate([4.0] * 30, 61, sigma=0.1, peak=5.0) is None, "half of 2 is left"
        assert self.evaluate([4.0] * 30, 61, sigma=0.1, peak=4.99) is IncidentVerdict.lingering
        assert self.evaluate([4.0] * 30, 61, sigma=0.1, peak=9.0, last_height=1.9) is IncidentVerdict.lingering
        assert self.evaluate([4.0] * 30, 61, sigma=0.1, peak=9.0, last_height=2.0) is None

    @pytest.mark.parametrize(
        ("facts", "iteration", "verdict"),
        [
            ({"kinds": ["grad_spike"]}, 52, None),
            ({"kinds": ["grad_spike"]}, 53, IncidentVerdict.harmless),
            ({"level": None}, 60, None),
            ({"level": None}, 61, IncidentVerdict.harmless),
        ],
    )
    def test_a_warning_sign_ends_harmless(
        self, facts: dict[str, Any], iteration: int, verdict: IncidentVerdict | None
    ) -> None:
        assert self.evaluate([5.0] * 20, iteration, **facts) is verdict

    @pytest.mark.parametrize(
        ("facts", "loss", "answer"),
        [
            ({}, 3.5, True),
            ({}, 3.51, False),
            ({"kinds": ["grad_spike", "level_shift"]}, 3.5, False),
            ({"peak": 9.0}, 3.7, True),
            ({"level": None}, 9.0, True),
        ],
    )
    def test_a_lasting_rise_may_be_tolerable(self, facts: dict[str, Any], loss: float, answer: bool) -> None:
        lineage = Lineage()
        for place in range(1, 61):
            lineage.add(record(place, loss=3.0 if place < 40 else loss))
        given: dict[str, Any] = {"level": 3.0, "sigma": 0.1, "kinds": ["level_shift"]}
        assert open_incident(**given | facts).is_tolerable(lineage, 60, cfg=EXACT) is answer

    @pytest.mark.parametrize(
        ("rung", "rewound", "rolled_back"),
        [(Rung.none, 2, 4), (Rung.skip, 2, 4), (Rung.rewind, 3, 4), (Rung.wide, 3, 4), (Rung.rollback, 3, 5)],
    )
    def test_each_restore_climbs_a_rung(self, rung: Rung, rewound: int, rolled_back: int) -> None:
        for kind, reached in ((ActionKind.rewind, rewound), (ActionKind.rollback, rolled_back)):
            climbing = open_incident(rung=rung)
            climbing.on_action(action(kind), cfg=CFG)
            assert climbing.rung == reached

    def test_a_skip_reaches_its_rung(self) -> None:
        skipped = open_incident(rung=Rung.none)
        skipped.on_action(action(ActionKind.skip, exclude=[4, 5]), cfg=CFG)
        assert skipped.rung is Rung.skip

    def test_a_watch_lasts_as_long_as_configured(self) -> None:
        watched = open_incident(rung=Rung.skip)
        watched.on_action(action(ActionKind.watch), cfg=CFG)
        assert (watched.rung, watched.watched_since, watched.watched_until) == (Rung.skip, 40, 60)

    @pytest.mark.parametrize(
        ("facts", "spike_type"),
        [
            ({"type_so_far": 1, "is_divergent": True}, 3),
            ({"type_so_far": 2, "rung": Rung.rewind}, 2),
            ({"rung": Rung.rollback}, None),
        ],
    )
    def test_the_type_of_a_spike_does_not_depend_on_the_action(
        self, facts: dict[str, Any], spike_type: int | None
    ) -> None:
        assert open_incident(**facts).spike_type == spike_type

    @pytest.mark.parametrize(
        ("kind", "is_divergent"),
        [("divergence", True), ("nonfinite", True), ("nonfinite weights", True), ("loss_spike", False)],
    )
    def test_findings_that_make_an_incident_divergent(self, kind: str, is_divergent: bool) -> None:
        incident = open_incident()
        incident.add_finding(kind, onset=40, onset_step=40, step=41, cursors=[])
        assert incident.is_divergent is is_divergent

    @pytest.mark.parametrize(("loss", "spike_type"), [(4.5, None), (4.51, 1)])
    def test_a_rejected_loss_spike_is_type_1(self, loss: float, spike_type: int | None) -> None:
        incident = open_incident(level=3.0, sigma=0.5)
        incident.add_rejected(cursor=40, loss=loss, grad_norm=1.0, is_excessive=False)
        assert incident.spike_type == spike_type


def action(kind: ActionKind, **facts: Any) -> Action:
    return Action(time=0.0, iteration=40, kind=kind, step=40, incident=1, reason="", onset=40, **facts)


def make_action(kind: ActionKind, *, incident: int, lr_scale: float | None = None) -> Action:
    return Action(
        time=0.0, iteration=61, step=61, kind=kind, incident=incident, onset=61, reason="a test", lr_scale=lr_scale
    )


class TestPolicyState:
    def run_with_check(self) -> tuple[Run, Action]:
        """A run with a loss spike without a known cause, for which a check was chosen."""
        run = Run()
        run.policy.on_held_out_measured(HeldOutMeasured(time=0.0, iteration=0, step=0, loss=3.0))
        assert run.iterate_clean(60) == []
        check = run.iterate(FindingKind.loss_spike, loss=5.0)
        assert check is not None
        assert check.kind is ActionKind.check
        return run, check

    def test_losses_of_other_held_out_rows_are_not_compared(self) -> None:
        """A resume with other data, ranks or micro-batches measures other rows, also while an incident is watched."""
        state = PolicyState.new(CFG)
        old = HeldOutMeasured(time=0.0, iteration=0, step=0, loss=3.0, rows="old")
        state.on_held_out_measured(old)
        state = PolicyState.restore(CFG, json.loads(json.dumps(state.state())))
        state.on_held_out_measured(replace(old, iteration=5, step=5))
        assert [each.step for each in state.held_out.measured] == [0, 5]
        state.on_record(record(6), [finding(FindingKind.grad_spike, record(6))])
        state.on_action(make_action(ActionKind.watch, incident=1))
        state.on_held_out_measured(replace(old, iteration=60, step=60, rows="new"))
        assert state.held_out.measured == []

    def test_a_failed_accept_is_not_repeated(self) -> None:
        run, check = self.run_with_check()
        accept = run.policy.on_outcome(replace(outcome(check, step=run.step), held_out_loss=3.0))
        assert accept is not None
        assert accept.kind is ActionKind.accept
        assert run.fail(accept) is None
        assert run.iterate() is None

    def test_nothing_is_decided_before_the_outcome_of_a_check(self) -> None:
        run, _ = self.run_with_check()
        assert run.iterate(FindingKind.divergence) is None

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            (FindingKind.replica_mismatch, ActionKind.halt),
            (FindingKind.data_mismatch, ActionKind.halt),
            (FindingKind.weights_changed, ActionKind.rewind),
            (FindingKind.optimizer_reset, ActionKind.rollback),
            (FindingKind.lr_jump, None),
        ],
    )
    @pytest.mark.parametrize("loss", [3.0, 9.0], ids=["healthy", "damaged"])
    def test_a_finding_that_the_held_out_loss_cannot_judge_counts_after_the_check(
        self, kind: FindingKind, expected: ActionKind | None, loss: float
    ) -> None:
        """Its guard raises it once; the next records say nothing of it."""
        run, check = self.run_with_check()
        assert run.iterate(kind) is None
        saved = run.policy.state()
        run.policy = Policy.restore(run.policy.policy_state.cfg, json.loads(json.dumps(saved)), lag=LAG)
        follow_up = run.policy.on_outcome(replace(outcome(check, step=run.step), held_out_loss=loss))
        assert follow_up is not None
        if expected is None:
            assert follow_up.kind is (ActionKind.accept if loss == 3.0 else ActionKind.watch)
        else:
            assert follow_up.kind is expected
            assert str(kind) in follow_up.reason

    def decide_in_flight(self, run: Run, *kinds: FindingKind, **facts: Any) -> None:
        """One more step that was issued before the check; the policy is saved and restored after its record."""
        run.iteration, run.step = run.iteration + 1, run.step + (not facts.get("refused"))
        now = replace(record(run.iteration, step=run.step, cursor=run.cursor), **facts)
        run.cursor += 1
        found = [replace(finding(kind, now), signal=PrecursorSignal.attention_logit) for kind in kinds]
        assert run.policy.decide(now, found) is None
        saved = json.loads(json.dumps(run.policy.state()))
        run.policy = Policy.restore(run.policy.policy_state.cfg, saved, lag=LAG)

    def actions_after(self, run: Run, check: Action, loss: float) -> list[Action]:
        """All actions that follow a check with this held-out loss."""
        actions, done = list[Action](), replace(outcome(check, step=run.step), held_out_loss=loss)
        while (chosen := run.policy.on_outcome(done)) is not None:
            actions.append(chosen)
            done = outcome(chosen, step=run.step)
        return actions

    @pytest.mark.parametrize(("loss", "kinds"), [(3.0, ["precision", "accept"]), (9.0, ["rewind", "precision"])])
    @pytest.mark.parametrize("is_last", [True, False])
    def test_fp8_range_in_flight_at_a_check_counts_after_it(self, loss: float, kinds: list[str], is_last: bool) -> None:
        """Its detector raises it once. With damage it is the known cause."""
        run, check = self.run_with_check()
        self.decide_in_flight(run, FindingKind.fp8_range)
        if not is_last:
            self.decide_in_flight(run)
        actions = self.actions_after(run, check, loss)
        assert [each.kind for each in actions] == kinds
        (precision,) = [each for each in actions if each.kind is ActionKind.precision]
        assert precision.in_fp8 is False
        assert precision.reason.startswith("fp8_range seen")
        assert run.policy.in_fallback

    @pytest.mark.parametrize(("loss", "kinds"), [(3.0, ["qk_clip", "accept"]), (9.0, ["watch", "qk_clip"])])
    def test_growing_logits_in_flight_at_a_check_are_clipped_after_it(self, loss: float, kinds: list[str]) -> None:
        run, check = self.run_with_check()
        self.decide_in_flight(run, FindingKind.precursor)
        self.decide_in_flight(run, FindingKind.precursor)
        assert [each.kind for each in self.actions_after(run, check, loss)] == kinds
        assert run.policy.clips_logits

    @pytest.mark.parametrize("is_corrupted", [True, False])
    @pytest.mark.parametrize("loss", [3.0, 9.0], ids=["healthy", "damaged"])
    def test_batches_rejected_in_flight_at_a_check_are_not_lost(self, is_corrupted: bool, loss: float) -> None:
        """Those of corrupted updates are consumed again, the others accepted with the data or excluded."""
        run, check = self.run_with_check()
        facts: dict[str, Any] = {"corrupted_ranks": [1], "corrupted": "the output of blocks.0"} if is_corrupted else {}
        first = run.cursor
        for _ in range(2):
            self.decide_in_flight(run, loss=9.0, refused=True, **facts)
        assert run.policy.policy_state.rejections.num_in_row == (0 if is_corrupted else 2)
        found = [(each.kind, each.exclude, each.give_back) for each in self.actions_after(run, check, loss)]
        batches = [[first, first], [first + 1, first + 1]]
        skip, watch, accept = ActionKind.skip, ActionKind.watch, ActionKind.accept
        match is_corrupted, loss:
            case True, 3.0:
                assert found == [*((skip, [], [each]) for each in batches), (accept, [], [])]
            case True, _:
                assert found == [(watch, [], []), *((skip, [], [each]) for each in batches)]
            case False, 3.0:
                assert found == [(accept, [], [[first, first + 1]])]
            case _:
                assert found == [(watch, [], []), *((skip, each, []) for each in batches)]

    @pytest.mark.parametrize("is_rejected_again", [False, True])
    def test_a_batch_that_was_given_back_is_not_given_back_twice(self, is_rejected_again: bool) -> None:
        """An operator gives a skipped batch back. The run trains on it or rejects it again, then accepts the data."""
        run = Run()
        run.policy.on_held_out_measured(HeldOutMeasured(time=0.0, iteration=0, step=0, loss=3.0))
        assert run.iterate_clean(60) == []
        self.reject(run, batch=60)
        run.policy.policy_state.on_action(replace(action(ActionKind.include, give_back=[[58, 60]]), incident=0))
        saved = json.loads(json.dumps(run.policy.state()))
        run.policy = Policy.restore(run.policy.policy_state.cfg, saved, lag=LAG)
        self.reject(run, batch=60 if is_rejected_again else 62)
        check = self.reject(run, batch=64)
        assert check is not None
        accept = run.policy.on_outcome(replace(outcome(check, step=run.step), held_out_loss=3.0))
        assert accept is not None
        assert accept.kind is ActionKind.accept
        assert accept.give_back == [[60, 60] if is_rejected_again else [62, 62], [64, 64]]

    def reject(self, run: Run, *, batch: int) -> Action | None:
        """The update of a batch is rejected, and an applied one follows a skip; returns an action that is no skip."""
        run.cursor = batch
        chosen = run.iterate(loss=5.0, refused=True)
        if chosen is None or chosen.kind is not ActionKind.skip:
            return chosen
        assert run.policy.on_outcome(outcome(chosen, step=run.step)) is None
        assert run.iterate() is None
        return None

    def test_a_restore_makes_void_what_was_in_flight_at_the_check(self) -> None:
        run, check = self.run_with_check()
        self.decide_in_flight(run, loss=9.0, refused=True)
        self.decide_in_flight(run, FindingKind.weights_changed)
        self.decide_in_flight(run, loss=9.0, refused=True)
        assert [each.kind for each in self.actions_after(run, check, 3.0)] == [ActionKind.rewind]
        assert run.iterate_clean(5) == []

    def test_a_healthy_check_answers_the_restore_for_another_incident_too(self) -> None:
        """What is owed for it follows without a second check; that would forget whose data is to be accepted."""
        run, check = self.run_with_check()
        state, batch = run.policy.policy_state, run.cursor
        state.incidents.opened.append(OpenIncident(number=2, onset=61, onset_step=61, end_step=61, kinds=["refusals"]))
        state.deferred = [Response(Rung.rewind, 2, "rejected in a row", batch=batch)]
        found = [(each.kind, each.incident, each.exclude) for each in self.actions_after(run, check, 3.0)]
        assert found == [(ActionKind.skip, 2, [batch, batch]), (ActionKind.accept, 1, [])]

    def test_growing_logits_in_the_record_of_a_loss_spike_are_clipped(self) -> None:
        run = Run()
        assert run.iterate_clean(60) == []
        now = record(61, loss=5.0)
        growing = replace(finding(FindingKind.precursor, now), signal=PrecursorSignal.attention_logit)
        watch = run.policy.decide(now, [finding(FindingKind.loss_spike, now), growing])
        assert watch is not None
        clip = run.policy.on_outcome(outcome(watch, step=61))
        assert clip is not None
        assert (watch.kind, clip.kind) == (ActionKind.watch, ActionKind.qk_clip)
        assert run.policy.on_outcome(outcome(clip, step=61)) is None

    def test_growing_logits_near_a_restored_incident_are_clipped(self) -> None:
        run = Run()
        run.iterate_clean(60)
        restore = run.iterate(FindingKind.weights_changed)
        assert restore is not None
        assert run.restore(restore, steps=5) is None
        now = record(run.iteration + 1, step=run.step + 1, cursor=run.cursor)
        growing = replace(finding(FindingKind.precursor, now), signal=PrecursorSignal.attention_logit)
        clip = run.policy.decide(now, [growing])
        assert clip is not None
        assert (clip.kind, clip.incident) == (ActionKind.qk_clip, restore.incident)

    def test_a_state_of_an_older_version_has_nothing_deferred(self) -> None:
        """It stored the rejected batches in the incident, and a response without its batch."""
        run, _ = self.run_with_check()
        self.decide_in_flight(run, loss=9.0, refused=True)
        saved = run.policy.policy_state.state()
        assert saved.pop("deferred")
        saved["demand"] = saved["demand"][:7]
        saved["cases"][0]["pending"] = [61]
        state = PolicyState.restore(run.policy.policy_state.cfg, json.loads(json.dumps(saved)))
        assert state.due == []

    def test_a_restart_drops_a_check_without_outcome(self) -> None:
        run, _ = self.run_with_check()
        again = RunStarted(time=0.0, iteration=run.iteration, world_size=1, num_steps=9, step=run.step)
        assert [*run.policy.choose_actions([again])] == []
        assert run.iterate() is None, "the response is dropped too"
        assert run.iterate(FindingKind.divergence) is not None

    def test_a_failed_restore_does_not_end_a_bf16_window(self) -> None:
        run = Run()
        run.iterate_clean(60)
        leave = run.iterate(FindingKind.fp8_range)
        assert leave is not None
        assert leave.kind is ActionKind.precision
        assert run.policy.on_outcome(outcome(leave, step=run.step)) is None
        assert run.policy.in_fallback
        restore = run.iterate(FindingKind.divergence)
        assert restore is not None
        assert restore.kind in (ActionKind.rewind, ActionKind.rollback)
        run.fail(restore)
        assert run.policy.in_fallback

    def test_a_failed_precision_change_is_not_recorded(self) -> None:
        run = Run()
        run.iterate_clean(60)
        leave = run.iterate(FindingKind.fp8_range)
        run.fail(leave)
        assert not run.policy.in_fallback

    def test_records_after_a_halt_change_nothing(self) -> None:
        run = Run()
        run.iterate_clean(60)
        state = run.policy.policy_state
        state.on_action(make_action(ActionKind.halt, incident=0))
        before = state.state()
        state.on_record(record(61, loss=9.0), [finding(FindingKind.divergence, record(61))])
        assert state.state() == before
        assert before["numbers"]["is_halted"]

    @pytest.mark.parametrize(("scale", "back"), [(0.5, 1.0), (0.25, 0.5), (1.0, 1.0)])
    def test_a_failed_cool_takes_its_factor_back(self, scale: float, back: float) -> None:
        run = Run()
        run.iterate_clean(60)
        restore = run.iterate(FindingKind.divergence)
        assert restore is not None
        state = run.policy.policy_state
        cool = make_action(COOL, incident=restore.incident, lr_scale=scale)
        state.on_action(cool)
        assert state.lr_scale == scale
        state.on_outcome(outcome(cool, step=run.step, succeeded=False))
        assert state.lr_scale == back

    @pytest.mark.parametrize(("grad_norm", "check_first"), [(1.0, True), (math.inf, False)])
    def test_only_a_finite_rejected_update_of_a_planned_change_is_checked(
        self, grad_norm: float, check_first: bool
    ) -> None:
        state = PolicyState.new(CFG)
        state.on_record(make_record(grad_norm=grad_norm, in_planned_change=True), [])
        assert state.response is not None
        assert (state.response.rung, state.response.check_first) == (Rung.skip, check_first)

    def test_a_check_after_a_rejected_update_holds_its_batch_back(self) -> None:
        state = PolicyState.new(CFG)
        for iteration in range(1, 5):
            state.on_record(record(iteration, cursor=10 * iteration), [])
        state.on_record(make_record(cursor=77, in_planned_change=True), [])
        state.on_action(make_action(ActionKind.check, incident=1))
        assert [response.batch for response in state.due] == [77]

    @pytest.mark.parametrize(
        ("facts", "is_divergent"), [({"loss": math.nan}, True), ({"grad_norm": math.inf}, False), ({}, False)]
    )
    def test_a_rejected_update_is_divergent_if_its_loss_is_not_finite(
        self, facts: dict[str, float], is_divergent: bool
    ) -> None:
        state = PolicyState.new(CFG)
        state.on_record(make_record(**facts), [])
        assert state.open_incidents[0].is_divergent is is_divergent

    @pytest.mark.parametrize(("grad_norm", "rung"), [(math.inf, Rung.skip), (1e9, Rung.watch)])
    def test_only_nonfinite_updates_are_skipped_if_nothing_else_is_allowed(self, grad_norm: float, rung: Rung) -> None:
        state = PolicyState.new(replace(CFG, actions=AllowedActions.nonfinite_only))
        state.on_record(make_record(grad_norm=grad_norm), [])
        assert state.response is not None
        assert state.response.rung is rung

    def test_broken_weights_are_watched_if_nothing_else_is_allowed(self) -> None:
        """Their batch is not to blame, so it is not skipped."""
        state = PolicyState.new(replace(CFG, actions=AllowedActions.nonfinite_only))
        state.on_record(make_record(loss=math.nan, param_norm=math.nan), [])
        assert state.response is not None
        assert (state.response.rung, state.response.reason) == (Rung.watch, "the weights are not finite")

    def test_the_first_of_two_equal_responses_counts(self) -> None:
        state, now = PolicyState.new(CFG), record(7)
        first = finding(FindingKind.divergence, now)
        state.on_record(now, [first, replace(first, message="the second, which sorts after it")])
        assert state.response is not None
        assert state.response.reason == "divergence seen"

    def test_an_unplanned_rejected_update_is_not_checked(self) -> None:
        state = PolicyState.new(CFG)
        state.on_record(make_record(), [])
        assert state.response is not None
        assert not state.response.check_first

    def test_fp8_range_responds_for_an_incident_that_is_not_treated(self) -> None:
        state, now = PolicyState.new(CFG), record(7)
        state.on_record(now, [finding(FindingKind.fp8_range, now)])
        assert state.response is not None
        assert (state.response.rung, state.response.incident, state.response.leaves_fp8) == (Rung.watch, 1, True)
        assert state.open_incidents[0].unfit == "fp8_range seen"


def test_the_slope_of_the_loss_needs_three_values() -> None:
    lineage = Lineage()
    for iteration, loss in ((1, 3.0), (2, 2.0)):
        lineage.add(record(iteration, loss=loss))
    assert lineage.fall_in_errors(since=0, sigma=0.5) == 0.0
    lineage.add(record(3, loss=1.0))
    assert lineage.fall_in_errors(since=0, sigma=0.5) == pytest.approx(1.0 / (0.5 * math.sqrt(12 / 27)))
    assert lineage.fall_in_errors(since=2, sigma=0.5) == 0.0
    assert lineage.fall_in_errors(since=0, sigma=0.0) == pytest.approx(1e6 * math.sqrt(27 / 12)), "at least 1e-6"
