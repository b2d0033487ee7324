"""Lines for a person on standard error: warnings of a run, and the log lines of the processes beside it."""

from __future__ import annotations

import sys
import time


def print_warning(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def log_with_time(line: str) -> None:
    """Print a line of the log of a process, which is its standard error."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", file=sys.stderr, flush=True)
