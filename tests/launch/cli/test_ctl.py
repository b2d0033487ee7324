"""`harness ctl` on run directories without a live run; tests/distributed has live ones."""

from __future__ import annotations

import errno
import getpass
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

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
    Profile,
    Rate,
    Resume,
    Reweight,
    Rollback,
    SaveCheckpoint,
    Skip,
    SkipBatches,
    UnskipBatches,
)
from harness.control.inbox import Inbox
from harness.core import rundir
from harness.core.event_json import to_json
from harness.core.events import Action, ActionKind, CheckpointSaved, Event, Intervention, RunEnded, RunStarted
from harness.core.rundir import RunDir, append_line, user_name
from harness.core.state import RunState
from harness.data.order.ledger import Ledger
from harness.telemetry.heartbeat import Heartbeat
from launch.cli import ctl, ctl_arguments
from launch.cli.main import main

STARTED = RunStarted(time=1.0, iteration=0, world_size=2, num_steps=9, step=0)
SAVED = CheckpointSaved(time=2.0, iteration=5, step=5, directory="step-00000005-gen-0", seconds=0.1)
ENDED = RunEnded(time=3.0, iteration=5, step=5, exit_code=75, reason="SIGTERM")
SKIPPED = Action(
    time=2.0, iteration=16, kind=ActionKind.skip, step=16, incident=2, reason="-", onset=15, exclude=[14, 15]
)
REASON = ("--reason", "new nodes")
THREE = "--batch N (one batch), --batches A..B (a range) or --next K (the next K)"
TARGETS = "checkpoints: step 20 (tainted), step 10 (candidate)"
NAMES = "skip, unskip, rollback, lr, exclude, reweight, precision, checkpoint, profile, pause, resume, stop, list"
LIST = f"{NAMES}, or --help"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of two sources with checkpoints at steps 10 and 20, the latter tainted."""
    run = RunDir(tmp_path / "first")
    run.path.mkdir()
    run.config.write_text(
        "data: {sources: {web: {weight: 1.0}, books: {weight: 2.0}}, phases: []}\nprecision: {kind: fp8}\n"
        "train: {batch_size: 4, sequence_length: 100}\n"
    )
    for step in (10, 20):
        path = run.checkpoints / catalog.name_of(step, 0)
        path.mkdir(parents=True)
        (path / catalog.STATE_FILE).write_text(json.dumps({"cursor": step}))
    catalog.mark(run.checkpoints / catalog.name_of(20, 0), Health.tainted, "spike")
    return run


def write_log(run: RunDir, *events: Event) -> None:
    for event in events:
        append_line(run.events, to_json(event))


def pending_orders(run: RunDir) -> list[Order]:
    return [command.order for command in commands.waiting(run)]


@contextmanager
def running_inbox(run: RunDir, handle: Callable[[Inbox, Command], None]) -> Iterator[None]:
    """A thread that handles commands like a run."""
    inbox, is_finished = Inbox(run), threading.Event()

    def listen() -> None:
        while not is_finished.is_set():
            for command in inbox.take():
                handle(inbox, command)
            time.sleep(0.01)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield
    finally:
        is_finished.set()
        thread.join(timeout=200)


@pytest.mark.parametrize(
    ("args", "order", "description"),
    [
        (["skip", "--next", "20"], Skip(num_batches=20), "skip the next 20 batches"),
        (["skip", "--batch", "812"], SkipBatches(first=812, last=812), "skip batch 812"),
        (["skip", "--batches", "812..831"], SkipBatches(first=812, last=831), "skip batches 812..831"),
        (["unskip", "--batch", "7"], UnskipBatches(first=7, last=7), "re-include batch 7"),
        (["unskip", "--batches", "3..7"], UnskipBatches(first=3, last=7), "re-include batches 3..7"),
        (["rollback", "--to", "30"], Rollback(to_step=30), "roll back to step 30"),
        (
            ["rollback", "--to", "10", "--exclude", "11..12"],
            Rollback(to_step=10, exclude=(11, 12)),
            "roll back to step 10 and exclude batches 11..12",
        ),
        (
            ["rollback", "--to", "10", "--incident", "2"],
            Rollback(to_step=10, exclude=(14, 15)),
            "roll back to step 10 and exclude batches 14..15",
        ),
        (
            ["reweight", "web=0.5", "books=2"],
            Reweight(weights={"web": 0.5, "books": 2.0}),
            "set the weight of web to 0.5, books to 2",
        ),
        (["lr", "0.5"], Rate(factor=0.5), "multiply the learning rate by 0.5"),
        (["lr", "1"], Rate(factor=1.0), "restore the learning rate"),
        (["exclude", "web"], ExcludeSource(source="web"), "exclude the source web"),
        (["precision", "bf16"], Precision(kind="bf16"), "compute in bf16"),
        (["checkpoint"], SaveCheckpoint(), "save a checkpoint"),
        (["profile", "--steps", "5"], Profile(num_steps=5), "profile 5 steps"),
        (
            ["profile", "--steps", "1", "--ranks", "0, 3"],
            Profile(num_steps=1, ranks=(0, 3)),
            "profile a step on rank 0, 3",
        ),
        (["pause"], Pause(), "pause"),
        (["resume"], Resume(), "resume"),
    ],
)
def test_every_command_is_sent_with_user_and_reason(
    run: RunDir, args: list[str], order: Order, description: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(run, STARTED, SKIPPED)
    Ledger.load(run.ledger).exclude(5, 7, "incident 1")
    assert ctl.main([str(run.path), *args, *REASON]) == 0
    effect, asked = capsys.readouterr().out.rpartition("asked ")[::2]
    assert asked == f"{run.path} to {description}\n"
    assert effect.startswith(f"{args[0]} ") == (args[0] in ctl_arguments.ABOUT_DATA), (
        "its effect is printed before it is sent"
    )
    (command,) = Inbox(run).take()
    assert (command.order, command.who, command.reason) == (order, user_name(), "new nodes")
    assert not run.stop.exists()


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["skip", "--next", "0"], "skip: must be 1 to 1,000,000 batches, got 0"),
        (["skip", "--next", "-3"], "skip: must be 1 to 1,000,000 batches, got -3"),
        (["skip", "--next", "few"], "ctl RUN skip: argument --next: invalid int value: 'few'; see --help"),
        (["skip", "812"], f"skip: '812' is not clear: use {THREE}"),
        (["skip", "812", "--next", "3"], f"skip: '812' is not clear: use {THREE}"),
        (["skip"], f"skip: missing batches: use {THREE}"),
        (["skip", "--batches", "7-9"], '--batches: must be A..B, first and last batch, got "7-9"'),
        (["skip", "--batches", "9..7"], "skip: needs batches A..B with 0 <= A <= B, got 9..7"),
        (
            ["skip", "--batch", "7", "--next", "2"],
            "ctl RUN skip: argument --next: not allowed with argument --batch; see --help",
        ),
        (["unskip", "812"], "unskip: '812' is not clear: use --batch N (one batch) or --batches A..B (a range)"),
        (["unskip", "--batch", "3"], "unskip: RUN excludes no batch of 3..3; its ledger is RUN/ledger.jsonl"),
        (["reweight", "web"], "reweight: must be SOURCE=WEIGHT, got 'web'"),
        (["reweight", "web=much"], "reweight: the weight of 'web' must be a number, got 'much'"),
        (["reweight", "wine=1"], "reweight: no source 'wine'; RUN has web, books"),
        (["rollback", "--to", "10", "--exclude", "x"], '--exclude: must be A..B, first and last batch, got "x"'),
        (["rollback", "--to", "10", "--incident", "3"], "--incident: RUN has no incident 3 in its log"),
        (["lr", "0"], "lr: must be a factor above 0 and at most 10, got 0.0"),
        (["lr", "nan"], "lr: must be a factor above 0 and at most 10, got nan"),
        (["lr", "1e400"], "lr: must be a factor above 0 and at most 10, got inf"),
        (["precision", "fp16"], "precision: must be bf16 or fp8, got fp16"),
        (["exclude", "wine"], "exclude: no source 'wine'; RUN has web, books"),
        (
            ["rollback", "--to", "9"],
            f"rollback: RUN has no checkpoint at or before step 9 that is not tainted; {TARGETS}",
        ),
        (["profile", "--steps", "101"], "profile: must be 1 to 100 steps, got 101"),
        (["profile", "--ranks", "0-3"], "--ranks: must be ranks like 0,3, got '0-3'"),
        (["rollback"], "ctl RUN rollback: the following arguments are required: --to; see --help"),
        (["pause", "10"], "ctl RUN pause: unrecognized arguments: 10; see --help"),
    ],
)
def test_invalid_commands_are_not_sent(
    run: RunDir, args: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(run, STARTED)
    assert ctl.main([str(run.path), *args, *REASON]) == 2
    error = capsys.readouterr().err
    assert error.replace(str(run.path), "RUN") == f"harness: {complaint}\n"
    assert not run.control.exists()


@pytest.mark.parametrize("config", ["precision: {kind: bf16}", "precision: fp8", "[]", "{"])
def test_only_an_fp8_run_can_change_precision(run: RunDir, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    run.config.write_text(config)
    assert ctl.main([str(run.path), "precision", "bf16", *REASON]) == 2
    complaint = f"harness: precision: {run.path} was not started in fp8, so it has no precision to change\n"
    assert capsys.readouterr().err == complaint


def test_one_source_must_remain_after_pending_commands(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main([str(run.path), "exclude", "web", *REASON]) == 0
    assert ctl.main([str(run.path), "exclude", "books", *REASON]) == 2
    assert capsys.readouterr().err == "harness: exclude: without 'books' no source would have a weight above 0\n"
    assert pending_orders(run) == [ExcludeSource(source="web")]


def test_a_profile_needs_no_reason(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(run, STARTED)
    assert ctl.main([str(run.path), "profile"]) == 0
    assert capsys.readouterr().out == f"asked {run.path} to profile 3 steps\n"
    assert pending_orders(run) == [Profile(num_steps=3)]


def test_ranks_to_profile_are_those_of_the_newest_heartbeats(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(run, STARTED)
    for num_ranks in (4, 2):  # the run was started again on fewer ranks
        beats = [Heartbeat(run, rank=rank, world_size=num_ranks, num_steps=9) for rank in range(num_ranks)]
        for beat in beats:
            with beat:
                pass
    assert ctl.main([str(run.path), "profile", "--ranks", "0,3"]) == 2
    assert capsys.readouterr().err == "harness: --ranks: no rank 3; the run has ranks 0 to 1\n"
    assert not run.control.exists()
    assert ctl.main([str(run.path), "profile", "--ranks", "1"]) == 0
    assert pending_orders(run) == [Profile(num_steps=3, ranks=(1,))]


@pytest.mark.parametrize(
    "name", ["skip --next 1", "unskip --batch 1", "rollback --to 10", "lr 1", "reweight web=1", "pause", "stop"]
)
def test_a_reason_is_required(run: RunDir, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main([str(run.path), *name.split()]) == 2
    assert "the following arguments are required: --reason" in capsys.readouterr().err
    for reason, complaint in [
        (" \n", "must not be empty"),
        ("x" * 1001, "must have at most 1000 characters, got 1001"),
    ]:
        assert ctl.main([str(run.path), *name.split(), "--reason", reason]) == 2
        assert capsys.readouterr().err == f"harness: --reason: {complaint}\n"
    assert not run.stop.exists()
    assert not run.control.exists()


@pytest.mark.parametrize(
    "args", ["skip --batch 812", "skip --next 3", "unskip --batch 5", "rollback --to 10", "reweight web=2"]
)
def test_a_dry_run_prints_the_effect_and_sends_nothing(
    run: RunDir, args: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(run, STARTED)
    Ledger.load(run.ledger).exclude(5, 7, "incident 1")
    assert ctl.main([str(run.path), *args.split(), "--dry-run"]) == 0
    effect, nothing = capsys.readouterr().out.splitlines()
    assert effect.startswith(f"{args.split()[0]} ")
    assert nothing == "dry run: nothing was sent"
    assert not run.control.exists()


def test_concurrent_commands_are_all_sent(run: RunDir) -> None:
    with ThreadPoolExecutor(8) as pool:
        codes = pool.map(lambda n: ctl.main([str(run.path), "skip", "--next", str(n), *REASON]), range(1, 33))
    assert set(codes) == {0}
    assert {order.num_batches for order in pending_orders(run) if isinstance(order, Skip)} == set(range(1, 33))


def test_wait_prints_the_result(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def handle(inbox: Inbox, command: Command) -> None:
        inbox.done(command, commands.intervention_event(command, 7, {"excluded": [10, 12]}))

    write_log(run, STARTED)
    with running_inbox(run, handle):
        assert ctl.main([str(run.path), "skip", "--next", "3", *REASON, "--wait"]) == 0
    effect = "skip excludes 3 batches, 0 to 2, 1,200 tokens if it is applied now, at batch 0\n"
    answer = f"{run.path}: done at iteration 7: skip the next 3 batches, excluded: [10, 12]\n"
    assert capsys.readouterr().out == f"{effect}asked {run.path} to skip the next 3 batches\n{answer}"
    (event,) = commands.interventions(run)
    assert (event.who, event.reason) == (user_name(), "new nodes")


def test_wait_finds_a_result_that_only_the_event_log_has(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def handle(inbox: Inbox, command: Command) -> None:
        event = commands.intervention_event(command, 7, {})
        write_log(run, event)
        inbox.done(command, event)

    write_log(run, STARTED)
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch.object(commands, "append_line", side_effect=full), running_inbox(run, handle):
        assert ctl.main([str(run.path), "checkpoint", *REASON, "--wait"]) == 0
    assert f"{run.path}: done at iteration 7: save a checkpoint\n" in capsys.readouterr().out


def test_wait_reports_a_rejected_command(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def handle(inbox: Inbox, command: Command) -> None:
        inbox.done(command, commands.intervention_event(command, 7, {commands.REFUSED: "no room"}))

    with running_inbox(run, handle):
        assert ctl.main([str(run.path), "checkpoint", *REASON, "--wait"]) == 2
    assert capsys.readouterr().err == f"harness: {run.path}: refused at iteration 7: no room\n"


def test_wait_reports_a_missing_command(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def set_aside(_inbox: Inbox, command: Command) -> None:
        path = commands.path_of(run, command.id)
        path.rename(commands.refused_path_of(run, command.id))

    def withdraw(_inbox: Inbox, command: Command) -> None:
        commands.path_of(run, command.id).unlink()

    for handle, fate in [(set_aside, "refused by the run, see "), (withdraw, "withdrawn: ")]:
        with running_inbox(run, handle):
            assert ctl.main([str(run.path), "pause", *REASON, "--wait"]) == 2
        assert f"harness: {run.path}: the command was {fate}" in capsys.readouterr().err


def test_wait_reports_the_end_of_the_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(run, STARTED, ENDED, STARTED)
    with running_inbox(run, lambda _inbox, _command: write_log(run, ENDED)):
        assert ctl.main([str(run.path), "pause", *REASON, "--wait"]) == 75
    assert "ended at step 5: SIGTERM (exit code 75); the command runs at its next start" in capsys.readouterr().out
    assert pending_orders(run) == [Pause()]


def test_list_shows_pending_commands_and_interventions(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main([str(run.path), "list"]) == 0
    assert capsys.readouterr().out == "pending: none\ninterventions: none\n"
    sent = commands.send(run, Skip(num_batches=3), who="ada", reason="boilerplate")
    inbox = Inbox(run)
    for number in range(1, 13):
        inbox.done(sent, commands.intervention_event(sent, number, {"excluded": [10, 12]}))
    pending_command = commands.send(run, Pause(), who="bob", reason="lunch")
    stop_requests.ask(run, who="eve", reason="new nodes")
    write_log(run, STARTED)
    capsys.readouterr()
    assert ctl.main([str(run.path), "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pending: 2"
    assert lines[1] == f"  {ctl.local_time(pending_command.time)}  bob: pause (lunch)"
    assert lines[2].endswith("  eve: stop (new nodes)")
    assert lines[3] == "interventions: the last 10 of 12"
    assert lines[4].endswith("  iteration 3  ada: skip the next 3 batches, excluded: [10, 12] (boilerplate)")
    assert len(lines) == 14
    write_log(run, ENDED)
    assert ctl.main([str(run.path), "list"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "pending: 1", "the next start does not obey the file STOP"


@pytest.mark.parametrize("when", ["1e30", "Infinity", "NaN", "-1e17"])
def test_list_shows_a_stop_request_at_an_impossible_time(
    run: RunDir, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.stop.write_text(f'{{"who": "eve", "time": {when}, "reason": "new nodes"}}')
    assert ctl.main([str(run.path), "list"]) == 0
    assert "eve: stop (new nodes)" in capsys.readouterr().out


def test_list_shows_interventions_without_a_command() -> None:
    event = Intervention(time=0.0, iteration=7, who="ada", reason="run.resume=changed", changes={"optim.lr": [1, 2]})
    assert ctl.render([], [event]).endswith("  iteration 7  ada: optim.lr: [1, 2] (run.resume=changed)")


@pytest.mark.parametrize("args", [["--help"], ["RUN", "--help"], ["help"]])
def test_help_names_every_command(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(args) == 0
    description = capsys.readouterr().out
    assert all(f"\n  {name}" in description or f", {name}" in description for name in ctl_arguments.DESCRIPTIONS)


@pytest.mark.parametrize("name", ctl_arguments.DESCRIPTIONS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        ctl.main(["RUN", name, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: harness ctl RUN {name} " in capsys.readouterr().out


@pytest.mark.parametrize("events", [(), (STARTED,), (STARTED, ENDED, STARTED), (STARTED, SAVED)])
def test_stop_records_user_and_reason(
    run: RunDir, events: tuple[Event, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(run, *events)
    assert ctl.main([str(run.path), "stop", *REASON]) == 0
    assert capsys.readouterr().out == f"asked {run.path} to stop\n"
    args = json.loads(run.stop.read_text())
    assert abs(args.pop("time") - time.time()) < 60
    assert args == {"who": user_name(), "reason": "new nodes"}
    assert not list(run.path.glob(".STOP*")), "no partial file is left"
    asked = stop_requests.read(run)
    assert asked is not None
    assert asked.in_words() == f"asked by {user_name()}: new nodes"


@pytest.mark.parametrize("events", [(STARTED, ENDED), (STARTED, ENDED, SAVED)])
def test_a_run_that_has_ended_gets_no_commands(
    run: RunDir, events: tuple[Event, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(run, *events)
    for name in ("stop", "pause"):
        assert ctl.main([str(run.path), name, *REASON]) == 2
        assert capsys.readouterr().err == f"harness: {run.path}: has ended at step 5: SIGTERM\n"
    assert not run.stop.exists()
    assert not run.control.exists()


def test_a_directory_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        for args in (["stop", *REASON], ["pause", *REASON], ["list"]):
            assert ctl.main([str(path), *args]) == 2
            assert capsys.readouterr().err == f"harness: {path}: is not a run directory: it has no config.yaml\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "ctl: missing run; give its directory and a command, or --help"),
        (["RUN"], f"ctl: missing command; choose {LIST}"),
        (["RUN", "fly"], f"ctl: unknown command 'fly'; choose {LIST}"),
        (["RUN", "stop", "--now", *REASON], "ctl RUN stop: unrecognized arguments: --now; see --help"),
        (["RUN", "list", "all"], "ctl RUN list: unrecognized arguments: all; see --help"),
    ],
)
def test_usage_errors_are_one_line(
    run: RunDir, args: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main([str(run.path) if name == "RUN" else name for name in args]) == 2
    assert capsys.readouterr().err == f"harness: {complaint}\n"
    assert not run.stop.exists()


def test_a_file_that_cannot_be_written_is_named(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.stop.mkdir()
    assert ctl.main([str(run.path), "stop", *REASON]) == 2
    assert capsys.readouterr().err == f"harness: {run.stop}: cannot be written: Is a directory\n"
    run.control.touch()
    assert ctl.main([str(run.path), "pause", *REASON]) == 2
    assert capsys.readouterr().err == f"harness: {run.control}: cannot be written: Not a directory\n"


@pytest.mark.parametrize("exit_code", [0, 75])
def test_wait_returns_the_exit_code_of_the_run(run: RunDir, exit_code: int, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(run, STARTED, ENDED, STARTED)
    codes: list[int] = []
    waiting = threading.Thread(target=lambda: codes.append(ctl.main([str(run.path), "stop", *REASON, "--wait"])))
    waiting.start()
    deadline = time.monotonic() + 30
    while not run.stop.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    write_log(run, SAVED)
    waiting.join(timeout=0.5)
    assert waiting.is_alive()
    write_log(run, RunEnded(time=4.0, iteration=7, step=7, exit_code=exit_code, reason="why not"))
    waiting.join(timeout=200)
    assert codes == [exit_code]
    assert capsys.readouterr().out.endswith(f"{run.path} ended at step 7: why not (exit code {exit_code})\n")


def test_ctrl_c_ends_the_wait_and_keeps_the_command(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    for name in ("stop", "pause"):
        assert ctl.main([str(run.path), name, *REASON, "--wait"]) == 75
        assert capsys.readouterr().err == f"harness: no longer waiting; {run.path} will still {name}\n"
    assert run.stop.exists()
    assert pending_orders(run) == [Pause()]


@pytest.mark.parametrize("error", [KeyError, OSError], ids=["before Python 3.13", "since"])
def test_a_user_without_a_name_is_recorded_by_uid(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def raise_error() -> str:
        raise error("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", raise_error)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert ctl.main([str(run.path), "stop", *REASON]) == 0
    asked = stop_requests.read(run)
    assert asked is not None
    assert asked.who == "user 12345"
    assert rundir.make_config_change_event({}, iteration=1).who == "user 12345"


def test_a_listed_rollback_target_survives_the_next_prune(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """`rollback --dry-run` lists step 10; retention would delete it when step 30 is good."""
    write_log(run, STARTED)
    assert ctl.main([str(run.path), "rollback", "--to", "10", "--dry-run"]) == 0
    run.config.write_text(run.config.read_text() + "checkpoint: {keep: 2}\n")
    for step in (30, 40):
        (run.checkpoints / catalog.name_of(step, 0)).mkdir()
        catalog.mark(run.checkpoints / catalog.name_of(step, 0), Health.good, "clean")
    assert main(["checkpoint", "prune", str(run.path), "--keep", "1"]) == 0
    assert [each.step for each in catalog.list_checkpoints(run.checkpoints)] == [10, 40]
    (run.checkpoints / catalog.HOLDS).unlink()
    assert main(["checkpoint", "prune", str(run.path), "--keep", "1"]) == 0
    assert [each.step for each in catalog.list_checkpoints(run.checkpoints)] == [40]
    capsys.readouterr()


def test_a_crashed_run_accepts_commands_for_its_next_start(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    crashed = RunEnded(time=3.0, iteration=5, step=5, exit_code=1, reason="rank 1 ran out of memory")
    write_log(run, STARTED, crashed)
    assert ctl.main([str(run.path), "pause", *REASON]) == 0
    line = f"harness: {run.path} crashed at step 5: rank 1 ran out of memory; its next start runs this command\n"
    assert capsys.readouterr().err == line
    assert pending_orders(run) == [Pause()]
    assert ctl.main([str(run.path), "stop", *REASON]) == 0
    assert capsys.readouterr().err.endswith("out of memory; the next `harness train` drops this request\n")


def test_a_run_that_starts_again_accepts_commands(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Its log ends with the end of its last start."""
    write_log(run, STARTED, ENDED)
    imports = "from pathlib import Path; from harness.core.locking import run_lease"
    code = f"{imports}; run_lease.hold(Path({str(run.path)!r}), 60); print(); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as start:
        assert start.stdout is not None
        start.stdout.readline()
        for name in ("pause", "stop"):
            assert ctl.main([str(run.path), name, *REASON]) == 0
            assert capsys.readouterr() == (f"asked {run.path} to {name}\n", "")
        for num_beats, exit_code in [(0, 0), (2, 2)]:  # not yet in the loop; at its end
            with patch("os.getpid", return_value=start.pid), Heartbeat(run, rank=0, world_size=1, num_steps=9) as beat:
                for _ in range(num_beats):
                    beat.beat(RunState())
            assert ctl.main([str(run.path), "pause", *REASON]) == exit_code
        start.kill()
    assert "has ended at step 5" in capsys.readouterr().err
