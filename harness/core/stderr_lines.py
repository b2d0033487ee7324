"""Lines for a person on standard error: warnings of a run, and the log lines of the processes beside it.

A line that cannot be written is lost: standard error may have no reader, or be a file on a full disk. The threads that
print them (event log, operator commands) must continue.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress


def print_warning(message: str) -> None:
    _print(f"warning: {message}")


def log_with_time(line: str) -> None:
    """Print a line of the log of a process, which is its standard error."""
    _print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")


def _print(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
