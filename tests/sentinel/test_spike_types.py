"""Tests of what detectors, policy and `harness judge` say of whole loss curves: recovering, lingering and divergent.

The recovering curve is the textbook one: from 2.1 to 4.5 in 20 steps, and back over the next 500.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from harness.analysis.judge.incident_groups import IncidentGroup, IncidentGrouper
from harness.core.events import ActionKind, FindingKind
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.policy.open_incident import ClosedIncident, IncidentVerdict
from harness.sentinel.policy.policy import Policy
from tests import composed
from tests.sentinel.policy_runs import record

LEVEL, PEAK, NUM_CLEAN, NUM_RISING, NUM_BACK = 2.1, 4.5, 400, 20, 500
HEIGHT = PEAK - LEVEL
RESTORES = (ActionKind.rewind, ActionKind.rollback)


def decay(since_peak: int) -> float:
    return LEVEL + HEIGHT * math.exp(-5 * since_peak / NUM_BACK)


def descend(since_peak: int) -> float:
    return max(LEVEL, PEAK - HEIGHT * since_peak / NUM_BACK)


def linger(since_peak: int) -> float:
    """Falls to a level of 3 and stays there."""
    return 3.0 + (PEAK - 3.0) * math.exp(-since_peak / 100)


def diverge(since_peak: int) -> float:
    return PEAK + 0.01 * since_peak


@dataclass(slots=True)
class Watched:
    """What was said of one curve. Steps are counted from the first high loss."""

    actions: list[tuple[ActionKind, int]] = field(default_factory=list)
    closed: list[ClosedIncident] = field(default_factory=list)
    open_types: list[int | None] = field(default_factory=list)
    findings: set[FindingKind] = field(default_factory=set)
    groups: list[IncidentGroup] = field(default_factory=list)


def watch(curve: Callable[[int], float], *, seed: int, noise: float, num_rows: int = 1200) -> Watched:
    """Feed a curve to the detectors, the policy (up to its first restore) and the grouping of `harness judge`."""
    cfg, random, said = composed.load().sentinel, Random(seed), Watched()
    detectors, policy, grouper = Detectors(cfg.detect), Policy.start(cfg.policy, lag=1), IncidentGrouper(cfg.detect)
    is_restored = False
    for place in range(num_rows):
        high = place - NUM_CLEAN
        rising = LEVEL + HEIGHT * (high + 1) / NUM_RISING
        loss = LEVEL if high < 0 else rising if high < NUM_RISING else curve(high - NUM_RISING + 1)
        row = record(place + 1, loss=loss + random.gauss(0.0, noise))
        row.grad_norm = math.exp(random.gauss(0.0, 0.1)) * (3.0 if 0 <= high < 2 * NUM_RISING else 1.0)
        findings = detectors.observe(row)
        said.findings |= {finding.kind for finding in findings}
        said.groups += grouper.observe(row, findings)
        if is_restored:
            continue
        action = policy.decide(row, findings)
        said.closed += policy.closed
        if action is not None:
            said.actions.append((action.kind, high))
            is_restored = action.kind in RESTORES
    said.groups += grouper.finish()
    said.open_types = [incident.spike_type for incident in policy.policy_state.open_incidents]
    return said


@pytest.mark.parametrize("curve", [decay, descend])
@pytest.mark.parametrize("noise", [0.01, 0.02, 0.05])
@pytest.mark.parametrize("seed", range(3))
def test_a_spike_that_recovers_over_500_steps_is_watched_and_left_alone(
    curve: Callable[[int], float], seed: int, noise: float
) -> None:
    said = watch(curve, seed=seed, noise=noise)
    assert [kind for kind, _ in said.actions] == [ActionKind.watch]
    assert said.closed == [ClosedIncident(1, IncidentVerdict.recovered, 1)]
    assert FindingKind.divergence not in said.findings
    (group,) = said.groups
    assert group.spike_type == 1
    assert group.end_step is not None
    assert 350 <= group.end_step - NUM_CLEAN <= 750
    assert group.base_loss == pytest.approx(LEVEL, abs=noise)


@pytest.mark.parametrize("seed", range(3))
def test_a_spike_that_stays_above_its_level_is_lingering(seed: int) -> None:
    said = watch(linger, seed=seed, noise=0.02)
    assert [kind for kind, _ in said.actions] == [ActionKind.watch, ActionKind.rollback]
    assert said.open_types == [2]
    assert [group.spike_type for group in said.groups] == [2]


@pytest.mark.parametrize("seed", range(3))
def test_a_spike_that_keeps_rising_is_divergent_and_rewound_soon(seed: int) -> None:
    said = watch(diverge, seed=seed, noise=0.02)
    (_, watched), (kind, rewound) = said.actions
    assert kind is ActionKind.rewind
    assert rewound - watched <= composed.load().sentinel.policy.patience_iterations + 10
    assert said.open_types == [3]
    assert {group.spike_type for group in said.groups} == {3}
