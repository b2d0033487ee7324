"""`python -m harness.analysis.postmortem RUN --incident N`: what a run starts by itself when an incident ends.

A process of low priority; what goes wrong is its last line, which the run repeats as a warning.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.postmortem.gather import find, remarks, told
from harness.analysis.postmortem.write import write_folder
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError
from harness.core.rundir import RunDir

NICENESS = 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.analysis.postmortem")
    parser.add_argument("run", type=Path)
    parser.add_argument("--incident", type=int, required=True, metavar="N", help="0: the remarks")
    words = parser.parse_args(argv)
    os.nice(NICENESS)
    run = RunDir(words.run)
    try:
        chosen = [find(run, words.incident)] if words.incident else remarks(told(run.events))
        for incident in chosen:
            write_folder(run, incident)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
