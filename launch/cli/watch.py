"""`harness watch`: follows a run in the terminal; the only module of the live view that imports rich.

On a terminal the view is redrawn every second until the run ends or Ctrl-C. Elsewhere, and with --once, it is printed
once as plain text.
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
from launch.cli.dashboard import require_run_dir
from launch.cli.parser import CommandParser
from launch.cli.remote_runs import require_local

DESCRIPTION = "Follow a run: progress, loss, ranks, recent events. Ctrl-C quits the view; the run continues."
EVERY_S = 1.0
PLAIN_WIDTH = 100


def main(argv: Sequence[str]) -> int:
    """Show the run; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        require_local(args.run, why="which has no heartbeats; `harness dashboard` reads it")
        run, story = require_run_dir(args.run), Story()
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    try:
        if args.once or not sys.stdout.isatty():
            print("\n".join(line.text for line in render_view(run, story, width=PLAIN_WIDTH)))
        else:
            redraw_until_end(run, story)
    except KeyboardInterrupt:
        pass
    return EXIT_DONE


def render_view(run: RunDir, story: Story, *, width: int) -> list[Line]:
    """The current view."""
    story.read_more(run)
    return frame(run.path.resolve().name, story, read_all(run), now_s=time.time(), width=width)


def redraw_until_end(run: RunDir, story: Story) -> None:
    """Redraw every second until the run has ended."""
    from rich.live import Live
    from rich.text import Text

    def render_text() -> Text:
        lines = render_view(run, story, width=shutil.get_terminal_size().columns)
        return Text("\n").join(Text(text, style=style) for text, style in lines)

    with Live(render_text(), auto_refresh=False) as live:
        while story.ended is None:
            time.sleep(EVERY_S)
            live.update(render_text(), refresh=True)


def build_parser() -> ArgumentParser:
    parser = CommandParser(prog="harness watch", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/first")
    parser.add_argument("--once", action="store_true", help="print the view once and exit")
    return parser
