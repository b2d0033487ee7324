"""The `harness` command: imports and runs a subcommand.

Why: help must print at once, so this file imports neither Hydra nor torch; each command imports what it needs.
How: a command is the module of the same name in `launch.cli` (`train` is `launch.train`), with a `main(arguments)` that
returns its exit code: 0 done, 1 crashed, 2 invalid config, 3 halted by the sentinel (do not requeue), 75 interrupted,
resumable (requeue). Here every command gets one line for an error of the
system, such as a file that cannot be read or a full disk.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_CRASHED, EXIT_DONE, EXIT_INTERRUPTED, StorageError
from harness.core.safe_stream import safe_output

SUMMARIES = {
    "train": "train a model, or resume a run: harness train [group=option] [key=value] ...",
    "plan": "estimate memory, traffic, step time and price: harness plan [group=option] [key=value] ...",
    "drill": "inject faults into a run and score it: harness drill NAME... | all | list | campaign ...",
    "status": "show live ranks and progress of a run: harness status RUN [--json]",
    "watch": "follow a run in the terminal: harness watch RUN",
    "dashboard": "write or serve the HTML page of a run, or compare runs: harness dashboard RUN... [--serve]",
    "ctl": "send a command to a running run: harness ctl RUN stop | pause | skip | unskip | lr | rollback ...",
    "checkpoint": "list, verify, prune, export or import checkpoints: harness checkpoint list RUN ...",
    "postmortem": "write the report of an incident: harness postmortem RUN [--incident N]",
    "verify": "check that the remedy of an incident works: harness verify RUN --incident N [--rerun]",
    "replay": "rerun the step that caused an incident: harness replay RUN --incident N [--batch]",
    "diagnose": "walk a decision tree over a run or a log: harness diagnose RUN | FILE [--json]",
    "judge": "run the detectors over any loss log: harness judge FILE [--json] [--plot OUT.png]",
    "sweep": "compare the jobs of a sweep: harness sweep report DIR",
    "report": "write an index page over many runs: harness report DIR [--build]",
    "sample": "generate text from a checkpoint: harness sample RUN --prompt TEXT",
    "health": "check the devices of this node, before it joins a run: harness health [--gpus N] [--json]",
    "data": "tokenize texts to an indexed corpus, or show a batch: harness data prepare | inspect ...",
}
COMMANDS = f"{', '.join(SUMMARIES)}, or --help"
USUAL_COMMANDS = {
    "run": "train",
    "start": "train",
    "resume": "train",
    "launch": "train",
    "generate": "sample",
    "estimate": "plan",
    "monitor": "watch",
    "logs": "watch",
    "stop": "ctl",
    "rollback": "ctl",
    "skip": "ctl",
    "export": "checkpoint",
    "import": "checkpoint",
    "prepare": "data",
    "tokenize": "data",
    "explain": "diagnose",
    "index": "report",
    "doctor": "health",
    "burnin": "health",
}
"""What other tools call a command, or what users take for one -> the command."""
PACKAGE = "pretraining-harness"


def help_text() -> str:
    lines = [f"  {name:<11} {summary}" for name, summary in SUMMARIES.items()]
    head = "usage: harness COMMAND [ARGUMENTS]\n\ncommands:"
    foot = "See `harness COMMAND --help` for its arguments. `harness --version` prints versions."
    return "\n".join([head, *lines, "", foot, ""])


def version_text() -> str:
    """Versions of this package, torch and Python, without importing torch."""
    import platform
    from importlib import metadata

    def version_of(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "(not installed as a package)"

    return f"harness {version_of(PACKAGE)}, torch {version_of('torch')}, Python {platform.python_version()}"


def guess_command(name: str) -> str:
    """A hint at the command that the user may have meant; empty if there is none."""
    from difflib import get_close_matches

    close = get_close_matches(name, SUMMARIES, n=1)
    meant = close[0] if close else USUAL_COMMANDS.get(name, "")
    return f"; did you mean {meant}?" if meant else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    with safe_output():
        return dispatch_command(list(sys.argv[1:] if argv is None else argv))


def dispatch_command(arguments: list[str]) -> int:
    match arguments:
        case ["-h" | "--help" | "help", *_]:
            print(help_text(), end="")
            return EXIT_DONE
        case ["-V" | "--version" | "version", *_]:
            print(version_text())
            return EXIT_DONE
        case [command, *rest] if command in SUMMARIES:
            return run_subcommand(command, rest)
        case [unknown, *_]:
            hint = guess_command(unknown)
            print(f"harness: unknown command {unknown!r}{hint}; choose {COMMANDS}", file=sys.stderr)
        case _:
            print(f"harness: missing command; choose {COMMANDS}", file=sys.stderr)
    return EXIT_BAD_CONFIG


def run_subcommand(command: str, arguments: Sequence[str]) -> int:
    """Import and run a command. An error of the system is one line, and Ctrl-C is none, also during imports."""
    module = "launch.train" if command == "train" else f"launch.cli.{command}"
    try:
        code: int = import_module(module).main(arguments)
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        print(f"harness: {describe_os_error(command, error)}", file=sys.stderr)
        code = exit_code_of(error)
        return code if command == "train" or code == EXIT_INTERRUPTED else EXIT_BAD_CONFIG


def describe_os_error(command: str, error: OSError) -> str:
    """The file and the error; without a file, as for a write to an open one, the command and where it failed."""
    from pathlib import Path
    from traceback import extract_tb

    if isinstance(error, StorageError):
        return str(error)
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    *_, place = extract_tb(error.__traceback__)
    where = f"{place.name} in {Path(place.filename).name}:{place.lineno}"
    return f"{command}: {error.strerror or error or type(error).__name__} ({where})"


def exit_code_of(error: OSError) -> int:
    """Exit code of a start: 75 if the same command may succeed later, 2 for a file that cannot be used, else 1. Every
    other command has 2 instead of 1."""
    from harness.core.locking.run_lease import STORAGE_ERRORS

    if isinstance(error, StorageError) or error.errno in STORAGE_ERRORS:
        return EXIT_INTERRUPTED
    return EXIT_CRASHED if error.filename is None else EXIT_BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main())
