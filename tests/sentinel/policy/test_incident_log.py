"""The incident log reports what the policy and the detectors found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.config.compose import load
from harness.core.events import Incident, StepRecord
from harness.sentinel.sentinel import Sentinel
from tests.analysis.postmortem.stories import healthy


def report_incidents(records: list[StepRecord], *, last: bool = False) -> list[Incident]:
    """All incidents of a log, as a run reports them."""
    sentinel = Sentinel.start(load(["sentinel.policy.clean_steps=30"]).sentinel)
    found: list[Incident] = []
    for record in records:
        sentinel.process_record(record)
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
