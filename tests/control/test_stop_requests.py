"""Stop requests: real signals to this process, and real STOP files in a run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from harness.config.errors import ConfigError
from harness.control import stop_requests
from harness.control.stop_requests import StopFile, StopRequest, signals_to
from harness.core.rundir import RunDir
from harness.resume import clear_old_stop_file
from tests.composed import load


class Clock:
    def time(self) -> float:
        return 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stop_requests, "time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_is_a_stop_request_and_its_reason(number: signal.Signals) -> None:
    stop = StopRequest()
    before = signal.getsignal(number)
    with signals_to(stop):
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
    assert stop.reason == number.name
    assert signal.getsignal(number) is before


def test_a_second_sigint_raises_keyboard_interrupt() -> None:
    stop = StopRequest()
    with signals_to(stop):
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.reason == "SIGUSR1", "the first signal is the reason"


def test_a_sigint_that_a_launcher_repeats_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stop_requests.RESTART_COUNT, "0")
    stop = StopRequest()
    with signals_to(stop):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.reason == "SIGINT"


def test_an_empty_stop_file_is_a_request(run: RunDir) -> None:
    stop = StopRequest()
    run.stop.touch()
    assert not stop, "not polled yet"
    stop.look(run)
    assert stop
    assert stop.reason == "STOP file"
    assert stop_requests.stop_event(run, 7) is None
    run.stop.unlink()
    stop.look(run)
    assert stop, "a request holds after the file is removed"
    assert stop.reason == "STOP file"


@pytest.mark.parametrize(
    ("reason", "description"),
    [
        ("maintenance\n  at noon", "asked by ada: maintenance at noon"),
        ("", "asked by ada"),
        ("\udcff", "asked by ada: ?"),
        ("\x1b[2Jgone", "asked by ada: ?[2Jgone"),
    ],
)
def test_the_reason_contains_the_user_and_the_text(run: RunDir, clock: Clock, reason: str, description: str) -> None:
    stop = StopRequest()
    stop_requests.ask(run, who="ada", reason=reason)
    stop.look(run)
    assert stop
    assert stop.reason == description
    event = stop_requests.stop_event(run, 7)
    assert event is not None
    assert (event.who, event.iteration, event.time) == ("ada", 7, clock.time())
    assert description in (f"asked by ada: {event.reason}", f"asked by ada{event.reason}")


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "7",
        '{"who": "ada"}',
        '{"who": 1, "time": "noon", "reason": ""}',
        '{"who": 1, "time": 1%s, "reason": ""}' % ("0" * 400),
        "{",
        "\0",
        "[" * 60000,
    ],
)
def test_a_stop_file_with_invalid_content_is_a_request(run: RunDir, content: str) -> None:
    stop = StopRequest()
    run.stop.write_text(content)
    stop.look(run)
    assert stop
    assert stop.reason == "STOP file"


def test_an_io_error_is_no_stop_request(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path) -> os.stat_result:
        raise OSError(5, "Input/output error")

    stop = StopRequest()
    stop_requests.ask(run, who="ada", reason="")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fail)
        stop.look(run)
        assert not stop
    stop.look(run)
    assert stop, "the next poll finds it"


def test_a_request_of_another_rank_has_a_reason() -> None:
    assert StopRequest().reason == "a signal to another rank"


def test_an_old_stop_file_is_removed(run: RunDir) -> None:
    stop_requests.clear_stop_file(run)
    stop_requests.ask(run, who="ada", reason="")
    assert stop_requests.read(run) is not None
    stop_requests.clear_stop_file(run)
    assert not run.stop.exists()
    run.stop.mkdir()
    with pytest.raises(ConfigError, match=r"^run\.dir: cannot remove .*/STOP: "):
        stop_requests.clear_stop_file(run)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        (stop_requests.RESTART_COUNT, "1", True),
        (stop_requests.RESTART_COUNT, "0", False),
        (stop_requests.STOP_CLEARED, "1", True),
    ],
)
def test_a_restart_and_the_ranks_of_a_launcher_keep_a_stop_request(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: bool
) -> None:
    cfg = load([f"run.dir={run.path.parent}", f"run.name={run.path.name}"])
    stop_requests.ask(run, who="ada", reason="")
    monkeypatch.setenv(variable, value)
    clear_old_stop_file(cfg)
    assert run.stop.exists() == expected


def test_a_start_beside_a_running_one_keeps_its_stop_request(run: RunDir) -> None:
    cfg = load([f"run.dir={run.path.parent}", f"run.name={run.path.name}"])
    stop_requests.ask(run, who="ada", reason="")
    imports = "from pathlib import Path; from harness.core.locking import run_lease"
    code = f"{imports}; run_lease.hold(Path({str(run.path)!r}), 60); print(); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ConfigError, match="is in use by"):
            clear_old_stop_file(cfg)
        other.kill()
    assert run.stop.exists()


def test_a_stop_file_survives_a_round_trip(run: RunDir, clock: Clock) -> None:
    stop_requests.ask(run, who="ada", reason="disk is full")
    assert stop_requests.read(run) == StopFile(who="ada", time=clock.time(), reason="disk is full")
