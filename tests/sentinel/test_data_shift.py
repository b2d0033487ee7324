"""New data is not damage: the response to one loss curve depends on the held-out loss."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from harness.config.schema import Config
from harness.core.events import Action, ActionKind
from harness.sentinel.policy.policy import replay_actions
from tests import composed
from tests.sentinel.plant import Plant

SHIFT, RETURN, NUM_STEPS = 300, 340, 500
DRASTIC = {ActionKind.rewind, ActionKind.rollback, ActionKind.halt, ActionKind.cool, ActionKind.swap}


@cache
def config(*overrides: str) -> Config:
    return composed.load(overrides)


def planned() -> Config:
    return config("data=mixture", f"data.phases=[{{from_batch: {SHIFT}, weights: {{text: 2.0}}}}]")


def shifted(cfg: Config, factor: float, noise: float, *, lasting: bool) -> Plant:
    end = 10**9 if lasting else RETURN
    plant = Plant(cfg, hardness=lambda batch: factor if SHIFT <= batch < end else 1.0, noise=noise)
    plant.train(NUM_STEPS)
    return plant


@pytest.mark.full
@pytest.mark.parametrize("is_planned", [False, True], ids=["unplanned", "planned"])
@pytest.mark.parametrize("lasting", [True, False], ids=["lasting", "returning"])
@pytest.mark.parametrize("noise", [0.003, 0.01, 0.03])
@pytest.mark.parametrize("factor", [1.1, 1.22, 1.25, 1.6, 2.0])
def test_a_data_shift_costs_nothing(factor: float, noise: float, lasting: bool, is_planned: bool) -> None:
    """No halt, no restore, at most 3 batches skipped, and none of them for good."""
    plant = shifted(planned() if is_planned else config(), factor, noise, lasting=lasting)
    taken = plant.actions()
    assert DRASTIC.isdisjoint(taken), taken
    assert taken[ActionKind.skip] <= 3
    assert not any(plant.ledger.is_excluded(batch) for batch in range(NUM_STEPS)), "all were given back"
    assert sorted(plant.consumed) == list(range(NUM_STEPS)), "every batch was trained on, once"
    assert replay_actions(plant.log, plant.cfg.sentinel.policy, lag=1) == [
        e for e in plant.log if isinstance(e, Action)
    ]


@pytest.mark.parametrize("factor", [1.25, 1.6, 2.0])
def test_the_same_curve_from_damaged_weights_leads_to_a_restore(factor: float) -> None:
    """Both runs have the same training losses until the first action."""
    data = shifted(config(), factor, 0.01, lasting=True)
    damage = Plant(config(), damaged_at=SHIFT, damage_factor=factor, noise=0.01)
    damage.train(NUM_STEPS)
    checks = [
        next(e for e in plant.log if isinstance(e, Action) and e.kind == ActionKind.check) for plant in (data, damage)
    ]
    assert replace(checks[0], time=0) == replace(checks[1], time=0), "up to here both runs are equal"
    responses = [
        [e.kind for e in plant.log if isinstance(e, Action) and e.iteration >= checks[0].iteration][1]
        for plant in (data, damage)
    ]
    assert responses == [ActionKind.accept, ActionKind.rewind]
    assert damage.damage == 1.0
    assert not damage.is_halted


def test_damage_early_in_a_run_is_not_hidden_by_the_fast_descent() -> None:
    """At iteration 90 the last measurement is 40 steps old, and the damaged state is no worse than it was then."""
    plant = Plant(config(), damaged_at=90, damage_factor=1.3, noise=0.003, save_every=50)
    plant.train(200)
    (check,) = [event for event in plant.log if isinstance(event, Action) and event.kind is ActionKind.check]
    assert check.level is not None
    assert plant.actions()[ActionKind.rewind] >= 1
    assert plant.damage == 1.0


def test_easier_data_of_a_planned_phase_does_not_make_a_healthy_state_look_damaged() -> None:
    """The training loss halves in the phase, that of the held-out rows does not. Later the data gets harder again."""
    plant = Plant(
        planned(),
        hardness=lambda batch: 1.0 if batch < SHIFT else 0.5 if batch < SHIFT + 100 else 1.0,
        save_every=SHIFT - 10,
    )
    plant.train(SHIFT + 150)
    taken = plant.actions()
    assert DRASTIC.isdisjoint(taken), taken
    assert taken[ActionKind.accept] == 1, taken


def test_damage_after_a_planned_phase_of_easier_data_leads_to_a_restore() -> None:
    plant = Plant(
        planned(),
        hardness=lambda batch: 1.0 if batch < SHIFT else 0.5,
        damaged_at=SHIFT + 100,
        damage_factor=1.6,
        save_every=SHIFT - 10,
    )
    plant.train(SHIFT + 200)
    assert plant.actions()[ActionKind.rewind] == 1, plant.actions()
    assert plant.damage == 1.0


def test_without_a_check_a_data_shift_leads_to_a_restore() -> None:
    plant = shifted(config("sentinel.policy.budgets.check.per_run=0"), 1.6, 0.01, lasting=True)
    assert ActionKind.check not in plant.actions()
    assert not DRASTIC.isdisjoint(plant.actions())


def test_bad_batches_are_skipped_and_not_accepted() -> None:
    """If a healthy state rejects batches for their gradients, the batches are bad."""
    bad = range(SHIFT, SHIFT + 12)
    plant = Plant(
        config(),
        hardness=lambda batch: 2.3 if batch in bad else 1.0,
        norm_factor=lambda batch: 60.0 if batch in bad else 1.0,
    )
    plant.train(NUM_STEPS - len(bad))
    assert DRASTIC.isdisjoint(plant.actions()), "nothing is wrong with the state"
    assert ActionKind.accept not in plant.actions()
    assert [batch for batch in range(NUM_STEPS) if plant.ledger.is_excluded(batch)] == list(bad)


def test_a_second_shift_is_accepted_too() -> None:
    plant = Plant(config(), hardness=lambda batch: 1.0 if batch < 300 else 1.5 if batch < 450 else 2.2)
    plant.train(600)
    assert DRASTIC.isdisjoint(plant.actions())
    assert sorted(plant.consumed) == list(range(600))
    assert plant.sentinel.policy.policy_state.budgets.num_spent["skip"] == 0, "skips of accepted data are refunded"


@pytest.mark.parametrize("gap", [12, 20, 30])
def test_a_shift_soon_after_a_restore_is_accepted(gap: int) -> None:
    """The restore helped and the run passed the place; the later shift gets its own check."""
    after = SHIFT + gap
    plant = Plant(config(), damaged_at=SHIFT, damage_factor=1.6, hardness=lambda batch: 1.6 if batch >= after else 1.0)
    plant.train(NUM_STEPS)
    taken = [event.kind for event in plant.log if isinstance(event, Action)]
    assert taken.count(ActionKind.rewind) == 1, taken
    assert ActionKind.accept in taken[taken.index(ActionKind.rewind) :]
    assert {ActionKind.rollback, ActionKind.halt}.isdisjoint(taken)
    assert not any(plant.ledger.is_excluded(batch) for batch in range(after, NUM_STEPS)), "all were given back"


def test_damage_soon_after_a_restore_leads_to_a_second_restore() -> None:
    """The check finds the state damaged again: the ladder continues where it was."""
    plant = Plant(config(), damaged_at=SHIFT, damage_factor=1.6, damaged_again_at=SHIFT + 45)
    plant.train(NUM_STEPS)
    taken = [event.kind for event in plant.log if isinstance(event, Action)]
    restores = [kind for kind in taken if kind in (ActionKind.rewind, ActionKind.rollback)]
    assert len(restores) == 2, taken
    assert taken.count(ActionKind.check) >= 2
    assert ActionKind.accept not in taken
    assert plant.damage == 1.0
    assert not plant.is_halted


def test_the_policy_survives_a_restart_in_the_middle_of_a_check() -> None:
    plant = Plant(config(), hardness=lambda batch: 1.6 if batch >= SHIFT else 1.0)
    while ActionKind.check not in plant.actions():
        plant.train(plant.state.step + 1)
    state = plant.sentinel.policy.state()
    assert json.loads(json.dumps(state, allow_nan=False)) == state
