"""`harness dashboard`: writes or serves the HTML page of a run, or a page that compares runs."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.core.rundir import RunDir, write_atomically
from launch.cli.parser import CommandParser
from launch.cli.remote_runs import require_local, run_dir_of
from launch.cli.write_error import write_error

if TYPE_CHECKING:
    from harness.analysis.dashboard.story import Story

DESCRIPTION = """\
Write RUN/dashboard.html: one page with all panels of the run, its incidents and post-mortems, its goodput and the cost
of stability. It needs no network and no other file. With --serve nothing is written: the page is served and updated
while the run trains, on 127.0.0.1 unless --host is given. Ctrl-C stops the server.

With two or more RUNs, write compare.html beside them: their curves over each other, their final numbers and the
differences between their configurations.

RUN may be the URL of a run in an object store: its files are copied to the cache directory of the user, and the page is
written there, unless --output is given.
"""
HOST, PORT = "127.0.0.1", 8787


def main(argv: Sequence[str]) -> int:
    """Write or serve the page; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        if args.serve:
            require_local(args.runs[0], why="where it does not grow; --serve needs a run directory")
        runs = [require_run_dir(path) for path in args.runs]
        out = Path(args.output) if args.output else None
        require(not args.serve or len(runs) == 1, "--serve", f"serves one run, got {len(runs)}")
        if args.serve:
            serve(runs[0], host=args.host, port=args.port)
        elif len(runs) == 1:
            print(write_page(runs[0], out or runs[0].dashboard))
        else:
            print(write_comparison(runs, out or comparison_file(runs)))
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return EXIT_DONE


def require_run_dir(path: str) -> RunDir:
    """A run directory, with or without an event log, or the local copy of a run in an object store."""
    run = run_dir_of(path)
    message = "is not a run directory: it has neither events.jsonl nor config.yaml"
    require(run.events.is_file() or run.config.is_file(), path, message)
    return run


def write_page(run: RunDir, out: Path) -> Path:
    """Write the page of a run, completely or not at all; returns its path."""
    from harness.analysis.dashboard.page import render
    from harness.analysis.dashboard.page_data import page_data

    write_text(out, render(page_data(run, read_story(run), now_s=time.time(), out=out)))
    return out


def comparison_file(runs: Sequence[RunDir]) -> Path:
    """compare.html in the innermost directory that holds all runs."""
    from harness.analysis.dashboard.index import COMPARISON_PAGE

    return Path(os.path.commonpath([run.path.resolve().parent for run in runs])) / COMPARISON_PAGE


def write_comparison(runs: Sequence[RunDir], out: Path) -> Path:
    """Write the page that compares runs, completely or not at all; returns its path."""
    from harness.analysis.dashboard.comparison import comparison_data
    from harness.analysis.dashboard.page import render_comparison

    paths = [run.path.resolve() for run in runs]
    twice = next((str(run.path) for run, path in zip(runs, paths, strict=True) if paths.count(path) > 1), "")
    require(not twice, twice, "is given twice; compare it with another run")
    stories = [(run, read_story(run)) for run in runs]
    write_text(out, render_comparison(comparison_data(stories, out=out, now_s=time.time())))
    return out


def read_story(run: RunDir) -> Story:
    """Everything that a page shows of a run."""
    from harness.analysis.dashboard.story import Story

    story = Story()
    try:
        story.read_more(run)
    except OSError as error:
        raise ConfigError(str(run.path), f"cannot be read: {error.strerror}") from None
    return story


def write_text(out: Path, text: str) -> None:
    try:
        write_atomically(out, text)
    except OSError as error:
        raise write_error(out, error) from None


def serve(run: RunDir, *, host: str, port: int) -> None:
    """Serve the page until Ctrl-C."""
    from harness.analysis.dashboard.serve import open_server

    require(0 <= port < 2**16, "--port", f"must be 0 (any free port) to 65535, got {port}")
    try:
        server = open_server(run, host=host, port=port)
    except OSError as error:
        raise ConfigError("--port", f"cannot listen on {host}:{port}: {error.strerror}") from None
    with server:
        print(f"http://{host}:{server.server_port}/  (Ctrl-C to stop)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        prog="harness dashboard", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run directory, such as runs/first; several: compare")
    parser.add_argument("--output", metavar="FILE", help="write to FILE instead")
    parser.add_argument("--serve", action="store_true", help="serve a live page; write nothing")
    parser.add_argument("--host", default=HOST, help=f"address to listen on; default: {HOST}, this machine only")
    parser.add_argument("--port", type=int, default=PORT, help=f"default: {PORT}; 0: any free port")
    return parser
