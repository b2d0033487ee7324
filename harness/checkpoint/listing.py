"""Checkpoints as a person wants to see them: one row each, with age, size and health.

How: what can be told from the names, the manifests and the sizes of files; no shard is read. A run may be saving and
deleting meanwhile: what goes while it is looked at is left out.
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
"""What stands in the place of health for a checkpoint that was set aside."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One checkpoint, as `list` tells it."""

    name: str
    step: int
    generation: int
    health: str
    time: float
    """When it was written, in seconds since 1970."""
    bytes: int
    """What it takes on disk."""
    tokens: int | None
    problem: str | None
    """Why its manifest cannot be used."""


def rows_of(root: Path) -> list[CheckpointRow]:
    """Checkpoints, oldest first, then those that were set aside."""
    saved = [(each.path, each.health.value) for each in catalog.list_checkpoints(root)]
    aside = [(path, QUARANTINED) for path in catalog.list_damaged(root)]
    rows = [row_of(path, health) for path, health in [*saved, *aside]]
    return [row for row in rows if row is not None]


def row_of(path: Path, health: str) -> CheckpointRow | None:
    """What can be told of a checkpoint without reading it all; None when it has gone meanwhile."""
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
    """What the files of a directory take, as far as it is still there."""
    total = 0
    with suppress(OSError):
        for path in directory.iterdir():
            total += path.lstat().st_size
    return total


def render(rows: Sequence[CheckpointRow], *, now_s: float) -> str:
    """A table for a terminal."""
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
