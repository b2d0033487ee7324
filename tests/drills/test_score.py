"""Tests of the measurements of a drill and of its bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.events import ActionKind, CheckpointJudged, Event, FindingKind, Outcome, RunRestarted, StepRecord
from harness.drills.drill_record import DrillEvidence
from harness.drills.scenario import Bounds, Expected
from harness.drills.score import RESTART_TIMES, BoundStatus, Card, check_bounds, detect, format_value, is_right, score
from tests.drills import logs

SKIP, REWIND, HALT = ActionKind.skip, ActionKind.rewind, ActionKind.halt


def bound_statuses(
    expected: Expected, bounds: Bounds, victim: DrillEvidence, twin: DrillEvidence | None
) -> dict[str, BoundStatus]:
    scenario = logs.scenario(expected, bounds)
    return {bound.name: bound.verdict for bound in check_bounds(scenario, score(scenario, victim, twin))}


def rejected_update(*findings: object, actions: tuple[ActionKind, ...] = (SKIP,), lost: int = 1) -> DrillEvidence:
    """A run whose update of iteration 12 was rejected."""
    events = [logs.started(), *logs.steps(1, 11), logs.step(12, 11, refused=True), *logs.steps(13, 21, behind=lost)]
    events += [*findings, *(logs.action(12, kind) for kind in actions)]  # type: ignore[list-item]
    return DrillEvidence(
        events=[*events, logs.held_out(4.02, 21), logs.ended(21)], faults=[logs.strike(12)], schedule=logs.HUNDRED
    )


def test_a_rejected_update_is_scored() -> None:
    found = logs.finding(13, ranks=[1], groups=["blocks.1"])
    expected = Expected(findings=[FindingKind.nonfinite], names_rank=True, groups=["blocks.1"], actions=[SKIP])
    bounds = Bounds(latency_steps=1, steps_lost=1, seconds=0, loss_gap=0.05)
    scenario = logs.scenario(expected, bounds)
    measured = score(scenario, rejected_update(found), logs.clean())
    assert (measured.detected, measured.latency_steps, measured.right_rank, measured.right_layer) == (
        True,
        1,
        True,
        True,
    )
    assert (measured.steps_lost, measured.tokens_lost, measured.seconds) == (1, 100, 0)
    assert measured.loss_gap == pytest.approx(0.02)
    assert (measured.identical, measured.false_alarms, measured.starts) == (False, 0, 1)
    card = Card(scenario="x", summary="", score=measured, bounds=check_bounds(scenario, measured))
    assert card.passed
    assert card.as_event(time=1.0, iteration=21).scores["loss_gap"] == pytest.approx(0.02)
    assert "remarks" not in card.as_event(time=1.0, iteration=21).scores


def test_a_run_that_is_continued_with_more_steps_must_do_them() -> None:
    first, second = replace(logs.started(), num_steps=10), logs.started(10, 10)
    whole = DrillEvidence(
        events=[first, *logs.steps(1, 10), logs.ended(10, 10), second, *logs.steps(11, 20), logs.ended()]
    )
    half = DrillEvidence(events=[first, *logs.steps(1, 10), second, logs.ended(10, 10)])
    scenario = logs.scenario(Expected(), Bounds())
    assert score(scenario, whole, logs.clean()).survived
    assert not score(scenario, half, logs.clean()).survived


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"ranks": [0]}, "right_rank"),
        ({"ranks": [0, 1]}, "right_rank"),
        ({"ranks": []}, "right_rank"),
        ({"groups": ["blocks.0"]}, "right_layer"),
        ({"groups": ["blocks.0", "blocks.1"]}, "right_layer"),
        ({"iteration": 15}, "latency_steps"),
        ({"iteration": 11}, "detected"),
        ({"kind": FindingKind.slow}, "detected"),
    ],
)
def test_each_error_breaks_its_own_bound(changes: dict[str, object], broken: str) -> None:
    values = {"iteration": 12, "ranks": [1], "groups": ["blocks.1"]} | changes
    expected = Expected(findings=[FindingKind.nonfinite], names_rank=True, groups=["blocks.1"], actions=[SKIP])
    found = logs.finding(**values)  # type: ignore[arg-type]
    statuses = bound_statuses(expected, Bounds(latency_steps=2), rejected_update(found), logs.clean())
    assert statuses[broken] is BoundStatus.broken
    others = {"survived", "starts", "exit_code", "struck", "right_action", "false_alarms"}
    assert all(statuses[name] is BoundStatus.held for name in others)


def test_a_killed_run_is_scored_by_its_launcher_output() -> None:
    expected = Expected(notices=["rank {rank} was killed by SIGKILL", "resumed from step-"], names_rank=True, starts=2)
    scenario = logs.scenario(expected, Bounds(steps_lost=3, seconds=10, identical=True))
    measured = score(scenario, logs.killed_and_resumed(), logs.clean())
    assert (measured.detected, measured.right_rank, measured.latency_steps) == (True, True, None)
    assert (measured.steps_lost, measured.seconds, measured.starts, measured.identical) == (3, 2.0, 2, True)
    assert all(bound.verdict in (BoundStatus.held, BoundStatus.free) for bound in check_bounds(scenario, measured))
    wrong = logs.scenario(expected)
    victim = logs.killed_and_resumed()
    victim.faults[0].rank = 0
    assert score(wrong, victim, logs.clean()).right_rank is False


def test_times_of_a_restart_inside_the_job() -> None:
    """Strikes at 21 and 61 s; the second restart is slower in everything but the notice."""
    events: list[Event] = [logs.started()]
    for number, (noticed, resumed, update) in enumerate([(24.0, 26.0, 27.0), (62.0, 65.0, 70.0)], start=1):
        events += [
            RunRestarted(time=noticed, iteration=0, step=0, number=number, reason="killed"),
            logs.started(time=resumed),
            logs.step(number, time=update),
            logs.step(number, time=update + 1),
        ]
    strikes = [logs.strike(10), logs.strike(30)]
    strikes[0].time, strikes[1].time = 21.0, 61.0
    scenario = logs.scenario()
    measured = score(scenario, DrillEvidence(events=events, faults=strikes), None)
    assert (measured.notice_s, measured.restart_s, measured.first_update_s) == (3.0, 3.0, 9.0)
    rows = {bound.name: bound.measured for bound in check_bounds(scenario, measured)}
    assert [rows[name] for name in RESTART_TIMES] == [3.0, 3.0, 9.0]
    by_runner = [event for event in events if not isinstance(event, RunRestarted)]
    measured = score(scenario, DrillEvidence(events=by_runner, faults=strikes), None)
    assert (measured.notice_s, measured.restart_s, measured.first_update_s) == (None, None, 9.0)
    assert not set(RESTART_TIMES) & {
        bound.name for bound in check_bounds(scenario, score(scenario, logs.clean(), None))
    }


def test_events_before_a_start_do_not_shorten_the_recovery_time() -> None:
    victim = logs.killed_and_resumed()
    judged = CheckpointJudged(time=23.4, iteration=11, directory="step-10", health="damaged", reason="hash")
    place = next(place for place, event in enumerate(victim.events) if event.time == 23.5)
    victim.events.insert(place, judged)
    assert score(logs.scenario(), victim, logs.clean()).seconds == 2.0


def test_an_unmeasured_bound_does_not_pass() -> None:
    bounds = Bounds(loss_gap=1.0, identical=True, latency_steps=3)
    statuses = bound_statuses(Expected(), bounds, logs.clean(), None)
    assert statuses["struck"] is BoundStatus.broken
    assert {name for name, verdict in statuses.items() if verdict is BoundStatus.unmeasured} == {
        "loss_gap",
        "identical",
        "latency_steps",
        "false_alarms",
    }


def test_a_run_that_ends_early_or_with_nan_does_not_survive() -> None:
    short = DrillEvidence(events=[logs.started(), *logs.steps(1, 9), logs.ended(9, 9)], faults=[logs.strike(5)])
    assert not score(logs.scenario(), short, logs.clean()).survived
    silent = DrillEvidence(events=[logs.started(), *logs.steps(1, 9)], faults=[logs.strike(5)])
    assert score(logs.scenario(), silent, logs.clean()).exit_code is None
    halted = DrillEvidence(events=[logs.started(), *logs.steps(1, 9), logs.ended(9, 9, exit_code=3)])
    assert score(logs.scenario(Expected(exit_code=3)), halted, logs.clean()).survived
    sick = logs.clean()
    last = sick.events[-3]
    assert isinstance(last, StepRecord)
    last.loss = math.nan
    assert not score(logs.scenario(), sick, logs.clean()).survived


def test_slow_in_the_twin_is_a_remark_and_any_other_finding_a_false_alarm() -> None:
    twin = logs.clean()
    twin.events.insert(5, logs.finding(5, FindingKind.slow))
    measured = score(logs.scenario(), logs.clean(), twin)
    assert measured.false_alarms == 0
    assert measured.remarks == ["twin, iteration 5: slow, odd"]
    twin.events.insert(5, logs.finding(5, FindingKind.loss_spike))
    assert score(logs.scenario(), logs.clean(), twin).false_alarms == 1


@pytest.mark.parametrize(
    ("expected", "taken", "right"),
    [
        ([], [], True),
        ([], [SKIP], False),
        ([SKIP], [], False),
        ([SKIP, REWIND], [SKIP], True),
        ([SKIP, REWIND], [SKIP, REWIND, SKIP], True),
        ([SKIP, REWIND], [REWIND, SKIP], False),
        ([SKIP], [SKIP, HALT], False),
    ],
)
def test_actions_must_be_the_expected_ones(expected: list[ActionKind], taken: list[ActionKind], right: bool) -> None:
    assert is_right(expected, taken) is right


def test_actions_before_the_strike_are_ignored() -> None:
    found = logs.finding(12, ranks=[1])
    victim = rejected_update(found)
    victim.events.insert(3, logs.action(3, HALT))
    expected = Expected(findings=[FindingKind.nonfinite], actions=[SKIP])
    assert score(logs.scenario(expected), victim, logs.clean()).right_action


def test_each_fault_of_a_plan_is_detected_separately() -> None:
    victim = rejected_update(logs.finding(12, ranks=[1]))
    victim.faults.append(logs.strike(17, rank=0, number=1))
    expected = Expected(findings=[FindingKind.nonfinite])
    fault = logs.scenario().fault
    assert [detect(expected, fault, number, victim).found for number in (0, 1, 2)] == [True, False, None]


WARMUP = logs.schedule((0, 2), (5, 3), (12, 8), sequence_length=10)
"""A batch-size warm-up: batches of 20 tokens, from batch 5 on of 30, from batch 12 on of 80."""


@given(
    refused=st.lists(st.booleans(), min_size=1, max_size=40),
    restored_after=st.sets(st.integers(0, 40), max_size=4),
    saved=st.integers(1, 9),
    is_start=st.booleans(),
)
def test_lost_steps_and_tokens_match_a_step_by_step_count(
    refused: list[bool], restored_after: set[int], saved: int, is_start: bool
) -> None:
    events: list[Event] = [logs.started()]
    lost, num_starts, cursor = list[int](), 1, 0
    kept, at_save = list[int](), (list[int](), 0)
    for iteration, is_refused in enumerate(refused, start=1):
        (lost if is_refused else kept).append(cursor)
        events.append(logs.step(iteration, len(kept), cursor=cursor, refused=is_refused))
        cursor += 1
        if iteration % saved == 0:
            at_save = (list(kept), cursor)
        if iteration in restored_after:
            lost += kept[len(at_save[0]) :]
            kept, cursor = list(at_save[0]), at_save[1]
            num_starts += is_start
            events += [logs.started(iteration, len(kept))] if is_start else []
    events.append(logs.ended(len(refused), len(kept)))
    measured = score(logs.scenario(), DrillEvidence(events=events, schedule=WARMUP), None)
    tokens = sum(20 if batch < 5 else 30 if batch < 12 else 80 for batch in lost)
    assert (measured.steps_lost, measured.tokens_lost, measured.starts) == (len(lost), tokens, num_starts)


def test_lost_tokens_are_those_of_the_batches_concerned() -> None:
    """A skip and a rewind in the small batches of a warm-up. At the final batch size they would have lost 320 tokens,
    more than the run had consumed by then."""
    refused = logs.step(3, 2, cursor=2, refused=True)
    events = [logs.started(), *logs.steps(1, 2), refused, *logs.steps(4, 7, behind=1)]
    events += [logs.step(iteration, iteration - 4, cursor=iteration - 4) for iteration in range(8, 17)]
    victim = DrillEvidence(events=[*events, logs.ended(16, 12)], schedule=WARMUP)
    measured = score(logs.scenario(), victim, None)
    assert WARMUP.tokens_ahead(0, 7) == 5 * 20 + 2 * 30
    assert (measured.steps_lost, measured.tokens_lost) == (4, 20 + 20 + 2 * 30)


def test_steps_that_a_checkpoint_holds_and_the_log_does_not_are_not_subtracted() -> None:
    """Killed after the checkpoint of step 8, when the record of step 6 was the last one that had been logged."""
    events = [logs.started(), *logs.steps(1, 6), logs.started(6, 8), logs.step(9, 9, refused=False)]
    events += [logs.step(10, 9, refused=True), logs.step(11, 10, cursor=10), logs.ended(11, 10)]
    measured = score(logs.scenario(), DrillEvidence(events=events, schedule=logs.HUNDRED), None)
    assert (measured.steps_lost, measured.tokens_lost) == (1, 100)


def test_the_iterations_that_a_trial_drops_count() -> None:
    victim = rejected_update()
    trial = Outcome(
        time=0.0,
        iteration=15,
        kind=ActionKind.trial,
        incident=1,
        succeeded=True,
        step=14,
        steps_lost=8,
        tokens_lost=560,
    )
    victim.events.append(trial)
    measured = score(logs.scenario(), victim, None)
    assert (measured.steps_lost, measured.tokens_lost) == (9, 660)


def test_values_are_formatted() -> None:
    assert [format_value(value) for value in (None, True, False, 12345, 0.12345, 3.0)] == [
        "-",
        "yes",
        "no",
        "12,345",
        "0.123",
        "3",
    ]
