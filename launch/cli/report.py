"""`harness report`: writes an index page over all runs below a directory."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.dashboard.index import RunRow, find_runs, render, run_row
from harness.analysis.dashboard.page import render as render_page
from harness.analysis.dashboard.page_data import page_data
from harness.analysis.dashboard.story import Story
from harness.analysis.postmortem.lessons import FILE as LESSONS
from harness.analysis.postmortem.lessons import read_lessons
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.core.rundir import RunDir, write_atomically
from launch.cli.parser import CommandParser

DESCRIPTION = """\
Write DIR/index.html: every run at or below DIR with its state, losses, incidents, goodput and a link to its page,
grouped by sweep, and the lessons of past incidents (lessons.md beside the runs), which are also printed. With --build
the page of every run is written too; without it only existing pages are linked.
"""


def main(argv: Sequence[str]) -> int:
    """Write the index; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        print(write_run_index(Path(args.dir), Path(args.output) if args.output else None, build=args.build))
        for line in lessons_below(Path(args.dir)):
            print(line)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except OSError as error:
        print(f"harness: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return EXIT_DONE


def write_run_index(root: Path, out: Path | None, *, build: bool) -> Path:
    """Write the index, completely or not at all; returns its path."""
    require(root.is_dir(), str(root), "is not a directory")
    rows = [row for run in find_runs(root) for row in [read_row(run, root=root, build=build)]]
    require(bool(rows), str(root), "no run found: no events.jsonl at or below it")
    out = out or root / "index.html"
    write_atomically(out, render(rows, title=root.resolve().name, lessons=lessons_below(root)))
    return out


def lessons_below(root: Path) -> list[str]:
    """The lessons beside the runs at or below a directory; of a run itself, its own."""
    is_run = RunDir(root).events.exists()
    folders = {root.resolve().parent} if is_run else {run.path.resolve().parent for run in find_runs(root)}
    lines = [line for folder in sorted(folders) for line in read_lessons(folder / LESSONS)]
    return [line for line in lines if line.startswith(f"- {root.resolve().name} ")] if is_run else lines


def read_row(run: RunDir, *, root: Path, build: bool) -> RunRow:
    story, now_s = Story(), time.time()
    story.read_more(run)
    if build:
        write_atomically(run.dashboard, render_page(page_data(run, story, now_s=now_s)))
    return run_row(run, story, root=root, now_s=now_s)


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="harness report", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("dir", metavar="DIR", help="directory of runs or sweeps, such as runs")
    parser.add_argument("--output", metavar="FILE", help="write to FILE; links stay relative to DIR")
    parser.add_argument("--build", action="store_true", help="also write the page of every run")
    return parser
