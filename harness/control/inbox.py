"""Operator commands as files in RUN/control: sending, reading, answering.

Whoever may write to the run directory may change the run; no port, password or PID is needed. Every change is logged
with who asked, when, why, and what came of it.

A command is one JSON file, moved into place by a rename. File names begin with the time, and commands apply in that
order. A thread of rank 0 polls once a second (`harness.control.watcher`). The step's all-reduce carries the flag to all
ranks, and they apply the commands at the same iteration. The answer is an `Intervention` event. It is written first,
then the file is removed, so a run that is killed in between does not apply a command twice. If neither is possible,
the answer in the event log keeps the next start from applying it. An unapplied command waits for the next start of the
run. A file that cannot be parsed is renamed to *.refused with one line on stderr; nothing in that directory can stop a
run.

Left out: whether the run can carry out an order (`harness.control.order_checks`), and authentication: `who` is what
the writer of the file claims.
"""

from __future__ import annotations

import reprlib
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from harness.config.errors import ConfigError, require
from harness.control.commands import Command, Order, in_words, one_line, parse_command
from harness.core import event_json
from harness.core.event_json import to_json
from harness.core.events import Intervention
from harness.core.rundir import CONFIG_CHANGED, RunDir, append_line
from harness.core.stderr_lines import print_warning
from harness.telemetry.event_log import read_non_step_events

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
    return [event for event in event_json.read(run.interventions) if isinstance(event, Intervention)]


def config_changes(run: RunDir) -> list[Intervention]:
    """List the resumes with another configuration so far, in order."""
    return [event for event in interventions(run) if event.reason == CONFIG_CHANGED]


def answer(run: RunDir, id: str) -> Intervention | None:
    """Return the answer to a command, or None if there is none yet."""
    return next((event for event in interventions(run) if event.changes.get("id") == id), None)


def intervention_event(command: Command, iteration: int, changes: Mapping[str, Any]) -> Intervention:
    """Build the answer to a command, for interventions.jsonl and the event log. Key `REFUSED`: why it was rejected."""
    asked = {"command": in_words(command.order), "id": command.id, "asked_time": command.time}
    return Intervention(
        time=time.time(), iteration=iteration, who=command.who, reason=command.reason, changes=asked | dict(changes)
    )


def append_intervention(run: RunDir, event: Intervention) -> None:
    """Append an intervention to interventions.jsonl; a failed write is a warning, because the event log has it too."""
    try:
        append_line(run.interventions, to_json(event))
    except OSError as error:
        message = f"cannot write {run.interventions}: {error.strerror}"
        print_warning(f"{message}; the event log alone has the intervention")


@final
class Inbox:
    """The command files of a run. Its methods never raise because of a disk or a file; they may block on one."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._ignored: set[str] = set()
        """Files that were processed and could not be removed."""
        with suppress(OSError):
            make_control(run)
        self._answered = {event.changes.get("id") for event in _answers(run)}

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
        append_intervention(self._run, event)
        path = path_of(self._run, command.id)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._ignored.add(path.name)
            print_warning(f"{path} was applied and cannot be removed: {error.strerror}")

    def _rename_refused(self, path: Path, why: str) -> None:
        print_warning(f"{self._run.control}: {reprlib.repr(path.name)} was refused: {why}")
        try:
            path.rename(path.with_name(f"{path.name}.{REFUSED}"))
        except OSError:
            self._ignored.add(path.name)


def _answers(run: RunDir) -> list[Intervention]:
    """The interventions so far. If commands wait, also those of the event log: a write to the other file may have
    failed, and their files may have stayed."""
    found = interventions(run)
    if _listed(run):
        with suppress(OSError):
            found += [event for event in read_non_step_events(run.events) if isinstance(event, Intervention)]
    return found


def _listed(run: RunDir) -> list[Path]:
    """List the complete command files, in order; none if the directory cannot be read."""
    try:
        return sorted(path for path in run.control.iterdir() if path.suffix == ".json" and path.name[0] != ".")
    except OSError:
        return []


def _read(path: Path) -> Command:
    require(path.name.isprintable(), "", "has a name that is not printable")
    require(stat.S_ISREG(path.lstat().st_mode), "", "is not a plain file")
    with path.open("rb") as file:
        text = file.read(LONGEST_BYTES + 1)
    require(len(text) <= LONGEST_BYTES, "", f"has more than {LONGEST_BYTES} bytes")
    return parse_command(text, id=path.stem)
