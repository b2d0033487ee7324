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

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.config.errors import ConfigError
from harness.control import inbox as commands
from harness.control.commands import (
    ORDERS,
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
    in_words,
    parse_command,
    parse_order,
)
from harness.control.inbox import Inbox
from harness.core.events import StepRecord, to_json
from harness.core.rundir import RunDir, append_line
from harness.data.order.ledger import Ledger

ALL_ORDERS = (
    Skip(num_batches=20),
    Rollback(to_step=900),
    Rate(factor=0.5),
    ExcludeSource(source="web"),
    Precision(kind="fp8"),
    SaveCheckpoint(),
    Pause(),
    Resume(),
)
COMMON_FIELDS = {"who": "ada", "time": 1e9, "reason": "why not"}
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


def step_record(step: int, cursor: int) -> StepRecord:
    return StepRecord(
        time=1.0,
        iteration=step,
        step=step,
        cursor=cursor,
        tokens=0,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        tokens_per_s=1.0,
        refused=False,
        stop_requested=False,
        step_time_s=1.0,
        flops_per_s=1.0,
    )


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
    assert in_words(Skip(num_batches=1)) == "skip 1 batch"
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
        (SKIP | {"command": "fly"}, "has no known command: 'fly'; known are skip, rollback, lr, exclude, "),
        (SKIP | {"command": "stop"}, "has no known command: 'stop'"),
        (SKIP | {"num_batches": "3"}, "skip: num_batches must be of type int, got '3'"),
        (SKIP | {"also": 3}, "skip: takes num_batches, got ['also', 'num_batches']"),
        (SKIP | {"reason": " \n"}, "reason: must not be empty"),
        (SKIP | {"reason": "x" * 1001}, "reason: must have at most 1000 characters, got 1001"),
        (SKIP | {"who": ""}, "who: must not be empty"),
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
        inbox.done(sent, commands.intervention_event(sent, 7, {}))
    assert "the event log alone has the intervention" in capsys.readouterr().err
    assert inbox.take() == [], "a command whose file cannot be removed is not applied again"


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
        "command": "skip 3 batches",
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
    processor.join(timeout=30)
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


def test_a_rollback_restores_only_untainted_checkpoints(run: RunDir) -> None:
    for step, generation in [(90, 0), (40, 1), (100, 0), (50, 1), (30, 0)]:
        (run.checkpoints / catalog.name_of(step, generation)).mkdir(parents=True)
    catalog.mark(run.checkpoints / catalog.name_of(50, 1), Health.tainted, "spike")

    def targets(step: int) -> list[tuple[int, int]]:
        return [(each.step, each.generation) for each in commands.untainted_checkpoints(run, step)]

    assert targets(95) == [(40, 1), (90, 0), (30, 0)], "the newest generation comes first"
    assert targets(40) == [(40, 1), (30, 0)]
    assert targets(39) == [(30, 0)]
    commands.check_order(run, Rollback(to_step=30))
    with pytest.raises(ConfigError, match="has no checkpoint at or before step 29 that is not tainted"):
        commands.check_order(run, Rollback(to_step=29))
    append_line(run.events, to_json(step_record(45, 50)))
    commands.check_order(run, Rollback(to_step=45))
    with pytest.raises(ConfigError, match="rollback: must be to step 45, the last, or before, got 46"):
        commands.check_order(run, Rollback(to_step=46))


def test_the_last_source_cannot_be_excluded(run: RunDir) -> None:
    run.config.write_text(
        "data: {sources: {web: {weight: 1.0}, books: {weight: 2.0}, code: {weight: 0.5}},"
        " phases: [{from_batch: 100, weights: {code: 0.0}}]}"
    )
    for name in ("web", "books", "code"):
        commands.check_order(run, ExcludeSource(source=name))
    with pytest.raises(ConfigError, match=r"exclude: no source 'wine'; .* has web, books, code"):
        commands.check_order(run, ExcludeSource(source="wine"))
    last = "exclude: without 'web' no source would have a weight above 0"
    with pytest.raises(ConfigError, match=last):
        commands.check_order(run, ExcludeSource(source="web"), before=[Pause(), ExcludeSource(source="books")])
    Ledger.load(run.ledger).reweight(50, {"books": 0.0}, "incident 1")
    with pytest.raises(ConfigError, match=last):
        commands.check_order(run, ExcludeSource(source="web"))
    commands.check_order(run, ExcludeSource(source="code"))
    Ledger.load(run.ledger).reweight(50, {"books": 1.0}, "a mistake")
    commands.check_order(run, ExcludeSource(source="web"))


@pytest.mark.parametrize("content", ["", "[", "data: 3", "data: {sources: [web], phases: []}"])
def test_a_config_without_sources_is_an_error(run: RunDir, content: str) -> None:
    run.config.write_text(content)
    with pytest.raises(ConfigError, match=r"config.yaml: has no data.sources and data.phases"):
        commands.check_order(run, ExcludeSource(source="web"))


@pytest.mark.parametrize(
    "order", [order for order in ALL_ORDERS if not isinstance(order, Rollback | ExcludeSource | Precision)]
)
def test_other_orders_are_always_valid(run: RunDir, order: Order) -> None:
    commands.check_order(run, order)
