"""`harness diagnose`: finds why a run misbehaves with a decision tree over its directory or any log.

How: the records of a run directory, finished or running, or the rows of any CSV or JSON lines file go through
`harness.analysis.diagnose.decision_tree`. Of a log above 32 MiB only the newest records are used, with a line on
stderr. The exit code says what was found, for scripts.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.analysis.diagnose.decision_tree import render, walk
from harness.analysis.diagnose.diagnosis import Diagnosis, Finds
from harness.analysis.diagnose.fix_commands import fix_commands
from harness.analysis.diagnose.logged_run import LoggedRun
from harness.analysis.judge.foreign_logs import NAMES, read_log
from harness.analysis.postmortem.gather import RECENT_BYTES, settings_of
from harness.analysis.postmortem.overrides import overrides_in
from harness.analysis.replay.history import read_replays
from harness.checkpoint import catalog
from harness.config.errors import EXIT_BAD_CONFIG, ConfigError, StorageError, require
from harness.config.precision import PrecisionKind
from harness.core.events import StepRecord
from harness.core.rundir import RunDir
from harness.telemetry.event_log import tail
from launch.cli.judge import detect_config, parse_columns
from launch.cli.parser import CommandParser

DESCRIPTION = f"""\
Walk the decision tree over a run directory (also while it trains) or over a CSV or JSON lines file with step, loss and
any of {", ".join(list(NAMES)[2:])}. Prints each question with its answer, and the commands of the fix.

exit code: {", ".join(f"{find.value} {find.name.replace('_', ' ')}" for find in Finds)}; 2 bad input
"""


def main(argv: Sequence[str]) -> int:
    """Print the walk through the tree; returns the exit code of the result."""
    try:
        args = build_parser().parse_args(argv)
        path = Path(args.run)
        run = read_logged_run(path, parse_columns(args.column), precision=args.precision)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    diagnosis = walk(run, detect=detect_config([]))
    commands = commands_of(diagnosis, run, path) if path.is_dir() else []
    print(json.dumps(as_json(diagnosis, commands), allow_nan=False) if args.json else render(diagnosis, commands))
    return int(diagnosis.finds)


def read_logged_run(path: Path, columns: dict[str, str], *, precision: str | None) -> LoggedRun:
    """Read a run directory, or the log of another program."""
    require(path.exists(), str(path), "no such run directory or file")
    if path.is_dir():
        run = _read_run_dir(RunDir(path))
    else:
        log = [replace(event) for event in read_log(path, columns)]
        rows = [event for event in log if isinstance(event, StepRecord)]
        require(bool(rows), str(path), "has no row with a loss")
        run = LoggedRun(records=rows, events=[event for event in log if not isinstance(event, StepRecord)])
    return run if precision is None else replace(run, settings=run.settings | {"precision.kind": precision})


def _read_run_dir(run: RunDir) -> LoggedRun:
    require(run.events.exists(), str(run.path), f"is not a run directory: it has no {run.events.name}")
    log = tail(run.events, RECENT_BYTES)
    rows = [event for event in log if isinstance(event, StepRecord)]
    if run.events.stat().st_size > RECENT_BYTES and rows:
        since = f"the newest {len(rows):,} steps, from iteration {rows[0].iteration}"
        print(f"harness: the log of {run.path} is long; using only {since}", file=sys.stderr)
    try:
        checkpoints: Sequence[catalog.Checkpoint] | None = catalog.list_checkpoints(run.checkpoints)
    except StorageError as error:
        print(f"harness: checkpoints are not considered: {error}", file=sys.stderr)
        checkpoints = None
    return LoggedRun(
        records=rows,
        settings=settings_of(run),
        events=[event for event in log if not isinstance(event, StepRecord)],
        checkpoints=checkpoints,
        replays=read_replays(run),
    )


def commands_of(diagnosis: Diagnosis, run: LoggedRun, path: Path) -> list[str]:
    """The fix as commands for a run directory; the overrides of the run are searched for only if they are needed."""
    restarts = bool(diagnosis.overrides) or diagnosis.restore_step is not None
    overrides = overrides_in(RunDir(path)) if restarts else []
    return fix_commands(
        diagnosis, run=str(path), is_running=run.is_running, is_finished=run.is_finished, overrides=overrides
    )


def as_json(diagnosis: Diagnosis, commands: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "finds": diagnosis.finds.name,
        "exit_code": int(diagnosis.finds),
        "conclusion": diagnosis.conclusion,
        "nodes": [asdict(node) for node in diagnosis.nodes],
        "commands": list(commands),
    }


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="harness diagnose", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="run directory, or a CSV or JSON lines file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    kinds = [str(kind) for kind in PrecisionKind]
    parser.add_argument("--precision", choices=kinds, help="precision of a foreign log, which does not record it")
    parser.add_argument(
        "--column", metavar="NAME=COLUMN", action="append", default=[], help="name of a column that is not recognised"
    )
    return parser
