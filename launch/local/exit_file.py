"""The file in which the launcher that coordinates the run leaves the exit code of the run, for the script of a job."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

EXIT_FILE = "HARNESS_EXIT_FILE"
"""Environment variable of Slurm jobs: path of the file."""


def write_exit_file(code: int) -> None:
    """Write the exit code, if this is a job that asks for it."""
    if path := os.environ.get(EXIT_FILE):
        with suppress(OSError):
            Path(path).write_text(f"{code}\n", encoding="ascii")
