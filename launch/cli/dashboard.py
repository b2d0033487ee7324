"""`harness dashboard`: writes or serves the HTML page of a run."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError, require
from harness.core.rundir import RunDir, write_atomically
from launch.cli.parser import CommandParser

DESCRIPTION = """\
Write RUN/dashboard.html: one page with all panels of the run, its incidents and post-mortems, its goodput and the cost
of stability. It needs no network and no other file. With --serve nothing is written: the page is served and updated
while the run trains, on 127.0.0.1 unless --host is given. Ctrl-C stops the server.
"""
HOST, PORT = "127.0.0.1", 8787


def main(argv: Sequence[str]) -> int:
    """Write or serve the page; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        run = require_run_dir(args.run)
        if args.serve:
            serve(run, host=args.host, port=args.port)
        else:
            print(write_page(run, Path(args.output) if args.output else run.dashboard))
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return EXIT_DONE


def require_run_dir(path: str) -> RunDir:
    """A run directory, with or without an event log."""
    run = RunDir(Path(path))
    message = "is not a run directory: it has neither events.jsonl nor config.yaml"
    require(run.events.is_file() or run.config.is_file(), path, message)
    return run


def write_page(run: RunDir, out: Path) -> Path:
    """Write the page, completely or not at all; returns its path."""
    from harness.analysis.dashboard.page import render
    from harness.analysis.dashboard.page_data import page_data
    from harness.analysis.dashboard.story import Story

    story = Story()
    try:
        story.read_more(run)
        text = render(page_data(run, story, now_s=time.time()))
    except OSError as error:
        raise ConfigError(str(run.path), f"cannot be read: {error.strerror}") from None
    try:
        write_atomically(out, text)
    except OSError as error:
        raise ConfigError(str(out), f"cannot be written: {error.strerror}") from None
    return out


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
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/first")
    parser.add_argument("--output", metavar="FILE", help="write to FILE instead")
    parser.add_argument("--serve", action="store_true", help="serve a live page; write nothing")
    parser.add_argument("--host", default=HOST, help=f"address to listen on; default: {HOST}, this machine only")
    parser.add_argument("--port", type=int, default=PORT, help=f"default: {PORT}; 0: any free port")
    return parser
