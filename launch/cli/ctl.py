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
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from harness.checkpoint import catalog
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_CRASHED, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, require
from harness.config.profile import require_ranks
from harness.control import inbox, stop_requests
from harness.control.commands import (
    LONGEST_REASON,
    Command,
    Order,
    Profile,
    Rollback,
    in_words,
    one_line,
    parse_order,
)
from harness.control.order_checks import check_order
from harness.control.order_effect import describe_effect, incident_batches, parse_batches
from harness.core.events import Intervention, RunEnded, RunStarted, StepRecord
from harness.core.locking import run_lease
from harness.core.rundir import RunDir, user_name
from harness.telemetry import heartbeat
from harness.telemetry.event_log import log_size, read_chunk, tail
from launch.cli.parser import CommandParser

HELP = """\
usage: harness ctl RUN COMMAND [ARGUMENTS] --reason TEXT [--wait]

RUN is a run directory, such as runs/first. Commands:
  skip --batches A..B      exclude these batches; or --batch N, or --next K
  unskip --batches A..B    re-include excluded batches; or --batch N
  rollback --to STEP       restore the newest untainted checkpoint at or before STEP; --exclude A..B or --incident N
                           also excludes batches
  lr FACTOR                multiply the scheduled learning rate; 1 restores it
  exclude SOURCE           stop reading a data source
  reweight SOURCE=WEIGHT   change the weights of data sources
  precision KIND           bf16: run an fp8 run in bf16; fp8: switch back to fp8
  checkpoint               save a checkpoint now
  profile --steps N        profile the next N steps on all ranks, or on --ranks 0,3, into RUN/profiles/; needs no reason
  pause, resume            pause with everything in memory; continue
  stop                     save a checkpoint and exit with 75, or with 0 after the last step
  list                     list pending commands and recent interventions

Commands about data first print what they would exclude or change; --dry-run sends nothing and
needs no reason. A..B includes both ends.
RUN/interventions.jsonl records who sent a command, when, why, and its result. Examples:
  harness ctl runs/first skip --batches 12140..12160 --reason "repeated boilerplate from shard 17"
  harness ctl runs/first rollback --to 12000 --exclude 12090..12110 --reason "loss floor moved up after 12100" --wait
  harness ctl runs/first lr 0.5 --reason "third spike today"
  harness ctl runs/first exclude web --reason "the dump of March is broken"
  harness ctl runs/first reweight web=0.5 code=2 --reason "more code for the last phase"

See `harness ctl RUN COMMAND --help` for its arguments.
"""

DESCRIPTIONS = {
    "skip": (
        "Exclude batches that the run has not read yet, also after a rollback past them. Batches that were read are\n"
        "excluded by `rollback --exclude`. --next does not count batches that are given back."
    ),
    "unskip": (
        "Re-include batches that an operator or the sentinel excluded. Batches that the run has passed are read next,\n"
        "the others in their place."
    ),
    "rollback": (
        "Restore the newest untainted checkpoint at or before a step, without a restart of the processes.\n"
        "No batch is excluded unless --exclude or --incident says so. The checkpoints that it lists, also with\n"
        "--dry-run, stay on disk for ten minutes."
    ),
    "lr": "Multiply the scheduled learning rate by a factor, until the next lr command.",
    "exclude": "Stop reading a data source; its share goes to the others by their weights.",
    "reweight": (
        "Change the weights of data sources from the next batch on. Weights are relative to those of the other\n"
        "sources, which keep theirs. From then on data.phases does not change the weights of the named sources."
    ),
    "precision": "Run an fp8 run in bf16, or switch it back to fp8.",
    "checkpoint": "Save a checkpoint now.",
    "profile": (
        "Profile the next steps with torch's profiler, without a restart: a trace, a table of kernels and, on GPUs, a\n"
        "snapshot of memory for each rank, in RUN/profiles/. The profiled steps are slower."
    ),
    "pause": "Finish the step and wait, with everything in memory, until resume or stop.",
    "resume": "Continue after a pause.",
    "stop": (
        "Save a checkpoint and exit. All ranks exit after the same step, with 75, or with 0 after the last step.\n"
        "Rerun the same `harness train` command to resume the run."
    ),
    "list": "List pending commands and recent interventions.",
}
ABOUT_DATA = ("skip", "unskip", "rollback", "reweight")
"""Commands whose effect on the data is printed before they are sent."""
COMMANDS = ", ".join(DESCRIPTIONS)
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


def parse_arguments(name: str, arguments: Sequence[str]) -> Namespace:
    """The arguments of a command. A dry run records nothing, so it needs no reason."""
    is_dry_run = name in ABOUT_DATA and "--dry-run" in arguments
    return parser_of_command(name).parse_args([*(["--reason", "dry run"] if is_dry_run else []), *arguments])


def send_command(run: RunDir, name: str, args: Namespace) -> int:
    """Send any command but stop."""
    reason = parse_reason(args)
    log_bytes = log_size(run.events)
    check_running(run)
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
        raise ConfigError(str(run.control), f"cannot be written: {error.strerror}") from None
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


def build_order(run: RunDir, name: str, args: Namespace) -> Order:
    """The order of a command line."""
    match name:
        case "skip" | "unskip":
            return build_skip(name, args)
        case "rollback":
            exclude: tuple[int, ...] = ()
            if args.incident is not None:
                exclude = incident_batches(run, args.incident)
            elif args.exclude is not None:
                exclude = parse_option("--exclude", args.exclude)
            return parse_order(name, {"to_step": args.to_step, "exclude": exclude})
        case "reweight":
            return parse_order(name, {"weights": dict(map(parse_weight, args.weights))})
        case "profile":
            return parse_order(name, {"num_steps": args.steps, "ranks": parse_ranks(args.ranks)})
        case _:
            given = {key: value for key, value in vars(args).items() if key not in ("reason", "wait")}
            return parse_order(name, given)


def parse_ranks(text: str) -> list[int]:
    """The ranks of `--ranks 0,3`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    require(all(part.isdecimal() for part in parts), "--ranks", f"must be ranks like 0,3, got {text!r}")
    return [int(part) for part in parts]


def build_skip(name: str, args: Namespace) -> Order:
    """The order of a skip or unskip. A bare number is an error: it could mean an index or a count."""
    options = "--batch N (one batch) or --batches A..B (a range)"
    if name == "skip":
        options = "--batch N (one batch), --batches A..B (a range) or --next K (the next K)"
    require(not args.number, name, f"{' '.join(args.number)!r} is not clear: use {options}")
    if name == "skip" and args.next is not None:
        return parse_order(name, {"num_batches": args.next})
    require(args.batch is not None or args.batches is not None, name, f"missing batches: use {options}")
    span = (args.batch, args.batch) if args.batch is not None else parse_option("--batches", args.batches)
    return parse_order("skip_batches" if name == "skip" else name, {"first": span[0], "last": span[1]})


def parse_option(option: str, text: str) -> tuple[int, int]:
    try:
        return parse_batches(text)
    except ConfigError as error:
        raise ConfigError(option, str(error)) from None


def parse_weight(text: str) -> tuple[str, float]:
    name, equals, weight = text.rpartition("=")
    try:
        require(bool(name and equals), "reweight", f"must be SOURCE=WEIGHT, got {text!r}")
        return name, float(weight)
    except ValueError:
        raise ConfigError("reweight", f"the weight of {name!r} must be a number, got {weight!r}") from None


def send_stop(run: RunDir, args: Namespace) -> int:
    """`harness ctl RUN stop`."""
    reason = parse_reason(args)
    log_bytes = log_size(run.events)
    check_running(run)
    try:
        stop_requests.ask(run, who=user_name(), reason=reason)
    except OSError as error:
        raise ConfigError(str(run.stop), f"cannot be written: {error.strerror}") from None
    print(f"asked {run.path} to stop", flush=True)
    return wait_or_interrupt(run, "stop", lambda: wait_for_end(run, log_bytes)) if args.wait else EXIT_DONE


def list_orders(run: RunDir) -> int:
    """`harness ctl RUN list`."""
    check_run_dir(run)
    waiting = [(command.time, command.who, in_words(command.order), command.reason) for command in inbox.waiting(run)]
    if (request := stop_requests.read(run)) is not None:
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
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def describe_changes(event: Intervention) -> str:
    """The command and its result, without fields for programs."""
    known = {key: value for key, value in event.changes.items() if key not in ("id", "asked_time")}
    request = known.pop("command", None)
    return one_line(
        ", ".join([*([str(request)] if request else []), *(f"{key}: {value}" for key, value in known.items())])
    )


def parse_reason(args: Namespace) -> str:
    """The reason, in one line that is not empty."""
    reason = one_line(str(args.reason))
    require(bool(reason), "--reason", "must not be empty")
    message = f"must have at most {LONGEST_REASON} characters, got {len(reason)}"
    require(len(reason) <= LONGEST_REASON, "--reason", message)
    return reason


def check_run_dir(run: RunDir) -> None:
    """Reject a directory that is not a run directory."""
    require(run.config.is_file(), str(run.path), f"is not a run directory: it has no {run.config.name}")


def check_running(run: RunDir) -> None:
    """Also reject a run that has ended; warn if it crashed or its process is gone."""
    check_run_dir(run)
    if gone := run_lease.dead_holder(run.path):
        print(f"harness: {run.path} is not running ({gone}); its next start runs this command", file=sys.stderr)
    for event in reversed(tail(run.events)):
        if isinstance(event, RunEnded) and event.exit_code == EXIT_CRASHED:
            message = f"crashed at step {event.step}: {event.reason}; its next start runs this command"
            print(f"harness: {run.path} {message}", file=sys.stderr)
            return
        if isinstance(event, RunEnded):
            raise ConfigError(str(run.path), f"has ended at step {event.step}: {event.reason}")
        if isinstance(event, RunStarted | StepRecord):
            return


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
    while True:
        is_pending = path.exists()
        ended, log_bytes = read_end(run, log_bytes)
        if (event := inbox.answer(run, command.id)) is not None:
            refused = event.changes.get(inbox.REFUSED)
            require(refused is None, str(run.path), f"refused at iteration {event.iteration}: {refused}")
            print(f"{run.path}: done at iteration {event.iteration}: {describe_changes(event)}")
            return EXIT_DONE
        if not is_pending:
            aside = inbox.refused_path_of(run, command.id)
            fate = f"refused by the run, see {aside}" if aside.exists() else f"withdrawn: {path} is gone"
            raise ConfigError(str(run.path), f"the command was {fate}")
        if ended is not None:
            print(f"{describe_end(run, ended)}; the command runs at its next start, unless you remove {path}")
            return EXIT_INTERRUPTED
        time.sleep(POLL_S)


def wait_for_end(run: RunDir, log_bytes: int) -> int:
    """Wait for the end of the run and print it; returns its exit code."""
    while True:
        ended, log_bytes = read_end(run, log_bytes)
        if ended is not None:
            print(describe_end(run, ended))
            return ended.exit_code
        time.sleep(POLL_S)


def read_end(run: RunDir, log_bytes: int) -> tuple[RunEnded | None, int]:
    """The first RunEnded in the log after its first `log_bytes`, and the new position."""
    while chunk := read_chunk(run.events, log_bytes):
        log_bytes = chunk.end
        for event in chunk.events:
            if isinstance(event, RunEnded):
                return event, log_bytes
    return None, log_bytes


def describe_end(run: RunDir, ended: RunEnded) -> str:
    return f"{run.path} ended at step {ended.step}: {ended.reason} (exit code {ended.exit_code})"


def parser_of_command(name: str) -> ArgumentParser:
    description = DESCRIPTIONS[name]
    parser = CommandParser(
        prog=f"harness ctl RUN {name}", description=description, formatter_class=RawDescriptionHelpFormatter
    )
    match name:
        case "skip" | "unskip":
            parser.add_argument("number", nargs="*", help=SUPPRESS)
            which = parser.add_mutually_exclusive_group()
            which.add_argument("--batch", metavar="N", type=int, help="the batch with this index")
            which.add_argument("--batches", metavar="A..B", help="the batches A to B, both included")
            if name == "skip":
                which.add_argument("--next", metavar="K", type=int, help="the next K batches")
        case "rollback":
            parser.add_argument(
                "--to",
                dest="to_step",
                metavar="STEP",
                type=int,
                required=True,
                help="restore a checkpoint at or before this step",
            )
            which = parser.add_mutually_exclusive_group()
            which.add_argument("--exclude", metavar="A..B", help="also exclude the batches A to B, both included")
            which.add_argument("--incident", metavar="N", type=int, help="also exclude the batches of this incident")
        case "reweight":
            parser.add_argument("weights", metavar="SOURCE=WEIGHT", nargs="+", help="0 or more; 0 turns a source off")
        case "lr":
            parser.add_argument(
                "factor", metavar="FACTOR", type=float, help="above 0, at most 10; 1 restores the schedule"
            )
        case "exclude":
            parser.add_argument("source", metavar="SOURCE", help="name of the source under data.sources")
        case "precision":
            parser.add_argument("kind", metavar="KIND", help="bf16 or fp8")
        case "profile":
            parser.add_argument("--steps", metavar="N", type=int, default=3, help="steps to profile (default: 3)")
            parser.add_argument("--ranks", metavar="R,...", default="", help="ranks to profile (default: all)")
        case "list":
            return parser
    if name in ABOUT_DATA:
        parser.add_argument("--dry-run", action="store_true", help="print what it would do, and send nothing")
    until = "the run has ended; exit with its exit code" if name == "stop" else "the command is done; print the result"
    changes_nothing = {"default": "profile"} if name == "profile" else {"required": True}
    parser.add_argument("--reason", metavar="TEXT", help="reason, recorded in the log of the run", **changes_nothing)
    parser.add_argument("--wait", action="store_true", help=f"wait until {until}")
    return parser
