"""The `harness` command: finds the subcommand, and nothing else.

Why: asking for help must answer at once, so this file imports neither Hydra nor torch; a command brings what it needs.
How: one `match` over the words of the command line. Every command returns its exit code: 0 done, 2 bad configuration,
3 halted by the sentinel (do not requeue), 75 interrupted but resumable (requeue), 1 crashed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.config import EXIT_BAD_CONFIG, EXIT_DONE

COMMANDS = "train, judge, data, checkpoint, ctl, plan, or --help"
HELP = """\
usage: harness COMMAND [ARGUMENTS]

commands:
  train       train a model, or resume a run: harness train [group=option] [key=value] ...
  judge       what the sentinel finds in any log of losses: harness judge FILE [--json] [--plot OUT.png]
  data        make an indexed corpus of texts, or look at a batch: harness data prepare | inspect ...
  checkpoint  list, verify, prune, export or import checkpoints: harness checkpoint list RUN ...
  ctl         ask something of a run that is training: harness ctl RUN stop ...
  plan        what a run would take and what a rollback would cost: harness plan [group=option] [key=value] ...

`harness COMMAND --help` says more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    match list(sys.argv[1:] if argv is None else argv):
        case ["-h" | "--help" | "help", *_]:
            print(HELP, end="")
            return EXIT_DONE
        case ["train", *arguments]:
            from launch import train

            return train.main(arguments)
        case ["judge", *arguments]:
            from launch import judge

            return judge.main(arguments)
        case ["data", *arguments]:
            from launch import data

            return data.main(arguments)
        case ["checkpoint", *arguments]:
            from launch import checkpoint

            return checkpoint.main(arguments)
        case ["ctl", *arguments]:
            from launch import ctl

            return ctl.main(arguments)
        case ["plan", *arguments]:
            from launch import plan

            return plan.main(arguments)
        case [unknown, *_]:
            print(f"harness: no command {unknown!r}; choose {COMMANDS}", file=sys.stderr)
            return EXIT_BAD_CONFIG
        case _:
            print(f"harness: which command? choose {COMMANDS}", file=sys.stderr)
            return EXIT_BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main())
