"""Climbing the ladder and leaving it: relapses, failures, budgets and cures."""

from __future__ import annotations

import math
from dataclasses import replace

from harness.core.events import Action
from harness.sentinel.policy.open_incident import ClosedIncident, IncidentVerdict
from tests.sentinel.policy_runs import F, K, Run, defaults, kind_of, outcome


class TestClimbing:
    def test_a_known_cause_is_rewound_at_once(self) -> None:
        run = Run()
        run.iterate_clean(100)
        run.iterate(F.grad_spike)
        run.iterate()
        action = run.iterate(F.loss_spike, loss=6.0)
        assert action is not None
        assert (action.kind, action.exclude) == (K.rewind, [99, 100])
        assert action.onset == 100

    def test_relapses_go_further_back_and_exclude_more_until_structural(self) -> None:
        run = Run()
        run.iterate_clean(500)
        kinds, onsets, widths = [], [], []
        for _ in range(12):
            run.iterate(F.grad_spike)
            action = run.iterate(F.loss_spike, loss=6.0)
            assert action is not None
            kinds.append(action.kind)
            if action.kind is K.halt:
                break
            onsets.append(action.onset)
            widths.append(action.exclude[1] - action.exclude[0] + 1)
            before = run.step
            follow = run.restore(action, steps=20)
            kinds += [] if follow is None else [follow.kind]
            run.iterate_clean(before - run.step - 2)
        assert kinds == [K.rewind, K.rewind, K.rollback, K.cool, K.rollback, K.cool, K.halt]
        assert widths == sorted(widths)
        assert widths[0] == 2
        assert action is not None
        assert "structural, needs a human" in action.reason

    def test_no_cure_left_is_structural(self) -> None:
        cfg = replace(defaults(), min_lr_scale=1.0)
        run = Run(cfg)
        run.iterate_clean(500)
        for kind in (K.rollback, K.halt):
            action = run.iterate(F.divergence, back=50)
            assert action is not None
            assert action.kind is kind
            if kind is K.rollback:
                assert run.restore(action, steps=200) is None
                run.iterate_clean(190)
        assert action is not None
        assert "structural, needs a human" in action.reason

    def test_failed_restores_climb_and_halt(self) -> None:
        run = Run()
        run.iterate_clean(100)
        run.iterate(F.grad_spike)
        rewind = run.iterate(F.loss_spike, loss=6.0)
        rollback = run.fail(rewind)
        nearer = run.fail(rollback)
        halt = run.fail(nearer)
        assert [kind_of(a) for a in (rewind, rollback, nearer, halt)] == [K.rewind, K.rollback, K.rollback, K.halt]
        assert rollback is not None
        assert nearer is not None
        assert halt is not None
        assert rollback.onset < nearer.onset <= 101, "first well before the onset, then anything before it"
        assert "no state to restore" in halt.reason
        assert run.iterate(F.divergence) is None, "a halted policy takes no action"

    def test_a_relapse_blames_the_batches_of_its_own_onset(self) -> None:
        run = Run()
        run.iterate_clean(100)
        run.iterate(F.grad_spike)
        action = run.iterate(F.loss_spike, loss=6.0)
        assert action is not None
        run.restore(action, steps=10)
        run.iterate_clean(40)
        blamed = run.cursor
        run.iterate(F.grad_spike)
        again = run.iterate(F.loss_spike, loss=6.0)
        assert again is not None
        assert (again.kind, again.incident) == (K.rewind, action.incident)
        neighbours = defaults().neighbours
        assert again.exclude == [blamed - 1 - neighbours, blamed + neighbours]

    def test_after_a_restore_newer_states_are_targets_too(self) -> None:
        run = Run()
        run.iterate_clean(500)
        run.iterate(F.grad_spike)
        action = run.iterate(F.loss_spike, loss=6.0)
        assert action is not None
        run.restore(action, steps=300)
        run.iterate_clean(600)
        rollback = run.iterate(F.divergence)
        assert rollback is not None
        margin, window = defaults().rollback_margin_steps, defaults().rollback_window_batches
        assert run.iteration - max(margin, window) < rollback.onset < run.iteration

    def test_records_before_the_outcome_of_a_restore_are_ignored(self) -> None:
        run = Run()
        run.iterate_clean(100)
        run.iterate(F.divergence)
        before = run.policy.state()
        assert run.iterate(F.replica_mismatch, loss=math.nan, refused=True) is None
        assert run.policy.state() == before

    def test_a_restore_closes_incidents_that_it_undoes(self) -> None:
        run = Run()
        run.iterate_clean(400)
        assert kind_of(run.iterate(F.loss_spike, loss=3.5)) is K.watch
        for _ in range(100):
            run.iterate(loss=3.5)
        rollback = run.iterate(F.divergence, loss=3.5)
        assert rollback is not None
        assert rollback.incident == 2
        run.restore(rollback, steps=300)
        assert run.policy.closed == [ClosedIncident(1, IncidentVerdict.undone, 2)]
        assert run.policy.doubtful_since is None

    def test_an_incident_after_clean_steps_starts_at_the_first_rung(self) -> None:
        run = Run()
        run.iterate_clean(100)
        for _ in range(2):
            run.iterate(F.grad_spike)
            action = run.iterate(F.loss_spike, loss=6.0)
            assert action is not None
            assert (action.kind, action.exclude[1] - action.exclude[0]) == (K.rewind, 1)
            run.restore(action, steps=10)
            run.iterate_clean(10 + defaults().clean_steps + defaults().region_steps)
        assert [closed.verdict for closed in run.closed] == [IncidentVerdict.cured, IncidentVerdict.cured]

    def test_retrained_steps_do_not_restore_a_budget(self) -> None:
        cfg = replace(defaults(), clean_steps=1, region_steps=1, window_steps=50, recur_after=10**9)
        run = Run(cfg)
        run.iterate_clean(500)
        kinds = []
        for _ in range(20):
            run.iterate(F.grad_spike)
            action = run.iterate(F.loss_spike, loss=6.0)
            assert action is not None
            kinds.append(action.kind)
            if action.kind is K.halt:
                break
            run.restore(action, steps=100)
            run.iterate_clean(98)
        assert kinds[-1] is K.halt
        assert action is not None
        assert "budget spent" in action.reason
        assert len(kinds) <= cfg.budgets.rewind.per_window + cfg.budgets.rollback.per_window + 1


class TestCures:
    def restore_repeatedly(self, run: Run) -> list[Action]:
        """Incidents far apart, each treated with one rewind; returns the follow-up actions."""
        follow_ups = []
        for _ in range(defaults().recur_after):
            run.iterate_clean(300)
            run.iterate(F.grad_spike)
            action = run.iterate(F.loss_spike, loss=6.0)
            assert action is not None
            assert action.kind is K.rewind
            follow_ups.append(run.restore(action, steps=5))
        return [action for action in follow_ups if action is not None]

    def test_recurring_restores_lower_the_lr_and_clean_steps_raise_it_again(self) -> None:
        run = Run()
        (cool,) = self.restore_repeatedly(run)
        assert (cool.kind, cool.lr_scale) == (K.cool, 0.5)
        assert cool.until is not None
        assert run.policy.on_outcome(outcome(cool, step=run.step)) is None
        assert run.policy.lr_scale == 0.5
        (warm,) = run.iterate_clean(1500)
        assert (warm.kind, warm.lr_scale, warm.until) == (K.cool, 1.0, None)
        assert warm.iteration - cool.iteration >= defaults().cool_steps
        assert run.policy.lr_scale == 1.0

    def test_a_failed_cooling_does_not_change_the_lr_scale(self) -> None:
        run = Run()
        (cool,) = self.restore_repeatedly(run)
        assert run.fail(cool) is None
        assert run.policy.lr_scale == 1.0

    def test_the_lr_is_not_raised_while_an_incident_is_watched(self) -> None:
        run = Run()
        (cool,) = self.restore_repeatedly(run)
        run.policy.on_outcome(outcome(cool, step=run.step))
        run.iterate_clean(defaults().cool_steps - 20)
        assert kind_of(run.iterate(F.loss_spike, loss=3.5)) is K.watch
        assert [run.iterate(loss=3.5) for _ in range(100)] == [None] * 100

    def test_a_rejected_batch_does_not_change_the_usual_loss_of_its_source(self) -> None:
        run = Run()
        run.iterate(sources={"web": 3.0, "code": 1.0})
        before = run.policy.policy_state.suspects.state()["habits"]
        run.iterate(refused=True, sources={"web": 3.0, "code": 90.0})
        assert run.policy.policy_state.suspects.state()["habits"] == before

    def test_bad_batches_of_one_source_switch_it_off(self) -> None:
        run = Run()
        for _ in range(50):
            run.iterate(sources={"web": 3.0, "code": 1.0})
        last = None
        for _ in range(defaults().swap_after):
            run.iterate_clean(10)
            skip = run.iterate(loss=math.nan, refused=True, sources={"web": 3.0, "code": math.nan})
            assert skip is not None
            assert skip.kind is K.skip
            last = run.policy.on_outcome(outcome(skip, step=run.step))
        assert last is not None
        assert (last.kind, last.source) == (K.swap, "code")

    def test_the_only_source_is_never_switched_off(self) -> None:
        run = Run()
        for _ in range(50):
            run.iterate(sources={"web": 3.0})
        for _ in range(5):
            run.iterate_clean(10)
            skip = run.iterate(loss=math.nan, refused=True, sources={"web": math.nan})
            assert skip is not None
            assert run.policy.on_outcome(outcome(skip, step=run.step)) is None

    def test_a_collapsed_loss_scale_is_rolled_back_and_cooled(self) -> None:
        run = Run()
        run.iterate_clean(150)
        action = run.iterate(F.scale_collapse)
        assert action is not None
        assert action.exclude == [], "no batch is blamed"
        assert kind_of(run.restore(action, steps=120)) is K.cool

    def test_the_last_source_left_by_a_phase_is_never_switched_off(self) -> None:
        run = Run()
        for _ in range(60):
            run.iterate(sources={"web": 3.0, "code": 1.0})
        for _ in range(60):
            run.iterate(sources={"web": 3.0})  # a phase switched code off
        for _ in range(5):
            run.iterate_clean(10)
            skip = run.iterate(loss=math.nan, refused=True, sources={"web": math.nan})
            assert skip is not None
            assert run.policy.on_outcome(outcome(skip, step=run.step)) is None
