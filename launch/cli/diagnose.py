"""`harness diagnose`: why a run misbehaves, question by question, over its directory or over any log.

How: the records of a run directory, finished or going on, or the rows of a CSV or JSON lines file that anyone wrote, go
through the tree of `harness.analysis.diagnose.decision_tree`. Of a log above 32 MiB the newest records are taken, and a
line on stderr says so. The exit code says what was found, so that a script can ask.
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
from harness.analysis.judge.foreign_logs import NAMES, records
from harness.analysis.postmortem.gather import RECENT_BYTES, recent_steps, settings_of
from harness.config.errors import EXIT_BAD_CONFIG, ConfigError, require
from harness.config.precision import PrecisionKind
from harness.core.events import StepRecord
from harness.core.rundir import RunDir
from launch.cli.judge import detect_config, named_columns
from launch.cli.parser import Parser

DESCRIPTION = f"""\
Walk the decision tree over a run directory (also one that is training) or over a CSV or JSON lines file with a step, a
loss and whatever else there is of {", ".join(list(NAMES)[2:])}. Each question is answered with its number.

exit code: {", ".join(f"{find.value} {find.name.replace('_', ' ')}" for find in Finds)}; 2 bad input
"""


def main(argv: Sequence[str]) -> int:
    """Print the walk; returns the exit code of what was found."""
    try:
        words = parser().parse_args(argv)
        diagnosis = diagnose(Path(words.run), named_columns(words.column), precision=words.precision)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    print(json.dumps(as_json(diagnosis), allow_nan=False) if words.json else render(diagnosis))
    return int(diagnosis.finds)


def diagnose(path: Path, columns: dict[str, str], *, precision: str | None) -> Diagnosis:
    """The diagnosis of a run directory or of a file."""
    require(path.exists(), str(path), "no such run directory or file")
    settings: dict[str, Any] = {}
    if path.is_dir():
        run = RunDir(path)
        require(run.events.exists(), str(path), f"is no run: it has no {run.events.name}")
        settings = settings_of(run)
        rows = recent_steps(run.events)
        if run.events.stat().st_size > RECENT_BYTES and rows:
            since = f"the newest {len(rows):,} steps, from iteration {rows[0].iteration}"
            print(f"harness: the log of {path} is long: diagnosed {since}", file=sys.stderr)
    else:
        rows = [_own(record) for record in records(path, columns)]
        require(bool(rows), str(path), "has no row with a loss")
    if precision is not None:
        settings = settings | {"precision.kind": precision}
    return walk(rows, settings, detect=detect_config([]))


def _own(record: StepRecord) -> StepRecord:
    """A copy: readers of foreign logs fill the same record again and again."""
    return replace(record)


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "finds": diagnosis.finds.name,
        "exit_code": int(diagnosis.finds),
        "conclusion": diagnosis.conclusion,
        "nodes": [asdict(node) for node in diagnosis.nodes],
    }


def parser() -> ArgumentParser:
    parser = Parser(prog="harness diagnose", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="run directory, or a CSV or JSON lines file")
    parser.add_argument("--json", action="store_true", help="as one line of JSON")
    kinds = [str(kind) for kind in PrecisionKind]
    parser.add_argument("--precision", choices=kinds, help="what a foreign log does not say")
    parser.add_argument(
        "--column", metavar="NAME=COLUMN", action="append", default=[], help="where a column is not recognised"
    )
    return parser
