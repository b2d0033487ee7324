"""Files in shared memory that hold the snapshots of a run, so that they outlive its processes.

Why: a process that is killed loses its own memory, and with it every step since the last checkpoint on disk. A file in
a tmpfs (/dev/shm) is memory too, but it belongs to the machine.
How: each run has one folder per machine, named after the user and the path of the run directory. Each rank claims one
set in it: a lock, the blocks that it copies snapshots into, and one header per block that holds a valid snapshot. The
lock is an flock, which the kernel releases when the process dies, so the next start can claim the set with its content
and reuses the same memory. A header is removed before its block is overwritten and is renamed into place when the block
is complete and hashed. A set is not bound to a rank: the header says which shard a block holds.
Removed: by the ranks when a run ends, by the launcher when it will not run here again (`launch.local.shared_memory`),
and by the next start of any run of the same user if the run directory is gone or nobody has touched it for `KEEP_S`. A
reboot removes everything.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, final

from harness.core.node_name import given_node_name

VERSION = 1
FOLDER_PREFIX = "harness-snapshots"
RUN_FILE = "run.json"
LOCK_FILE = "lock"
HEADER_SUFFIX = ".json"
KEEP_S = 24 * 3600.0
"""Snapshots of a run without a process are removed after this time."""
MAX_SETS = 4096


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """What a block holds. It is written last."""

    version: int = VERSION
    shard: int
    """Index of the shard of the model and optimizer state."""
    num_shards: int
    world_size: int
    config: str
    """Digest of the config keys that determine what the run computes."""
    layout: str
    """Digest of name, dtype and shape of every tensor in the block."""
    starts: list[str]
    """Ids of the starts of the run whose history has this state."""
    iteration: int
    num_bytes: int
    sha256: str
    state: dict[str, Any]
    """The run state, as in state.json of a checkpoint."""


def snapshot_folder(shared_dir: str | Path, run: Path) -> Path:
    """The folder of a run on this machine, or on this node if several are rehearsed on one machine."""
    place = f"{run.resolve()}{given_node_name()}"
    key = hashlib.sha256(place.encode()).hexdigest()[:16]
    return Path(shared_dir) / f"{FOLDER_PREFIX}-{os.getuid()}-{key}"


def create_folder(folder: Path, run: Path) -> None:
    """Create the folder of a run. Raises `OSError` if that is not possible or another user made it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} exists and does not belong to this user")
    _write_atomically(folder / RUN_FILE, json.dumps({"run": str(run.resolve())}))


@final
class SnapshotSet:
    """The files of one rank. Its lock is held until `release` or the end of the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        _held.append(self)

    @classmethod
    def claim(cls, path: Path) -> Self | None:
        """Lock a set, and create it if it is missing; None if a process holds it."""
        path.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (path / LOCK_FILE).stat().st_ino == os.fstat(descriptor).st_ino:  # not removed in between
                return cls(path, descriptor)
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return None

    def block(self, name: str) -> Path:
        return self.path / name

    def write_header(self, name: str, header: SnapshotHeader) -> None:
        content = {each.name: getattr(header, each.name) for each in fields(header)}
        _write_atomically(self.path / f"{name}{HEADER_SUFFIX}", json.dumps(content))

    def remove_header(self, name: str) -> None:
        (self.path / f"{name}{HEADER_SUFFIX}").unlink(missing_ok=True)

    def headers(self) -> dict[str, SnapshotHeader]:
        """Block name -> header of every block that holds a snapshot; unreadable headers are left out."""
        return dict(_headers(self.path))

    def release(self) -> None:
        """Release the lock; the set is removed unless a block holds a snapshot. May be called more than once."""
        if self._descriptor is not None and not self.headers():
            remove_tree(self.path)
        self.unlock()

    def unlock(self) -> None:
        """Release the lock and leave the files as they are."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.remove(self)


_held: list[SnapshotSet] = []
"""Sets that this process has locked."""


def unlock_leftovers(folder: Path) -> None:
    """Unlock the sets of a run that crashed in this process while the process lives on."""
    for files in [held for held in _held if held.path.parent == folder]:
        files.unlock()


def _headers(path: Path) -> Iterator[tuple[str, SnapshotHeader]]:
    for file in sorted(path.glob(f"*{HEADER_SUFFIX}")):
        with suppress(OSError, ValueError, TypeError):
            header = SnapshotHeader(**json.loads(file.read_text(encoding="utf-8")))
            if header.version == VERSION:
                yield file.name.removesuffix(HEADER_SUFFIX), header


def claim_own(folder: Path, shard: int) -> SnapshotSet | None:
    """Claim a set that a rank with the same shard left behind; None if there is none."""
    for path in list_sets(folder):
        if any(header.shard == shard for name, header in _headers(path) if is_slot(name)):
            claimed = SnapshotSet.claim(path)
            if claimed is not None:
                return claimed
    return None


def claim_any(folder: Path) -> SnapshotSet:
    """Claim any set that no process holds, or create one."""
    for number in range(MAX_SETS):
        claimed = SnapshotSet.claim(folder / f"set-{number}")
        if claimed is not None:
            return claimed
    raise OSError(f"{folder} has {MAX_SETS} sets in use")


def claim_rest(folder: Path) -> list[SnapshotSet]:
    """Claim all sets that no process holds."""
    return [claimed for path in list_sets(folder) if (claimed := SnapshotSet.claim(path)) is not None]


def list_sets(folder: Path) -> list[Path]:
    """The sets of a run on this machine, claimed or not."""
    return sorted(folder.glob("set-*"))


def slot_name(index: int) -> str:
    """Name of the block of a ring slot."""
    return f"slot-{index}"


def is_slot(name: str) -> bool:
    return name.startswith("slot-")


def held_bytes(folder: Path) -> int:
    """Memory that the files of a run take on this machine."""
    total = 0
    for path in folder.glob("set-*/*"):
        with suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


def remove_run(folder: Path) -> None:
    """Remove the snapshots of a run from this machine, except sets that a process holds."""
    with suppress(OSError):
        for claimed in claim_rest(folder):
            remove_tree(claimed.path)
            claimed.release()
        remove_if_empty(folder)


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run if it has no set."""
    with suppress(OSError):
        if not list_sets(folder):
            (folder / RUN_FILE).unlink(missing_ok=True)
            folder.rmdir()


def remove_abandoned(shared_dir: Path, *, now: float | None = None) -> None:
    """Remove what other runs of this user left behind: their directory is gone, or they are older than `KEEP_S`."""
    now = time.time() if now is None else now
    for folder in shared_dir.glob(f"{FOLDER_PREFIX}-{os.getuid()}-*"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            run = Path(json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["run"])
            touched = max(path.stat().st_mtime for path in [folder, *folder.glob("set-*")])
            if not run.exists() or now - touched > KEEP_S:
                remove_run(folder)


def remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _write_atomically(path: Path, text: str) -> None:
    """Replace a file; readers see the old content or the new one. Memory needs no fsync."""
    scratch = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
