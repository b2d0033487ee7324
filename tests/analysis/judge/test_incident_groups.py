from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.analysis.judge.incident_groups import GRAVEST, IncidentGroup, IncidentGrouper, Severity
from harness.core.events import ABOUT_SPEED, Finding, FindingKind, StepRecord
from harness.sentinel.detect.detectors import Detectors
from tests.sentinel.series import config, losses, norms, record, records

CFG = config()


def group_incidents(rows: list[StepRecord]) -> list[IncidentGroup]:
    detectors, incidents = Detectors(CFG), IncidentGrouper(CFG)
    ended = [incident for row in rows for incident in incidents.observe(row, detectors.observe(row))]
    return ended + list(incidents.finish())


def with_hump(first: int, num: int, height: float, total: int = 2000) -> list[float]:
    values = losses(total)
    values[first : first + num] = [height * value for value in values[first : first + num]]
    return values


def test_healthy_run_has_no_incidents() -> None:
    assert group_incidents(records(losses(1500))) == []


def test_recovering_spike_is_type_1() -> None:
    (incident,) = group_incidents(records(with_hump(1000, 25, 1.3)))
    assert incident.kind is FindingKind.loss_spike
    assert incident.onset_step == 1000
    assert 1000 <= incident.detected_step <= 1002
    assert 1000 <= incident.peak_step < 1025
    assert incident.end_step == pytest.approx(1030, abs=8)
    assert (incident.spike_type, incident.severity) == (1, Severity.low)
    assert incident.base_loss == pytest.approx(3.0, rel=0.02)
    assert incident.peak_loss == pytest.approx(3.9, rel=0.04)


def test_slowly_recovering_spike_is_type_1() -> None:
    values = losses(2000)
    for place in range(300):
        values[1000 + place] *= 1 + 0.4 * math.exp(-place / 60)
    (incident,) = group_incidents(records(values))
    assert (incident.kind, incident.spike_type, incident.severity) == (FindingKind.loss_spike, 1, Severity.low)
    assert incident.end_step is not None
    assert 1100 < incident.end_step < 1400


def test_spike_that_falls_and_stays_above_its_level_is_type_2() -> None:
    values = losses(2000)
    for place in range(1000):
        values[1000 + place] *= 1.1 + 0.3 * math.exp(-place / 60)
    (incident,) = group_incidents(records(values))
    assert (incident.kind, incident.spike_type, incident.severity) == (FindingKind.loss_spike, 2, Severity.medium)
    assert incident.end_step is None


def test_loss_that_never_recovers_is_type_3() -> None:
    (incident,) = group_incidents(records(with_hump(1000, 1000, 2.5)))
    assert incident.kind is FindingKind.divergence
    assert (incident.spike_type, incident.severity, incident.end_step) == (3, Severity.high, None)
    assert incident.kinds == [FindingKind.loss_spike, FindingKind.divergence]
    assert (incident.onset_step, incident.detected_step) == (1000, 1000)


def test_nan_is_type_3_and_less_severe_if_the_loss_recovers() -> None:
    values, grad_norms = losses(600), norms(600)
    (incident,) = group_incidents(records(values[:300] + [math.nan] * 300, grad_norms))
    assert (incident.kind, incident.onset_step, incident.end_step) == (FindingKind.nonfinite, 300, None)
    assert (incident.spike_type, incident.severity) == (3, Severity.high)
    rows = records(values, grad_norms)
    rows[300] = record(300, math.nan, math.nan, refused=True, nonfinite_ranks=[2])
    (incident,) = group_incidents(rows)
    assert (incident.spike_type, incident.severity, incident.ranks) == (3, Severity.medium, [2])


def test_second_spike_is_a_new_incident_before_the_first_recovers() -> None:
    values = with_hump(1000, 40, 1.4)
    values[1040:1300] = [1.05 * value for value in values[1040:1300]]
    values[1150:1180] = [1.4 * value for value in values[1150:1180]]
    found = group_incidents(records(values))
    assert [incident.onset_step for incident in found] == [1000, 1150]
    assert [incident.spike_type for incident in found] == [2, 1]
    assert found[0].end_step is None
    assert found[1].end_step == pytest.approx(1306, abs=8)


def test_findings_that_do_not_affect_the_loss_have_no_type() -> None:
    rows = records(losses(400))
    rows[200].mismatched_ranks = [1]
    (incident,) = group_incidents(rows)
    assert (incident.kind, incident.spike_type) == (FindingKind.replica_mismatch, None)
    assert incident.severity is Severity.high


def found(kind: FindingKind, row: StepRecord, *, back: int = 0) -> Finding:
    return Finding(
        time=0.0,
        iteration=row.iteration,
        kind=kind,
        step=row.step,
        onset=row.iteration - back,
        value=1.0,
        bound=0.0,
        message=str(kind),
    )


def follow(values: list[float], findings: dict[int, FindingKind], *, back: int = 0) -> list[IncidentGroup]:
    """Incidents of losses and of findings at some of their steps."""
    incidents, ended = IncidentGrouper(CFG), []
    for step, loss in enumerate(values):
        row = record(step, loss)
        ended += incidents.observe(row, [found(findings[step], row, back=back)] if step in findings else [])
    return ended + list(incidents.finish())


@pytest.mark.parametrize("num_high", [9, 300])
def test_a_spike_that_is_back_at_its_level_is_type_1_however_long_it_took(num_high: int) -> None:
    values = [3.0] * 100 + [4.0] + [3.5] * num_high + [1.0] + [3.0] * 30
    (incident,) = follow(values, {100: FindingKind.loss_spike})
    assert (incident.peak_step, incident.end_step, incident.spike_type) == (100, 101 + num_high, 1)
    assert (incident.base_loss, incident.peak_loss) == (3.0, 4.0)


def test_the_level_before_a_spike_is_that_before_its_onset_and_not_before_its_finding() -> None:
    values = [3.0] * 100 + [3.5] * 10 + [4.0] * 5
    (incident,) = follow(values, {110: FindingKind.loss_spike}, back=10)
    assert (incident.onset_step, incident.base_loss) == (100, 3.0)


def test_a_slow_rise_that_partly_falls_back_is_type_3() -> None:
    """Its onset is hundreds of rows before its finding."""
    rises = [min(0.003 * place, 0.8) if place < 300 else 0.4 for place in range(900)]
    values = [3.0 * (1 + rise) + 0.07 * math.sin(place) for place, rise in enumerate([0.0] * 400 + rises)]
    (incident,) = group_incidents(records(values, norms(len(values))))
    assert (incident.kind, incident.spike_type, incident.severity) == (FindingKind.divergence, 3, Severity.high)
    assert incident.onset_step == pytest.approx(400, abs=25)
    assert incident.detected_step > 500
    assert incident.base_loss == pytest.approx(3.0, rel=0.02)
    assert incident.end_step is None


@pytest.mark.parametrize("kind", [FindingKind.divergence, FindingKind.level_shift])
def test_a_slow_change_that_began_before_its_incident_sets_the_level(kind: FindingKind) -> None:
    incidents = IncidentGrouper(CFG)
    for step in range(200):
        row = record(step, 4.0 + 0.01 * (-1) ** step)
        incidents.observe(row, [found(FindingKind.grad_spike, row)] if step == 199 else [])
    row = record(200, 4.0)
    incidents.observe(row, [replace(found(kind, row, back=150), bound=3.0)])
    (incident,) = incidents.finish()
    assert (incident.onset_step, incident.detected_step, incident.base_loss) == (50, 199, 3.0)


@pytest.mark.parametrize(("low", "end"), [(4.0, None), (2.0, 82)])
def test_incident_is_closed_at_the_next_spike_and_ends_only_if_the_loss_had_recovered(
    low: float, end: int | None
) -> None:
    values = [3.0] * 50 + [4.0] * 30 + [low] * 10 + [4.0] * 60
    first, second = follow(values, {50: FindingKind.loss_spike, 90: FindingKind.loss_spike})
    assert (first.onset_step, first.end_step, second.onset_step, second.detected_step) == (50, end, 90, 90)


def test_the_search_for_the_loss_scale_is_no_incident_and_its_collapse_is_one() -> None:
    rows = records(losses(300), norms(300))
    for row in rows:
        row.loss_scale = 1024.0
    for row, scale in zip(rows[:4], (2.0**16, 2.0**15, 2.0**14, 2.0**13), strict=False):
        row.grad_norm, row.refused, row.loss_scale = math.inf, True, scale
    assert group_incidents(rows) == []
    for row, scale in zip(rows[200:212], (2.0**power for power in range(2, -10, -1)), strict=True):
        row.grad_norm, row.refused, row.loss_scale = math.inf, True, scale
    (incident,) = group_incidents(rows)
    assert (incident.kind, incident.severity) == (FindingKind.scale_collapse, Severity.high)


def test_rejected_updates_are_one_incident_with_their_highest_loss() -> None:
    """Their detector is not re-armed in between. All have the same step, and a restore lowers it."""
    rows = records(losses(300), norms(300))
    for row, factor in zip(rows[200:212], (1.0, 2.0, 3.0, *[2.5] * 9), strict=True):
        row.step, row.loss, row.refused = 200, factor * row.loss, factor > 1
    for row in rows:
        row.lr = 0.05 if row.iteration == 200 else 0.001
    for row in rows[212:]:
        row.step -= 22
    (incident,) = group_incidents(rows)
    assert incident.kinds == [FindingKind.lr_jump, FindingKind.loss_spike]
    assert (incident.onset_step, incident.detected_step, incident.peak_step, incident.end_step) == (200, 200, 200, 200)
    assert incident.peak_loss == rows[202].loss
    assert (incident.spike_type, incident.severity) == (1, Severity.low)


def test_spike_of_an_applied_update_joins_the_rejected_ones_before_it() -> None:
    rows = records(with_hump(200, 40, 2.0, total=400), norms(400))
    for row in rows[200:205]:
        row.refused = True
    (incident,) = group_incidents(rows)
    assert (incident.onset_step, incident.spike_type) == (200, 1)
    assert incident.num_findings > 5


@pytest.mark.parametrize(("step", "back", "onset"), [(0, 0, 0), (5, 3, 2), (5, 9, 0)])
def test_onset_is_converted_to_steps(step: int, back: int, onset: int) -> None:
    (incident,) = follow([3.0] * 40, {step: FindingKind.grad_spike}, back=back)
    assert (incident.onset_step, incident.detected_step) == (onset, step)


def test_the_usual_loss_falls_faster_than_it_rises() -> None:
    incidents = IncidentGrouper(CFG)
    incidents.observe(record(0, 2.0), [])
    incidents.observe(record(1, 3.0), [])
    assert [incidents.mean, incidents.deviation] == pytest.approx([2.0 + 1 / 32, 0.01])
    before = incidents.mean
    incidents.observe(record(2, 1.0), [])
    assert incidents.mean == pytest.approx(before + (1.0 - before) / 8)


def test_incident_before_any_finite_loss_ends_with_the_first_rows() -> None:
    (incident,) = follow([math.nan, *[3.0] * 20], {0: FindingKind.nonfinite})
    assert (incident.end_step, incident.spike_type) == (1, 3)
    assert math.isnan(incident.base_loss)


def test_incident_has_the_gravest_kind_and_all_ranks() -> None:
    incidents, row = IncidentGrouper(CFG), record(0, 3.0)
    kinds = (FindingKind.grad_spike, FindingKind.divergence, FindingKind.level_shift, FindingKind.grad_spike)
    findings = [found(kind, row) for kind in kinds]
    findings[0].ranks, findings[1].ranks = [3, 1], [1, 2]
    incidents.observe(row, findings)
    (incident,) = incidents.finish()
    assert (incident.kind, incident.message, incident.num_findings) == (FindingKind.divergence, "divergence", 4)
    assert (incident.kinds, incident.ranks) == ([*kinds[:3]], [1, 2, 3])


def test_findings_about_speed_are_no_incidents_and_no_part_of_one() -> None:
    kinds = {20: FindingKind.slow, 22: FindingKind.lr_jump, 24: FindingKind.speed_recovered}
    (incident,) = follow([3.0] * 60, kinds)
    assert (incident.kind, incident.kinds, incident.num_findings) == (FindingKind.lr_jump, [FindingKind.lr_jump], 1)
    assert (incident.onset_step, incident.detected_step, incident.end_step) == (22, 22, 22)


def test_every_other_finding_has_a_gravity() -> None:
    assert sorted(GRAVEST) == sorted(set(FindingKind) - ABOUT_SPEED)


def test_incident_is_closed_after_twice_the_lingering_rows() -> None:
    incidents, ended = IncidentGrouper(CFG), []
    for step in range(600):
        row = record(step, 3.0 if step < 50 else 4.0)
        if incidents.observe(row, [found(FindingKind.loss_spike, row)] if step == 50 else []):
            ended.append(step)
    assert ended == [50 + 2 * CFG.lingering_rows]


def test_a_run_that_never_learned_is_severe() -> None:
    rows = records([5.6 + 0.05 * math.sin(row) for row in range(900)])
    for step, row in enumerate(rows):
        row.step, row.iteration, row.lr = step, step, 0.3
    (incident,) = group_incidents(rows)
    assert (incident.kind, incident.severity) == (FindingKind.never_learned, Severity.high)
    assert "learning rate (peak 0.3)" in incident.message
