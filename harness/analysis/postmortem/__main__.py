"""`python -m harness.analysis.postmortem RUN --incident N`: the process that a run starts when an incident ends.

It runs at low priority. On an error its last line is the message, and the run repeats it as a warning. With
`--replay-within` it first replays the guilty step on the CPU; a run asks for that after its last step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.postmortem.gather import find_incident, remarks
from harness.analysis.postmortem.write import write_folder
from harness.analysis.replay.after_run import replay_after_run
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError
from harness.core.child_process import lower_priority
from harness.core.rundir import RunDir
from harness.telemetry.event_log import read_non_step_events


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.analysis.postmortem")
    parser.add_argument("run", type=Path)
    parser.add_argument("--incident", type=int, required=True, metavar="N", help="number of the incident; 0: remarks")
    parser.add_argument("--replay-within", type=float, metavar="SECONDS", help="replay the guilty step first")
    args = parser.parse_args(argv)
    lower_priority()
    run = RunDir(args.run)
    try:
        chosen = [find_incident(run, args.incident)] if args.incident else remarks(read_non_step_events(run.events))
        if args.replay_within is not None:
            replay_after_run(run, args.incident, within_s=args.replay_within)
        for incident in chosen:
            write_folder(run, incident)
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
