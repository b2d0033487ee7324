"""The thread that looks for STOP and for commands: the loop hears what it finds, and never waits for the disk."""

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

PATIENCE_S = 30.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "first")
    run.path.mkdir()
    return run


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "LOOK_EVERY_S", 0.01)


def within_patience(happens: Callable[[], object]) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while not happens():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def test_what_is_on_disk_is_heard_and_answered_once(run: RunDir) -> None:
    stop = StopRequest()
    with Watcher(run, stop) as inbox:
        assert not inbox.waits()
        sent = [commands.send(run, order, who="ada", reason="lunch") for order in (Pause(), Resume())]
        assert within_patience(lambda: len(inbox.take()) == 2)
        assert inbox.take() == sent
        assert inbox.waits()
        for command in inbox.take():
            inbox.done(command, commands.intervention_event(command, 7, {}))
            assert commands.answer(run, command.id) is not None, "on disk before the loop goes on"
        assert inbox.take() == []
        assert not inbox.waits()
        run.stop.touch()
        assert within_patience(lambda: bool(stop))
    assert not commands.waiting(run)
    assert [event.changes["command"] for event in commands.interventions(run)] == ["pause", "resume"]


def test_the_word_is_repeated_once_a_second_until_it_is_done(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.send(run, Pause(), who="ada", reason="lunch")
    inbox, clock = Watcher(run, StopRequest()), iter([100.0, 100.2, 101.5])
    inbox.look()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert [inbox.waits() for _ in range(3)] == [True, False, True]


def test_a_paused_run_waits_for_a_command(run: RunDir) -> None:
    with Watcher(run, StopRequest()) as inbox:
        assert not inbox.wait(0.05)
        threading.Timer(0.2, lambda: commands.send(run, Resume(), who="ada", reason="fed")).start()
        assert inbox.wait(PATIENCE_S)


def test_its_thread_ends_with_it(run: RunDir) -> None:
    before = threading.active_count()
    with Watcher(run, StopRequest()):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.mark.skipif(not can_stall(), reason="needs root and /dev/fuse")
def test_a_file_system_that_stalls_holds_nobody_up(run: RunDir, tmp_path: Path) -> None:
    stop = StopRequest()
    with Stalled(tmp_path / "mount") as stalled, Watcher(run, stop) as inbox:
        run.stop.symlink_to(stalled.path / "STOP")
        assert within_patience(lambda: stalled.num_held)
        begin_s = time.monotonic()
        assert not any(bool(stop) or inbox.waits() or inbox.take() for _ in range(1000))
        assert time.monotonic() - begin_s < PATIENCE_S
        assert not stop
        stalled.release()
        assert within_patience(lambda: bool(stop)), "it is seen when the file system answers"


@pytest.mark.skipif(not can_stall(), reason="needs root and /dev/fuse")
def test_an_answer_that_cannot_be_written_holds_the_run_up_once_and_not_for_long(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watcher, "DONE_WAIT_S", 0.3)
    sent = [commands.send(run, Pause(), who="ada", reason="lunch") for _ in range(3)]
    with Stalled(tmp_path / "mount") as stalled, Watcher(run, StopRequest()) as inbox:
        assert within_patience(lambda: len(inbox.take()) == 3)
        run.interventions.symlink_to(stalled.path / "interventions.jsonl")
        for command in sent:
            inbox.done(command, commands.intervention_event(command, 7, {}))
        assert inbox.take() == [], "what is done is not taken again"
        assert len(commands.waiting(run)) == 3, "the file stays until the answer is on disk"
        assert capfd.readouterr().err.count("has accepted no data for 0.3 s; training continues") == 1
        stalled.release()
        assert within_patience(lambda: not commands.waiting(run))
