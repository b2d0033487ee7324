"""`harness sweep report DIR`: compares the jobs of a sweep in a table, a page and plots.

Everything is read from the run directories of the jobs, while the sweep runs or years later. The report and plots go to
the directory of the sweep, or to `--output`; the table is printed. Any directory of runs will do.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.postmortem.report.html_report import render as render_html
from harness.analysis.sweeps import sweep_record
from harness.analysis.sweeps.job_result import read_job_result
from harness.analysis.sweeps.ranking import rank
from harness.analysis.sweeps.sweep_picture import draw_all
from harness.analysis.sweeps.sweep_text import as_json, render_markdown, render_text
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.core.rundir import write_atomically
from launch.cli.parser import CommandParser
from launch.cli.write_error import write_error

HELP = """\
usage: harness sweep report DIR [--json] [--output FILE]

Compare the jobs of a sweep, or any runs in DIR: a table by final held-out loss, the best overrides, and whether they
are better by more than chance. Writes report.md and report.html with loss curves and heat maps.
`harness train --multirun key=value,value ...` runs a sweep.
"""


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    try:
        match argv:
            case ["-h" | "--help" | "help", *_]:
                print(HELP, end="")
                return EXIT_DONE
            case ["report", *arguments]:
                return report_command(arguments)
            case [unknown, *_]:
                raise ConfigError("sweep", f"unknown command {unknown!r}; choose report, or --help")
            case _:
                raise ConfigError("sweep", "missing command; choose report, or --help")
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG


def report_command(arguments: Sequence[str]) -> int:
    """Print and write the report of a sweep; returns the exit code."""
    args = build_parser().parse_args(arguments)
    directory = Path(args.directory)
    sweep = sweep_record.read(directory)
    ranking = rank([read_job_result(directory, job) for job in sweep.jobs])
    best = "".join(sweep_record.train_command(directory, sweep, score.result.job) for score in ranking.ranked[:1])
    page = Path(args.output) if args.output else directory / "report.md"
    require(page.suffix != ".html", "--output", "names the Markdown report; its page is written beside it as .html")
    try:
        pictures = draw_all(sweep, ranking, page.parent, page.stem)
        markdown = render_markdown(sweep, ranking, pictures, best=best)
        write_atomically(page, markdown)
        html = page.with_suffix(".html")
        write_atomically(html, render_html(markdown, page.parent, title=f"Sweep {sweep.name}"))
    except OSError as error:
        raise write_error(page, error) from None
    print(render_text(sweep, ranking, best=best))
    print(f"report  {page}\npage    {html}")
    if args.json:
        print(json.dumps(as_json(sweep, ranking, best=best), allow_nan=False))
    return EXIT_DONE


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="harness sweep report", description="Compare the jobs of a sweep.")
    parser.add_argument("directory", metavar="DIR", help="directory of the sweep, such as runs/NAME")
    parser.add_argument("--json", action="store_true", help="also print everything as one line of JSON, last on stdout")
    parser.add_argument("--output", metavar="FILE", help="path of the report; its plots go beside it")
    return parser
