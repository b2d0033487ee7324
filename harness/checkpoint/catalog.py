"""What checkpoints there are, how healthy each is, and which may go.

Why: a run that trains on NaN must never delete the last state that was healthy, and a half-written or half-deleted
directory must never be taken for a checkpoint.
How: one directory per (step, generation). It comes into being and goes by a rename; on its way in or out it has a
hidden name. Health lies in a small file of its own, because it is known only later: a checkpoint is a *candidate* until
enough clean steps have followed it, then *good*; one taken after the onset of an incident is *tainted*. Health that
cannot be read is *unread*, which is never written down; while there is any, nothing is deleted.
`select_for_deletion` is the whole rule of retention, as a pure function.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import final

from harness.checkpoint.integrity import OtherVersion, storage_error
from harness.config.errors import StorageError
from harness.core.locking import run_lease
from harness.core.rundir import write_atomically

HEALTH = "health.json"
_NAME = re.compile(r"step-(\d{8,})-gen-(\d+)")
_DAMAGED = re.compile(r"step-\d{8,}-gen-\d+\.damaged(-\d+)?")
_UNFINISHED = re.compile(r"\.step-\d{8,}-gen-\d+(\.part|(\.damaged(-\d+)?)?\.gone-[0-9a-f]+)")


class Health(StrEnum):
    candidate = "candidate"
    """Not enough clean steps have followed it yet."""
    good = "good"
    """Enough have, and its weights and moments are finite."""
    tainted = "tainted"
    """Taken after something went wrong."""
    unread = "unread"
    """Not known: storage did not answer, or a newer version wrote it."""


_WRITTEN = [health.value for health in Health if health is not Health.unread]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    path: Path
    step: int
    generation: int
    health: Health

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def age(self) -> tuple[int, int]:
        """Grows with every checkpoint: a rewound run is newer than what it left behind."""
        return self.generation, self.step


def name_of(step: int, generation: int) -> str:
    return f"step-{step:08d}-gen-{generation}"


def parse_name(name: str) -> tuple[int, int]:
    """Step and generation, also of a checkpoint that was set aside."""
    match = _NAME.match(name)
    assert match is not None, f"{name} is not the name of a checkpoint"
    return int(match[1]), int(match[2])


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Checkpoints that exist, oldest first; `StorageError` where that cannot be found out."""
    found = [
        Checkpoint(path=path, step=int(match[1]), generation=int(match[2]), health=health_of(path))
        for path in _directories(root)
        if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.age)


def list_damaged(root: Path) -> list[Path]:
    """Checkpoints that were found to be damaged and set aside."""
    return sorted(path for path in _directories(root) if _DAMAGED.fullmatch(path.name))


def _directories(root: Path) -> list[Path]:
    """What lies there; nothing where nothing was ever saved. A link that leads nowhere is a mount that is gone."""
    try:
        with os.scandir(root) as entries:
            return [root / entry.name for entry in entries if entry.is_dir()]
    except FileNotFoundError as error:
        if root.is_symlink():
            raise storage_error(root, error) from None
        return []
    except OSError as error:
        raise storage_error(root, error) from None


def health_of(path: Path) -> Health:
    """What was written beside a checkpoint; a candidate where nothing was, or what is no health at all."""
    try:
        return read_health(path)
    except (StorageError, OtherVersion):
        return Health.unread


def read_health(path: Path) -> Health:
    """The same, but `StorageError` or `OtherVersion` for what cannot be read."""
    file = path / HEALTH
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))["health"]
    except FileNotFoundError as error:
        if not os.path.isdir(path):  # noqa: PTH112 -- the mount is gone, or the checkpoint; `Path.is_dir` may raise
            raise storage_error(file, error) from None
        return Health.candidate
    except OSError as error:
        raise storage_error(file, error) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        return Health.candidate
    if not isinstance(stated, str):
        return Health.candidate
    if stated not in _WRITTEN:
        raise OtherVersion(file, f"health {stated[:20]!r}, known are {', '.join(_WRITTEN)}")
    return Health(stated)


def mark(path: Path, health: Health, reason: str) -> None:
    """Write down how healthy a checkpoint has turned out to be."""
    write_atomically(path / HEALTH, json.dumps({"health": health, "reason": reason, "time": time.time()}))


def select_for_deletion(checkpoints: Sequence[Checkpoint], *, keep: int, keep_every_steps: int) -> list[Checkpoint]:
    """Those that may go, oldest first.

    The newest `keep` stay, and the first in every `keep_every_steps` steps (0: none); whatever else holds, so do the
    newest good one and its heir, the first candidate after it, which must live until it has proved good itself.
    None may go while the health of any is unread: that one may be the good one that makes another select_for_deletion.
    """
    if any(checkpoint.health is Health.unread for checkpoint in checkpoints):
        return []
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.age)
    sound = [checkpoint for checkpoint in ordered if checkpoint.health is not Health.tainted]
    kept = {checkpoint.path for checkpoint in sound[-keep:]}
    kept |= {checkpoint.path for checkpoint in _milestones(sound, keep_every_steps)}
    good = [checkpoint for checkpoint in sound if checkpoint.health is Health.good]
    heirs = [checkpoint for checkpoint in sound if not good or checkpoint.age > good[-1].age]
    kept |= {checkpoint.path for checkpoint in [*good[-1:], *heirs[:1]]}
    return [checkpoint for checkpoint in ordered if checkpoint.path not in kept]


def _milestones(ordered: Sequence[Checkpoint], every_steps: int) -> list[Checkpoint]:
    """The first checkpoint in every interval of steps; of several generations, the newest one's."""
    first: dict[int, Checkpoint] = {}
    for checkpoint in ordered if every_steps else ():
        interval = checkpoint.step // every_steps
        if interval and (interval not in first or first[interval].generation < checkpoint.generation):
            first[interval] = checkpoint
    return list(first.values())


def scratch_path(root: Path, name: str) -> Path:
    """Where a checkpoint is written before it exists."""
    return root / f".{name}.part"


def publish(scratch: Path, target: Path) -> None:
    """The moment a checkpoint exists: it and the name are on disk when this returns."""
    fsync(scratch)
    run_lease.guard()
    scratch.rename(target)
    fsync(target.parent)


def delete(path: Path) -> bool:
    """Delete a checkpoint, or one that was set aside; False where another process was first.

    Killed on the way, what is left has no name that anybody reads. That name is this call's alone, so that a run and an
    operator who drop the same one at the same time do not delete under each other's hands.
    """
    run_lease.guard()
    hidden = path.with_name(f".{path.name}.gone-{secrets.token_hex(4)}")
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return False
    with suppress(FileNotFoundError):  # a run that starts sweeps this too
        shutil.rmtree(hidden)
    return True


def quarantine(path: Path) -> Path:
    """Take a damaged checkpoint out of the way, under a name a person will see; returns it."""
    number, aside = 1, path.with_name(f"{path.name}.damaged")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(aside)
    return aside


def remove_unfinished(root: Path) -> None:
    """Remove what a killed process left half written or half deleted; no process may be writing."""
    for path in root.glob(".step-*"):
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def fsync(path: Path) -> None:
    """Force the content of a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
