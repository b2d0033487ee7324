"""`harness ctl`: what an operator asks of a running run, written down with who asked and why.

Why: a run must be told things from any machine that sees its directory, without its processes' numbers or a port.
How: what is asked is held against the run directory first; then it is a small file there, put in place whole by a
rename (`harness.control.inbox`, and `harness.control.stop_requests` for stop). The run finds it within a second or so,
does it on all ranks at the same step, and writes the intervention into its log. A plain `touch RUN/STOP` stops it too,
without a name. A complaint is one line on stderr and exit code 2.
Left out: whether the run's processes still live is not known here. A run that was killed has no last word in its log;
what it was asked waits for its next start (a stop is then forgotten), and `--wait` waits too, until Ctrl-C.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, require
from harness.control import inbox, stop_requests
from harness.control.commands import (
    LONGEST_REASON,
    ORDERS,
    Command,
    Order,
    Rollback,
    in_words,
    one_line,
    parse_order,
)
from harness.core.events import Intervention, RunEnded, RunStarted, StepRecord
from harness.core.locking import run_lease
from harness.core.rundir import RunDir, user_name
from harness.telemetry.event_log import read_chunk, tail
from launch.cli.parser import CommandParser

HELP = """\
usage: harness ctl RUN COMMAND [ARGUMENTS] --reason TEXT [--wait]

RUN is a run directory, such as runs/first. Commands:
  skip N              never see the next N batches
  rollback --to STEP  go back to the newest sound checkpoint at or before STEP
  lr FACTOR           multiply the learning rate of the schedule; 1 restores it
  exclude SOURCE      read a source of data no more
  precision KIND      bf16: compute a run in fp8 in bf16; fp8: in fp8 again
  checkpoint          save one now
  pause, resume       stay where the run is, in memory; go on
  stop                save a checkpoint and leave, with exit code 75 or, after the last step, 0
  list                what waits, and what was changed last

Who asked, when and why is written to RUN/interventions.jsonl with what came of it. Examples:
  harness ctl runs/first skip 20 --reason "repeated boilerplate from shard 17"
  harness ctl runs/first rollback --to 12000 --reason "loss floor moved up after 12100" --wait
  harness ctl runs/first lr 0.5 --reason "third spike today"
  harness ctl runs/first exclude web --reason "the dump of March is broken"

`harness ctl RUN COMMAND --help` says more.
"""

DESCRIPTIONS = {
    "skip": "Exclude the next batches for ever. A run that is rolled back past them does not see them either.",
    "rollback": "Go back to the newest checkpoint at or before a step that is not tainted; its processes stay.",
    "lr": "Multiply the learning rate of the schedule by a factor, until another one is asked for.",
    "exclude": "Turn a source of data off; the others share its place by their weights.",
    "precision": "Compute a run in fp8 in bf16, until fp8 is asked for.",
    "checkpoint": "Save a checkpoint now.",
    "pause": "Finish the step and stay, with everything in memory, until resume or stop.",
    "resume": "Go on after a pause.",
    "stop": (
        "Ask a run to save a checkpoint and leave. All ranks leave after the same step, with exit code 75 or, after\n"
        "the last step, 0. `harness train` with the words that started the run resumes it."
    ),
    "list": "Show what a run was asked and has not done yet, and what was changed in it last.",
}
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
                parser_of("list").parse_args(arguments)
                return list_command(RunDir(Path(run)))
            case [run, "stop", *arguments]:
                return stop(RunDir(Path(run)), parser_of("stop").parse_args(arguments))
            case [run, word, *arguments] if word in ORDERS:
                return ask(RunDir(Path(run)), word, parser_of(word).parse_args(arguments))
            case [_, unknown, *_]:
                raise ConfigError("ctl", f"unknown command {unknown!r}; choose {COMMANDS}, or --help")
            case [_]:
                raise ConfigError("ctl", f"missing command; choose {COMMANDS}, or --help")
            case _:
                raise ConfigError("ctl", "missing run; give its directory and a command, or --help")
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except OSError as error:
        print(f"harness: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_BAD_CONFIG


def ask(run: RunDir, word: str, args: Namespace) -> int:
    """Any command that a run goes on after."""
    reason = reason_of(args)
    order = parse_order(word, {key: value for key, value in vars(args).items() if key not in ("reason", "wait")})
    log_bytes = num_bytes_of_log(run)
    check_running(run)
    inbox.check(run, order, before=[command.order for command in inbox.waiting(run)])
    try:
        command = inbox.send(run, order, who=user_name(), reason=reason)
    except OSError as error:
        raise ConfigError(str(run.control), f"cannot be written: {error.strerror}") from None
    print(f"asked {run.path} to {in_words(order)}{target_of(run, order)}", flush=True)
    return wait(run, in_words(order), lambda: wait_for_answer(run, command, log_bytes)) if args.wait else EXIT_DONE


def stop(run: RunDir, args: Namespace) -> int:
    """`harness ctl RUN stop`."""
    reason = reason_of(args)
    log_bytes = num_bytes_of_log(run)
    check_running(run)
    try:
        stop_requests.ask(run, who=user_name(), reason=reason)
    except OSError as error:
        raise ConfigError(str(run.stop), f"cannot be written: {error.strerror}") from None
    print(f"asked {run.path} to stop", flush=True)
    return wait(run, "stop", lambda: wait_for_end(run, log_bytes)) if args.wait else EXIT_DONE


def list_command(run: RunDir) -> int:
    """`harness ctl RUN list`."""
    check_run(run)
    waiting = [(command.time, command.who, in_words(command.order), command.reason) for command in inbox.waiting(run)]
    if (asked := stop_requests.read(run)) is not None:
        waiting.append((asked.time, asked.who, "stop", asked.reason))
    print(render(waiting, inbox.interventions(run)))
    return EXIT_DONE


def render(waiting: Sequence[tuple[float, str, str, str]], interventions: Sequence[Intervention]) -> str:
    """What waits (when, who, what, why), then what was changed last, as text."""
    lines = [f"waiting: {len(waiting) or 'nothing'}"]
    lines += [f"  {clock(when)}  {who}: {what} ({reason})" for when, who, what, reason in waiting]
    last = interventions[-NUM_LISTED:]
    total = f"the last {len(last)} of {len(interventions)}" if len(last) < len(interventions) else len(last) or "none"
    lines += [f"interventions: {total}"]
    lines += [
        f"  {clock(event.time)}  iteration {event.iteration}  {event.who}: {changes_in_words(event)} ({event.reason})"
        for event in last
    ]
    return "\n".join(lines)


def clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def changes_in_words(event: Intervention) -> str:
    """What was asked and what came of it, without what only programs need."""
    known = {key: value for key, value in event.changes.items() if key not in ("id", "asked_time")}
    asked = known.pop("command", None)
    return one_line(", ".join([*([str(asked)] if asked else []), *(f"{key}: {value}" for key, value in known.items())]))


def reason_of(args: Namespace) -> str:
    """Why, in one line that is not empty."""
    reason = one_line(str(args.reason))
    require(bool(reason), "--reason", "must not be empty")
    message = f"must have at most {LONGEST_REASON} characters, got {len(reason)}"
    require(len(reason) <= LONGEST_REASON, "--reason", message)
    return reason


def target_of(run: RunDir, order: Order) -> str:
    """Which checkpoint a rollback would take; a newer one may come before it is done."""
    if not isinstance(order, Rollback):
        return ""
    best = next(iter(inbox.rollback_targets(run, order.to_step)), None)
    return f": {best.name} ({best.health})" if best is not None else ""


def check_run(run: RunDir) -> None:
    """Refuse a directory that is no run's."""
    require(run.config.is_file(), str(run.path), f"is not a run directory: it has no {run.config.name}")


def check_running(run: RunDir) -> None:
    """Refuse also a run that has ended by itself or was stopped; warn of one whose process is gone."""
    check_run(run)
    if gone := run_lease.dead_holder(run.path):
        print(f"harness: {run.path} is not running ({gone}); its next start hears of this", file=sys.stderr)
    for event in reversed(tail(run.events)):
        if isinstance(event, RunEnded):
            raise ConfigError(str(run.path), f"has ended at step {event.step}: {event.reason}")
        if isinstance(event, RunStarted | StepRecord):
            return


def num_bytes_of_log(run: RunDir) -> int:
    return run.events.stat().st_size if run.events.exists() else 0


def wait(run: RunDir, asked: str, wait_for: Callable[[], int]) -> int:
    """The exit code that was waited for; Ctrl-C takes nothing back."""
    try:
        return wait_for()
    except KeyboardInterrupt:
        print(f"harness: no longer waiting; {run.path} is still asked to {asked}", file=sys.stderr)
        return EXIT_INTERRUPTED


def wait_for_answer(run: RunDir, command: Command, log_bytes: int) -> int:
    """Wait until a command was answered and say how, or that the run ended without an answer."""
    path = inbox.path_of(run, command.id)
    while True:
        is_there = path.exists()
        ended, log_bytes = read_end(run, log_bytes)
        if (event := inbox.answer(run, command.id)) is not None:
            refused = event.changes.get(inbox.REFUSED)
            require(refused is None, str(run.path), f"refused at iteration {event.iteration}: {refused}")
            print(f"{run.path} did at iteration {event.iteration}: {changes_in_words(event)}")
            return EXIT_DONE
        if not is_there:
            aside = inbox.refused_path_of(run, command.id)
            fate = f"refused by the run, see {aside}" if aside.exists() else f"withdrawn: {path} is gone"
            raise ConfigError(str(run.path), f"the command was {fate}")
        if ended is not None:
            print(f"{in_the_end(run, ended)}; the command waits for its next start, unless you remove {path}")
            return EXIT_INTERRUPTED
        time.sleep(POLL_S)


def wait_for_end(run: RunDir, log_bytes: int) -> int:
    """Wait for the end of the run and say how it ended; returns its exit code."""
    while True:
        ended, log_bytes = read_end(run, log_bytes)
        if ended is not None:
            print(in_the_end(run, ended))
            return ended.exit_code
        time.sleep(POLL_S)


def read_end(run: RunDir, log_bytes: int) -> tuple[RunEnded | None, int]:
    """The first end in the log after its first `log_bytes`, and how far it was read."""
    while chunk := read_chunk(run.events, log_bytes):
        log_bytes = chunk.end
        for event in chunk.events:
            if isinstance(event, RunEnded):
                return event, log_bytes
    return None, log_bytes


def in_the_end(run: RunDir, ended: RunEnded) -> str:
    return f"{run.path} ended at step {ended.step}: {ended.reason} (exit code {ended.exit_code})"


def parser_of(word: str) -> ArgumentParser:
    description = DESCRIPTIONS[word]
    parser = CommandParser(
        prog=f"harness ctl RUN {word}", description=description, formatter_class=RawDescriptionHelpFormatter
    )
    match word:
        case "skip":
            parser.add_argument("num_batches", metavar="N", type=int, help="how many batches, at least 1")
        case "rollback":
            parser.add_argument("--to", dest="to_step", metavar="STEP", type=int, required=True, help="at or before it")
        case "lr":
            parser.add_argument("factor", metavar="FACTOR", type=float, help="above 0, at most 10; 1: as scheduled")
        case "exclude":
            parser.add_argument("source", metavar="SOURCE", help="its name under data.sources")
        case "precision":
            parser.add_argument("kind", metavar="KIND", help="bf16 or fp8")
        case "list":
            return parser
    until = "the run has ended; exit with its exit code" if word == "stop" else "it was done, and say what came of it"
    parser.add_argument("--reason", metavar="TEXT", required=True, help="why, for the log of the run")
    parser.add_argument("--wait", action="store_true", help=f"until {until}")
    return parser
