"""`harness postmortem`: the report of an incident, written again from what the run directory holds now.

A run writes these by itself when an incident ends; this is for a run that was killed, for one that goes on, and for a
newer version of the rules. Markdown goes to stdout, everything to `incidents/NNN/`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.postmortem.gather import find, folder_of, incidents, remarks, told
from harness.analysis.postmortem.write import MARKDOWN, write_folder
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.core.events import Incident
from harness.core.rundir import RunDir
from launch.cli.parser import Parser

DESCRIPTION = """\
Write RUN/incidents/NNN/ (evidence.json, postmortem.md, postmortem.html, pictures) and print the post-mortem. Without
--incident all incidents and remarks (duplicate batches that no incident accounts for) are written, and listed.
"""


def main(argv: Sequence[str]) -> int:
    """Write and print; returns the exit code."""
    try:
        words = parser().parse_args(argv)
        run = RunDir(Path(words.run))
        require(run.events.exists(), words.run, f"is no run: it has no {run.events.name}")
        log = told(run.events)
        chosen = [*incidents(log), *remarks(log)] if words.incident is None else [find(run, words.incident)]
        if not chosen:
            print(f"{words.run}: no incidents")
            return EXIT_DONE
        folders = [write_folder(run, incident) for incident in chosen]
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except OSError as error:
        print(f"harness: {error.filename}: cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if len(folders) == 1:
        print((folders[0] / MARKDOWN).read_text(encoding="utf-8"), end="")
    else:
        for incident, folder in zip(chosen, folders, strict=True):
            print(summary(incident, folder))
    return EXIT_DONE


def summary(incident: Incident, folder: Path) -> str:
    """One line of the list: the answer that the report gives to why."""
    lines = (folder / MARKDOWN).read_text(encoding="utf-8").splitlines()
    why = next((line.removeprefix("- Why: ") for line in lines if line.startswith("- Why: ")), "")
    kinds = ", ".join(incident.kinds)
    return f"{folder_of(incident)}  iteration {incident.onset}: {kinds}; {incident.verdict}; {why}  {folder / MARKDOWN}"


def parser() -> ArgumentParser:
    parser = Parser(prog="harness postmortem", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--incident", metavar="N", type=int, help="its number; default: all")
    return parser
