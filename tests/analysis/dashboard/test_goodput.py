"""Goodput: every second of wall time is in exactly one account."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analysis.dashboard.goodput import Account, Accounts, Goodput
from harness.analysis.dashboard.loss_causes import LossCause
from harness.core.events import (
    ActionKind,
    CheckpointJudged,
    CheckpointSaved,
    EndCause,
    EvalRecord,
    Event,
    Intervention,
    Outcome,
    RunEnded,
    RunRestarted,
    RunStarted,
    TrialMeasured,
)
from tests.analysis.dashboard.logs import record


def total(*lines: str | Event) -> Goodput:
    accounts = Accounts()
    for line in lines:
        if isinstance(line, str):
            accounts.add_step(json.loads(line))
        else:
            accounts.add(line)
    return accounts.total()


def started(time: float, *, step: int = 0) -> RunStarted:
    return RunStarted(time=time, iteration=step, world_size=2, num_steps=100, step=step)


def ended(time: float, step: int) -> RunEnded:
    return RunEnded(time=time, iteration=step, step=step, exit_code=0, reason="done")


def order(time: float, command: str) -> Intervention:
    return Intervention(time=time, iteration=0, who="ada", reason="", changes={"command": command})


def saved(time: float, blocked_s: float) -> CheckpointSaved:
    return CheckpointSaved(time=time, iteration=0, step=0, directory="d", seconds=1.0, blocked_s=blocked_s)


def accounts_of(goodput: Goodput) -> dict[str, float]:
    return {str(account): round(seconds, 9) for account, seconds in goodput.seconds.items() if seconds}


def test_a_restart_inside_the_job_is_stopped_time() -> None:
    """Two seconds until the failure was noticed, three until the ranks had resumed, one until their first step."""
    goodput = total(
        started(0.0),
        record(1, time=1.0),
        record(2, time=2.0),
        RunRestarted(time=4.0, iteration=2, step=2, number=1, reason="killed"),
        started(7.0, step=1),
        record(2, time=8.0),
    )
    assert accounts_of(goodput)["stopped"] == 5.0
    assert accounts_of(goodput)["starting"] == 2.0


def tried(time: float) -> TrialMeasured:
    return TrialMeasured(
        time=time,
        iteration=2,
        incident=1,
        remedy="unchanged",
        steps=2,
        num_refused=0,
        findings=[],
        held_out_before=3.0,
        held_out_loss=2.9,
        grad_norm_before=1.0,
        grad_norm=1.0,
        seconds=2.0,
    )


def test_a_trial_is_lost_time_without_the_steps_that_are_kept() -> None:
    """Two candidates take five seconds; one second of them was spent on the two steps that are kept."""
    outcome = Outcome(
        time=7.0, iteration=2, kind=ActionKind.trial, incident=1, succeeded=True, step=2, seconds=4.0, steps_lost=2
    )
    steps = [record(3, time=7.0), record(4, time=7.0)]
    goodput = total(
        started(0.0), record(1, time=1.0), record(2, time=2.0), tried(4.0), tried(6.0), outcome, *steps, ended(7.0, 4)
    )
    assert accounts_of(goodput) == {"starting": 1.0, "kept": 2.0, "trying": 4.0}
    lost = goodput.lost[LossCause.trial]
    assert (lost.seconds, lost.times, lost.steps) == (4.0, 1, 2)


def test_a_trial_that_is_killed_is_lost_time() -> None:
    goodput = total(started(0.0), record(1, time=1.0), record(2, time=2.0), tried(4.0), started(5.0, step=2))
    assert accounts_of(goodput)["trying"] == 2.0
    assert goodput.wall_s == 5.0


def test_accounts_of_a_healthy_run() -> None:
    goodput = total(
        started(0.0),
        record(1, time=3.0),
        record(2, time=4.0),
        saved(4.5, blocked_s=0.25),
        record(3, time=5.0),
        EvalRecord(time=7.0, iteration=3, step=3, loss=2.0, tokens=10),
        saved(7.4, blocked_s=0.1),
        ended(7.5, 3),
    )
    assert accounts_of(goodput) == {"starting": 3.0, "kept": 1.75, "evaluating": 2.0, "saving": 0.75}
    assert goodput.wall_s == 7.5
    assert goodput.of_time == pytest.approx(1.75 / 7.5)
    assert goodput.lost_to_recovery == pytest.approx(0.75 / 7.5)
    assert (goodput.num_kept, goodput.tokens_kept, goodput.tokens_consumed) == (3, 3072, 3072)


def test_refused_and_undone_steps_are_weighted_by_step_time() -> None:
    goodput = total(
        started(0.0),
        record(1, time=1.0),
        record(2, time=2.0),
        record(3, time=3.0, step=2, refused=True),
        record(4, time=5.0, step=3, step_time_s=1.0),
        Outcome(
            time=5.5,
            iteration=4,
            kind=ActionKind.rewind,
            incident=1,
            succeeded=True,
            step=2,
            seconds=0.4,
            tokens_lost=2048,
        ),
        record(5, time=6.5, step=3, tokens=3 * 1024),
        ended(6.5, 3),
    )
    # 5.1 s between steps, by their own clocks 0.5 (kept) : 0.5 (refused) : 1.0 (undone) : 0.5 (kept)
    assert accounts_of(goodput) == {"starting": 1.0, "restoring": 0.4, "kept": 2.04, "refused": 1.02, "undone": 2.04}
    assert (goodput.num_kept, goodput.num_refused, goodput.num_undone) == (3, 1, 1)
    assert goodput.tokens_consumed == 5 * 1024
    assert goodput.of_tokens == pytest.approx(3 / 5)


def test_crash_costs_unsaved_steps_and_downtime() -> None:
    goodput = total(
        started(0.0),
        *(record(index, time=float(index)) for index in range(1, 6)),
        started(20.0, step=2),
        record(6, time=22.0, step=3, tokens=3 * 1024),
        record(7, time=23.0, step=4, tokens=4 * 1024),
    )
    assert accounts_of(goodput) == {"starting": 3.0, "stopped": 15.0, "kept": 2.0, "undone": 3.0}
    assert (goodput.num_kept, goodput.num_undone) == (4, 3)


def test_machines_are_held_while_a_start_lives_and_over_its_restarts() -> None:
    """They are not between an end and the next start, nor after a start that is gone without a line."""
    restarted = RunRestarted(time=12.0, iteration=1, step=1, number=1, reason="killed")
    first: list[str | Event] = [
        started(0.0),
        record(1, time=10.0),
        restarted,
        started(15.0, step=1),
        record(2, time=20.0),
    ]
    stopped: list[str | Event] = [
        *first,
        ended(21.0, 2),
        replace(started(1000.0, step=2), world_size=8),
        record(3, time=1003.0),
    ]
    assert (total(*first).held_s, total(*first).rank_s) == (20.0, 2 * 20.0)
    assert (total(*stopped).held_s, total(*stopped).rank_s) == (24.0, 2 * 21.0 + 8 * 3.0)
    gone: list[str | Event] = [*first, started(1000.0, step=2), record(3, time=1003.0)]
    assert (total(*gone).held_s, total(*gone).wall_s) == (23.0, 1003.0)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_restore_takes_its_time_from_before_the_step_that_was_in_flight(is_first: bool) -> None:
    """The log has the step first, with a later time."""
    rewound = Outcome(time=4.9, iteration=4, kind=ActionKind.rewind, incident=1, succeeded=True, step=1, seconds=0.4)
    before: list[str | Event] = [] if is_first else [record(2, time=3.0), order(4.5, "note")]
    goodput = total(started(0.0), record(1, time=1.0), started(2.0, step=1), *before, record(3, time=5.0), rewound)
    expected = {"starting": 3.6} if is_first else {"starting": 2.0, "undone": 1.6}
    assert accounts_of(goodput) == {**expected, "stopped": 1.0, "restoring": 0.4}
    assert goodput.lost[LossCause.rollback].seconds == (0.4 if is_first else 0.4 + 1.6)
    assert goodput.wall_s == 5.0


def test_failed_restore_undoes_no_step() -> None:
    failed = Outcome(time=3.0, iteration=2, kind=ActionKind.rollback, incident=1, succeeded=False, step=2, seconds=0.5)
    goodput = total(started(0.0), record(1, time=1.0), record(2, time=2.0), failed)
    assert accounts_of(goodput) == {"starting": 1.0, "kept": 1.5, "restoring": 0.5}
    assert goodput.num_undone == 0


def test_pause_lasts_until_resume() -> None:
    refused = Intervention(time=9.5, iteration=0, who="a", reason="", changes={"command": "pause", "refused": "no"})
    goodput = total(
        started(0.0), record(1, time=1.0), order(2.0, "pause"), order(9.0, "resume"), refused, record(2, time=10.0)
    )
    assert accounts_of(goodput) == {"starting": 1.0, "paused": 7.0, "kept": 2.0}


def test_run_that_ends_while_paused_and_run_without_steps() -> None:
    assert accounts_of(total(started(0.0), order(1.0, "pause"), ended(5.0, 0))) == {"starting": 1.0, "paused": 4.0}
    empty = total()
    assert (empty.wall_s, empty.of_time, empty.lost_to_recovery, empty.of_tokens) == (0.0, 0.0, 0.0, 0.0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("sceropx"), st.floats(-5, 50)), max_size=60))
def test_accounts_add_up_to_the_wall_time(moves: list[tuple[str, float]]) -> None:
    """Whatever happens in whatever order, also under a clock that is set back."""
    time, latest = 0.0, 0.0
    events: list[str | Event] = [started(0.0)]
    for iteration, (move, passed_s) in enumerate(moves, start=1):
        time += passed_s
        latest = max(latest, time)
        match move:
            case "s":
                events.append(record(iteration, time=time))
            case "c":
                events.append(saved(time, blocked_s=1.0))
            case "e":
                events.append(EvalRecord(time=time, iteration=iteration, step=iteration, loss=1.0, tokens=1))
            case "r":
                events.append(started(time, step=iteration // 2))
            case "o":
                kind = ActionKind.rewind
                events.append(
                    Outcome(time=time, iteration=iteration, kind=kind, incident=1, succeeded=True, step=iteration // 2)
                )
            case "p":
                events.append(order(time, "pause" if iteration % 2 else "resume"))
            case _:
                events.append(ended(time, iteration))
    goodput = total(*events)
    assert goodput.wall_s == pytest.approx(latest)
    assert all(seconds >= 0 for seconds in goodput.seconds.values())
    assert set(goodput.seconds) == set(Account)
    lost_s = sum(cost.seconds for cost in goodput.lost.values())
    assert lost_s + goodput.seconds[Account.kept] == pytest.approx(goodput.wall_s)
    assert sum(cost.steps for cost in goodput.lost.values()) == goodput.num_undone + goodput.num_refused


def restarted(time: float, cause: EndCause) -> RunRestarted:
    return RunRestarted(time=time, iteration=0, step=0, number=1, reason="failed", cause=str(cause))


def costs_of(goodput: Goodput) -> dict[str, tuple[float, int, int]]:
    return {str(cause): (round(cost.seconds, 9), cost.times, cost.steps) for cause, cost in goodput.lost.items()}


def test_lost_time_by_cause() -> None:
    """Each failure costs the time to notice it, to start again, to the first step, and the steps trained again."""
    goodput = total(
        started(0.0),
        record(1, time=1.0, step_time_s=1.0),
        record(2, time=2.0, step_time_s=1.0),
        record(3, time=3.0, step_time_s=1.0),
        restarted(13.0, EndCause.hung_rank),
        started(16.0, step=2),
        record(4, time=17.0, step=3),
        started(27.0, step=3),  # nothing says how the start before ended
        record(5, time=28.0, step=4),
        RunEnded(time=28.0, iteration=5, step=4, exit_code=75, reason="stopped"),
        started(30.0, step=4),
        record(6, time=31.0, step=5),
        restarted(32.0, EndCause.unknown),  # as in a log of an older version
        started(33.0, step=5),
        record(7, time=34.0, step=6),
    )
    assert costs_of(goodput) == {
        "hung rank": (15.0, 1, 1),
        "lost launcher": (11.0, 1, 0),
        "stop and resume": (3.0, 1, 0),
        "unknown failure": (3.0, 1, 0),
        "first start": (1.0, 1, 0),
    }
    assert goodput.of_time == pytest.approx(1.0 / 34.0), "two steps of one second, of which one was trained again"
    assert goodput.main_causes == [
        "hung rank 44.1%",
        "lost launcher 32.4%",
        "stop and resume 8.8%",
        "unknown failure 8.8%",
    ]


def test_steps_behind_a_damaged_checkpoint_are_lost_to_storage() -> None:
    """A rank is killed at step 5. The checkpoint of step 4 is damaged, that of step 2 is loaded: of the three steps
    that are trained again, the kill cost one."""
    damaged = CheckpointJudged(time=7.0, iteration=5, directory="step-00000004-gen-0", health="damaged", reason="sha")
    goodput = total(
        started(0.0),
        *(record(step, time=float(step), step_time_s=1.0) for step in range(1, 6)),
        restarted(6.0, EndCause.killed_rank),
        damaged,
        started(7.0, step=2),
        record(6, time=8.0, step=3),
    )
    costs = costs_of(goodput)
    assert costs["killed rank"] == (3.0 + 1.0, 1, 1), "three seconds to the first step, and one step"
    assert costs["storage"] == (2.0, 1, 2)
    assert goodput.seconds[Account.kept] == 1.0


def test_planned_work_has_causes_too() -> None:
    rewound = Outcome(time=8.5, iteration=4, kind=ActionKind.rewind, incident=1, succeeded=True, step=2, seconds=0.5)
    goodput = total(
        started(0.0),
        record(1, time=1.0),
        record(2, time=2.0),
        record(3, time=3.0, step=2, refused=True),
        EvalRecord(time=5.0, iteration=3, step=2, loss=2.0, tokens=10),
        order(5.0, "pause"),
        order(6.0, "resume"),
        record(4, time=8.0, step=3, step_time_s=0.5),
        rewound,
        saved(8.5, blocked_s=0.0),
        ended(9.0, 2),
    )
    costs = costs_of(goodput)
    assert (costs["evaluation"], costs["pause"]) == ((2.0, 1, 0), (1.0, 1, 0))
    assert costs["rejected updates"][1:] == (1, 1)
    assert costs["rewind or rollback"][1:] == (1, 1)
    assert costs["checkpoints"] == (0.5, 1, 0)
