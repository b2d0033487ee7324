"""The `harness` command: finds the subcommand, and nothing else.

Why: asking for help must answer at once, so this file imports neither Hydra nor torch; a command brings what it needs.
How: a command is the module of the same name in `launch`, with a `main(arguments)` that returns its exit code: 0 done,
2 bad configuration, 3 halted by the sentinel (do not requeue), 75 interrupted but resumable (requeue), 1 crashed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE

SUMMARIES = {
    "train": "train a model, or resume a run: harness train [group=option] [key=value] ...",
    "plan": "what a run would take and what a rollback would cost: harness plan [group=option] [key=value] ...",
    "drill": "break a run on purpose and score its answer: harness drill NAME... | all | list | campaign ...",
    "status": "who is alive in a run, and how far it is: harness status RUN [--json]",
    "watch": "a run in the terminal, as it goes: harness watch RUN",
    "dashboard": "a run as one page, written or kept live: harness dashboard RUN [--serve]",
    "ctl": "ask something of a run that is training: harness ctl RUN stop ...",
    "checkpoint": "list, verify, prune, export or import checkpoints: harness checkpoint list RUN ...",
    "postmortem": "what happened, why, and what to change: harness postmortem RUN [--incident N]",
    "replay": "the guilty step once more, machine or data: harness replay RUN --incident N [--batch]",
    "diagnose": "why a run misbehaves, question by question: harness diagnose RUN | FILE [--json]",
    "judge": "what the sentinel finds in any log of losses: harness judge FILE [--json] [--plot OUT.png]",
    "sweep": "what the jobs of a sweep came to: harness sweep report DIR",
    "report": "an index page over many runs: harness report DIR [--build]",
    "data": "make an indexed corpus of texts, or look at a batch: harness data prepare | inspect ...",
}
COMMANDS = f"{', '.join(SUMMARIES)}, or --help"


def help_text() -> str:
    lines = [f"  {name:<11} {summary}" for name, summary in SUMMARIES.items()]
    head, foot = "usage: harness COMMAND [ARGUMENTS]\n\ncommands:", "`harness COMMAND --help` says more."
    return "\n".join([head, *lines, "", foot, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    match list(sys.argv[1:] if argv is None else argv):
        case ["-h" | "--help" | "help", *_]:
            print(help_text(), end="")
            return EXIT_DONE
        case [command, *arguments] if command in SUMMARIES:
            module = "launch.train" if command == "train" else f"launch.cli.{command}"
            code: int = import_module(module).main(arguments)
            return code
        case [unknown, *_]:
            print(f"harness: no command {unknown!r}; choose {COMMANDS}", file=sys.stderr)
        case _:
            print(f"harness: which command? choose {COMMANDS}", file=sys.stderr)
    return EXIT_BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main())
