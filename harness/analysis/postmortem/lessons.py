"""Collects one line for each incident in `lessons.md`, beside the runs.

Why: a post-mortem is read once. What it taught should be at hand when the next run is configured.
How: the line of an incident begins with its run and number, and is replaced when its post-mortem is written again. A
new line is placed by its name among those of other incidents. All other lines belong to people and stay as they are. A
lock serializes the processes of several runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.core.locking.file_lock import exclusive
from harness.core.rundir import RunDir, write_atomically

FILE, LOCK = "lessons.md", ".lessons.lock"
HEADING = "# Lessons\n\nOne line for each incident; its post-mortem replaces the line.\n\n"
WAIT_S = 10.0
OF_AN_INCIDENT = re.compile(r"- \S.* (remark-)?\d{3,}: ")
"""How the line of an incident begins: its run and its folder."""


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
        old = (path.read_text(encoding="utf-8", errors="replace") if path.exists() else "") or HEADING
        new = replace_lesson(old, prefix, lesson)
        if new != old:
            write_atomically(path, new)


def replace_lesson(text: str, prefix: str, lesson: str) -> str:
    """A file of lessons with the line of one incident, or without it if the lesson is empty."""
    lines = text.removesuffix("\n").split("\n")
    places = [place for place, line in enumerate(lines) if line.startswith(prefix)]
    others = [line for place, line in enumerate(lines) if place not in places]
    if lesson:
        at = places[0] if places else place_of_new(others, prefix)
        others.insert(at, prefix + lesson)
    return "".join(f"{line}\n" for line in others)


def place_of_new(lines: Sequence[str], prefix: str) -> int:
    """Where to insert a line: before the first incident with a later name, else behind the paragraph of the last one,
    else at the end."""
    incidents = [place for place, line in enumerate(lines) if OF_AN_INCIDENT.match(line)]
    later = next((place for place in incidents if lines[place] > prefix), None)
    if later is not None:
        return later
    last = incidents[-1] if incidents else len(lines)
    return next((place for place in range(last, len(lines)) if not lines[place]), len(lines))


def read_lessons(path: Path) -> Iterator[str]:
    """The lines of a file of lessons; none if it does not exist."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    yield from (line for line in text.splitlines() if line.startswith("- "))
