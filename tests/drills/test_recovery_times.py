"""Tests of recovery times: what happens from one strike to the next belongs to the first."""

from __future__ import annotations

from dataclasses import replace

from harness.core.events import (
    CheckpointFailed,
    CheckpointJudged,
    EndCause,
    Event,
    FaultInjected,
    RunEnded,
    RunRestarted,
)
from harness.drills.drill_record import DrillEvidence, Start
from harness.drills.recovery_times import list_recoveries
from tests.drills import logs


def strike(time: float, *, number: int, iteration: int) -> FaultInjected:
    return replace(logs.strike(iteration, number=number), time=time)


def test_each_fault_of_a_long_run_has_its_own_times() -> None:
    """A hang, a disk that is full for two iterations, and a killed launcher."""
    hang = RunRestarted(time=32.0, iteration=11, step=11, number=1, reason="rank 1 hung", cause=str(EndCause.hung_rank))
    unsaved = CheckpointFailed(time=51.0, iteration=14, step=11, reason="No space left on device")
    damaged = CheckpointJudged(time=70.0, iteration=16, directory="step-00000012-gen-0", health="damaged", reason="sha")
    events: list[Event] = [
        logs.started(),
        *logs.steps(1, 11),  # to 22 s
        hang,
        logs.started(11, 8, time=35.0),
        *(logs.step(at, at - 3, time=time) for at, time in [(12, 36.0), (13, 38.0), (14, 50.0)]),
        unsaved,
        *(logs.step(at, at - 3, time=time) for at, time in [(15, 52.0), (16, 54.0)]),
        damaged,
        logs.started(16, 10, time=70.0),
        *(logs.step(at, at - 6, time=2.0 * at + 40) for at in range(17, 27)),
        logs.ended(26),
    ]
    victim = DrillEvidence(
        events=events,
        faults=[
            strike(23.0, number=0, iteration=12),
            strike(49.0, number=1, iteration=14),
            strike(51.5, number=1, iteration=15),
            strike(55.0, number=2, iteration=17),
        ],
        starts=[Start(exit_code=-9, ended=57.0), Start(exit_code=0, ended=100.0)],
    )
    hung, full, killed = list_recoveries(victim)
    assert (hung.notice_s, hung.restart_s, hung.first_update_s) == (9.0, 3.0, 13.0)
    assert (hung.steps_lost, hung.starts, hung.cause, hung.recovered) == (3, 1, "hung rank", True)
    assert (full.notice_s, full.restart_s, full.first_update_s) == (2.0, None, 1.0)
    assert (full.steps_lost, full.starts, full.cause) == (0, 0, "checkpoint not saved")
    assert (killed.notice_s, killed.restart_s, killed.first_update_s) == (2.0, 13.0, 19.0)
    assert (killed.steps_lost, killed.cause) == (3, "lost launcher, damaged checkpoint")


def test_a_start_that_the_launcher_gave_up_keeps_its_cause() -> None:
    """The launcher writes `run_ended` with the time of the last step, which is before the strike."""
    gave_up = RunEnded(time=22.0, iteration=11, step=11, exit_code=1, reason="died", cause=str(EndCause.killed_rank))
    events = [logs.started(), *logs.steps(1, 11), gave_up, logs.started(11, 10, time=40.0), *logs.steps(21, 30)]
    victim = DrillEvidence(
        events=events,
        faults=[strike(22.5, number=0, iteration=12)],
        starts=[Start(exit_code=1, ended=24.5)],
    )
    (killed,) = list_recoveries(victim)
    assert (killed.cause, killed.notice_s, killed.restart_s, killed.steps_lost) == ("killed rank", 2.0, 15.5, 1)


def test_a_run_that_never_continues_is_not_recovered() -> None:
    victim = DrillEvidence(
        events=[logs.started(), *logs.steps(1, 11), logs.started(11, 8, time=30.0), logs.step(12, 9, time=31.0)],
        faults=[strike(22.5, number=0, iteration=12)],
    )
    (lost,) = list_recoveries(victim)
    assert (lost.recovered, lost.first_update_s, lost.steps_lost) == (False, 8.5, 3)
    assert (lost.notice_s, lost.restart_s) == (None, None), "the record of the start has no time"
    assert list_recoveries(logs.clean()) == []
