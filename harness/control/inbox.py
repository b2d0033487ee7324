"""Operator commands as files in RUN/control: sending, checking, reading, answering.

Whoever may write to the run directory may change the run; no port, password or PID is needed. Every change is logged
with who asked, when, why, and what came of it.

A command is one JSON file, moved into place by a rename. File names begin with the time, and commands apply in that
order. A thread of rank 0 polls once a second (`harness.control.watcher`). The step's all-reduce carries the flag to all
ranks, and they apply the commands at the same iteration. The answer is an `Intervention` event. It is written first,
then the file is removed, so a run that is killed in between does not apply a command twice. An unapplied command
waits for the next start of the run. A file that cannot be parsed is renamed to *.refused with one line on stderr;
nothing in that directory can stop a run.

Left out: authentication. `who` is what the writer of the file claims.
"""

from __future__ import annotations

import reprlib
import secrets
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, assert_never, final

import yaml

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Checkpoint, Health
from harness.config.errors import ConfigError, require
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
    in_words,
    one_line,
    parse_command,
)
from harness.core import events
from harness.core.events import Intervention, StepRecord, to_json
from harness.core.rundir import RunDir, append_line
from harness.data.order.ledger import Ledger
from harness.data.order.mixture import Change, phases_of
from harness.telemetry.event_log import tail

POLL_S = 0.2
LONGEST_BYTES = 65536
REFUSED = "refused"
"""Key of an intervention's changes: why the run rejected the command."""


def path_of(run: RunDir, id: str) -> Path:
    return run.control / f"{id}.json"


def refused_path_of(run: RunDir, id: str) -> Path:
    """The new name of a command file that the run could not parse."""
    return run.control / f"{id}.json.{REFUSED}"


def make_control(run: RunDir) -> None:
    """Create RUN/control with the permissions of the run directory."""
    try:
        run.control.mkdir()
    except FileExistsError:
        return
    run.control.chmod(stat.S_IMODE(run.path.stat().st_mode))


def send(run: RunDir, order: Order, *, who: str, reason: str) -> Command:
    """Write a command file for rank 0, readable by the run's user."""
    now_ns = time.time_ns()
    begin = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_ns // 10**9))
    id = f"{begin}-{now_ns // 1000 % 10**6:06d}-{secrets.token_hex(4)}"
    command = Command(id=id, order=order, who=one_line(who), time=now_ns / 1e9, reason=one_line(reason))
    make_control(run)
    path = path_of(run, id)
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        scratch.write_text(command.to_json() + "\n", encoding="utf-8")
        scratch.chmod(0o644)
        scratch.rename(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    return command


def waiting(run: RunDir) -> list[Command]:
    """List the commands that wait, in order. Files that cannot be parsed are left to the run."""
    found = []
    for path in _listed(run):
        with suppress(OSError, ConfigError):
            found.append(_read(path))
    return found


def interventions(run: RunDir) -> list[Intervention]:
    """List the interventions so far, in order."""
    if not run.interventions.exists():
        return []
    return [event for event in events.read(run.interventions) if isinstance(event, Intervention)]


def answer(run: RunDir, id: str) -> Intervention | None:
    """Return the answer to a command, or None if there is none yet."""
    return next((event for event in interventions(run) if event.changes.get("id") == id), None)


def intervention_event(command: Command, iteration: int, changes: Mapping[str, Any]) -> Intervention:
    """Build the answer to a command, for interventions.jsonl and the event log. Key `REFUSED`: why it was rejected."""
    asked = {"command": in_words(command.order), "id": command.id, "asked_time": command.time}
    return Intervention(
        time=time.time(), iteration=iteration, who=command.who, reason=command.reason, changes=asked | dict(changes)
    )


def untainted_checkpoints(run: RunDir, to_step: int) -> list[Checkpoint]:
    """List the untainted checkpoints at or before a step, newest generation and step first."""
    sound = [each for each in catalog.list_checkpoints(run.checkpoints) if each.health is not Health.tainted]
    return [each for each in reversed(sound) if each.step <= to_step]


def check_order(run: RunDir, order: Order, *, before: Sequence[Order] = ()) -> None:
    """Raise `ConfigError` if this run cannot carry out an order after the orders `before`, judging by its directory.

    The command line calls it before it sends a command, and the run before it applies one: things change in between.
    """
    match order:
        case Rollback():
            _check_step(run, order.to_step)
        case ExcludeSource():
            earlier = {each.source for each in before if isinstance(each, ExcludeSource)}
            _check_source(run, order.source, earlier)
        case Precision():
            _check_precision(run)
        case Skip() | Rate() | SaveCheckpoint() | Pause() | Resume():
            pass
        case _:
            assert_never(order)


def _check_step(run: RunDir, to_step: int) -> None:
    record = last_record(run)
    if record is not None:
        require(
            to_step <= record.step, "rollback", f"must be to step {record.step}, the last, or before, got {to_step}"
        )
    message = f"{run.path} has no checkpoint at or before step {to_step} that is not tainted"
    require(bool(untainted_checkpoints(run, to_step)), "rollback", message)


def _check_source(run: RunDir, name: str, earlier: set[str]) -> None:
    data = _data_section(run)
    weights = {source: section["weight"] for source, section in data["sources"].items()}
    require(name in weights, "exclude", f"no source {name!r}; {run.path} has {', '.join(weights)}")
    record = last_record(run)
    cursor = 0 if record is None else record.cursor + 1
    planned = [Change(phase["from_batch"], phase["weights"]) for phase in data["phases"]]
    amended = [Change(entry.from_batch, entry.weights) for entry in Ledger.load(run.ledger, writer=False).reweightings]
    off = dict.fromkeys({name, *earlier} & weights.keys(), 0.0)
    try:
        phases_of(weights, planned, [*amended, Change(cursor, off)])
    except ConfigError:
        raise ConfigError("exclude", f"without {name!r} no source would have a weight above 0") from None


def _check_precision(run: RunDir) -> None:
    match _tree(run):
        case {"precision": {"kind": "fp8"}}:
            return
    raise ConfigError("precision", f"{run.path} was not started in fp8, so it has no precision to change")


def _data_section(run: RunDir) -> dict[str, Any]:
    match _tree(run):
        case {"data": {"sources": dict(), "phases": list()} as data}:
            return dict(data)
    raise ConfigError(str(run.config), "has no data.sources and data.phases")


def _tree(run: RunDir) -> dict[str, Any]:
    """Return the config of a run, or an empty dict if it cannot be parsed."""
    try:
        tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def last_record(run: RunDir) -> StepRecord | None:
    """Return the newest step record near the end of the log, or None."""
    return next((event for event in reversed(tail(run.events)) if isinstance(event, StepRecord)), None)


@final
class Inbox:
    """The command files of a run. Its methods never raise because of a disk or a file; they may block on one."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._ignored: set[str] = set()
        """Files that were processed and could not be removed."""
        with suppress(OSError):
            make_control(run)
        self._answered = {event.changes.get("id") for event in interventions(run)}

    def take(self) -> list[Command]:
        """List all waiting commands, in order, until `done` is called for them. Invalid files are renamed."""
        taken = []
        for path in _listed(self._run):
            if path.name in self._ignored:
                continue
            try:
                command = _read(path)
                require(command.id not in self._answered, "", "was applied before")
                taken.append(command)
            except ConfigError as error:
                self._rename_refused(path, str(error))
            except PermissionError as error:
                self._rename_refused(path, f"cannot be read: {error.strerror}")
            except OSError:
                continue  # removed meanwhile, or an I/O error that may be gone next time
        return taken

    def done(self, command: Command, event: Intervention) -> None:
        """Write the answer to a command, then remove its file."""
        self._answered.add(command.id)
        try:
            append_line(self._run.interventions, to_json(event))
        except OSError as error:
            _warn(f"cannot write {self._run.interventions}: {error.strerror}; the event log alone has the intervention")
        path = path_of(self._run, command.id)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._ignored.add(path.name)
            _warn(f"{path} was applied and cannot be removed: {error.strerror}")

    def _rename_refused(self, path: Path, why: str) -> None:
        _warn(f"{self._run.control}: {reprlib.repr(path.name)} was refused: {why}")
        try:
            path.rename(path.with_name(f"{path.name}.{REFUSED}"))
        except OSError:
            self._ignored.add(path.name)


def _listed(run: RunDir) -> list[Path]:
    """List the complete command files, in order; none if the directory cannot be read."""
    try:
        return sorted(path for path in run.control.iterdir() if path.suffix == ".json" and path.name[0] != ".")
    except OSError:
        return []


def _read(path: Path) -> Command:
    require(stat.S_ISREG(path.lstat().st_mode), "", "is not a plain file")
    with path.open("rb") as file:
        text = file.read(LONGEST_BYTES + 1)
    require(len(text) <= LONGEST_BYTES, "", f"has more than {LONGEST_BYTES} bytes")
    return parse_command(text, id=path.stem)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
