"""Lists the checkpoints of a run with their health, and decides which may be deleted.

Why: a run that trains on NaN must never delete the last healthy state, and a partly written or partly deleted directory
must never be mistaken for a checkpoint.
How: one directory per (step, generation). It appears and disappears by a rename; before and after it has a hidden name.
Health is a small file of its own, because it is known only later. A checkpoint is a *candidate* until enough clean
steps have followed it, then *good*; one taken after the onset of an incident is *tainted*. Health that cannot be read
is *unread*, which is never written; while any checkpoint is unread, none is deleted.
`select_for_deletion` is the whole retention rule, as a pure function.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import final

from harness.checkpoint.integrity import OtherVersion, storage_error
from harness.config.errors import StorageError
from harness.core.locking import run_lease
from harness.core.rundir import fsync, write_atomically

HEALTH = "health.json"
STATE_FILE = "state.json"
"""The run state of a checkpoint."""
NUM_BEHIND = 3
"""Intervals of `keep_behind_steps` whose first checkpoint stays: the last one may have begun just now, and the first
one before it may be a little too young."""
NEWEST = "newest"
"""Why the newest checkpoints are kept."""
HOLDS = "held.json"
"""The request of an operator's command to keep the checkpoints that it has listed."""
HOLD_S = 600.0
_NAME = re.compile(r"step-(\d{8,})-gen-(\d+)")
_DAMAGED = re.compile(r"step-\d{8,}-gen-\d+\.damaged(-\d+)?")
_UNFINISHED = re.compile(r"\.step-\d{8,}-gen-\d+(\.part|(\.damaged(-\d+)?)?\.gone-[0-9a-f]+)")


class Health(StrEnum):
    candidate = "candidate"
    """Not enough clean steps have followed it yet."""
    good = "good"
    """Enough clean steps have followed it, and its weights and moments are finite."""
    tainted = "tainted"
    """Taken after the onset of an incident."""
    unread = "unread"
    """Unknown: the storage returned an error, or a newer version wrote the file."""


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
        """Sort key, oldest first: after a rollback the generation is higher, whatever the step."""
        return self.generation, self.step


def name_of(step: int, generation: int) -> str:
    return f"step-{step:08d}-gen-{generation}"


def parse_name(name: str) -> tuple[int, int]:
    """Step and generation, also of a quarantined checkpoint."""
    match = _NAME.match(name)
    assert match is not None, f"{name} is not the name of a checkpoint"
    return int(match[1]), int(match[2])


def is_checkpoint_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """All checkpoints, oldest first; `StorageError` if the directory cannot be listed."""
    found = [
        Checkpoint(path=path, step=int(match[1]), generation=int(match[2]), health=health_of(path))
        for path in _directories(root)
        if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.age)


def cursor_of(path: Path) -> int | None:
    """The next batch of the run at a checkpoint; None if its state is missing or cannot be parsed, so that no load
    accepts it."""
    file = path / STATE_FILE
    try:
        cursor = json.loads(file.read_text(encoding="utf-8"))["cursor"]
    except FileNotFoundError as error:
        if not os.path.isdir(path):  # noqa: PTH112 -- the mount or the checkpoint is gone; `Path.is_dir` may raise
            raise storage_error(file, error) from None
        return None
    except OSError as error:
        raise storage_error(file, error) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return cursor if isinstance(cursor, int) else None


def list_damaged(root: Path) -> list[Path]:
    """Quarantined checkpoints: those that were found to be damaged and renamed."""
    return sorted(path for path in _directories(root) if _DAMAGED.fullmatch(path.name))


def _directories(root: Path) -> list[Path]:
    """Subdirectories; empty if nothing was ever saved. A dangling symlink counts as a lost mount, an error."""
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
    """The health recorded in a checkpoint; candidate if there is no record or it is malformed, unread on an error."""
    try:
        return read_health(path)
    except (StorageError, OtherVersion):
        return Health.unread


def read_health(path: Path) -> Health:
    """Like `health_of`, but raises `StorageError` or `OtherVersion` instead of returning unread."""
    file = path / HEALTH
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))["health"]
    except FileNotFoundError as error:
        if not os.path.isdir(path):  # noqa: PTH112 -- the mount or the checkpoint is gone; `Path.is_dir` may raise
            raise storage_error(file, error) from None
        return Health.candidate
    except OSError as error:
        raise storage_error(file, error) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        return Health.candidate
    if not isinstance(stated, str):
        return Health.candidate
    if stated not in _WRITTEN:
        raise OtherVersion(file, f"health {stated[:20]!r}; allowed are {', '.join(_WRITTEN)}")
    return Health(stated)


def mark(path: Path, health: Health, reason: str) -> None:
    """Record the health of a checkpoint, and why; on disk when this returns."""
    write_atomically(path / HEALTH, health_text(health, reason, time_s=time.time()))
    fsync(path)


def health_text(health: Health, reason: str, *, time_s: float) -> str:
    """Content of a health file."""
    return json.dumps({"health": health, "reason": reason, "time": time_s})


def request_hold(root: Path, checkpoints: Sequence[Checkpoint], *, now: float) -> None:
    """Ask whoever prunes to keep these checkpoints for `HOLD_S`: an operator was shown them as rollback targets.

    It replaces the last request. Only a request: a run that has not read it yet may still delete one of them.
    """
    write_atomically(root / HOLDS, json.dumps({"time": now, "names": [checkpoint.name for checkpoint in checkpoints]}))


def held_names(root: Path, *, now: float) -> frozenset[str]:
    """Names of the checkpoints that an operator was shown within the last `HOLD_S`.

    The operator's clock may be ahead of this one, or behind, by less than that.
    """
    try:
        request = json.loads((root / HOLDS).read_text(encoding="utf-8"))
        is_current = abs(now - float(request["time"])) < HOLD_S
        return frozenset(map(str, request["names"])) if is_current else frozenset()
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


def select_for_deletion(
    checkpoints: Sequence[Checkpoint],
    *,
    keep: int,
    keep_every_steps: int,
    keep_behind_steps: int = 0,
    held: Collection[str] = (),
) -> list[Checkpoint]:
    """Checkpoints that may be deleted, oldest first.

    Kept are the newest `keep`, the first in every `keep_every_steps` steps (0: none of these), one at least
    `keep_behind_steps` older than the newest (0: not required), those named in `held`, and always the newest good one
    and the first candidate after it, which must survive until it is good itself.
    Nothing may be deleted while any health is unread: the unread one may be the newest good one.
    """
    if any(checkpoint.health is Health.unread for checkpoint in checkpoints):
        return []
    kept = reasons_to_keep(
        checkpoints, keep=keep, keep_every_steps=keep_every_steps, keep_behind_steps=keep_behind_steps, held=held
    )
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.age)
    return [checkpoint for checkpoint in ordered if checkpoint.path not in kept]


def reasons_to_keep(
    checkpoints: Sequence[Checkpoint],
    *,
    keep: int,
    keep_every_steps: int,
    keep_behind_steps: int = 0,
    held: Collection[str] = (),
) -> dict[Path, str]:
    """Why each checkpoint is kept that `select_for_deletion` does not return, the first reason that holds."""
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.age)
    sound = [checkpoint for checkpoint in ordered if checkpoint.health is not Health.tainted]
    good = [checkpoint for checkpoint in sound if checkpoint.health is Health.good]
    later = [checkpoint for checkpoint in sound if not good or checkpoint.age > good[-1].age]
    reasons = (
        (NEWEST, sound[-keep:]),
        ("newest good", good[-1:]),
        ("next candidate", later[:1]),
        ("keep_every_steps", _milestones(sound, keep_every_steps)),
        ("keep_behind_steps", _milestones(sound, keep_behind_steps, with_first=True)[-NUM_BEHIND:]),
        ("listed for a rollback", [checkpoint for checkpoint in sound if checkpoint.name in held]),
    )
    kept: dict[Path, str] = {}
    for reason, found in reasons:
        for checkpoint in found:
            kept.setdefault(checkpoint.path, reason)
    return kept


def _milestones(ordered: Sequence[Checkpoint], every_steps: int, *, with_first: bool = False) -> list[Checkpoint]:
    """The first checkpoint in every interval of steps, oldest interval first.

    `ordered` is without those that a rollback has undone, which are tainted. `with_first` includes the interval from
    step 0 on.
    """
    first: dict[int, Checkpoint] = {}
    for checkpoint in ordered if every_steps else ():
        interval = checkpoint.step // every_steps
        if interval or with_first:
            first.setdefault(interval, checkpoint)
    return [first[interval] for interval in sorted(first)]


def scratch_path(root: Path, name: str) -> Path:
    """The hidden directory in which a checkpoint is written before it is published."""
    return root / f".{name}.part"


def publish(scratch: Path, target: Path) -> None:
    """Rename a finished directory to its final name; content and name are synced to disk when this returns."""
    fsync(scratch)
    run_lease.guard()
    scratch.rename(target)
    fsync(target.parent)


def delete(path: Path) -> bool:
    """Delete a checkpoint, quarantined or not; False if another process has deleted it first.

    It is renamed first, so a process killed on the way leaves only a hidden directory that nothing reads. The hidden
    name is unique to this call: a run and an operator may delete the same checkpoint at the same time.
    """
    run_lease.guard()
    hidden = path.with_name(f".{path.name}.gone-{secrets.token_hex(4)}")
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return False
    with suppress(FileNotFoundError):  # `remove_unfinished` of a starting run may delete it at the same time
        _remove(hidden)
    return True


def _remove(path: Path) -> None:
    """Delete a directory. Of a link to one, only the link: another program may own what it points to."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint to NAME.damaged, so that no load tries it again; returns the new path."""
    number, target = 1, path.with_name(f"{path.name}.damaged")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(target)
    return target


def remove_unfinished(root: Path) -> None:
    """Delete what a killed process left partly written or partly deleted. No other process may be writing."""
    for path in root.glob(".step-*"):
        if _UNFINISHED.fullmatch(path.name):
            with suppress(OSError):
                _remove(path)
