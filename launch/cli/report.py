"""`harness report`: writes an index page over all runs below a directory."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.dashboard.comparison import comparison_data
from harness.analysis.dashboard.index import COMPARISON_PAGE, RunRow, find_runs, group_links, render, run_row
from harness.analysis.dashboard.page import render as render_page
from harness.analysis.dashboard.page import render_comparison
from harness.analysis.dashboard.page_data import page_data
from harness.analysis.dashboard.story import Story
from harness.analysis.postmortem.lessons import FILE as LESSONS
from harness.analysis.postmortem.lessons import read_lessons
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.core.rundir import RunDir, write_atomically
from launch.cli.parser import CommandParser

DESCRIPTION = """\
Write DIR/index.html: every run at or below DIR with its state, losses, incidents, goodput and a link to its page,
grouped by sweep, and the lessons of past incidents (lessons.md beside the runs), which are also printed. A link to a
run counts as a run. With --build the page of every run is written too, and in every directory of runs compare.html,
which compares them; without it only existing pages are linked. Reports and pictures of `harness sweep report` are
linked from their sweep.
"""
MOST_COMPARED = 32
"""Runs of one directory that compare.html holds, the first by name."""


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
    return EXIT_DONE


def write_run_index(root: Path, out: Path | None, *, build: bool) -> Path:
    """Write the index, completely or not at all; returns its path."""
    require(root.is_dir(), str(root), "is not a directory")
    groups: dict[Path, list[RunDir]] = {}
    for run in find_runs(root):
        groups.setdefault(run.path.parent, []).append(run)
    require(bool(groups), str(root), "no run found: no events.jsonl at or below it")
    rows = [row for runs in groups.values() for row in read_group(runs, root=root, build=build)]
    require(bool(rows), str(root), "no run can be read")
    out = out or root / "index.html"
    links = {row.group: group_links(root / row.group) for row in rows}
    text = render(rows, title=root.resolve().name, lessons=lessons_below(root), links=links)
    write_atomically(out, text)
    return out


def read_group(runs: Sequence[RunDir], *, root: Path, build: bool) -> list[RunRow]:
    """The rows of the runs of one directory; with `build`, also their pages and the page that compares them.

    A run that cannot be read is left out, with a warning; so is a page that cannot be written.
    """
    rows: list[RunRow] = []
    stories: list[tuple[RunDir, Story]] = []
    now_s = time.time()
    for run in runs:
        story = Story()
        try:
            story.read_more(run)
            page = render_page(page_data(run, story, now_s=now_s)) if build else ""
        except OSError as error:
            message = f"{error.filename or run.path}: {error.strerror}; {run.path} is left out"
            print(f"harness: warning: {message}", file=sys.stderr)
            continue
        if build:
            write_linked_page(run.dashboard, page)
            stories += [(run, story)] if len(stories) < MOST_COMPARED else []
        rows.append(run_row(run, story, root=root, now_s=now_s))
    if len(stories) > 1:
        out = runs[0].path.parent / COMPARISON_PAGE
        data = comparison_data(stories, out=out, now_s=now_s, title=f"{out.parent.resolve().name}: comparison")
        write_linked_page(out, render_comparison(data))
    return rows


def write_linked_page(path: Path, text: str) -> None:
    """Write a page that the index links; a warning if that is not possible, as for a run of another user."""
    try:
        write_atomically(path, text)
    except OSError as error:
        print(f"harness: warning: {path} cannot be written: {error.strerror}", file=sys.stderr)


def lessons_below(root: Path) -> list[str]:
    """The lessons beside the runs at or below a directory; of a run itself, and of a run behind a link, its own."""
    runs = find_runs(root)
    single = [run.path.resolve() for run in runs if run.path == root or run.path.is_symlink()]
    folders = {path.parent for run in runs if (path := run.path.resolve()) not in single}
    lines = [line for folder in sorted(folders) for line in read_lessons(folder / LESSONS)]
    own = [(path.name, read_lessons(path.parent / LESSONS)) for path in single if path.parent not in folders]
    return lines + [line for name, lessons in own for line in lessons if line.startswith(f"- {name} ")]


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="harness report", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("dir", metavar="DIR", help="directory of runs or sweeps, such as runs")
    parser.add_argument("--output", metavar="FILE", help="write to FILE; links stay relative to DIR")
    parser.add_argument("--build", action="store_true", help="also write the page of every run")
    return parser
