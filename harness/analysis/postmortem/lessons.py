"""Collects one line for each incident in `lessons.md`, beside the runs.

Why: a post-mortem is read once. What it taught should be at hand when the next run is configured.
How: the line of an incident begins with its run and number, and is replaced when its post-mortem is written again. A
lock serializes the processes of several runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from harness.core.locking.file_lock import exclusive
from harness.core.rundir import RunDir, write_atomically

FILE, LOCK = "lessons.md", ".lessons.lock"
HEADING = "# Lessons\n\nOne line for each incident; its post-mortem replaces the line.\n\n"
WAIT_S = 10.0


def lessons_file(run: RunDir) -> Path:
    return run.path.resolve().parent / FILE


def record_lesson(run: RunDir, folder: str, lesson: str) -> None:
    """Write the line of one incident; an empty lesson removes it. Does nothing if another process holds the lock."""
    path = lessons_file(run)
    prefix = f"- {run.path.resolve().name} {folder}: "
    deadline = time.monotonic() + WAIT_S
    with exclusive(path.with_name(LOCK), keep_trying=lambda: time.monotonic() < deadline) as lock:
        if lock is None:
            return
        old = list(read_lessons(path))
        new = [line for line in old if not line.startswith(prefix)]
        new = sorted([*new, prefix + lesson]) if lesson else new
        if new != old:
            write_atomically(path, HEADING + "".join(f"{line}\n" for line in new))


def read_lessons(path: Path) -> Iterator[str]:
    """The lines of a file of lessons; none if it does not exist."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    yield from (line for line in text.splitlines() if line.startswith("- "))
