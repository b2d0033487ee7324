"""Log lines and exit codes of the sink process."""

from __future__ import annotations

import sys
import time

from harness.core.credentials import without_credentials

EXIT_NOT_SENT = 1
"""Exit code of the sink process if a target did not accept everything."""


def log(message: str) -> None:
    """Print a line with its time, without the credentials of URIs in it."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {without_credentials(message)}", file=sys.stderr, flush=True)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
