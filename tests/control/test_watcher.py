"""The thread that polls for STOP and for commands: the training loop reads memory and never waits for the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.control import inbox as commands
from harness.control import watcher
from harness.control.commands import Pause, Resume
from harness.control.stop_requests import StopRequest
from harness.control.watcher import Watcher
from harness.core.rundir import RunDir
from tests.stalled import Stalled, can_stall

TIMEOUT_S = 30.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "first")
    run.path.mkdir()
    return run


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "LOOK_EVERY_S", 0.01)


def wait_until(condition: Callable[[], object]) -> bool:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def test_stop_and_commands_are_found_and_each_command_is_answered_once(run: RunDir) -> None:
    stop = StopRequest()
    with Watcher(run, stop) as inbox:
        assert not inbox.waits()
        sent = [commands.send(run, order, who="ada", reason="lunch") for order in (Pause(), Resume())]
        assert wait_until(lambda: len(inbox.take()) == 2)
        assert inbox.take() == sent
        assert inbox.waits()
        for command in inbox.take():
            inbox.done(command, commands.intervention_event(command, 7, {}))
            assert commands.answer(run, command.id) is not None, "the answer is on disk before the loop continues"
        assert inbox.take() == []
        assert not inbox.waits()
        run.stop.touch()
        assert wait_until(lambda: bool(stop))
    assert not commands.waiting(run)
    assert [event.changes["command"] for event in commands.interventions(run)] == ["pause", "resume"]


def test_waits_is_true_once_a_second_until_the_command_is_done(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.send(run, Pause(), who="ada", reason="lunch")
    inbox, clock = Watcher(run, StopRequest()), iter([100.0, 100.2, 101.5])
    inbox.look()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert [inbox.waits() for _ in range(3)] == [True, False, True]


def test_a_paused_run_waits_for_a_command(run: RunDir) -> None:
    with Watcher(run, StopRequest()) as inbox:
        assert not inbox.wait(0.05)
        threading.Timer(0.2, lambda: commands.send(run, Resume(), who="ada", reason="fed")).start()
        assert inbox.wait(TIMEOUT_S)


def test_the_thread_ends_with_the_watcher(run: RunDir) -> None:
    before = threading.active_count()
    with Watcher(run, StopRequest()):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.mark.skipif(not can_stall(), reason="needs root and /dev/fuse")
def test_a_stalled_file_system_does_not_block_the_loop(run: RunDir, tmp_path: Path) -> None:
    stop = StopRequest()
    with Stalled(tmp_path / "mount") as stalled, Watcher(run, stop) as inbox:
        run.stop.symlink_to(stalled.path / "STOP")
        assert wait_until(lambda: stalled.num_held)
        begin_s = time.monotonic()
        assert not any(bool(stop) or inbox.waits() or inbox.take() for _ in range(1000))
        assert time.monotonic() - begin_s < TIMEOUT_S
        assert not stop
        stalled.release()
        assert wait_until(lambda: bool(stop)), "STOP is found when the file system responds again"


@pytest.mark.skipif(not can_stall(), reason="needs root and /dev/fuse")
def test_an_answer_that_cannot_be_written_blocks_the_loop_once_and_briefly(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watcher, "DONE_WAIT_S", 0.3)
    sent = [commands.send(run, Pause(), who="ada", reason="lunch") for _ in range(3)]
    with Stalled(tmp_path / "mount") as stalled, Watcher(run, StopRequest()) as inbox:
        assert wait_until(lambda: len(inbox.take()) == 3)
        run.interventions.symlink_to(stalled.path / "interventions.jsonl")
        for command in sent:
            inbox.done(command, commands.intervention_event(command, 7, {}))
        assert inbox.take() == [], "applied commands are not returned again"
        assert len(commands.waiting(run)) == 3, "the file stays until the answer is on disk"
        assert capfd.readouterr().err.count("has accepted no data for 0.3 s; training continues") == 1
        stalled.release()
        assert wait_until(lambda: not commands.waiting(run))
