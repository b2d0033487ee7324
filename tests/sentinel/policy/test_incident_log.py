"""The incident log reports what the policy and the detectors found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.core.events import Action, ActionKind, FindingKind, Incident, StepRecord
from harness.sentinel.policy.incident_log import IncidentLog
from harness.sentinel.policy.open_incident import OpenIncident
from harness.sentinel.policy.policy_state import PolicyState
from harness.sentinel.sentinel import Sentinel
from tests.analysis.postmortem.stories import healthy
from tests.composed import load
from tests.sentinel.policy_runs import defaults, finding, record


def report_incidents(records: list[StepRecord], *, last: bool = False) -> list[Incident]:
    """All incidents of a log, as a run reports them."""
    sentinel = Sentinel.start(load(["sentinel.policy.clean_steps=30"]).sentinel)
    found: list[Incident] = []
    for row in records:
        sentinel.process_record(row)
        found += sentinel.drain_events()
    return found + sentinel.drain_events(last=last)


def with_nan_gradient(num: int) -> list[StepRecord]:
    """The gradient of one rank is not finite in row 100, the update is rejected, and `num` rows follow."""
    facts: dict[str, Any] = {"group_grad_norms": {"embedding": 0.3, "head": float("nan")}, "nonfinite_ranks": [1]}
    row = replace(healthy(100), grad_norm=float("nan"), refused=True, step=99, **facts)
    after = [replace(healthy(at), step=at - 1) for at in range(101, 101 + num)]
    return [*(healthy(at) for at in range(100)), row, *after]


def test_a_closed_incident_names_ranks_groups_batches_and_actions() -> None:
    (incident,) = report_incidents(with_nan_gradient(60))
    assert (incident.number, incident.verdict, incident.is_open) == (1, "cured", False)
    assert (incident.onset, incident.last) == (100, 100)
    assert incident.kinds == ["refusal", "nonfinite"]
    assert (incident.ranks, incident.groups, incident.cursors) == ([1], ["head"], [100])
    assert incident.actions == ["skip"]
    assert incident.iteration > 120


def test_an_open_incident_is_reported_only_at_the_end_of_the_run() -> None:
    assert report_incidents(with_nan_gradient(10)) == []
    (incident,) = report_incidents(with_nan_gradient(10), last=True)
    assert (incident.is_open, incident.verdict, incident.actions) == (True, "open", ["skip"])


def test_a_clean_run_has_no_incident() -> None:
    assert report_incidents([healthy(at) for at in range(200)], last=True) == []


def log_of(*incidents: OpenIncident) -> tuple[IncidentLog, PolicyState]:
    """A log that has seen one rejected update at iteration 100 while these incidents are open."""
    state, log = PolicyState.new(defaults()), IncidentLog()
    state.incidents.opened = list(incidents)
    log.on_record(record(100, refused=True), [], state)
    return log, state


def open_at(step: int, *, number: int = 1, **facts: Any) -> OpenIncident:
    return OpenIncident(number=number, onset=step, onset_step=step, end_step=step, **facts)


def test_a_rejected_update_prolongs_its_incident_without_a_finding() -> None:
    log, state = log_of(open_at(101))
    log.on_record(record(101, refused=True), [], state)
    assert (log.entries[1].last, log.entries[1].last_step) == (101, 101)


def test_a_clean_step_does_not_prolong_an_incident_even_below_its_last_step() -> None:
    log, state = log_of(open_at(100))
    log.on_record(record(102, step=98), [], state)
    assert log.entries[1].last == 100


def test_a_finding_belongs_to_the_incident_at_its_step_and_else_to_the_newest() -> None:
    log, state = log_of(open_at(300), open_at(100, number=2))
    row = record(250)
    log.on_record(row, [replace(finding(FindingKind.loss_spike, row), ranks=[3])], state)
    assert (log.entries[1].ranks, log.entries[2].ranks) == ([3], []), "only the first incident reaches step 250"
    row = record(400)
    log.on_record(row, [replace(finding(FindingKind.slow, row), ranks=[5])], state)
    assert (log.entries[1].ranks, log.entries[2].ranks) == ([3], [5]), "no incident reaches step 400"


@pytest.mark.parametrize(
    ("facts", "last"),
    [({}, 140), ({"lr_scale": 0.5}, 140), ({"lr_scale": 1.0}, 100), ({"in_fp8": True}, 100), ({"in_fp8": False}, 140)],
)
def test_an_action_prolongs_its_incident_unless_it_undoes_a_cure(facts: dict[str, Any], last: int) -> None:
    log, _ = log_of(open_at(100))
    given: dict[str, Any] = {"step": 140, "incident": 1, "reason": "", "onset": 140}
    log.on_action(Action(time=0.0, iteration=140, kind=ActionKind.cool, **given, **facts))
    assert (log.entries[1].last, log.entries[1].actions) == (last, ["cool"])


def test_an_open_incident_has_the_type_of_its_trajectory_so_far() -> None:
    incident = open_at(100, type_so_far=2)
    log, _ = log_of(incident)
    (drained,) = log.drain([incident])
    assert (drained.spike_type, drained.is_open) == (2, True)
    assert drained.time > 0.0
