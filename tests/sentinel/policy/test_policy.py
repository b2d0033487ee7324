"""The first response to each finding: each test is a row of the tables of the policy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.core.events import ActionKind, FindingKind
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.policy.open_incident import ClosedIncident, IncidentVerdict
from harness.sentinel.policy.policy import Policy
from tests.composed import load
from tests.sentinel.policy_runs import LAG, F, K, Run, defaults, finding, kind_of, outcome, record


def test_a_clean_run_gets_no_action() -> None:
    run = Run()
    assert run.iterate_clean(300) == []
    assert run.policy.doubtful_since is None


class TestWatch:
    def test_a_spike_that_recovers_is_type_1_and_costs_nothing(self) -> None:
        run = Run()
        run.iterate_clean(100)
        action = run.iterate(F.loss_spike, loss=4.5)
        assert kind_of(action) is K.watch
        assert run.policy.doubtful_since == 101
        for age in range(100):
            assert run.iterate(loss=3.0 + 1.5 * math.exp(-age / 10)) is None
        assert run.closed == [ClosedIncident(1, IncidentVerdict.recovered, 1)]
        assert run.policy.doubtful_since is None

    def test_an_incident_is_watched_only_once(self) -> None:
        run = Run()
        run.iterate_clean(100)
        assert kind_of(run.iterate(F.grad_spike)) is K.watch
        assert run.iterate(F.v_stale) is None

    def test_a_warning_sign_without_consequences_is_harmless(self) -> None:
        run = Run()
        run.iterate_clean(100)
        assert kind_of(run.iterate(F.grad_spike)) is K.watch
        assert run.iterate_clean(defaults().patience_iterations) == []
        assert run.closed == [ClosedIncident(1, IncidentVerdict.harmless, None)]

    def test_an_update_rejected_during_a_watch_is_skipped(self) -> None:
        run = Run()
        run.iterate_clean(100)
        assert kind_of(run.iterate(F.rank_outlier)) is K.watch
        run.iterate_clean(9)
        action = run.iterate(F.nonfinite, refused=True)
        assert kind_of(action) is K.skip
        assert action is not None
        assert action.exclude == [110, 110]

    def test_a_spike_that_does_not_recover_is_rewound_to_before_its_onset(self) -> None:
        run = Run()
        run.iterate_clean(100)
        run.iterate(loss=6.0)
        run.iterate(F.loss_spike, loss=6.0, back=1)
        actions = [run.iterate(loss=6.0) for _ in range(defaults().patience_iterations)]
        (action,) = [action for action in actions if action is not None]
        assert kind_of(action) is K.rewind
        assert action.exclude == [99, 100], "the batch of the onset (iteration 101) and the one before"
        assert action.onset == 100, "the restored state must precede the excluded batches"

    def test_a_spike_that_lingers_is_rolled_back(self) -> None:
        run = Run()
        run.iterate_clean(400)
        run.iterate(F.loss_spike, loss=5.0)
        actions = [run.iterate(loss=3.5 + 1.5 * math.exp(-age / 8)) for age in range(450)]
        found = [action for action in actions if action is not None]
        assert [action.kind for action in found] == [K.rollback]
        assert found[0].onset <= 401 - defaults().rollback_margin_steps
        first, last = found[0].exclude
        assert first < 399 < 401 < last

    def test_a_watch_is_prolonged_while_the_spike_halves(self) -> None:
        run = Run()
        run.iterate_clean(100)
        run.iterate(F.loss_spike, loss=7.0)
        actions = [run.iterate(loss=3.0 + 4.0 * math.exp(-age / 50)) for age in range(600)]
        assert [action for action in actions if action is not None] == []
        assert run.closed == [ClosedIncident(1, IncidentVerdict.recovered, 1)]


class TestNewData:
    @pytest.mark.parametrize("kind", [F.level_shift, F.loss_spike])
    def test_a_small_lasting_rise_is_accepted_in_the_end(self, kind: FindingKind) -> None:
        run = Run()
        run.iterate_clean(100)
        for _ in range(20):
            assert run.iterate(loss=3.5) is None
        assert kind_of(run.iterate(kind, loss=3.5, back=20)) is K.watch
        assert [run.iterate(loss=3.5) for _ in range(250)] == [None] * 250
        assert run.closed == [ClosedIncident(1, IncidentVerdict.accepted, None)]

    def test_a_large_lasting_rise_is_rolled_back(self) -> None:
        """OLMo-core takes a sustained jump for the new normal after four steps."""
        run = Run()
        run.iterate_clean(100)
        for _ in range(20):
            run.iterate(loss=8.0)
        assert kind_of(run.iterate(F.level_shift, loss=8.0, back=20)) is K.rollback

    def test_a_lasting_rise_with_a_known_cause_is_damage(self) -> None:
        run = Run()
        run.iterate_clean(100)
        run.iterate(F.grad_spike)
        for _ in range(12):
            run.iterate(loss=3.3)
        assert kind_of(run.iterate(F.level_shift, loss=3.3, back=12)) is K.rollback

    def test_a_cause_that_is_found_after_the_rise_makes_it_damage_too(self) -> None:
        run = Run()
        run.iterate_clean(100)
        run.iterate(F.loss_spike, loss=3.3)
        run.iterate(F.rank_outlier, loss=3.3)
        actions = [run.iterate(loss=3.3) for _ in range(defaults().patience_iterations)]
        assert [action.kind for action in actions if action is not None] == [K.rewind]


class TestSkip:
    def test_a_rejected_batch_is_excluded_and_nothing_is_restored(self) -> None:
        run = Run()
        run.iterate_clean(50)
        action = run.iterate(F.nonfinite, F.rank_outlier, loss=math.nan, refused=True)
        assert action is not None
        assert (action.kind, action.exclude, action.incident) == (K.skip, [50, 50], 1)
        assert run.policy.on_outcome(outcome(action, step=50)) is None
        assert run.iterate_clean(300) == []

    def test_one_nan_costs_one_batch(self) -> None:
        """OLMo-core skips 129 after one NaN."""
        run = Run()
        actions = [run.iterate(loss=math.nan if i == 50 else 3.0, refused=i == 50) for i in range(300)]
        assert [action.kind for action in actions if action is not None] == [K.skip]

    def test_batches_without_a_token_to_predict_are_no_incident(self) -> None:
        run = Run()
        run.iterate_clean(50)
        for place in range(51, 61):
            empty = replace(record(place, step=50, refused=True), loss=0.0, grad_norm=0.0)
            assert run.policy.decide(empty, Detectors(load().sentinel.detect).observe(empty)) is None
        assert run.policy.policy_state.open_incidents == []
        assert run.policy.policy_state.rejections.num_in_row == 0

    def test_rejections_in_a_row_show_a_damaged_state(self) -> None:
        run = Run()
        run.iterate_clean(50)
        actions = [run.iterate(F.nonfinite, loss=math.nan, refused=True) for _ in range(3)]
        assert [kind_of(action) for action in actions] == [K.skip, K.skip, K.rewind]
        rewind = actions[-1]
        assert rewind is not None
        assert rewind.onset == 50, "the update before the first rejection did the damage"
        assert rewind.exclude == [49, 50], "its batch, and the first rejected one"
        (incident,) = run.policy.policy_state.open_incidents
        assert (incident.onset, incident.onset_step) == (51, 50), "the first rejected iteration"

    def test_batches_that_the_restored_state_rejects_too_are_skipped(self) -> None:
        """A bad shard must not end the run: the state was restored and is not the cause."""
        run = Run()
        run.iterate_clean(50)
        actions = [run.iterate(loss=9.0, refused=True) for _ in range(3)]
        assert [kind_of(action) for action in actions] == [K.skip, K.skip, K.rewind]
        assert actions[-1] is not None
        run.restore(actions[-1], steps=2)
        num = defaults().budgets.skip.per_window - 2
        actions = [run.iterate(loss=9.0, refused=True) for _ in range(num)]
        assert {kind_of(action) for action in actions} == {K.skip}, "until the skip budget is spent"
        assert kind_of(run.iterate(loss=9.0, refused=True)) is K.rollback

    def test_a_rejection_after_an_lr_jump_blames_no_batch(self) -> None:
        run = Run()
        run.iterate_clean(50)
        assert kind_of(run.iterate(F.lr_jump)) is K.watch
        action = run.iterate(loss=9.0, refused=True)
        assert action is not None
        assert (action.kind, action.exclude) == (K.rewind, [])
        assert action.onset == 51, "before the rate jumped"
        run.restore(action, steps=2)
        assert kind_of(run.iterate(loss=9.0, refused=True)) is K.skip, "now the batch is blamed"

    def test_nan_again_after_a_restore_is_not_caused_by_batches(self) -> None:
        run = Run()
        run.iterate_clean(50)
        actions = [run.iterate(loss=math.nan, refused=True) for _ in range(3)]
        assert actions[-1] is not None
        run.restore(actions[-1], steps=2)
        actions = [run.iterate(loss=math.nan, refused=True) for _ in range(3)]
        assert [kind_of(action) for action in actions] == [K.skip, K.skip, K.rewind]

    def test_frequent_rejections_roll_back(self) -> None:
        run = Run()
        run.iterate_clean(200)
        kinds = set()
        for _ in range(defaults().budgets.skip.per_window):
            kinds.add(kind_of(run.iterate(loss=math.inf, refused=True)))
            run.iterate_clean(5)
        assert kinds == {K.skip}
        assert kind_of(run.iterate(loss=math.inf, refused=True)) is K.rollback

    def test_overflows_of_a_settling_loss_scale_blame_no_batch(self) -> None:
        policy = Policy.start(defaults(), lag=LAG)
        for iteration in range(1, 17):
            now = replace(
                record(iteration, step=0, refused=True), grad_norm=math.inf, loss_scale=2.0 ** (17 - iteration)
            )
            assert policy.decide(now, [finding(F.nonfinite, now)]) is None

    def test_an_overflow_below_a_scale_of_one_is_a_rejection(self) -> None:
        now = replace(record(1, step=0, refused=True), grad_norm=math.inf, loss_scale=0.5)
        assert kind_of(Policy.start(defaults(), lag=LAG).decide(now, [])) is K.skip


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (F.divergence, K.rollback),
        (F.nonfinite, K.rollback),
        (F.optimizer_reset, K.rollback),
        (F.scale_collapse, K.rollback),
        (F.fp8_range, K.precision),
        (F.weights_changed, K.rewind),
        (F.corruption, K.watch),
        (F.corrupting_rank, K.rewind),
        (F.corruption_passed, None),
        (F.replica_mismatch, K.halt),
        (F.weight_drift, K.watch),
        (F.lr_jump, K.watch),
        (F.rank_outlier, K.watch),
        (F.v_stale, K.watch),
        (F.slow, None),
        (F.duplicate_batch, None),
    ],
)
def test_first_response_to_each_finding(kind: FindingKind, expected: ActionKind | None) -> None:
    run = Run()
    run.iterate_clean(150)
    assert kind_of(run.iterate(kind)) is expected


def test_nonfinite_weights_roll_back() -> None:
    run = Run()
    run.iterate_clean(150)
    broken = replace(record(151), param_norm=math.nan)
    action = run.policy.decide(broken, [])
    assert action is not None
    assert action.kind is K.rollback
    assert action.onset < 150


def test_lost_moments_without_a_checkpoint_are_watched() -> None:
    run = Run()
    run.iterate_clean(20)
    action = run.iterate(F.optimizer_reset)
    assert action is not None
    assert action.exclude == []
    assert kind_of(run.fail(run.fail(action))) is K.watch


@pytest.mark.parametrize(("num_clean", "onset"), [(30, 131), (3, 100)], ids=["long ago", "just now"])
def test_a_restore_does_not_go_behind_a_rejection_that_clean_steps_followed(num_clean: int, onset: int) -> None:
    """The rejection changed nothing. A much later one is another problem, and the steps between are clean."""
    run = Run()
    run.iterate_clean(100)
    assert kind_of(run.iterate(refused=True)) is K.skip
    run.iterate_clean(num_clean)
    skips = [run.iterate(refused=True) for _ in range(2)]
    assert [kind_of(each) for each in skips] == [K.skip, K.skip]
    rewind = run.iterate(refused=True)
    assert rewind is not None
    assert rewind.kind is K.rewind
    assert rewind.onset == onset, "before the batch that precedes the first rejection in a row"
