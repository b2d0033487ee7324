"""How the ladder is climbed and left again: relapses, failures, budgets and cures."""

from __future__ import annotations

import math
from dataclasses import replace

from harness.core.events import Action
from harness.sentinel.policy.open_incident import ClosedIncident, IncidentVerdict
from tests.sentinel.policy_runs import F, K, Run, defaults, kind_of, outcome


class TestClimbing:
    def test_a_known_cause_is_rewound_at_once(self) -> None:
        run = Run()
        run.calm(100)
        run.take(F.grad_spike)
        run.take()
        action = run.take(F.loss_spike, loss=6.0)
        assert action is not None
        assert (action.kind, action.exclude) == (K.rewind, [99, 100])
        assert action.onset == 100

    def test_the_same_place_goes_further_back_with_more_batches_until_structural(self) -> None:
        run = Run()
        run.calm(500)
        kinds, onsets, widths = [], [], []
        for _ in range(12):
            run.take(F.grad_spike)
            action = run.take(F.loss_spike, loss=6.0)
            assert action is not None
            kinds.append(action.kind)
            if action.kind is K.halt:
                break
            onsets.append(action.onset)
            widths.append(action.exclude[1] - action.exclude[0] + 1)
            before = run.step
            follow = run.go_back(action, steps=20)
            kinds += [] if follow is None else [follow.kind]
            run.calm(before - run.step - 2)
        assert kinds == [K.rewind, K.rewind, K.rollback, K.cool, K.rollback, K.cool, K.halt]
        assert widths == sorted(widths)
        assert widths[0] == 2
        assert action is not None
        assert "structural, needs a human" in action.reason

    def test_no_cure_left_is_structural(self) -> None:
        cfg = replace(defaults(), min_lr_scale=1.0)
        run = Run(cfg)
        run.calm(500)
        for kind in (K.rollback, K.halt):
            action = run.take(F.divergence, back=50)
            assert action is not None
            assert action.kind is kind
            if kind is K.rollback:
                assert run.go_back(action, steps=200) is None
                run.calm(190)
        assert action is not None
        assert "structural, needs a human" in action.reason

    def test_nothing_to_go_back_to_climbs_and_halts(self) -> None:
        run = Run()
        run.calm(100)
        run.take(F.grad_spike)
        rewind = run.take(F.loss_spike, loss=6.0)
        rollback = run.fail(rewind)
        nearer = run.fail(rollback)
        halt = run.fail(nearer)
        assert [kind_of(a) for a in (rewind, rollback, nearer, halt)] == [K.rewind, K.rollback, K.rollback, K.halt]
        assert rollback is not None
        assert nearer is not None
        assert halt is not None
        assert rollback.onset < nearer.onset <= 101, "first well before the onset, then anything before it"
        assert "no state to restore" in halt.reason
        assert run.take(F.divergence) is None, "a halted policy is silent"

    def test_a_relapse_is_blamed_where_it_shows(self) -> None:
        run = Run()
        run.calm(100)
        run.take(F.grad_spike)
        action = run.take(F.loss_spike, loss=6.0)
        assert action is not None
        run.go_back(action, steps=10)
        run.calm(40)
        guilty = run.cursor
        run.take(F.grad_spike)
        again = run.take(F.loss_spike, loss=6.0)
        assert again is not None
        assert (again.kind, again.incident) == (K.rewind, action.incident)
        neighbours = defaults().neighbours
        assert again.exclude == [guilty - 1 - neighbours, guilty + neighbours]

    def test_after_a_restore_newer_states_are_targets_too(self) -> None:
        run = Run()
        run.calm(500)
        run.take(F.grad_spike)
        action = run.take(F.loss_spike, loss=6.0)
        assert action is not None
        run.go_back(action, steps=300)
        run.calm(600)
        rollback = run.take(F.divergence)
        assert rollback is not None
        margin, window = defaults().rollback_margin_steps, defaults().rollback_window_batches
        assert run.iteration - max(margin, window) < rollback.onset < run.iteration

    def test_until_a_restore_is_done_records_tell_of_a_state_that_is_given_up(self) -> None:
        run = Run()
        run.calm(100)
        run.take(F.divergence)
        before = run.policy.state()
        assert run.take(F.replica_mismatch, loss=math.nan, refused=True) is None
        assert run.policy.state() == before

    def test_what_a_restore_takes_back_is_watched_no_longer(self) -> None:
        run = Run()
        run.calm(400)
        assert kind_of(run.take(F.loss_spike, loss=3.5)) is K.watch
        for _ in range(100):
            run.take(loss=3.5)
        rollback = run.take(F.divergence, loss=3.5)
        assert rollback is not None
        assert rollback.incident == 2
        run.go_back(rollback, steps=300)
        assert run.policy.closed == [ClosedIncident(1, IncidentVerdict.undone, None)]
        assert run.policy.doubtful_since is None

    def test_a_place_left_behind_begins_anew(self) -> None:
        run = Run()
        run.calm(100)
        for _ in range(2):
            run.take(F.grad_spike)
            action = run.take(F.loss_spike, loss=6.0)
            assert action is not None
            assert (action.kind, action.exclude[1] - action.exclude[0]) == (K.rewind, 1)
            run.go_back(action, steps=10)
            run.calm(10 + defaults().clean_steps + defaults().region_steps)
        assert [closed.verdict for closed in run.closed] == [IncidentVerdict.cured, IncidentVerdict.cured]

    def test_steps_trained_again_earn_nothing_back(self) -> None:
        cfg = replace(defaults(), clean_steps=1, region_steps=1, window_steps=50, recur_after=10**9)
        run = Run(cfg)
        run.calm(500)
        kinds = []
        for _ in range(20):
            run.take(F.grad_spike)
            action = run.take(F.loss_spike, loss=6.0)
            assert action is not None
            kinds.append(action.kind)
            if action.kind is K.halt:
                break
            run.go_back(action, steps=100)
            run.calm(98)
        assert kinds[-1] is K.halt
        assert action is not None
        assert "budget spent" in action.reason
        assert len(kinds) <= cfg.budgets.rewind.per_window + cfg.budgets.rollback.per_window + 1


class TestCures:
    def restore_often(self, run: Run) -> list[Action]:
        """Trouble at places far apart, each cured by one rewind; returns what followed the rewinds."""
        follow_ups = []
        for _ in range(defaults().recur_after):
            run.calm(300)
            run.take(F.grad_spike)
            action = run.take(F.loss_spike, loss=6.0)
            assert action is not None
            assert action.kind is K.rewind
            follow_ups.append(run.go_back(action, steps=5))
        return [action for action in follow_ups if action is not None]

    def test_recurring_restores_cool_the_learning_rate_and_a_clean_stretch_gives_it_back(self) -> None:
        run = Run()
        (cool,) = self.restore_often(run)
        assert (cool.kind, cool.lr_scale) == (K.cool, 0.5)
        assert cool.until is not None
        assert run.policy.on_outcome(outcome(cool, step=run.step)) is None
        assert run.policy.lr_scale == 0.5
        (warm,) = run.calm(1500)
        assert (warm.kind, warm.lr_scale, warm.until) == (K.cool, 1.0, None)
        assert warm.iteration - cool.iteration >= defaults().cool_steps
        assert run.policy.lr_scale == 1.0

    def test_a_cooling_that_failed_is_not_counted_on(self) -> None:
        run = Run()
        (cool,) = self.restore_often(run)
        assert run.fail(cool) is None
        assert run.policy.lr_scale == 1.0

    def test_no_warming_up_while_something_is_watched(self) -> None:
        run = Run()
        (cool,) = self.restore_often(run)
        run.policy.on_outcome(outcome(cool, step=run.step))
        run.calm(defaults().cool_steps - 20)
        assert kind_of(run.take(F.loss_spike, loss=3.5)) is K.watch
        assert [run.take(loss=3.5) for _ in range(100)] == [None] * 100

    def test_a_refused_batch_is_no_habit_of_its_source(self) -> None:
        run = Run()
        run.take(sources={"web": 3.0, "code": 1.0})
        before = run.policy.policy_state.suspects.state()["habits"]
        run.take(refused=True, sources={"web": 3.0, "code": 90.0})
        assert run.policy.policy_state.suspects.state()["habits"] == before

    def test_batches_of_one_source_turn_it_off(self) -> None:
        run = Run()
        for _ in range(50):
            run.take(sources={"web": 3.0, "code": 1.0})
        last = None
        for _ in range(defaults().swap_after):
            run.calm(10)
            skip = run.take(loss=math.nan, refused=True, sources={"web": 3.0, "code": math.nan})
            assert skip is not None
            assert skip.kind is K.skip
            last = run.policy.on_outcome(outcome(skip, step=run.step))
        assert last is not None
        assert (last.kind, last.source) == (K.swap, "code")

    def test_the_only_source_is_never_turned_off(self) -> None:
        run = Run()
        for _ in range(50):
            run.take(sources={"web": 3.0})
        for _ in range(5):
            run.calm(10)
            skip = run.take(loss=math.nan, refused=True, sources={"web": math.nan})
            assert skip is not None
            assert run.policy.on_outcome(outcome(skip, step=run.step)) is None

    def test_a_collapsed_loss_scale(self) -> None:
        run = Run()
        run.calm(150)
        action = run.take(F.scale_collapse)
        assert action is not None
        assert action.exclude == [], "no batch is to blame"
        assert kind_of(run.go_back(action, steps=120)) is K.cool

    def test_the_last_source_that_a_phase_left_is_never_turned_off(self) -> None:
        run = Run()
        for _ in range(60):
            run.take(sources={"web": 3.0, "code": 1.0})
        for _ in range(60):
            run.take(sources={"web": 3.0})  # a phase switched code off
        for _ in range(5):
            run.calm(10)
            skip = run.take(loss=math.nan, refused=True, sources={"web": math.nan})
            assert skip is not None
            assert run.policy.on_outcome(outcome(skip, step=run.step)) is None
