"""`harness ctl`: what an operator asks of a running run, written down with who asked and why.

Why: a run must be told things from any machine that sees its directory, without its processes' numbers or a port.
How: a request is a small file in the run directory (`harness.requests` says which), put there whole by a rename; the
run finds it within a second or so, writes the intervention into its log, and acts. A plain `touch RUN/STOP` does the
same without a name. A complaint is one line on stderr and exit code 2.
Left out: whether the run's processes still live is not known here. A run that was killed has no last word in its log;
it takes the request as one from before its next start, and `--wait` waits for that, until Ctrl-C.
"""

from __future__ import annotations

import getpass
import os
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from harness import requests
from harness.config import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, require
from harness.events import RunEnded, RunStarted, StepRecord
from harness.rundir import RunDir
from harness.telemetry.sinks import read_chunk, tail
from launch.parser import Parser

HELP = """\
usage: harness ctl RUN COMMAND [ARGUMENTS]

RUN is a run directory, such as runs/first. Commands:
  stop     save a checkpoint and leave, with exit code 75 or, after the last step, 0; the same words resume the run

`harness ctl RUN COMMAND --help` says more.
"""

STOP = """\
Ask a run to save a checkpoint and leave. All ranks leave after the same step, with exit code 75 or, after the last
step, 0. `harness train` with the words that started the run resumes it.
"""

COMMANDS = "stop"
LONGEST_REASON = 1000
POLL_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    try:
        match list(argv):
            case ["-h" | "--help" | "help", *_]:
                print(HELP, end="")
                return EXIT_DONE
            case [run, "stop", *arguments]:
                return stop(RunDir(Path(run)), arguments)
            case [_, unknown, *_]:
                raise ConfigError("ctl", f"no command {unknown!r}; choose {COMMANDS}, or --help")
            case [_]:
                raise ConfigError("ctl", f"which command? choose {COMMANDS}, or --help")
            case _:
                raise ConfigError("ctl", "which run? give its directory and a command, or --help")
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG


def stop(run: RunDir, arguments: Sequence[str]) -> int:
    """`harness ctl RUN stop`."""
    words = stop_parser().parse_args(arguments)
    message = f"must have at most {LONGEST_REASON} characters, got {len(words.reason)}"
    require(len(words.reason) <= LONGEST_REASON, "--reason", message)
    log_bytes = run.events.stat().st_size if run.events.exists() else 0
    check_running(run)
    try:
        requests.ask(run, who=operator(), reason=words.reason)
    except OSError as error:
        raise ConfigError(str(run.stop), f"cannot be written: {error.strerror}") from None
    print(f"asked {run.path} to stop")
    if not words.wait:
        return EXIT_DONE
    try:
        ended = wait_for_end(run, log_bytes)
    except KeyboardInterrupt:
        print(f"harness: no longer waiting; {run.path} is still asked to stop", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(f"{run.path} ended at step {ended.step}: {ended.reason} (exit code {ended.exit_code})")
    return ended.exit_code


def check_running(run: RunDir) -> None:
    """Refuse a directory that is no run's, and a run that has ended by itself or was stopped."""
    if not run.config.is_file():
        raise ConfigError(str(run.path), f"is no run directory: it has no {run.config.name}")
    for event in reversed(tail(run.events)):
        if isinstance(event, RunEnded):
            raise ConfigError(str(run.path), f"has ended at step {event.step}: {event.reason}")
        if isinstance(event, RunStarted | StepRecord):
            return


def operator() -> str:
    """Whoever types this, by name where the machine knows one."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def wait_for_end(run: RunDir, log_bytes: int) -> RunEnded:
    """The first end in the log after its first `log_bytes`."""
    while True:
        while chunk := read_chunk(run.events, log_bytes):
            log_bytes = chunk.end
            for event in chunk.events:
                if isinstance(event, RunEnded):
                    return event
        time.sleep(POLL_S)


def stop_parser() -> ArgumentParser:
    parser = Parser(prog="harness ctl RUN stop", description=STOP, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--reason", metavar="TEXT", default="", help="why, for the log of the run")
    parser.add_argument("--wait", action="store_true", help="until the run has ended; exit with its exit code")
    return parser
