"""Log lines and exit codes of the sink process."""

from __future__ import annotations

from harness.core.credentials import without_credentials
from harness.core.stderr_lines import log_with_time

EXIT_NOT_SENT = 1
"""Exit code of the sink process if a target did not accept everything."""


def log(message: str) -> None:
    """Print a line with its time, without the credentials of URIs in it."""
    log_with_time(without_credentials(message))


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
