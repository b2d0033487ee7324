from __future__ import annotations

import math

import pytest

from harness.events import FindingKind, StepRecord
from harness.sentinel.detectors import Detectors
from harness.sentinel.incidents import Incident, Incidents, Severity
from tests.sentinel.series import config, losses, norms, record, records

CFG = config()


def tell(rows: list[StepRecord]) -> list[Incident]:
    detectors, incidents = Detectors(CFG), Incidents(CFG)
    ended = [incident for row in rows for incident in incidents.observe(row, detectors.observe(row))]
    return ended + list(incidents.finish())


def with_hump(first: int, num: int, height: float, total: int = 2000) -> list[float]:
    values = losses(total)
    values[first : first + num] = [height * value for value in values[first : first + num]]
    return values


def test_a_quiet_run_has_no_incidents() -> None:
    assert tell(records(losses(1500))) == []


def test_a_spike_that_recovers_is_of_type_1() -> None:
    (incident,) = tell(records(with_hump(1000, 25, 1.3)))
    assert incident.kind is FindingKind.loss_spike
    assert incident.onset_step == 1000
    assert 1000 <= incident.detected_step <= 1002
    assert 1000 <= incident.peak_step < 1025
    assert incident.end_step == pytest.approx(1027, abs=8)
    assert (incident.spike_type, incident.severity) == (1, Severity.low)
    assert incident.base_loss == pytest.approx(3.0, rel=0.02)
    assert incident.peak_loss == pytest.approx(3.9, rel=0.04)


def test_a_spike_that_lingers_is_of_type_2() -> None:
    values = losses(2000)
    for place in range(300):
        values[1000 + place] *= 1 + 0.4 * math.exp(-place / 60)
    (incident,) = tell(records(values))
    assert (incident.kind, incident.spike_type, incident.severity) == (FindingKind.loss_spike, 2, Severity.medium)
    assert incident.end_step is not None
    assert 1100 < incident.end_step < 1400


def test_a_loss_that_never_comes_back_is_of_type_3() -> None:
    (incident,) = tell(records(with_hump(1000, 1000, 2.5)))
    assert incident.kind is FindingKind.divergence
    assert (incident.spike_type, incident.severity, incident.end_step) == (3, Severity.high, None)
    assert incident.kinds == [FindingKind.loss_spike, FindingKind.divergence]
    assert (incident.onset_step, incident.detected_step) == (1000, 1000)


def test_nan_to_the_end_is_of_type_3_and_one_that_was_refused_is_not() -> None:
    values, grad_norms = losses(600), norms(600)
    (incident,) = tell(records(values[:300] + [math.nan] * 300, grad_norms))
    assert (incident.kind, incident.onset_step, incident.end_step) == (FindingKind.nonfinite, 300, None)
    assert (incident.spike_type, incident.severity) == (3, Severity.high)
    rows = records(values, grad_norms)
    rows[300] = record(300, math.nan, math.nan, refused=True, nonfinite_ranks=[2])
    (incident,) = tell(rows)
    assert (incident.spike_type, incident.severity, incident.ranks) == (1, Severity.medium, [2])


def test_two_spikes_are_two_incidents_also_when_the_first_has_not_ended() -> None:
    values = with_hump(1000, 40, 1.4)
    values[1040:1300] = [1.05 * value for value in values[1040:1300]]
    values[1150:1180] = [1.4 * value for value in values[1150:1180]]
    found = tell(records(values))
    assert [incident.onset_step for incident in found] == [1000, 1150]
    assert found[0].end_step is not None
    assert found[0].end_step < 1155


def test_findings_that_do_not_touch_the_loss_have_no_type() -> None:
    rows = records(losses(400))
    rows[200].mismatched_ranks = [1]
    (incident,) = tell(rows)
    assert (incident.kind, incident.spike_type) == (FindingKind.replica_mismatch, None)
    assert incident.severity is Severity.high
