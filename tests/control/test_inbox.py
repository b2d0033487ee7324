"""Operator commands as files: they arrive unchanged, in order and once; invalid files are set aside with a warning."""

from __future__ import annotations

import json
import os
import pickle
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.config.errors import ConfigError
from harness.control import inbox as commands
from harness.control.commands import (
    ORDERS,
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
    in_words,
    parse_command,
    parse_order,
)
from harness.control.inbox import Inbox
from harness.core.event_json import to_json
from harness.core.rundir import RunDir, append_line

ALL_ORDERS = (
    Skip(num_batches=20),
    SkipBatches(first=812, last=831),
    UnskipBatches(first=812, last=812),
    Rollback(to_step=900, exclude=(890, 910)),
    Rate(factor=0.5),
    ExcludeSource(source="web"),
    Reweight(weights={"web": 0.5, "code": 2.0}),
    Precision(kind="fp8"),
    SaveCheckpoint(),
    Profile(num_steps=3, ranks=(0, 3)),
    Pause(),
    Resume(),
)
COMMON_FIELDS: dict[str, Any] = {"who": "ada", "time": 1e9, "reason": "why not"}
SKIP = {"command": "skip", "num_batches": 3} | COMMON_FIELDS


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "first")
    run.path.mkdir()
    return run


def write(run: RunDir, name: str, content: object) -> Path:
    """Write a file into the control directory, as another program might."""
    run.control.mkdir(exist_ok=True)
    path = run.control / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.control.iterdir())


@pytest.mark.parametrize("order", ALL_ORDERS, ids=lambda order: type(order).__name__)
def test_a_sent_command_arrives_unchanged(run: RunDir, order: Order) -> None:
    inbox = Inbox(run)
    sent = commands.send(run, order, who="ada", reason="a\n\x1b[31mred\tspike")
    assert names(run) == [f"{sent.id}.json"], "no temporary file is left"
    (taken,) = inbox.take()
    assert taken == sent == pickle.loads(pickle.dumps(taken)), (
        "it survives pickling, by which it is sent to the other ranks"
    )
    assert (taken.order, taken.who, taken.reason) == (order, "ada", "a ?[31mred spike")
    assert abs(taken.time - time.time()) < 60
    assert commands.waiting(run) == [sent]


def test_every_order_has_a_description() -> None:
    assert {type(order) for order in ALL_ORDERS} == set(ORDERS.values())
    assert len({in_words(order) for order in ALL_ORDERS}) == len(ALL_ORDERS)
    assert in_words(Skip(num_batches=1)) == "skip the next batch"
    assert in_words(UnskipBatches(first=812, last=812)) == "re-include batch 812"
    assert in_words(SkipBatches(first=812, last=831)) == "skip batches 812..831"
    assert in_words(Rollback(to_step=9)) == "roll back to step 9"
    assert in_words(Rollback(to_step=9, exclude=(7, 9))) == "roll back to step 9 and exclude batches 7..9"
    assert in_words(Rate(factor=1.0)) == "restore the learning rate"


@pytest.mark.parametrize(
    ("command_name", "fields", "message"),
    [
        ("skip", {"num_batches": 0}, "skip: must be 1 to 1,000,000 batches, got 0"),
        ("skip", {"num_batches": 1000001}, "skip: must be 1 to 1,000,000 batches, got 1000001"),
        ("skip", {"num_batches": True}, "skip: num_batches must be of type int, got True"),
        ("skip", {"num_batches": 1.0}, "skip: num_batches must be of type int, got 1.0"),
        ("skip", {}, "skip: takes num_batches, got []"),
        ("pause", {"for_s": 3}, "pause: takes nothing, got ['for_s']"),
        ("rollback", {"to_step": -1}, "rollback: must be to step 0 or later, got -1"),
        ("lr", {"factor": 0}, "lr: must be a factor above 0 and at most 10, got 0"),
        ("lr", {"factor": 10.01}, "lr: must be a factor above 0 and at most 10, got 10.01"),
        ("lr", {"factor": float("nan")}, "lr: must be a factor above 0 and at most 10, got nan"),
        ("exclude", {"source": ""}, "exclude: must name a source"),
        ("exclude", {"source": "w\ud800eb"}, r"exclude: the name of a source must be printable, got 'w\ud800eb'"),
        ("reweight", {"weights": {"\x1b[2J": 1}}, r"reweight: the name of a source must be printable, got '\x1b[2J'"),
        ("skip_batches", {"first": 5, "last": 4}, "skip: needs batches A..B with 0 <= A <= B, got 5..4"),
        ("unskip", {"first": -1, "last": 4}, "unskip: needs batches A..B with 0 <= A <= B, got -1..4"),
        ("skip_batches", {"first": 0, "last": 10**6}, "skip: must be 1 to 1,000,000 batches, got 1000001"),
        ("skip_batches", {"first": 0}, "skip_batches: takes first, last, got ['first']"),
        ("rollback", {"to_step": 9, "exclude": [1]}, "rollback: exclude must be first and last batch, got (1,)"),
        ("rollback", {"to_step": 9, "exclude": [2, 1]}, "rollback: needs batches A..B with 0 <= A <= B, got 2..1"),
        (
            "rollback",
            {"to_step": 9, "exclude": [1, True]},
            "rollback: exclude must be of type tuple[int, ...], got [1, True]",
        ),
        ("reweight", {"weights": {}}, "reweight: must name a source and its weight"),
        ("reweight", {"weights": {"web": -1}}, "reweight: the weight of 'web' must be 0 or more and finite, got -1.0"),
        (
            "reweight",
            {"weights": {"web": "1"}},
            "reweight: weights must be of type dict[str, float], got {'web': '1'}",
        ),
        ("reweight", {"weights": {"web": 10**400}}, "reweight: weights must be floats, got an integer above 1.8e+308"),
    ],
)
def test_an_invalid_argument_is_refused_in_one_line(command_name: str, fields: dict[str, Any], message: str) -> None:
    for attempt in (
        lambda: parse_order(command_name, fields),
        lambda: parse_command(json.dumps({"command": command_name} | fields | COMMON_FIELDS).encode(), id="a"),
    ):
        with pytest.raises(ConfigError) as error:
            attempt()
        assert str(error.value) == message
    assert parse_order("lr", {"factor": 10}) == Rate(factor=10)


def test_files_of_earlier_versions_are_read_and_plain_rollbacks_are_written_like_theirs() -> None:
    """The fields of the first version: an older run reads a rollback that excludes nothing."""
    old = {"command": "rollback", "to_step": 9} | COMMON_FIELDS
    command = parse_command(json.dumps(old).encode(), id="a")
    assert command.order == Rollback(to_step=9, exclude=())
    assert json.loads(command.to_json()) == old
    assert parse_command(json.dumps(SKIP).encode(), id="a").order == Skip(num_batches=3)
    assert json.loads(Command(id="a", order=Skip(num_batches=3), **COMMON_FIELDS).to_json()) == SKIP


@pytest.mark.parametrize(
    ("content", "reason_text"),
    [
        (b"", "is not JSON"),
        (json.dumps(SKIP).encode()[:-7], "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 60000, "is not JSON"),
        (b" " * 70000, "has more than 65536 bytes"),
        ([], "needs command, who, time and reason"),
        ({"command": "skip", "num_batches": 3}, "needs command, who, time and reason"),
        (
            SKIP | {"command": "fly"},
            "has no known command: 'fly'; known are skip, skip_batches, unskip, ",
        ),
        (SKIP | {"command": "stop"}, "has no known command: 'stop'"),
        (SKIP | {"num_batches": "3"}, "skip: num_batches must be of type int, got '3'"),
        (SKIP | {"also": 3}, "skip: takes num_batches, got ['also', 'num_batches']"),
        (SKIP | {"reason": " \n"}, "reason: must not be empty"),
        (SKIP | {"reason": "x" * 1001}, "reason: must have at most 1000 characters, got 1001"),
        (SKIP | {"who": ""}, "who: must not be empty"),
        (
            {"command": "reweight", "weights": {"web": 10**400}} | COMMON_FIELDS,
            "reweight: weights must be floats, got an integer above 1.8e+308",
        ),
        (SKIP | {"time": 10**400}, "time: must be in seconds since 1970, got 1000"),
        (SKIP | {"time": float("nan")}, "time: must be in seconds since 1970, got nan"),
    ],
)
def test_an_invalid_file_is_set_aside_with_one_line(
    run: RunDir, content: object, reason_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    inbox = Inbox(run)
    write(run, "a.json", content)
    good = commands.send(run, Pause(), who="ada", reason="lunch")
    assert [command.id for command in commands.waiting(run)] == [good.id], "listing the commands changes nothing"
    assert inbox.take() == [good] == inbox.take()
    assert names(run) == sorted([f"{good.id}.json", "a.json.refused"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {run.control}: 'a.json' was refused: {reason_text}")


def test_a_file_whose_name_is_not_text_is_set_aside(run: RunDir) -> None:
    """The answer to a command holds the name."""
    write(run, "caf\udce9.json", SKIP)
    assert Inbox(run).take() == []
    assert names(run) == ["caf\udce9.json.refused"]


def test_only_plain_files_are_opened(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inbox = Inbox(run)
    secret = tmp_path / "secret"
    secret.write_text(json.dumps(SKIP))
    os.mkfifo(run.control / "fifo.json")
    (run.control / "directory.json").mkdir()
    (run.control / "link.json").symlink_to(secret)
    assert inbox.take() == []
    assert names(run) == ["directory.json.refused", "fifo.json.refused", "link.json.refused"]
    assert capsys.readouterr().err.count("is not a plain file\n") == 3


def test_unfinished_and_other_files_are_ignored(run: RunDir) -> None:
    inbox = Inbox(run)
    for name in (".a.json.tmp", ".a.json", "a.json.tmp", "a.json.refused", "notes.txt"):
        write(run, name, SKIP)
    assert inbox.take() == commands.waiting(run) == []
    assert len(names(run)) == 5


def test_an_io_error_gives_no_command_and_no_crash(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    inbox = Inbox(run)
    sent = commands.send(run, Pause(), who="ada", reason="lunch")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fail)
        assert inbox.take() == []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        assert inbox.take() == []
    assert inbox.take() == [sent], "the next poll reads it"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        patch.setattr(commands, "append_line", fail)
        inbox.done(sent, event := commands.intervention_event(sent, 7, {}))
    assert "the event log alone has the intervention" in capsys.readouterr().err
    assert inbox.take() == [], "a command whose file cannot be removed is not applied again"
    append_line(run.events, to_json(event))
    assert Inbox(run).take() == [], "nor at the next start"
    assert names(run) == [f"{sent.id}.json.refused"]


def test_a_missing_control_directory_has_no_commands(run: RunDir) -> None:
    inbox = Inbox(run)
    run.control.rmdir()
    assert inbox.take() == commands.waiting(run) == []


def test_a_command_is_answered_once(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    inbox = Inbox(run)
    sent = commands.send(run, Skip(num_batches=3), who="ada", reason="boilerplate")
    assert commands.answer(run, sent.id) is None
    (taken,) = inbox.take()
    path = commands.path_of(run, sent.id)
    content = path.read_bytes()
    event = commands.intervention_event(taken, 7, {"excluded": [10, 12]})
    assert (event.iteration, event.who, event.reason) == (7, "ada", "boilerplate")
    inbox.done(taken, event)
    assert not names(run)
    assert not inbox.take()
    assert commands.answer(run, sent.id) == event
    assert event.changes == {
        "command": "skip the next 3 batches",
        "id": sent.id,
        "asked_time": sent.time,
        "excluded": [10, 12],
    }
    path.write_bytes(content)  # as if the run had been killed before it could remove the file
    assert Inbox(run).take() == []
    assert names(run) == [f"{path.name}.refused"]
    assert capsys.readouterr().err.endswith("was refused: was applied before\n")


def test_a_pending_command_is_kept_until_the_next_start(run: RunDir) -> None:
    sent = commands.send(run, Pause(), who="ada", reason="lunch")
    assert Inbox(run).take() == Inbox(run).take() == [sent]


def test_many_operators_at_once(run: RunDir) -> None:
    """While the run reads commands, none is lost, torn or reordered."""
    inbox, taken, is_over = Inbox(run), list[Command](), threading.Event()

    def process_commands() -> None:
        while not (is_over.is_set() and not commands.waiting(run)):
            for command in inbox.take():
                taken.append(command)
                inbox.done(command, commands.intervention_event(command, len(taken), {}))

    def send_commands(operator: int) -> list[str]:
        return [commands.send(run, Skip(num_batches=n), who=str(operator), reason="-").id for n in range(1, 11)]

    processor = threading.Thread(target=process_commands)
    processor.start()
    with ThreadPoolExecutor(4) as pool:
        sent = [id for ids in pool.map(send_commands, range(4)) for id in ids]
    is_over.set()
    processor.join(timeout=200)
    assert sorted(command.id for command in taken) == sorted(sent)
    for operator in range(4):
        orders = [command.order for command in taken if command.who == str(operator)]
        assert orders == [Skip(num_batches=n) for n in range(1, 11)]
    assert not names(run)
    assert len(commands.interventions(run)) == 40


def test_the_control_directory_has_the_permissions_of_the_run_directory(run: RunDir) -> None:
    before = os.umask(0o077)
    try:
        run.path.chmod(0o775)
        sent = commands.send(run, Pause(), who="ada", reason="lunch")
    finally:
        os.umask(before)
    assert stat.S_IMODE(run.control.stat().st_mode) == 0o775
    assert stat.S_IMODE(commands.path_of(run, sent.id).stat().st_mode) == 0o644, "the run can read it"
    run.control.chmod(0o700)
    Inbox(run)
    assert stat.S_IMODE(run.control.stat().st_mode) == 0o700, "narrower permissions are kept"


def test_an_unreadable_file_is_reported_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_permission_error(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    inbox = Inbox(run)
    write(run, "a.json", SKIP)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", raise_permission_error)
        patch.setattr(Path, "rename", raise_permission_error)
        assert inbox.take() == inbox.take() == []
    assert capsys.readouterr().err.count("'a.json' was refused: cannot be read: Permission denied\n") == 1


def test_a_failed_send_leaves_no_file(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", raise_disk_full)
    with pytest.raises(OSError, match="No space left"):
        commands.send(run, Pause(), who="ada", reason="lunch")
    assert names(run) == []
