"""`harness ctl` against run directories as a run leaves them; runs that listen are in tests/distributed."""

from __future__ import annotations

import getpass
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.control import inbox as commands
from harness.control import stop_requests
from harness.control.commands import (
    Command,
    ExcludeSource,
    Order,
    Pause,
    Precision,
    Rate,
    Resume,
    Rollback,
    SaveCheckpoint,
    Skip,
)
from harness.control.inbox import Inbox
from harness.core import rundir
from harness.core.events import CheckpointSaved, Event, Intervention, RunEnded, RunStarted, to_json
from harness.core.rundir import RunDir, append_line, user_name
from launch.cli import ctl

STARTED = RunStarted(time=1.0, iteration=0, world_size=2, num_steps=9, step=0)
SAVED = CheckpointSaved(time=2.0, iteration=5, step=5, directory="step-00000005-gen-0", seconds=0.1)
ENDED = RunEnded(time=3.0, iteration=5, step=5, exit_code=75, reason="SIGTERM")
WHY = ("--reason", "new nodes")
LIST = "skip, rollback, lr, exclude, precision, checkpoint, pause, resume, stop, list, or --help"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of two sources with checkpoints at steps 10 and 20, the latter tainted."""
    run = RunDir(tmp_path / "first")
    run.path.mkdir()
    run.config.write_text(
        "data: {sources: {web: {weight: 1.0}, books: {weight: 2.0}}, phases: []}\nprecision: {kind: fp8}\n"
    )
    for step in (10, 20):
        (run.checkpoints / catalog.name_of(step, 0)).mkdir(parents=True)
    catalog.mark(run.checkpoints / catalog.name_of(20, 0), Health.tainted, "spike")
    return run


def tell(run: RunDir, *events: Event) -> None:
    for event in events:
        append_line(run.events, to_json(event))


def asked_of(run: RunDir) -> list[Order]:
    return [command.order for command in commands.waiting(run)]


@contextmanager
def acting(run: RunDir, act: Callable[[Inbox, Command], None]) -> Iterator[None]:
    """A run that hears, in a thread."""
    inbox, is_over = Inbox(run), threading.Event()

    def listen() -> None:
        while not is_over.is_set():
            for command in inbox.take():
                act(inbox, command)
            time.sleep(0.01)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(timeout=30)


@pytest.mark.parametrize(
    ("words", "order", "told"),
    [
        (["skip", "20"], Skip(num_batches=20), "skip 20 batches"),
        (["rollback", "--to", "30"], Rollback(to_step=30), "roll back to step 30: step-00000010-gen-0 (candidate)"),
        (["lr", "0.5"], Rate(factor=0.5), "multiply the learning rate by 0.5"),
        (["lr", "1"], Rate(factor=1.0), "restore the learning rate"),
        (["exclude", "web"], ExcludeSource(source="web"), "exclude the source web"),
        (["precision", "bf16"], Precision(kind="bf16"), "compute in bf16"),
        (["checkpoint"], SaveCheckpoint(), "save a checkpoint"),
        (["pause"], Pause(), "pause"),
        (["resume"], Resume(), "resume"),
    ],
)
def test_every_command_is_a_file_with_a_name_and_a_reason(
    run: RunDir, words: list[str], order: Order, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(run, STARTED)
    assert ctl.main([str(run.path), *words, *WHY]) == 0
    assert capsys.readouterr().out == f"asked {run.path} to {told}\n"
    (command,) = Inbox(run).take()
    assert (command.order, command.who, command.reason) == (order, user_name(), "new nodes")
    assert not run.stop.exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["skip", "0"], "skip: must be 1 to 1,000,000 batches, got 0"),
        (["skip", "-3"], "skip: must be 1 to 1,000,000 batches, got -3"),
        (["skip", "few"], "ctl RUN skip: argument N: invalid int value: 'few'; see --help"),
        (["skip"], "ctl RUN skip: the following arguments are required: N; see --help"),
        (["lr", "0"], "lr: must be a factor above 0 and at most 10, got 0.0"),
        (["lr", "nan"], "lr: must be a factor above 0 and at most 10, got nan"),
        (["lr", "1e400"], "lr: must be a factor above 0 and at most 10, got inf"),
        (["precision", "fp16"], "precision: must be bf16 or fp8, got fp16"),
        (["exclude", "wine"], "exclude: no source 'wine'; RUN has web, books"),
        (["rollback", "--to", "9"], "rollback: RUN has no checkpoint at or before step 9 that is not tainted"),
        (["rollback"], "ctl RUN rollback: the following arguments are required: --to; see --help"),
        (["pause", "10"], "ctl RUN pause: unrecognized arguments: 10; see --help"),
    ],
)
def test_what_the_run_cannot_do_is_not_sent(
    run: RunDir, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(run, STARTED)
    assert ctl.main([str(run.path), *words, *WHY]) == 2
    error = capsys.readouterr().err
    assert error.replace(str(run.path), "RUN") == f"harness: {complaint}\n"
    assert not run.control.exists()


@pytest.mark.parametrize("config", ["precision: {kind: bf16}", "precision: fp8", "[]", "{"])
def test_only_a_run_in_fp8_can_leave_it(run: RunDir, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    run.config.write_text(config)
    assert ctl.main([str(run.path), "precision", "bf16", *WHY]) == 2
    complaint = f"harness: precision: {run.path} was not started in fp8, so it has no precision to change\n"
    assert capsys.readouterr().err == complaint


def test_one_source_must_stay_also_after_what_waits(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main([str(run.path), "exclude", "web", *WHY]) == 0
    assert ctl.main([str(run.path), "exclude", "books", *WHY]) == 2
    assert capsys.readouterr().err == "harness: exclude: without 'books' no source would have a weight above 0\n"
    assert asked_of(run) == [ExcludeSource(source="web")]


@pytest.mark.parametrize("word", ["skip 1", "rollback --to 10", "lr 1", "exclude web", "checkpoint", "pause", "stop"])
def test_a_reason_is_required(run: RunDir, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main([str(run.path), *word.split()]) == 2
    assert "the following arguments are required: --reason" in capsys.readouterr().err
    for reason, complaint in [
        (" \n", "must not be empty"),
        ("x" * 1001, "must have at most 1000 characters, got 1001"),
    ]:
        assert ctl.main([str(run.path), *word.split(), "--reason", reason]) == 2
        assert capsys.readouterr().err == f"harness: --reason: {complaint}\n"
    assert not run.stop.exists()
    assert not run.control.exists()


def test_two_operators_at_once_are_both_heard(run: RunDir) -> None:
    with ThreadPoolExecutor(8) as pool:
        codes = pool.map(lambda n: ctl.main([str(run.path), "skip", str(n), *WHY]), range(1, 33))
    assert set(codes) == {0}
    assert {order.num_batches for order in asked_of(run) if isinstance(order, Skip)} == set(range(1, 33))


def test_wait_tells_what_came_of_it(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def act(inbox: Inbox, command: Command) -> None:
        inbox.done(command, commands.intervention_event(command, 7, {"excluded": [10, 12]}))

    tell(run, STARTED)
    with acting(run, act):
        assert ctl.main([str(run.path), "skip", "3", *WHY, "--wait"]) == 0
    answer = f"{run.path} did at iteration 7: skip 3 batches, excluded: [10, 12]\n"
    assert capsys.readouterr().out == f"asked {run.path} to skip 3 batches\n{answer}"
    (event,) = commands.interventions(run)
    assert (event.who, event.reason) == (user_name(), "new nodes")


def test_wait_tells_that_the_run_refused(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def act(inbox: Inbox, command: Command) -> None:
        inbox.done(command, commands.intervention_event(command, 7, {commands.REFUSED: "no room"}))

    with acting(run, act):
        assert ctl.main([str(run.path), "checkpoint", *WHY, "--wait"]) == 2
    assert capsys.readouterr().err == f"harness: {run.path}: refused at iteration 7: no room\n"


def test_wait_tells_of_a_command_that_is_gone(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def set_aside(_inbox: Inbox, command: Command) -> None:
        path = commands.path_of(run, command.id)
        path.rename(commands.refused_path_of(run, command.id))

    def withdraw(_inbox: Inbox, command: Command) -> None:
        commands.path_of(run, command.id).unlink()

    for act, fate in [(set_aside, "refused by the run, see "), (withdraw, "withdrawn: ")]:
        with acting(run, act):
            assert ctl.main([str(run.path), "pause", *WHY, "--wait"]) == 2
        assert f"harness: {run.path}: the command was {fate}" in capsys.readouterr().err


def test_wait_tells_of_an_end_without_an_answer(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    tell(run, STARTED, ENDED, STARTED)
    with acting(run, lambda _inbox, _command: tell(run, ENDED)):
        assert ctl.main([str(run.path), "pause", *WHY, "--wait"]) == 75
    assert "ended at step 5: SIGTERM (exit code 75); the command waits for its next start" in capsys.readouterr().out
    assert asked_of(run) == [Pause()]


def test_list_shows_what_waits_and_what_was_done(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main([str(run.path), "list"]) == 0
    assert capsys.readouterr().out == "waiting: nothing\ninterventions: none\n"
    sent = commands.send(run, Skip(num_batches=3), who="ada", reason="boilerplate")
    inbox = Inbox(run)
    for number in range(1, 13):
        inbox.done(sent, commands.intervention_event(sent, number, {"excluded": [10, 12]}))
    waits = commands.send(run, Pause(), who="bob", reason="lunch")
    stop_requests.ask(run, who="eve", reason="new nodes")
    tell(run, STARTED, ENDED)
    capsys.readouterr()
    assert ctl.main([str(run.path), "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "waiting: 2"
    assert lines[1] == f"  {ctl.clock(waits.time)}  bob: pause (lunch)"
    assert lines[2].endswith("  eve: stop (new nodes)")
    assert lines[3] == "interventions: the last 10 of 12"
    assert lines[4].endswith("  iteration 3  ada: skip 3 batches, excluded: [10, 12] (boilerplate)")
    assert len(lines) == 14


def test_list_shows_also_what_no_command_asked_for() -> None:
    event = Intervention(time=0.0, iteration=7, who="ada", reason="run.resume=changed", changes={"optim.lr": [1, 2]})
    assert ctl.render([], [event]).endswith("  iteration 7  ada: optim.lr: [1, 2] (run.resume=changed)")


@pytest.mark.parametrize("words", [["--help"], ["RUN", "--help"], ["help"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(words) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {word}" in told or f", {word}" in told for word in ctl.DESCRIPTIONS)


@pytest.mark.parametrize("word", ctl.DESCRIPTIONS)
def test_every_command_has_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        ctl.main(["RUN", word, "--help"])
    assert left.value.code == 0
    assert f"usage: harness ctl RUN {word} " in capsys.readouterr().out


@pytest.mark.parametrize("events", [(), (STARTED,), (STARTED, ENDED, STARTED), (STARTED, SAVED)])
def test_a_run_is_asked_by_name(run: RunDir, events: tuple[Event, ...], capsys: pytest.CaptureFixture[str]) -> None:
    tell(run, *events)
    assert ctl.main([str(run.path), "stop", *WHY]) == 0
    assert capsys.readouterr().out == f"asked {run.path} to stop\n"
    words = json.loads(run.stop.read_text())
    assert abs(words.pop("time") - time.time()) < 60
    assert words == {"who": user_name(), "reason": "new nodes"}
    assert not list(run.path.glob(".STOP*")), "nothing half written is left"
    asked = stop_requests.read(run)
    assert asked is not None
    assert asked.in_words() == f"asked by {user_name()}: new nodes"


@pytest.mark.parametrize("events", [(STARTED, ENDED), (STARTED, ENDED, SAVED)])
def test_a_run_that_has_ended_is_not_asked(
    run: RunDir, events: tuple[Event, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    tell(run, *events)
    for word in ("stop", "pause"):
        assert ctl.main([str(run.path), word, *WHY]) == 2
        assert capsys.readouterr().err == f"harness: {run.path}: has ended at step 5: SIGTERM\n"
    assert not run.stop.exists()
    assert not run.control.exists()


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        for words in (["stop", *WHY], ["pause", *WHY], ["list"]):
            assert ctl.main([str(path), *words]) == 2
            assert capsys.readouterr().err == f"harness: {path}: is not a run directory: it has no config.yaml\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "ctl: missing run; give its directory and a command, or --help"),
        (["RUN"], f"ctl: missing command; choose {LIST}"),
        (["RUN", "fly"], f"ctl: unknown command 'fly'; choose {LIST}"),
        (["RUN", "stop", "--now", *WHY], "ctl RUN stop: unrecognized arguments: --now; see --help"),
        (["RUN", "list", "all"], "ctl RUN list: unrecognized arguments: all; see --help"),
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
    assert ctl.main([str(run.path), "stop", *WHY]) == 2
    assert capsys.readouterr().err == f"harness: {run.stop}: cannot be written: Is a directory\n"
    run.control.touch()
    assert ctl.main([str(run.path), "pause", *WHY]) == 2
    assert capsys.readouterr().err == f"harness: {run.control}: cannot be written: Not a directory\n"


@pytest.mark.parametrize("exit_code", [0, 75])
def test_wait_gives_the_code_of_this_end(run: RunDir, exit_code: int, capsys: pytest.CaptureFixture[str]) -> None:
    tell(run, STARTED, ENDED, STARTED)
    codes: list[int] = []
    waiting = threading.Thread(target=lambda: codes.append(ctl.main([str(run.path), "stop", *WHY, "--wait"])))
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
    for word in ("stop", "pause"):
        assert ctl.main([str(run.path), word, *WHY, "--wait"]) == 75
        assert capsys.readouterr().err == f"harness: no longer waiting; {run.path} is still asked to {word}\n"
    assert run.stop.exists()
    assert asked_of(run) == [Pause()]


@pytest.mark.parametrize("error", [KeyError, OSError], ids=["before Python 3.13", "since"])
def test_a_user_without_a_name_has_a_number(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def nobody() -> str:
        raise error("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert ctl.main([str(run.path), "stop", *WHY]) == 0
    asked = stop_requests.read(run)
    assert asked is not None
    assert asked.who == "user 12345"
    assert rundir.make_config_change_event({}, iteration=1).who == "user 12345"
