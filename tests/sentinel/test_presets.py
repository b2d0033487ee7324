"""The presets of `conf/sentinel`: `observe` only logs, `strict` has tighter bounds than `default`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest

from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.config.sentinel import AllowedActions, SentinelConfig
from harness.core.events import Action, ActionKind, Finding, FindingKind
from harness.sentinel.policy.policy import replay_actions
from tests import composed
from tests.sentinel.plant import Plant

ONSET, NUM_STEPS = 300, 800


@cache
def config(preset: str) -> Config:
    return composed.load([f"sentinel={preset}"])


def spike(batch: int) -> float:
    return 8.0 if ONSET <= batch < ONSET + 3 else 1.0


def lasting_rise(batch: int) -> float:
    return 1.5 if batch >= ONSET else 1.0


def divergence(batch: int) -> float:
    return 1.0 + 0.01 * max(batch - ONSET, 0)


def findings(plant: Plant) -> set[FindingKind]:
    return {event.kind for event in plant.log if isinstance(event, Finding)}


CURVES = [
    (spike, FindingKind.loss_spike),
    (lasting_rise, FindingKind.loss_spike),
    (divergence, FindingKind.divergence),
]


@pytest.mark.parametrize(("hardness", "kind"), CURVES, ids=["spike", "lasting rise", "divergence"])
def test_observe_applies_every_finite_update_and_takes_no_action(
    hardness: Callable[[int], float], kind: FindingKind
) -> None:
    """Gradients rise with the loss, and the weights are damaged too: the default preset acts on each of these runs."""
    plants = {}
    for preset in ("default", "observe"):
        plants[preset] = Plant(
            config(preset),
            hardness=hardness,
            norm_factor=lambda batch: 50.0 * hardness(batch) if hardness(batch) > 1 else 1.0,
            damaged_at=ONSET + 10,
            damage_factor=1.3,
        )
        plants[preset].train(NUM_STEPS)
    assert set(plants["default"].actions()) - {ActionKind.watch}
    observed = plants["observe"]
    assert set(observed.actions()) <= {ActionKind.watch}, "watch changes nothing"
    assert kind in findings(observed)
    assert observed.consumed == list(range(NUM_STEPS)), "every batch was trained on, once, in order"
    assert not observed.is_halted
    assert replay_actions(observed.log, observed.cfg.sentinel.policy, lag=1) == [
        event for event in observed.log if isinstance(event, Action)
    ]


def test_observe_closes_an_incident_whose_loss_stays_high() -> None:
    plant = Plant(config("observe"), hardness=lasting_rise, norm_factor=lambda batch: 50.0 if batch >= ONSET else 1.0)
    plant.train(NUM_STEPS)
    incidents = plant.sentinel.drain_events()
    assert incidents
    assert {incident.verdict for incident in incidents} <= {"stuck", "lingering", "harmless", "accepted"}
    assert {action for incident in incidents for action in incident.actions} == {ActionKind.watch}
    assert plant.sentinel.policy.doubtful_since is None, "later checkpoints can become good"


@pytest.mark.parametrize("num_bad", [1, 5])
def test_observe_rejects_nonfinite_updates_and_skips_their_batches(num_bad: int) -> None:
    """Also where so many in a row would lead to a rewind with the default preset."""
    bad = range(ONSET, ONSET + num_bad)
    plant = Plant(config("observe"), norm_factor=lambda batch: math.nan if batch in bad else 1.0)
    plant.train(NUM_STEPS)
    assert plant.actions() == {ActionKind.skip: num_bad}
    assert FindingKind.nonfinite in findings(plant)
    assert not set(bad) & set(plant.consumed)
    assert all(plant.ledger.is_excluded(batch) for batch in bad)
    assert not plant.is_halted


def test_observe_excludes_more_batches_than_the_skip_budget_allows() -> None:
    """The next action would be a rollback, and a rejected batch that is not in the ledger is read again by a resume."""
    cfg = composed.load(["sentinel=observe", "sentinel.policy.budgets.skip.per_window=2"])
    plant = Plant(cfg, norm_factor=lambda batch: math.nan if ONSET <= batch < ONSET + 5 else 1.0)
    plant.train(NUM_STEPS)
    assert plant.actions() == {ActionKind.skip: 5}
    assert all(plant.ledger.is_excluded(batch) for batch in range(ONSET, ONSET + 5))


def test_the_default_preset_allows_all_actions() -> None:
    assert config("default").sentinel.policy.actions is AllowedActions.all
    assert composed.load().sentinel == config("default").sentinel


def test_an_unknown_value_of_actions_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"sentinel\.policy\.actions: must be one of all, nonfinite_only, got 'none'"):
        composed.load(["sentinel.policy.actions=none"])


def leaves(cfg: SentinelConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def add(prefix: str, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                add(f"{prefix}{key}.", value)
            else:
                flat[prefix + key] = value

    add("", asdict(cfg))
    return flat


def test_strict_lowers_bounds_and_changes_nothing_else() -> None:
    default, strict = leaves(config("default").sentinel), leaves(config("strict").sentinel)
    changed = {key for key, value in strict.items() if value != default[key]}
    assert {"detect.gate_sigmas", "detect.spike_sigmas", "policy.held_out_tolerance"} <= changed
    assert all(strict[key] < default[key] for key in changed)


@pytest.mark.parametrize(("preset", "is_rejected"), [("default", False), ("strict", True), ("observe", False)])
def test_strict_rejects_a_spike_that_the_default_applies(preset: str, is_rejected: bool) -> None:
    plant = Plant(config(preset), norm_factor=lambda batch: 18.0 if batch == ONSET else 1.0)
    plant.train(ONSET + 50)
    assert (ONSET not in plant.consumed) is is_rejected
