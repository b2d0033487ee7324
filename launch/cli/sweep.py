"""`harness sweep report DIR`: what the jobs of a sweep came to, as a table, a page and pictures.

Why: a sweep is done for one answer, and the answer is worth no more than the doubt that comes with it.
How: everything is read from the directories of the jobs, while the sweep runs or years later. The page and its
pictures lie in the directory of the sweep, or where `--output` says; the table is printed. Any directory that holds
runs will do.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.sweeps import sweep_record
from harness.analysis.sweeps.job_result import result_of
from harness.analysis.sweeps.picture import draw_all
from harness.analysis.sweeps.ranking import rank
from harness.analysis.sweeps.render import as_json, markdown, text
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError
from harness.core.rundir import write_atomically
from launch.cli.parser import Parser

HELP = """\
usage: harness sweep report DIR [--json] [--output FILE]

Compare the jobs of a sweep, or any runs that lie side by side in DIR: a table by final held-out loss, the best
overrides, and whether they are better by more than chance. Writes report.md with loss curves and heat maps.
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
                return report(arguments)
            case [unknown, *_]:
                raise ConfigError("sweep", f"no command {unknown!r}; choose report, or --help")
            case _:
                raise ConfigError("sweep", "which command? choose report, or --help")
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG


def report(arguments: Sequence[str]) -> int:
    """Print and write the report of a sweep; returns the exit code."""
    words = parser().parse_args(arguments)
    directory = Path(words.directory)
    sweep = sweep_record.read(directory)
    ranking = rank([result_of(directory, job) for job in sweep.jobs])
    page = Path(words.output) if words.output else directory / "report.md"
    try:
        pictures = draw_all(sweep, ranking, page.parent, page.stem)
        write_atomically(page, markdown(sweep, ranking, pictures))
    except OSError as error:
        raise ConfigError(str(page), f"cannot be written: {error.strerror}") from None
    print(text(sweep, ranking))
    print(f"report  {page}")
    if words.json:
        print(json.dumps(as_json(sweep, ranking), allow_nan=False))
    return EXIT_DONE


def parser() -> ArgumentParser:
    parser = Parser(prog="harness sweep report", description="Compare the jobs of a sweep.")
    parser.add_argument("directory", metavar="DIR", help="of the sweep: runs/NAME")
    parser.add_argument("--json", action="store_true", help="also print everything as one line of JSON, the last one")
    parser.add_argument("--output", metavar="FILE", help="where the page goes; its pictures lie beside it")
    return parser
