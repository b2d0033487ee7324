"""`harness postmortem`: writes the report of an incident from the current contents of the run directory.

A run writes its reports itself when an incident ends. This command is for a run that was killed or still runs, and for
a newer version of the rules. Markdown goes to stdout, all files to `incidents/NNN/`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.postmortem.endings import find_ending
from harness.analysis.postmortem.gather import find_incident, folder_of, incidents, remarks
from harness.analysis.postmortem.write import MARKDOWN, write_folder
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, StorageError, require
from harness.core.events import Incident
from harness.telemetry.event_log import read_non_step_events
from launch.cli.parser import CommandParser
from launch.cli.remote_runs import run_dir_of
from launch.cli.write_error import write_error

DESCRIPTION = """\
Write RUN/incidents/NNN/ (evidence.json, postmortem.md, postmortem.html, plots) and print the post-mortem. Without
--incident all incidents and remarks (duplicate batches outside any incident) are written and listed. RUN may be the
URL of a run in an object store: its files are copied to the cache directory of the user, and the reports are written
there.
"""


def main(argv: Sequence[str]) -> int:
    """Write and print reports; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        run = run_dir_of(args.run)
        require(run.events.exists(), args.run, f"is not a run directory: it has no {run.events.name}")
        log = read_non_step_events(run.events)
        chosen = [*incidents(log), *remarks(log)] if args.incident is None else [find_incident(run, args.incident)]
        ending = find_ending(log)
        if not chosen:
            print(f"{args.run}: no incidents" if ending is None else f"{args.run}: no incidents; {ending.line}")
            return EXIT_DONE
        folders = [write_folder(run, incident) for incident in chosen]
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except OSError as error:
        if error.filename is None or not Path(error.filename).is_relative_to(run.incidents):
            raise
        failure = write_error(Path(error.filename), error)
        print(f"harness: {failure}", file=sys.stderr)
        return EXIT_INTERRUPTED if isinstance(failure, StorageError) else EXIT_BAD_CONFIG
    if len(folders) == 1:
        print((folders[0] / MARKDOWN).read_text(encoding="utf-8"), end="")
    else:
        for incident, folder in zip(chosen, folders, strict=True):
            print(incident_line(incident, folder))
    if ending is not None:
        print(f"{args.run}: {ending.line}")
    return EXIT_DONE


def incident_line(incident: Incident, folder: Path) -> str:
    """One line of the list, with the cause that the report names."""
    lines = (folder / MARKDOWN).read_text(encoding="utf-8").splitlines()
    why = next((line.removeprefix("- Why: ") for line in lines if line.startswith("- Why: ")), "")
    kinds = ", ".join(incident.kinds)
    return f"{folder_of(incident)}  iteration {incident.onset}: {kinds}; {incident.verdict}; {why}  {folder / MARKDOWN}"


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="harness postmortem", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/first")
    parser.add_argument("--incident", metavar="N", type=int, help="number of the incident; default: all")
    return parser
