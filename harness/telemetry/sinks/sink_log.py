"""Log lines and exit codes of the sink process.

How: rank 0 reads a pipe from it. What no retry can change goes there too, so that it is on the console of the run at
once, and not only in a log that nobody reads while the run trains.
"""

from __future__ import annotations

import os
from contextlib import suppress

from harness.core.credentials import without_credentials
from harness.core.stderr_lines import log_with_time

EXIT_NOT_SENT = 1
"""Exit code of the sink process if a target did not accept everything."""


_reports: int | None = None
"""File descriptor of the pipe to rank 0."""


def report_to(descriptor: int | None) -> None:
    """Use this pipe for `report`; None: there is no rank 0 that reads."""
    global _reports
    _reports = descriptor


def report(message: str) -> None:
    """Log a line, and send it to rank 0."""
    log(message)
    if _reports is not None:
        with suppress(OSError):  # rank 0 is gone
            os.write(_reports, f"{without_credentials(message)}\n".encode())


def log(message: str) -> None:
    """Print a line with its time, without the credentials of URIs in it."""
    log_with_time(without_credentials(message))


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
