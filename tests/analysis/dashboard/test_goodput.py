"""Goodput: every second of wall time is in exactly one account."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analysis.dashboard.goodput import Account, Accounts, Goodput
from harness.core.events import (
    ActionKind,
    CheckpointSaved,
    EvalRecord,
    Event,
    Intervention,
    Outcome,
    RunEnded,
    RunStarted,
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
    assert goodput.tax == pytest.approx(0.75 / 7.5)
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
    assert accounts_of(total(started(0.0), order(1.0, "pause"), ended(5.0, 0))) == {"paused": 4.0, "saving": 1.0}
    empty = total()
    assert (empty.wall_s, empty.of_time, empty.tax, empty.of_tokens) == (0.0, 0.0, 0.0, 0.0)


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
