"""What a rank says about itself, with a real thread and real files."""

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


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(heartbeat, "WRITE_EVERY_S", 0.01)
    return RunDir(tmp_path)


def heart(run: RunDir, rank: int = 0, world_size: int = 1) -> Heartbeat:
    return Heartbeat(run, rank=rank, world_size=world_size, num_steps=100)


def eventually(run: RunDir, fits: Callable[[Beat], bool], rank: int = 0) -> Beat:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        beat = heartbeat.read(heartbeat.file_of(run, rank))
        if beat is not None and fits(beat):
            return beat
        time.sleep(0.005)
    raise AssertionError(f"never written; last: {beat}")


def test_the_first_iteration_belongs_to_the_start_and_then_the_loop_is_seen_to_move(run: RunDir) -> None:
    state = RunState()
    with heart(run) as mine:
        assert eventually(run, lambda beat: beat.beats == 0).phase is Phase.start
        mine.beat(state)
        assert eventually(run, lambda beat: beat.beats == 1).phase is Phase.start
        state.iteration, state.step = 7, 5
        mine.beat(state)
        beat = eventually(run, lambda beat: beat.beats == 2)
        assert (beat.phase, beat.iteration, beat.step, beat.exit_code) == (Phase.train, 7, 5, None)
        mine.beat(state, Phase.pause)
        eventually(run, lambda beat: beat.phase is Phase.pause)
        assert json.loads(run.status.read_text())["state"] in ("running", "paused")
        with mine.during(Phase.save):
            eventually(run, lambda beat: beat.phase is Phase.save)
        assert eventually(run, lambda beat: beat.beats == 4).phase is Phase.pause
        mine.end(75, "stopped: SIGTERM")
    status = json.loads(run.status.read_text())
    assert (status["state"], status["exit_code"], status["reason"]) == ("ended", 75, "stopped: SIGTERM")
    assert (status["step"], status["num_steps"], status["iteration"], status["eta_s"]) == (5, 100, 7, None)
    last = heartbeat.read(heartbeat.file_of(run, 0))
    assert last is not None
    assert (last.phase, last.exit_code) == (Phase.end, 75)


def test_a_loop_that_stands_still_is_told_from_a_process_that_does(run: RunDir) -> None:
    with heart(run) as mine:
        mine.beat(RunState())
        first = eventually(run, lambda beat: beat.beats == 1)
        later = eventually(run, lambda beat: beat.writes > first.writes + 3)
        assert later.beats == 1
        assert later.beat_time == pytest.approx(first.beat_time, abs=0.01)
        assert later.time > first.time


def test_an_exception_is_the_last_word_in_one_line(run: RunDir) -> None:
    with pytest.raises(RuntimeError), heart(run):
        raise RuntimeError("connection\nreset")
    assert json.loads(run.status.read_text())["reason"] == "RuntimeError: connection reset"


def test_only_the_ranks_of_this_start_are_remembered(run: RunDir) -> None:
    for rank in range(3):
        with heart(run, rank=rank, world_size=3):
            pass
    assert [beat.rank for beat in heartbeat.read_all(run)] == [0, 1, 2]
    with heart(run, world_size=2):
        pass
    assert [beat.rank for beat in heartbeat.read_all(run)] == [0, 1]


def test_a_directory_that_cannot_be_written_costs_nothing(run: RunDir) -> None:
    run.heartbeat.touch()
    with heart(run) as mine:
        mine.beat(RunState())
    assert heartbeat.read_all(run) == []


def test_a_beat_touches_no_file(run: RunDir) -> None:
    """The step path only stores the state; a thread writes it."""
    mine = heart(run)
    mine.beat(RunState(iteration=7))
    assert not run.heartbeat.exists()


def test_many_ranks_write_less_often(tmp_path: Path) -> None:
    with heart(RunDir(tmp_path), rank=1, world_size=2000):
        beat = eventually(RunDir(tmp_path), lambda beat: beat.writes > 0, rank=1)
    assert beat.every_s == 20.0


def test_torn_and_foreign_files_are_passed_over(run: RunDir) -> None:
    run.heartbeat.mkdir()
    for rank, text in enumerate(("", "{", "[]", '{"phase": "train"}', '{"phase": "dance"}', "null")):
        heartbeat.file_of(run, rank).write_text(text)
    assert heartbeat.read_all(run) == []


def test_the_launcher_has_the_last_word_on_a_run_that_was_killed(run: RunDir) -> None:
    heartbeat.end_of_run(run, 1, "nothing was there")
    assert not run.status.exists()
    with heart(run):
        pass
    heartbeat.end_of_run(run, 1, "rank 1 on host2 was killed by SIGKILL")
    status = json.loads(run.status.read_text())
    assert (status["state"], status["exit_code"], status["num_steps"]) == ("ended", 1, 100)
    assert status["reason"] == "rank 1 on host2 was killed by SIGKILL"
