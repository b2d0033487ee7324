"""`harness watch`: a run in the terminal, as it goes; the door of the live view to rich.

On a terminal the view is drawn anew every second until the run ends or Ctrl-C; elsewhere, and with --once, it is
printed once as plain text.
"""

from __future__ import annotations

import shutil
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence

from harness.analysis.dashboard.story import Story
from harness.analysis.dashboard.terminal_view import Line, frame
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError
from harness.core.rundir import RunDir
from harness.telemetry.heartbeat import read_all
from launch.cli.dashboard import opened
from launch.cli.parser import Parser

DESCRIPTION = "Show a run as it goes: progress, loss, ranks, the last events. Ctrl-C leaves; the run goes on."
EVERY_S = 1.0
PLAIN_WIDTH = 100


def main(argv: Sequence[str]) -> int:
    """Show the run; returns the exit code."""
    try:
        words = parser().parse_args(argv)
        run, story = opened(words.run), Story()
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    try:
        if words.once or not sys.stdout.isatty():
            print("\n".join(line.text for line in look(run, story, width=PLAIN_WIDTH)))
        else:
            follow(run, story)
    except KeyboardInterrupt:
        pass
    return EXIT_DONE


def look(run: RunDir, story: Story, *, width: int) -> list[Line]:
    """The view, as of now."""
    story.read_more(run)
    return frame(run.path.resolve().name, story, read_all(run), now_s=time.time(), width=width)


def follow(run: RunDir, story: Story) -> None:
    """Draw anew every second, until the run has ended."""
    from rich.live import Live
    from rich.text import Text

    def picture() -> Text:
        lines = look(run, story, width=shutil.get_terminal_size().columns)
        return Text("\n").join(Text(text, style=style) for text, style in lines)

    with Live(picture(), auto_refresh=False) as live:
        while story.ended is None:
            time.sleep(EVERY_S)
            live.update(picture(), refresh=True)


def parser() -> ArgumentParser:
    parser = Parser(prog="harness watch", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/first")
    parser.add_argument("--once", action="store_true", help="print the view once, and leave")
    return parser
