"""What a start of a run reads from its logs: a pause, a learning rate; tests/distributed has commands on live runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.control import inbox as commands
from harness.control import stop_requests
from harness.control.apply import find_interrupted_pause, ordered_factor
from harness.control.commands import Command, Order, Pause, Rate, Resume
from harness.control.inbox import REFUSED
from harness.core.event_json import to_json
from harness.core.events import Event, Intervention, RunEnded, RunRestarted, RunStarted
from harness.core.rundir import RunDir, append_line

STARTED = RunStarted(time=1.0, iteration=0, world_size=2, num_steps=9, step=0)
RESTARTED = RunRestarted(time=1.0, iteration=5, step=5, number=1, reason="rank 1 died")
ENDED = RunEnded(time=1.0, iteration=5, step=5, exit_code=75, reason="SIGTERM")


def ordered(order: Order, **changes: Any) -> Intervention:
    return commands.intervention_event(Command(id="1", order=order, who="ada", time=1.0, reason="lunch"), 5, changes)


PAUSED, RESUMED, SLOWED = ordered(Pause()), ordered(Resume()), ordered(Rate(factor=0.5))
REFUSED_RESUME = ordered(Resume(), **{REFUSED: "no"})


@pytest.mark.parametrize(
    ("log", "is_paused"),
    [
        ((STARTED, PAUSED, SLOWED, RESTARTED), True),
        ((STARTED, PAUSED, REFUSED_RESUME, RESTARTED), True),
        ((STARTED, PAUSED, RESTARTED, RESTARTED), True),
        ((STARTED, PAUSED, ENDED, RESTARTED), True),
        ((STARTED, PAUSED), True),
        ((STARTED, PAUSED, RESUMED, RESTARTED), False),
        ((STARTED, RESTARTED), False),
        ((STARTED, PAUSED, ENDED), False),
        ((STARTED, PAUSED, ENDED, STARTED, RESTARTED), False),
        ((), False),
    ],
)
def test_a_restart_inside_the_job_continues_the_pause_of_the_start_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: tuple[Event, ...], *, is_paused: bool
) -> None:
    run = RunDir(tmp_path)
    for event in log:
        append_line(run.events, to_json(event))
    monkeypatch.delenv(stop_requests.RESTART_COUNT, raising=False)
    assert find_interrupted_pause(run) is None, "a start by a user trains"
    monkeypatch.setenv(stop_requests.RESTART_COUNT, "1")
    assert find_interrupted_pause(run) == (PAUSED if is_paused else None)


def test_the_newest_factor_is_found_in_either_log(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert ordered_factor(run, 0.25) == 0.25
    first, second, third = (
        replace(ordered(Rate(factor=factor), factor=factor), iteration=iteration)
        for iteration, factor in [(3, 0.1), (5, 0.5), (7, 0.7)]
    )
    append_line(run.events, to_json(first))
    assert ordered_factor(run, 1.0) == 0.1
    append_line(run.interventions, to_json(second))
    assert ordered_factor(run, 1.0) == 0.5, "the log has lost it"
    append_line(run.events, to_json(third))
    assert ordered_factor(run, 1.0) == 0.7, "it could not be written to interventions.jsonl"
    append_line(run.events, to_json(ordered(Rate(factor=9.0), factor=9.0, **{REFUSED: "no"})))
    assert ordered_factor(run, 1.0) == 0.7
