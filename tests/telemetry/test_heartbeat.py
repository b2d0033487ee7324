"""Tests of heartbeat files, with a real thread and real files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.telemetry import heartbeat
from harness.telemetry.heartbeat import Beat, Heartbeat, Phase
from tests.telemetry.conftest import MakeStep


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(heartbeat, "WRITE_EVERY_S", 0.01)
    return RunDir(tmp_path)


def make_heartbeat(run: RunDir, rank: int = 0, world_size: int = 1) -> Heartbeat:
    return Heartbeat(run, rank=rank, world_size=world_size, num_steps=100)


def wait_for_beat(run: RunDir, fits: Callable[[Beat], bool], rank: int = 0) -> Beat:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        beat = heartbeat.read(heartbeat.heartbeat_file(run, rank))
        if beat is not None and fits(beat):
            return beat
        time.sleep(0.005)
    raise AssertionError(f"never written; last: {beat}")


def test_phases_and_beats_of_a_run_reach_the_files(run: RunDir) -> None:
    state = RunState()
    with make_heartbeat(run) as own:
        assert wait_for_beat(run, lambda beat: beat.beats == 0).phase is Phase.start
        own.beat(state)
        assert wait_for_beat(run, lambda beat: beat.beats == 1).phase is Phase.start
        state.iteration, state.step = 7, 5
        own.beat(state)
        beat = wait_for_beat(run, lambda beat: beat.beats == 2)
        assert (beat.phase, beat.iteration, beat.step, beat.exit_code) == (Phase.train, 7, 5, None)
        own.beat(state, Phase.pause)
        wait_for_beat(run, lambda beat: beat.phase is Phase.pause)
        assert json.loads(run.status.read_text())["state"] in ("running", "paused")
        with own.during(Phase.save):
            wait_for_beat(run, lambda beat: beat.phase is Phase.save)
        assert wait_for_beat(run, lambda beat: beat.beats == 4).phase is Phase.pause
        state.iteration, state.step = 8, 6
        own.end(75, "stopped: SIGTERM", state)
    status = json.loads(run.status.read_text())
    assert (status["state"], status["exit_code"], status["reason"]) == ("ended", 75, "stopped: SIGTERM")
    assert (status["step"], status["num_steps"], status["iteration"], status["eta_s"]) == (6, 100, 8, None)
    last = heartbeat.read(heartbeat.heartbeat_file(run, 0))
    assert last is not None
    assert (last.phase, last.exit_code) == (Phase.end, 75)


def test_the_slowest_step_is_that_of_recent_training(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock_s)
    own = make_heartbeat(run)
    run.heartbeat.mkdir()

    def pass_time(seconds: float, phase: Phase = Phase.train) -> float:
        nonlocal clock_s
        clock_s += seconds
        own.beat(RunState(), phase)
        own._write()
        beat = heartbeat.read(heartbeat.heartbeat_file(run, 0))
        assert beat is not None
        return beat.slowest_step_s

    assert [pass_time(90.0), pass_time(60.0)] == [0.0, 0.0], "the start and the first iteration, which may compile"
    assert pass_time(8.0) == 8.0
    assert [pass_time(seconds) for seconds in (1.0, 1.0, 9.0)] == [0.98 * 8.0, 0.98 * 0.98 * 8.0, 9.0]
    assert pass_time(50.0, Phase.evaluate) == pass_time(50.0) == 9.0, "an evaluation is no step"
    with own.during(Phase.save):
        clock_s += 70.0
    assert pass_time(2.0) == 0.98 * 9.0


def test_a_stopped_loop_differs_from_a_stopped_process(run: RunDir) -> None:
    with make_heartbeat(run) as own:
        own.beat(RunState())
        first = wait_for_beat(run, lambda beat: beat.beats == 1)
        later = wait_for_beat(run, lambda beat: beat.writes > first.writes + 3)
        assert later.beats == 1
        assert later.beat_time == pytest.approx(first.beat_time, abs=0.01)
        assert later.time > first.time


def test_an_exception_becomes_the_reason_in_one_line(run: RunDir) -> None:
    with pytest.raises(RuntimeError), make_heartbeat(run):
        raise RuntimeError("connection\nreset")
    assert json.loads(run.status.read_text())["reason"] == "RuntimeError: connection reset"


def test_files_of_ranks_that_no_longer_exist_are_deleted(run: RunDir) -> None:
    for rank in range(3):
        with make_heartbeat(run, rank=rank, world_size=3):
            pass
    assert [beat.rank for beat in heartbeat.read_all(run)] == [0, 1, 2]
    with make_heartbeat(run, world_size=2):
        pass
    assert [beat.rank for beat in heartbeat.read_all(run)] == [0, 1]


def test_an_unwritable_directory_is_ignored(run: RunDir) -> None:
    run.heartbeat.touch()
    with make_heartbeat(run) as own:
        own.beat(RunState())
    assert heartbeat.read_all(run) == []


def test_a_beat_touches_no_file(run: RunDir) -> None:
    """The step path only stores the state; a thread writes it."""
    own = make_heartbeat(run)
    own.beat(RunState(iteration=7))
    assert not run.heartbeat.exists()


def test_many_ranks_write_less_often(tmp_path: Path) -> None:
    with make_heartbeat(RunDir(tmp_path), rank=1, world_size=2000):
        beat = wait_for_beat(RunDir(tmp_path), lambda beat: beat.writes > 0, rank=1)
    assert beat.every_s == 20.0


def test_torn_and_unknown_files_are_skipped(run: RunDir) -> None:
    run.heartbeat.mkdir()
    for rank, text in enumerate(("", "{", "[]", '{"phase": "train"}', '{"phase": "dance"}', "null")):
        heartbeat.heartbeat_file(run, rank).write_text(text)
    assert heartbeat.read_all(run) == []


def test_the_launcher_marks_a_killed_run_as_ended(run: RunDir) -> None:
    heartbeat.mark_ended(run, 1, "nothing was there")
    assert not run.status.exists()
    with make_heartbeat(run):
        pass
    heartbeat.mark_ended(run, 1, "rank 1 on host2 was killed by SIGKILL")
    status = json.loads(run.status.read_text())
    assert (status["state"], status["exit_code"], status["num_steps"]) == ("ended", 1, 100)
    assert status["reason"] == "rank 1 on host2 was killed by SIGKILL"
    heartbeat.mark_restarting(run, "rank 1 on host2 was killed by SIGKILL")
    status = json.loads(run.status.read_text())
    assert (status["state"], status["exit_code"]) == ("restarting", None)


@pytest.mark.parametrize(("left_s", "expected"), [(None, 0.1 * (100 - 8)), (77.0, 77.0)])
def test_the_time_to_the_end_is_the_given_one_or_that_of_equal_steps(
    run: RunDir, make_step: MakeStep, left_s: float | None, expected: float
) -> None:
    with make_heartbeat(run) as own:
        own.set_progress(make_step(7), left_s=left_s)
        first = own._writes + 2  # the write under way may have begun before
        wait_for_beat(run, lambda beat: beat.writes > first)
        assert json.loads(run.status.read_text())["eta_s"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "change", [{"rank": []}, {"world_size": None}, {"host": 3}, {"iteration": "9"}, {"time": {}}, {"exit_code": "0"}]
)
def test_a_heartbeat_with_a_wrong_type_counts_as_missing(run: RunDir, change: dict[str, object]) -> None:
    with make_heartbeat(run):
        wait_for_beat(run, lambda _: True)
    path = heartbeat.heartbeat_file(run, 0)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"time": round(fields["time"])}))
    assert heartbeat.read(path) is not None, "a whole number of seconds is a number"
    path.write_text(json.dumps(fields | change))
    assert heartbeat.read(path) is None
