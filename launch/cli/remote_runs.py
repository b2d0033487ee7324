"""Runs in an object store (`checkpoint.remote.url`) as arguments of the commands that only read a run.

The files of the run are copied to a local directory, and the command works there; checkpoints stay in the store. A
second call copies only the files that changed. Heartbeats, logs of the ranks and incident folders are not in the store.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from harness.checkpoint.remote.remote_run import RemoteRun, RunIndex
from harness.config.errors import ConfigError, StorageError, require
from harness.core.object_store import is_url
from harness.core.rundir import RunDir, write_atomically
from launch.cli.remote_checkpoints import open_url

COPIED = ".copied.json"
NUM_TRIES = 3


def run_dir_of(given: str) -> RunDir:
    """The run directory of an argument: a path, or the local copy of a run in an object store."""
    return copy_remote_run(given) if is_url(given) else RunDir(Path(given))


def require_local(given: str, *, why: str) -> None:
    """Reject the URL of a run, for a command that needs more than the store has."""
    require(not is_url(given), given, f"is in an object store, {why}")


def copy_remote_run(url: str) -> RunDir:
    """Copy the files of a run from its store; returns the local directory."""
    try:
        return _copy(open_url(url), url)
    except StorageError as error:
        raise ConfigError(url, f"the store cannot be read: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(error.filename or f"the copy of {url}", f"cannot be written: {error.strerror}") from None


def _copy(remote: RemoteRun, url: str) -> RunDir:
    index = remote.read_index()
    if index is None:
        raise ConfigError(url, "is not a run: there is no run.json; runs are uploaded with checkpoint.remote.url")
    for number in range(NUM_TRIES):
        try:
            return _copy_files(remote, index, url)
        except ConfigError:
            newer = remote.read_index()  # an upload deletes pieces that the newest index does not name
            if newer is None or newer == index or number == NUM_TRIES - 1:
                raise
            index = newer
    raise AssertionError("unreachable")


def _copy_files(remote: RemoteRun, index: RunIndex, url: str) -> RunDir:
    digest = hashlib.sha256(f"{remote.url} {index.run_id}".encode()).hexdigest()[:16]
    run = RunDir(_copies() / digest / url.rstrip("/").rpartition("/")[2])
    copied = _read_copied(run.path / COPIED)
    if not copied:
        shutil.rmtree(run.path, ignore_errors=True)
    run.path.mkdir(parents=True, exist_ok=True)
    for name, pieces in index.files.items():
        listed = [list(piece) for piece in pieces]
        if copied.get(name) != listed or not (run.path / name).is_file():
            remote.download_file(pieces, run.path / name)
        copied[name] = listed
        write_atomically(run.path / COPIED, json.dumps(copied))
    return run


def _read_copied(path: Path) -> dict[str, list[list[object]]]:
    """Name -> pieces of the files that were copied."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _copies() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "pretraining-harness" / "runs"
