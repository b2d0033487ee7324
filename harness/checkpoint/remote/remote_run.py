"""A run in an object store: which objects it consists of, and how they are read and verified.

    URL/NAME/run.json                          index of the run files, with a hash of each and of itself
    URL/NAME/files/SHA256                      content of the run files, in pieces named by their hash
    URL/NAME/checkpoints/step-*-gen-*/...      as on disk; manifest.json is written last and deleted first

Why: a process can be killed between any two requests. Nothing that it leaves may look like a checkpoint.
How: a checkpoint exists in the store if its manifest does, and the manifest is written after every other file was read
back and compared. Pieces of run files have the hash of their content as their name and are never changed; the index
is replaced as a whole, so all run files that it names belong together.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, final

from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import HEALTH, Checkpoint, Health
from harness.checkpoint.integrity import MANIFEST, READERS, Damaged, Manifest, OtherVersion
from harness.config.errors import ConfigError, require
from harness.core.object_store import ObjectStore, StoredObject, join_url
from harness.core.rundir import fsync

KEY = "checkpoint.remote.url"
INDEX = "run.json"
FILES = "files"
CHECKPOINTS = "checkpoints"
VERSION = 1


class Piece(NamedTuple):
    sha256: str
    num_bytes: int


class RunIndex(NamedTuple):
    """Content of `run.json`."""

    run_id: str
    """Random; tells a run from another one of the same name."""
    files: dict[str, list[Piece]]
    """Name in the run directory -> its pieces in order."""


def open_remote_run(url: str, name: str, *, retry_s: float) -> RemoteRun:
    return RemoteRun(ObjectStore(join_url(url, name), key=KEY, retry_s=retry_s))


@final
class RemoteRun:
    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.url = store.url

    def read_index(self) -> RunIndex | None:
        """The index of the run files; None if the run was never uploaded. A damaged one is a `ConfigError`."""
        try:
            text = self.store.read(INDEX)
        except FileNotFoundError:
            return None
        try:
            return parse_run_index(text)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(KEY, f"{self.url}/{INDEX}: is damaged or of another version ({error})") from None

    def list_checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first."""
        found = []
        for name, files in self.list_directories().items():
            if MANIFEST in files:
                step, generation = catalog.parse_name(name)
                health = self._health(name) if HEALTH in files else Health.candidate
                path = Path(CHECKPOINTS, name)
                found.append(Checkpoint(path=path, step=step, generation=generation, health=health))
        return sorted(found, key=lambda checkpoint: checkpoint.age)

    def list_directories(self) -> dict[str, dict[str, StoredObject]]:
        """Name of every checkpoint, complete or not -> its objects."""
        directories: dict[str, dict[str, StoredObject]] = {}
        for path, found in self.store.find_all(CHECKPOINTS).items():
            name, _, file = path.partition("/")
            if file and catalog.is_checkpoint_name(name):
                directories.setdefault(name, {})[file] = found
        return directories

    def read_manifest(self, name: str) -> Manifest:
        """The manifest of a checkpoint; `Damaged` if it is missing or its hash differs."""
        path = place_of(name, MANIFEST)
        try:
            return integrity.parse_manifest(self.store.read(path).decode())
        except (FileNotFoundError, ValueError) as error:
            raise Damaged(self._as_path(path), f"is not a manifest: {error}") from None

    def verify_checkpoint(self, name: str, progress: Callable[[int], object] | None = None) -> Manifest:
        """Read every byte of a checkpoint in the store and compare it with the manifest; raises `Damaged`."""
        manifest = self.read_manifest(name)

        def check(file: str) -> None:
            for block in self.checked_chunks(name, file, manifest):
                if progress is not None:
                    progress(len(block))

        with ThreadPoolExecutor(max_workers=READERS) as pool:
            list(pool.map(check, manifest.files))
        return manifest

    def checked_chunks(self, name: str, file: str, manifest: Manifest) -> Iterator[bytes]:
        """The content of a file of a checkpoint; raises `Damaged` at its end if it is not what the manifest says."""
        path, entry, digest = place_of(name, file), manifest.files[file], hashlib.sha256()
        found = self.store.look_up(path)
        if found is None or found.num_bytes != entry.bytes:
            there = "is missing" if found is None else f"has {found.num_bytes:,} bytes, {entry.bytes:,} were saved"
            raise Damaged(self._as_path(path), there)
        for block in self.store.chunks(path, entry.bytes):
            digest.update(block)
            yield block
        if digest.hexdigest() != entry.sha256:
            raise Damaged(self._as_path(path), "its content is not what was saved (sha256 differs)")

    def download_checkpoint(self, name: str, root: Path) -> None:
        """Download a checkpoint into a hidden directory, verify it on disk, then rename it; raises `Damaged`.

        One that an earlier download left there is kept if it is intact.
        """
        manifest, target = self.read_manifest(name), root / name
        if target.exists():
            with suppress(Damaged, OtherVersion):
                if integrity.read_manifest(target) == manifest:
                    integrity.verify(target, manifest=manifest)
                    return
            catalog.delete(target)
        scratch = catalog.scratch_path(root, name)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)

        def fetch(file: str) -> None:
            with (scratch / file).open("wb") as output:
                for block in self.checked_chunks(name, file, manifest):
                    output.write(block)
            fsync(scratch / file)

        with ThreadPoolExecutor(max_workers=READERS) as pool:
            list(pool.map(fetch, manifest.files))
        for file in (HEALTH, MANIFEST):
            with suppress(FileNotFoundError):
                (scratch / file).write_bytes(self.store.read(place_of(name, file)))
                fsync(scratch / file)
        integrity.verify(scratch)
        catalog.publish(scratch, target)

    def download_file(self, pieces: Sequence[Piece], target: Path) -> None:
        """Download a run file, compare every piece with its hash, then rename it into place."""
        scratch = target.with_name(f".{target.name}.tmp")
        scratch.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            for piece in pieces:
                place = f"{FILES}/{piece.sha256}"
                try:
                    content = self.store.read(place)
                except FileNotFoundError:
                    content = b""
                is_intact = hashlib.sha256(content).hexdigest() == piece.sha256
                require(is_intact, KEY, f"{self.url}/{place}, a piece of {target.name}, is missing or damaged")
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(target)

    def take_over(self, run_id: str) -> None:
        """Give the store to another run: it has no run files any more, and an uploader of the old run ends."""
        self.store.write(INDEX, render_index(RunIndex(run_id, {})))

    def delete_checkpoint(self, name: str, files: dict[str, StoredObject]) -> None:
        """Delete a checkpoint and its mark, which may be newer than the list of its files; from the first request on it
        is no checkpoint any more."""
        self.store.delete(place_of(name, file) for file in sorted({*files, HEALTH}, key=lambda file: file != MANIFEST))

    def _health(self, name: str) -> Health:
        try:
            return parse_health(self.store.read(place_of(name, HEALTH)))
        except FileNotFoundError:
            return Health.candidate

    def _as_path(self, path: str) -> Path:
        return Path(PurePosixPath(self.url, path))


def place_of(name: str, file: str) -> str:
    """Path of a file of a checkpoint, relative to the run."""
    return f"{CHECKPOINTS}/{name}/{file}"


def parse_health(content: bytes) -> Health:
    """The health in a health file; candidate if it is malformed."""
    try:
        return Health(json.loads(content)["health"])
    except (ValueError, KeyError, TypeError):
        return Health.candidate


def render_index(index: RunIndex) -> bytes:
    content: dict[str, Any] = {"version": VERSION, "id": index.run_id, "files": index.files}
    return json.dumps(content | {"sha256": _digest(content)}, indent=1).encode()


def parse_run_index(text: bytes) -> RunIndex:
    """Raises ValueError, KeyError or TypeError if this version cannot read it."""
    content = json.loads(text)
    if content.pop("sha256") != _digest(content):
        raise ValueError("its own sha256 differs")
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']}, allowed is {VERSION}")
    files = {
        str(name): [Piece(str(sha), int(size)) for sha, size in pieces] for name, pieces in content["files"].items()
    }
    if not all(integrity.is_plain_name(name) for name in files):
        raise ValueError("a name leads out of the run directory")
    return RunIndex(str(content["id"]), files)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
