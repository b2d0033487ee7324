"""Lists checkpoints as a table for `harness checkpoint list`: one row each, with age, size and health.

How: it reads directory names, manifests and file sizes; no shard is read. A run may save and delete meanwhile: a
checkpoint that disappears is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from harness.checkpoint import catalog, integrity
from harness.checkpoint.integrity import Damaged, OtherVersion
from harness.config.errors import StorageError

QUARANTINED = "damaged"
"""Shown as the health of a quarantined checkpoint."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One checkpoint in the output of `harness checkpoint list`."""

    name: str
    step: int
    generation: int
    health: str
    time: float
    """When it was written, in seconds since the epoch."""
    bytes: int
    """Size on disk."""
    tokens: int | None
    problem: str | None
    """Why its manifest cannot be used; None: it can."""


def checkpoint_rows(root: Path) -> list[CheckpointRow]:
    """Checkpoints, oldest first, then the quarantined ones."""
    saved = [(checkpoint.path, checkpoint.health.value) for checkpoint in catalog.list_checkpoints(root)]
    damaged = [(path, QUARANTINED) for path in catalog.list_damaged(root)]
    rows = [checkpoint_row(path, health) for path, health in [*saved, *damaged]]
    return [row for row in rows if row is not None]


def checkpoint_row(path: Path, health: str) -> CheckpointRow | None:
    """The row of a checkpoint; reads no shard. None if the checkpoint was deleted meanwhile."""
    step, generation = catalog.parse_name(path.name)
    manifest, problem = None, None
    try:
        manifest = integrity.read_manifest(path)
    except Damaged as damage:
        problem = f"{damage.path.name}: {damage.problem}"
    except (StorageError, OtherVersion) as error:
        problem = str(error)
    try:
        changed_s = path.stat().st_mtime
    except FileNotFoundError:
        return None
    except OSError:
        changed_s = 0.0
    return CheckpointRow(
        name=path.name,
        step=step,
        generation=generation,
        health=health,
        time=changed_s if manifest is None else manifest.time,
        bytes=bytes_of(path),
        tokens=None if manifest is None else manifest.tokens,
        problem=problem,
    )


def bytes_of(directory: Path) -> int:
    """Bytes of the files in a directory; files that disappear meanwhile are not counted."""
    total = 0
    with suppress(OSError):
        for path in directory.iterdir():
            total += path.lstat().st_size
    return total


def render(rows: Sequence[CheckpointRow], *, now_s: float) -> str:
    """Render the rows as a text table."""
    table = [("name", "step", "generation", "health", "age", "size", "tokens", "")]
    for row in rows:
        tokens = "-" if row.tokens is None else f"{row.tokens:,}"
        age, size = age_text(now_s - row.time), size_text(row.bytes)
        table.append((row.name, str(row.step), str(row.generation), row.health, age, size, tokens, row.problem or ""))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    to_left = {0, 3, 7}
    lines = (
        "  ".join(
            f"{text:{'<' if number in to_left else '>'}{width}}"
            for number, (text, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in table
    )
    return "\n".join(line.rstrip() for line in lines)


def size_text(num_bytes: int) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


def age_text(seconds: float) -> str:
    for unit, scale in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
