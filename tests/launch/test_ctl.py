"""`harness ctl` against run directories as a run leaves them; runs that listen are in tests/distributed."""

from __future__ import annotations

import getpass
import json
import threading
import time
from pathlib import Path

import pytest

from harness import requests
from harness.events import CheckpointSaved, Event, RunEnded, RunStarted, to_json
from harness.rundir import RunDir, append_line
from launch import ctl

STARTED = RunStarted(time=1.0, iteration=0, world_size=2, num_steps=9, step=0)
SAVED = CheckpointSaved(time=2.0, iteration=5, step=5, directory="step-00000005-gen-0", seconds=0.1)
ENDED = RunEnded(time=3.0, iteration=5, step=5, exit_code=75, reason="SIGTERM")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "first")
    run.path.mkdir()
    run.config.write_text("run: {}\n")
    return run


def tell(run: RunDir, *events: Event) -> None:
    for event in events:
        append_line(run.events, to_json(event))


@pytest.mark.parametrize("events", [(), (STARTED,), (STARTED, ENDED, STARTED), (STARTED, SAVED)])
def test_a_run_is_asked_by_name(run: RunDir, events: tuple[Event, ...], capsys: pytest.CaptureFixture[str]) -> None:
    tell(run, *events)
    assert ctl.main([str(run.path), "stop", "--reason", "new nodes"]) == 0
    assert capsys.readouterr().out == f"asked {run.path} to stop\n"
    words = json.loads(run.stop.read_text())
    assert abs(words.pop("time") - time.time()) < 60
    assert words == {"who": getpass.getuser(), "reason": "new nodes"}
    assert not list(run.path.glob(".STOP*")), "nothing half written is left"
    asked = requests.read(run)
    assert asked is not None
    assert asked.in_words() == f"asked by {getpass.getuser()}: new nodes"


@pytest.mark.parametrize("events", [(STARTED, ENDED), (STARTED, ENDED, SAVED)])
def test_a_run_that_has_ended_is_not_asked(
    run: RunDir, events: tuple[Event, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    tell(run, *events)
    assert ctl.main([str(run.path), "stop"]) == 2
    assert capsys.readouterr().err == f"harness: {run.path}: has ended at step 5: SIGTERM\n"
    assert not run.stop.exists()


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        assert ctl.main([str(path), "stop"]) == 2
        assert capsys.readouterr().err == f"harness: {path}: is no run directory: it has no config.yaml\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "ctl: which run? give its directory and a command, or --help"),
        (["RUN"], "ctl: which command? choose stop, or --help"),
        (["RUN", "fly"], "ctl: no command 'fly'; choose stop, or --help"),
        (["RUN", "stop", "--now"], "ctl RUN stop: unrecognized arguments: --now; --help says more"),
        (["RUN", "stop", "--reason", "x" * 1001], "--reason: must have at most 1000 characters, got 1001"),
    ],
)
def test_wrong_words_are_one_line(
    run: RunDir, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main([str(run.path) if word == "RUN" else word for word in words]) == 2
    assert capsys.readouterr().err == f"harness: {complaint}\n"
    assert not run.stop.exists()


def test_a_file_that_cannot_be_written_is_named(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.stop.mkdir()
    assert ctl.main([str(run.path), "stop"]) == 2
    assert capsys.readouterr().err == f"harness: {run.stop}: cannot be written: Is a directory\n"


@pytest.mark.parametrize("exit_code", [0, 75])
def test_wait_gives_the_code_of_this_end(run: RunDir, exit_code: int, capsys: pytest.CaptureFixture[str]) -> None:
    tell(run, STARTED, ENDED, STARTED)
    codes: list[int] = []
    waiting = threading.Thread(target=lambda: codes.append(ctl.main([str(run.path), "stop", "--wait"])))
    waiting.start()
    deadline = time.monotonic() + 30
    while not run.stop.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    tell(run, SAVED)
    waiting.join(timeout=0.5)
    assert waiting.is_alive()
    tell(run, RunEnded(time=4.0, iteration=7, step=7, exit_code=exit_code, reason="why not"))
    waiting.join(timeout=30)
    assert codes == [exit_code]
    assert capsys.readouterr().out.endswith(f"{run.path} ended at step 7: why not (exit code {exit_code})\n")


def test_who_will_not_wait_leaves_the_request(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert ctl.main([str(run.path), "stop", "--wait"]) == 75
    assert capsys.readouterr().err == f"harness: no longer waiting; {run.path} is still asked to stop\n"
    assert run.stop.exists()


def test_a_user_without_a_name_has_a_number(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert ctl.main([str(run.path), "stop"]) == 0
    asked = requests.read(run)
    assert asked is not None
    assert asked.who == "user 12345"
