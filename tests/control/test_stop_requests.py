"""What a run hears from outside: real signals to this process, real files in a run directory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from harness.config.errors import ConfigError
from harness.control import stop_requests
from harness.control.stop_requests import StopFile, StopRequest, signals_to
from harness.core.rundir import RunDir


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
def test_a_signal_is_a_request_and_the_reason(number: signal.Signals) -> None:
    stop = StopRequest()
    before = signal.getsignal(number)
    with signals_to(stop):
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
    assert stop.reason == number.name
    assert signal.getsignal(number) is before


def test_only_a_second_sigint_insists() -> None:
    stop = StopRequest()
    with signals_to(stop):
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.reason == "SIGUSR1", "the first one counts"


def test_an_empty_stop_file_is_a_request(run: RunDir) -> None:
    stop = StopRequest()
    run.stop.touch()
    assert not stop, "nobody looked"
    stop.look(run)
    assert stop
    assert stop.reason == "STOP file"
    assert stop_requests.stop_event(run, 7) is None
    run.stop.unlink()
    stop.look(run)
    assert stop, "what was seen holds"
    assert stop.reason == "STOP file"


@pytest.mark.parametrize(
    ("reason", "in_words"),
    [
        ("maintenance\n  at noon", "asked by ada: maintenance at noon"),
        ("", "asked by ada"),
        ("\udcff", "asked by ada: ?"),
        ("\x1b[2Jgone", "asked by ada: ?[2Jgone"),
    ],
)
def test_who_asked_is_told(run: RunDir, clock: Clock, reason: str, in_words: str) -> None:
    stop = StopRequest()
    stop_requests.ask(run, who="ada", reason=reason)
    stop.look(run)
    assert stop
    assert stop.reason == in_words
    event = stop_requests.stop_event(run, 7)
    assert event is not None
    assert (event.who, event.iteration, event.time) == ("ada", 7, clock.time())
    assert in_words in (f"asked by ada: {event.reason}", f"asked by ada{event.reason}")


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
def test_a_file_that_says_something_else_is_a_request_all_the_same(run: RunDir, content: str) -> None:
    stop = StopRequest()
    run.stop.write_text(content)
    stop.look(run)
    assert stop
    assert stop.reason == "STOP file"


def test_a_disk_that_fails_is_no_stop(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path) -> os.stat_result:
        raise OSError(5, "Input/output error")

    stop = StopRequest()
    stop_requests.ask(run, who="ada", reason="")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fail)
        stop.look(run)
        assert not stop
    stop.look(run)
    assert stop, "it is asked again"


def test_a_signal_elsewhere_has_a_name_too() -> None:
    assert StopRequest().reason == "a signal to another rank"


def test_a_stop_of_last_time_is_cleared(run: RunDir) -> None:
    stop_requests.clear_stop_file(run)
    stop_requests.ask(run, who="ada", reason="")
    assert stop_requests.read(run) is not None
    stop_requests.clear_stop_file(run)
    assert not run.stop.exists()
    run.stop.mkdir()
    with pytest.raises(ConfigError, match=r"STOP cannot be removed: "):
        stop_requests.clear_stop_file(run)


def test_what_is_asked_is_read_back(run: RunDir, clock: Clock) -> None:
    stop_requests.ask(run, who="ada", reason="disk is full")
    assert stop_requests.read(run) == StopFile(who="ada", time=clock.time(), reason="disk is full")
