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

from harness.analysis.diagnose.decision_tree import Diagnosis, Finds, render, walk
from harness.analysis.judge.foreign_logs import NAMES, read_records
from harness.analysis.postmortem.gather import RECENT_BYTES, recent_steps, settings_of
from harness.config.errors import EXIT_BAD_CONFIG, ConfigError, require
from harness.config.precision import PrecisionKind
from harness.core.events import StepRecord
from harness.core.rundir import RunDir
from launch.cli.judge import detect_config, parse_columns
from launch.cli.parser import CommandParser

DESCRIPTION = f"""\
Walk the decision tree over a run directory (also while it trains) or over a CSV or JSON lines file with step, loss and
any of {", ".join(list(NAMES)[2:])}. Prints each question with its answer.

exit code: {", ".join(f"{find.value} {find.name.replace('_', ' ')}" for find in Finds)}; 2 bad input
"""


def main(argv: Sequence[str]) -> int:
    """Print the walk through the tree; returns the exit code of the result."""
    try:
        args = build_parser().parse_args(argv)
        diagnosis = diagnose(Path(args.run), parse_columns(args.column), precision=args.precision)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    print(json.dumps(as_json(diagnosis), allow_nan=False) if args.json else render(diagnosis))
    return int(diagnosis.finds)


def diagnose(path: Path, columns: dict[str, str], *, precision: str | None) -> Diagnosis:
    """Diagnose a run directory or a file."""
    require(path.exists(), str(path), "no such run directory or file")
    settings: dict[str, Any] = {}
    if path.is_dir():
        run = RunDir(path)
        require(run.events.exists(), str(path), f"is not a run directory: it has no {run.events.name}")
        settings = settings_of(run)
        rows = recent_steps(run.events)
        if run.events.stat().st_size > RECENT_BYTES and rows:
            since = f"the newest {len(rows):,} steps, from iteration {rows[0].iteration}"
            print(f"harness: the log of {path} is long; using only {since}", file=sys.stderr)
    else:
        rows = [_copy_record(record) for record in read_records(path, columns)]
        require(bool(rows), str(path), "has no row with a loss")
    if precision is not None:
        settings = settings | {"precision.kind": precision}
    return walk(rows, settings, detect=detect_config([]))


def _copy_record(record: StepRecord) -> StepRecord:
    """A copy: readers of foreign logs reuse one record object."""
    return replace(record)


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "finds": diagnosis.finds.name,
        "exit_code": int(diagnosis.finds),
        "conclusion": diagnosis.conclusion,
        "nodes": [asdict(node) for node in diagnosis.nodes],
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
