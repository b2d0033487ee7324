"""Commands as files: what is sent arrives as it was, in order, once; what is no command harms nobody."""

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

EVERY = (
    Skip(num_batches=20),
    Rollback(to_step=900),
    Rate(factor=0.5),
    ExcludeSource(source="web"),
    Precision(kind="fp8"),
    SaveCheckpoint(),
    Pause(),
    Resume(),
)
GIVEN = {"who": "ada", "time": 1e9, "reason": "why not"}
SKIP = {"command": "skip", "num_batches": 3} | GIVEN


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "first")
    run.path.mkdir()
    return run


def write(run: RunDir, name: str, content: object) -> Path:
    """A file as another program might leave it."""
    run.control.mkdir(exist_ok=True)
    path = run.control / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.control.iterdir())


def at(step: int, cursor: int) -> StepRecord:
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


@pytest.mark.parametrize("order", EVERY, ids=lambda order: type(order).__name__)
def test_what_is_sent_arrives(run: RunDir, order: Order) -> None:
    inbox = Inbox(run)
    sent = commands.send(run, order, who="ada", reason="a\n\x1b[31mred\tspike")
    assert names(run) == [f"{sent.id}.json"], "nothing half written is left"
    (taken,) = inbox.take()
    assert taken == sent == pickle.loads(pickle.dumps(taken)), "ranks hear the same"
    assert (taken.order, taken.who, taken.reason) == (order, "ada", "a ?[31mred spike")
    assert abs(taken.time - time.time()) < 60
    assert commands.waiting(run) == [sent]


def test_every_order_has_a_word() -> None:
    assert {type(order) for order in EVERY} == set(ORDERS.values())
    assert len({in_words(order) for order in EVERY}) == len(EVERY)
    assert in_words(Skip(num_batches=1)) == "skip 1 batch"
    assert in_words(Rate(factor=1.0)) == "restore the learning rate"


@pytest.mark.parametrize(
    ("word", "given", "complaint"),
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
def test_what_can_never_be_is_refused_in_one_line(word: str, given: dict[str, Any], complaint: str) -> None:
    for attempt in (
        lambda: parse_order(word, given),
        lambda: parse_command(json.dumps({"command": word} | given | GIVEN).encode(), id="a"),
    ):
        with pytest.raises(ConfigError) as error:
            attempt()
        assert str(error.value) == complaint
    assert parse_order("lr", {"factor": 10}) == Rate(factor=10)


@pytest.mark.parametrize(
    ("content", "why"),
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
def test_what_is_no_command_is_set_aside_with_one_line(
    run: RunDir, content: object, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    inbox = Inbox(run)
    write(run, "a.json", content)
    good = commands.send(run, Pause(), who="ada", reason="lunch")
    assert [command.id for command in commands.waiting(run)] == [good.id], "who only looks changes nothing"
    assert inbox.take() == [good] == inbox.take()
    assert names(run) == sorted([f"{good.id}.json", "a.json.refused"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {run.control}: 'a.json' was refused: {why}")


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


def test_what_is_not_whole_yet_is_nobodys(run: RunDir) -> None:
    inbox = Inbox(run)
    for name in (".a.json.tmp", ".a.json", "a.json.tmp", "a.json.refused", "notes.txt"):
        write(run, name, SKIP)
    assert inbox.take() == commands.waiting(run) == []
    assert len(names(run)) == 5


def test_a_disk_that_fails_is_no_command_and_no_crash(
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
    assert inbox.take() == [sent], "it is asked again"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        patch.setattr(commands, "append_line", fail)
        inbox.done(sent, commands.intervention_event(sent, 7, {}))
    assert "the event log alone has the intervention" in capsys.readouterr().err
    assert inbox.take() == [], "what cannot be removed is done all the same"


def test_a_directory_that_is_gone_is_empty(run: RunDir) -> None:
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


def test_what_nobody_took_waits_for_the_next_start(run: RunDir) -> None:
    sent = commands.send(run, Pause(), who="ada", reason="lunch")
    assert Inbox(run).take() == Inbox(run).take() == [sent]


def test_many_operators_at_once(run: RunDir) -> None:
    """While the run takes what is there, nothing is lost, torn or taken out of order."""
    inbox, taken, is_over = Inbox(run), list[Command](), threading.Event()

    def act() -> None:
        while not (is_over.is_set() and not commands.waiting(run)):
            for command in inbox.take():
                taken.append(command)
                inbox.done(command, commands.intervention_event(command, len(taken), {}))

    def operate(operator: int) -> list[str]:
        return [commands.send(run, Skip(num_batches=n), who=str(operator), reason="-").id for n in range(1, 11)]

    acting = threading.Thread(target=act)
    acting.start()
    with ThreadPoolExecutor(4) as pool:
        sent = [id for ids in pool.map(operate, range(4)) for id in ids]
    is_over.set()
    acting.join(timeout=30)
    assert sorted(command.id for command in taken) == sorted(sent)
    for operator in range(4):
        orders = [command.order for command in taken if command.who == str(operator)]
        assert orders == [Skip(num_batches=n) for n in range(1, 11)]
    assert not names(run)
    assert len(commands.interventions(run)) == 40


def test_the_directory_of_the_run_says_who_may(run: RunDir) -> None:
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
    assert stat.S_IMODE(run.control.stat().st_mode) == 0o700, "who narrows it is obeyed"


def test_a_file_that_may_not_be_read_is_set_aside(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    inbox = Inbox(run)
    write(run, "a.json", SKIP)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", forbid)
        patch.setattr(Path, "rename", forbid)
        assert inbox.take() == inbox.take() == []
    assert capsys.readouterr().err.count("'a.json' was refused: cannot be read: Permission denied\n") == 1


def test_a_send_that_fails_leaves_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        commands.send(run, Pause(), who="ada", reason="lunch")
    assert names(run) == []


def test_a_rollback_goes_to_what_is_sound(run: RunDir) -> None:
    for step, generation in [(90, 0), (40, 1), (100, 0), (50, 1), (30, 0)]:
        (run.checkpoints / catalog.name_of(step, generation)).mkdir(parents=True)
    catalog.mark(run.checkpoints / catalog.name_of(50, 1), Health.tainted, "spike")

    def targets(step: int) -> list[tuple[int, int]]:
        return [(each.step, each.generation) for each in commands.untainted_checkpoints(run, step)]

    assert targets(95) == [(40, 1), (90, 0), (30, 0)], "what a rewind left behind comes last"
    assert targets(40) == [(40, 1), (30, 0)]
    assert targets(39) == [(30, 0)]
    commands.check_order(run, Rollback(to_step=30))
    with pytest.raises(ConfigError, match="has no checkpoint at or before step 29 that is not tainted"):
        commands.check_order(run, Rollback(to_step=29))
    append_line(run.events, to_json(at(45, 50)))
    commands.check_order(run, Rollback(to_step=45))
    with pytest.raises(ConfigError, match="rollback: must be to step 45, the last, or before, got 46"):
        commands.check_order(run, Rollback(to_step=46))


def test_a_source_is_excluded_unless_nothing_is_left(run: RunDir) -> None:
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
def test_a_configuration_without_sources_is_named(run: RunDir, content: str) -> None:
    run.config.write_text(content)
    with pytest.raises(ConfigError, match=r"config.yaml: has no data.sources and data.phases"):
        commands.check_order(run, ExcludeSource(source="web"))


@pytest.mark.parametrize(
    "order", [order for order in EVERY if not isinstance(order, Rollback | ExcludeSource | Precision)]
)
def test_the_rest_can_always_be_done(run: RunDir, order: Order) -> None:
    commands.check_order(run, order)
