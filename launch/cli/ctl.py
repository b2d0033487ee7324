"""`harness ctl`: sends an operator's command to a running run, recorded with who asked and why.

Why: an operator must reach a run from any machine that sees its directory, without process ids or a port.
How: the command is checked against the run directory and written there as a small file, atomically
(`harness.control.inbox`; `harness.control.stop_requests` for stop). The run finds it within about a second, executes it
on all ranks at the same step, and logs the intervention. A plain `touch RUN/STOP` stops the run too, without a name. An
error is one line on stderr and exit code 2.
Left out: whether the processes of the run are still alive. A run whose launcher was killed too has no last event in its
log. A command for it, or for a run that crashed, waits for its next start (a stop is then dropped), and `--wait` waits
too, until Ctrl-C.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard

from harness.checkpoint import catalog
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_CRASHED, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, require
from harness.config.profile import require_ranks
from harness.control import inbox, stop_requests
from harness.control.commands import Command, Profile, Rollback, in_words, one_line
from harness.control.order_checks import check_order
from harness.control.order_effect import describe_effect
from harness.core.events import Event, Intervention, RunEnded, RunStarted, StepRecord
from harness.core.locking import directory_lease, run_lease
from harness.core.locking.lease_holder import this_process
from harness.core.rundir import RunDir, user_name
from harness.telemetry import heartbeat
from harness.telemetry.event_log import log_size, read_chunk, tail
from harness.telemetry.heartbeat import Phase
from launch.cli.ctl_arguments import (
    COMMANDS,
    DESCRIPTIONS,
    HELP,
    build_order,
    parse_arguments,
    parse_reason,
    parser_of_command,
)
from launch.cli.write_error import write_error

POLL_S = 0.2
NUM_LISTED = 10


def main(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    try:
        match list(argv):
            case ["-h" | "--help" | "help", *_] | [_, "-h" | "--help", *_]:
                print(HELP, end="")
                return EXIT_DONE
            case [run, "list", *arguments]:
                parser_of_command("list").parse_args(arguments)
                return list_orders(RunDir(Path(run)))
            case [run, "stop", *arguments]:
                return send_stop(RunDir(Path(run)), parser_of_command("stop").parse_args(arguments))
            case [run, name, *arguments] if name in DESCRIPTIONS:
                return send_command(RunDir(Path(run)), name, parse_arguments(name, arguments))
            case [_, unknown, *_]:
                raise ConfigError("ctl", f"unknown command {unknown!r}; choose {COMMANDS}, or --help")
            case [_]:
                raise ConfigError("ctl", f"missing command; choose {COMMANDS}, or --help")
            case _:
                raise ConfigError("ctl", "missing run; give its directory and a command, or --help")
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG


def send_command(run: RunDir, name: str, args: Namespace) -> int:
    """Send any command but stop."""
    reason = parse_reason(args)
    log_bytes = log_size(run.events)
    check_running(run, fate="its next start runs this command")
    order = build_order(run, name, args)
    if isinstance(order, Rollback):
        hold_targets(run)
    if isinstance(order, Profile):
        check_ranks(run, order)
    check_order(run, order, before=[command.order for command in inbox.waiting(run)])
    effect = describe_effect(run, order)
    if effect:
        print(f"{name} {effect}", flush=True)
    if effect and args.dry_run:
        print("dry run: nothing was sent")
        return EXIT_DONE
    try:
        command = inbox.send(run, order, who=user_name(), reason=reason)
    except OSError as error:
        raise write_error(run.control, error) from None
    print(f"asked {run.path} to {in_words(order)}", flush=True)
    return (
        wait_or_interrupt(run, in_words(order), lambda: wait_for_answer(run, command, log_bytes))
        if args.wait
        else EXIT_DONE
    )


def check_ranks(run: RunDir, order: Profile) -> None:
    """Reject ranks that the run does not have, as far as heartbeats tell how many it has."""
    if beats := heartbeat.read_all(run):
        require_ranks("--ranks", order.ranks, max(beats, key=lambda beat: beat.time).world_size)


def hold_targets(run: RunDir) -> None:
    """Ask the run to keep the checkpoints that are listed now until the operator has decided. Without the right to
    write there, they are only listed."""
    with suppress(OSError):
        catalog.request_hold(run.checkpoints, catalog.list_checkpoints(run.checkpoints), now=time.time())


def send_stop(run: RunDir, args: Namespace) -> int:
    """`harness ctl RUN stop`."""
    reason = parse_reason(args)
    log_bytes = log_size(run.events)
    check_running(run, fate="the next `harness train` drops this request")
    try:
        stop_requests.ask(run, who=user_name(), reason=reason)
    except OSError as error:
        raise write_error(run.stop, error) from None
    print(f"asked {run.path} to stop", flush=True)
    return wait_or_interrupt(run, "stop", lambda: wait_for_end(run, log_bytes)) if args.wait else EXIT_DONE


def list_orders(run: RunDir) -> int:
    """`harness ctl RUN list`."""
    check_run_dir(run)
    waiting = [(command.time, command.who, in_words(command.order), command.reason) for command in inbox.waiting(run)]
    if (request := stop_requests.read(run)) is not None and last_end(run) is None:
        waiting.append((request.time, request.who, "stop", request.reason))
    print(render(waiting, inbox.interventions(run)))
    return EXIT_DONE


def render(waiting: Sequence[tuple[float, str, str, str]], interventions: Sequence[Intervention]) -> str:
    """Pending commands (when, who, what, why), then recent interventions, as text."""
    lines = [f"pending: {len(waiting) or 'none'}"]
    lines += [f"  {local_time(when)}  {who}: {what} ({reason})" for when, who, what, reason in waiting]
    last = interventions[-NUM_LISTED:]
    total = f"the last {len(last)} of {len(interventions)}" if len(last) < len(interventions) else len(last) or "none"
    lines += [f"interventions: {total}"]
    lines += [f"  {describe_intervention(event)}" for event in last]
    return "\n".join(lines)


def describe_intervention(event: Intervention) -> str:
    when = f"{local_time(event.time)}  iteration {event.iteration}"
    return f"{when}  {event.who}: {describe_changes(event)} ({event.reason})"


def local_time(time_s: float) -> str:
    """A time as text. It may come from a file that anybody wrote."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (ValueError, OverflowError, OSError):
        return f"time {time_s:g}"


def describe_changes(event: Intervention) -> str:
    """The command and its result, without fields for programs."""
    known = {key: value for key, value in event.changes.items() if key not in ("id", "asked_time")}
    request = known.pop("command", None)
    return one_line(
        ", ".join([*([str(request)] if request else []), *(f"{key}: {value}" for key, value in known.items())])
    )


def check_run_dir(run: RunDir) -> None:
    """Reject a directory that is not a run directory."""
    require(run.config.is_file(), str(run.path), f"is not a run directory: it has no {run.config.name}")


def check_running(run: RunDir, *, fate: str) -> None:
    """Also reject a run that has ended; warn if it crashed or its process is gone. `fate`: what becomes of the request
    then."""
    check_run_dir(run)
    if gone := run_lease.dead_holder(run.path):
        print(f"harness: {run.path} is not running ({gone}); {fate}", file=sys.stderr)
    ended = last_end(run)
    if ended is None:
        return
    is_crash = ended.exit_code == EXIT_CRASHED
    require(is_crash, str(run.path), f"has ended at step {ended.step}: {ended.reason}")
    print(f"harness: {run.path} crashed at step {ended.step}: {ended.reason}; {fate}", file=sys.stderr)


def last_end(run: RunDir) -> RunEnded | None:
    """How the run has ended; None if it trains or starts, or if nothing has logged its end."""
    for event in reversed(tail(run.events)):
        if isinstance(event, RunEnded):
            return None if is_starting(run) else event
        if isinstance(event, RunStarted | StepRecord):
            return None
    return None


def is_starting(run: RunDir) -> bool:
    """Whether a start of a run that has ended holds its lease, before it logs anything. The process that has ended
    holds the lease too, until it has sent everything; its heartbeat tells them apart."""
    seen = None
    with suppress(OSError):
        seen = directory_lease.read_newest(run.path / run_lease.FOLDER)
    if seen is None or seen.holder is None or seen.released or seen.is_alive(this_process()) is False:
        return False
    beat = heartbeat.read(heartbeat.heartbeat_file(run, 0))
    is_same = beat is not None and (beat.host, beat.pid) == (seen.holder.host, seen.holder.pid)
    return not is_same or (beat is not None and beat.phase is Phase.start)


def wait_or_interrupt(run: RunDir, request: str, wait_for: Callable[[], int]) -> int:
    """The exit code of the wait; Ctrl-C ends the wait, not the command."""
    try:
        return wait_for()
    except KeyboardInterrupt:
        print(f"harness: no longer waiting; {run.path} will still {request}", file=sys.stderr)
        return EXIT_INTERRUPTED


def wait_for_answer(run: RunDir, command: Command, log_bytes: int) -> int:
    """Wait for the result of a command, or for the end of the run, and print it."""
    path = inbox.path_of(run, command.id)
    logged: Intervention | None = None
    while True:
        is_pending = path.exists()
        events, log_bytes = read_until_end(run, log_bytes)
        logged = next((event for event in events if is_answer(event, command)), logged)
        if (event := inbox.answer(run, command.id) or (None if is_pending else logged)) is not None:
            refused = event.changes.get(inbox.REFUSED)
            require(refused is None, str(run.path), f"refused at iteration {event.iteration}: {refused}")
            print(f"{run.path}: done at iteration {event.iteration}: {describe_changes(event)}")
            return EXIT_DONE
        if not is_pending:
            aside = inbox.refused_path_of(run, command.id)
            fate = f"refused by the run, see {aside}" if aside.exists() else f"withdrawn: {path} is gone"
            raise ConfigError(str(run.path), f"the command was {fate}")
        if ended := end_of(events):
            print(f"{describe_end(run, ended)}; the command runs at its next start, unless you remove {path}")
            return EXIT_INTERRUPTED
        time.sleep(POLL_S)


def wait_for_end(run: RunDir, log_bytes: int) -> int:
    """Wait for the end of the run and print it; returns its exit code."""
    while True:
        events, log_bytes = read_until_end(run, log_bytes)
        if ended := end_of(events):
            print(describe_end(run, ended))
            return ended.exit_code
        time.sleep(POLL_S)


def read_until_end(run: RunDir, log_bytes: int) -> tuple[list[Event], int]:
    """The events in the log after its first `log_bytes`, until a RunEnded is among them, and the new position."""
    events: list[Event] = []
    while not end_of(events) and (chunk := read_chunk(run.events, log_bytes)):
        log_bytes = chunk.end
        events += chunk.events
    return events, log_bytes


def end_of(events: Sequence[Event]) -> RunEnded | None:
    """The first RunEnded of these events."""
    return next((event for event in events if isinstance(event, RunEnded)), None)


def is_answer(event: Event, command: Command) -> TypeGuard[Intervention]:
    """Whether an event of the log is the result of a command. interventions.jsonl lacks it after a failed write."""
    return isinstance(event, Intervention) and event.changes.get("id") == command.id


def describe_end(run: RunDir, ended: RunEnded) -> str:
    return f"{run.path} ended at step {ended.step}: {ended.reason} (exit code {ended.exit_code})"
