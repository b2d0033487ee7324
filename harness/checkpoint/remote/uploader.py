"""Uploads checkpoints and run files to an object store while the run trains, in a process of its own.

Why: an upload takes longer than a save, and a store fails for minutes. Neither may delay a step or end a run.
How: the uploader only reads the run directory. A checkpoint that appeared there is complete (`catalog.publish`). It is
pinned by hard links, so that the run may delete it meanwhile; its files are uploaded, read back and compared with the
hashes of the manifest; then the run files follow, and the manifest last. The newest checkpoint comes first, and older
ones that retention would delete anyway are left out, so an uploader that was cut off catches up. One pass does all
that is due; a pass that fails is repeated with growing pauses.
Order of the run files: the event log is read first, then the ledger, then the health of the checkpoints. The health is
sent before the index that publishes the others. Whatever the log mentions has therefore happened to them too: the store
never shows a rollback together with a checkpoint that it has undone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from harness.checkpoint import catalog, integrity
from harness.checkpoint.catalog import HEALTH, Checkpoint, Health
from harness.checkpoint.integrity import MANIFEST, READERS, Damaged, Manifest, OtherVersion
from harness.checkpoint.remote.remote_run import (
    FILES,
    INDEX,
    Piece,
    RemoteRun,
    RunIndex,
    parse_health,
    place_of,
    render_index,
)
from harness.checkpoint.taint_log import read_taints
from harness.config.checkpoint import CheckpointConfig
from harness.config.errors import ConfigError, StorageError
from harness.core.object_store import StoredObject
from harness.core.rundir import RunDir, write_atomically

RUN_FILES = (
    *("mlflow.json", "wandb.json", "alerts.json"),
    *("events.jsonl", "ledger.jsonl", "interventions.jsonl", "config.yaml", "corpus.json"),
    *("manifest.json", "rare-tokens.npz", "drill.json"),
)
"""What a resume elsewhere needs, and what continues the run in MLflow, W&B and its alerts, in the order in which they
are read: what was sent is a position in the log, so it is read before the log."""
ID_FILE = "remote.json"
PIECE_BYTES = 2**23
"""A log grows; only its pieces that are not in the store yet are uploaded."""
RUN_FILES_EVERY_S = 60.0
PINNED = ".upload-"


@final
class Uploader:
    def __init__(self, run: RunDir, remote: RemoteRun, cfg: CheckpointConfig) -> None:
        self._run = run
        self._remote = remote
        self._cfg = cfg
        self._index: RunIndex | None = None
        """The newest index in the store; None: not known."""
        self._index_s = -RUN_FILES_EVERY_S
        self._healths: dict[str, bytes] = {}
        """Checkpoint -> its health file as it is in the store."""
        self._manifests: dict[str, bytes] = {}
        """Checkpoint -> its manifest as it is in the store."""
        self._log_pieces: list[Piece] = []
        """Complete pieces of the event log that are in the store; a log only grows."""
        self._damaged: set[str] = set()
        """Local checkpoints that did not match their manifest; they are not tried again."""
        for left in run.checkpoints.glob(f"{PINNED}*"):
            shutil.rmtree(left, ignore_errors=True)

    def upload_due(self, *, last: bool = False) -> Iterator[str]:
        """Upload what is due, and yield a line for each thing done. `last`: the run files too, changed or not.

        Raises `StorageError` if the store or the disk fails. Nothing is lost then, and the next call continues.
        """
        self._require_same_run()
        while True:
            directories = self._remote.list_directories()
            yield from self._send_healths(directories)
            checkpoints = self._known(directories)
            expendable = {each.name for each in self._expendable(checkpoints)}
            due = [
                each
                for each in checkpoints
                if each.path.is_absolute() and each.name not in expendable and each.health is not Health.tainted
            ]
            if not due:
                break
            yield from self._upload(due[-1].path, directories.get(due[-1].name, {}))
        if last or time.monotonic() - self._index_s > RUN_FILES_EVERY_S:
            yield from self._send_run_files()
        yield from self._prune(expendable, directories)

    def _known(self, directories: dict[str, dict[str, StoredObject]]) -> list[Checkpoint]:
        """Checkpoints in the store, and local ones that are not there (with an absolute path), oldest first."""
        local = {each.name: each for each in catalog.list_checkpoints(self._run.checkpoints)}
        known = []
        for name, files in directories.items():
            if MANIFEST in files and self._is_current(name):
                step, generation = catalog.parse_name(name)
                health = local[name].health if name in local else self._stored_health(name, files)
                known.append(Checkpoint(path=Path(name), step=step, generation=generation, health=health))
        there = {each.name for each in known}
        known += [
            Checkpoint(path=each.path.absolute(), step=each.step, generation=each.generation, health=each.health)
            for each in local.values()
            if each.name not in there and each.name not in self._damaged
        ]
        return sorted(known, key=lambda checkpoint: checkpoint.age)

    def _is_current(self, name: str) -> bool:
        """Whether the checkpoint in the store is the local one of that name: a rollback may have replaced it."""
        return _content(self._run.checkpoints / name / MANIFEST) in (None, self._stored_manifest(name))

    def _stored_manifest(self, name: str) -> bytes:
        """The manifest of a checkpoint in the store; empty if it has been deleted."""
        if name not in self._manifests:
            with suppress(FileNotFoundError):
                self._manifests[name] = self._remote.store.read(place_of(name, MANIFEST))
        return self._manifests.get(name, b"")

    def _stored_health(self, name: str, files: dict[str, StoredObject]) -> Health:
        if name not in self._healths and HEALTH in files:
            self._healths[name] = self._remote.store.read(place_of(name, HEALTH))
        return parse_health(self._healths[name]) if name in self._healths else Health.candidate

    def _forget(self, name: str) -> None:
        """Call before a checkpoint is deleted from the store, or its manifest."""
        self._manifests.pop(name, None)
        self._healths.pop(name, None)

    def _expendable(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        return catalog.select_for_deletion(
            checkpoints, keep=self._cfg.remote.keep, keep_every_steps=self._cfg.keep_every_steps
        )

    def _send_healths(self, directories: dict[str, dict[str, StoredObject]]) -> Iterator[str]:
        for name, files in directories.items():
            if MANIFEST not in files:
                continue
            health = self._health_of(name, self._stored_manifest(name))
            self._stored_health(name, files)
            if health is not None and self._healths.get(name) != health:
                self._send_health(name, health)
                yield f"{name}: sent its health"

    def _send_health(self, name: str, health: bytes) -> None:
        self._remote.store.write(place_of(name, HEALTH), health)
        self._healths[name] = health

    def _health_of(self, name: str, manifest: bytes) -> bytes | None:
        """The health file of the checkpoint with this manifest; None: it has none.

        Without a local copy, the taint log tells whether it is tainted.
        """
        path = self._run.checkpoints / name
        health, local = _content(path / HEALTH), _content(path / MANIFEST)
        if local == manifest:
            return health
        taints = read_taints(self._run.checkpoints)
        with suppress(ValueError):  # a damaged manifest is no checkpoint
            known = integrity.parse_manifest(manifest.decode()) if taints else None
            for taint in taints:
                if known is not None and taint.covers(known):
                    return catalog.health_text(Health.tainted, taint.reason, time_s=taint.time).encode()
        return None

    def _upload(self, path: Path, present: dict[str, StoredObject]) -> Iterator[str]:
        name, begun_s = path.name, time.monotonic()
        try:
            with _pinned(path) as source:
                manifest = integrity.read_manifest(source)
                self._forget(name)
                others = [file for file in (MANIFEST, HEALTH) if file in present]  # of another checkpoint of that name
                self._remote.store.delete(place_of(name, file) for file in others)
                with ThreadPoolExecutor(max_workers=READERS) as pool:
                    list(pool.map(lambda file: self._send_file(source, file, manifest, present), manifest.files))
                yield from self._send_run_files()
                content = (source / MANIFEST).read_bytes()
                health = self._health_of(name, content)
                if health is not None and parse_health(health) is Health.tainted:
                    yield f"{name}: tainted while it was uploaded"
                    return
                if health is not None:
                    self._send_health(name, health)
                self._remote.store.write(place_of(name, MANIFEST), content)
        except FileNotFoundError:
            yield f"{name}: deleted before it was uploaded"
        except (Damaged, OtherVersion) as error:
            self._damaged.add(name)
            yield f"{name}: not uploaded: {error}"
        else:
            seconds = time.monotonic() - begun_s
            yield f"{name}: uploaded and verified, {manifest.bytes:,} bytes in {seconds:.1f} s"

    def _send_file(self, source: Path, file: str, manifest: Manifest, present: dict[str, StoredObject]) -> None:
        """Upload a file and read it back. One that an earlier uploader left is only read back."""
        name = source.name.removeprefix(PINNED)
        is_there = file in present and present[file].num_bytes == manifest.files[file].bytes
        if is_there and self._is_intact(name, file, manifest):
            return
        self._remote.store.upload(source / file, place_of(name, file))
        if not self._is_intact(name, file, manifest):
            integrity.verify(source, manifest=manifest)  # raises if the local file is what differs
            problem = "was changed on its way to the store; it is uploaded again"
            raise StorageError(errno.EIO, problem, f"{self._remote.url}/{place_of(name, file)}")

    def _is_intact(self, name: str, file: str, manifest: Manifest) -> bool:
        try:
            for _ in self._remote.checked_chunks(name, file, manifest):
                pass
        except Damaged:
            return False
        return True

    def _send_run_files(self) -> Iterator[str]:
        """Upload the pieces of the run files that are not in the store, the health of the checkpoints, then the index;
        then delete old pieces."""
        index, blocks = RunIndex(self._run_id(), {}), dict[str, bytes]()
        if not self._run.events.is_file():
            return
        for name in RUN_FILES:
            with suppress(FileNotFoundError):
                is_log = name == self._run.events.name
                pieces = self._log_pieces if is_log else []
                for block in _blocks(self._run.path / name, len(pieces) * PIECE_BYTES, whole_lines=is_log):
                    piece = Piece(hashlib.sha256(block).hexdigest(), len(block))
                    blocks[piece.sha256] = block
                    pieces = [*pieces, piece]
                index.files[name] = pieces
        self._index_s = time.monotonic()
        if index == self._index:
            return
        store, present = self._remote.store, self._remote.store.find_all(FILES)
        for sha256, block in blocks.items():
            if sha256 not in present or present[sha256].num_bytes != len(block):
                store.write(f"{FILES}/{sha256}", block)
        yield from self._send_healths(self._remote.list_directories())
        store.write(INDEX, render_index(index))
        self._index = index
        self._log_pieces = [piece for piece in index.files[self._run.events.name] if piece.num_bytes == PIECE_BYTES]
        kept = {piece.sha256 for pieces in index.files.values() for piece in pieces}
        store.delete(f"{FILES}/{name}" for name in present if name not in kept)

    def _prune(self, expendable: set[str], directories: dict[str, dict[str, StoredObject]]) -> Iterator[str]:
        """Delete what retention does not keep, and what an interrupted upload left."""
        local = {each.name for each in catalog.list_checkpoints(self._run.checkpoints)}
        for name, files in directories.items():
            is_partial = MANIFEST not in files
            if name in expendable or (is_partial and name not in local):
                self._forget(name)
                self._remote.delete_checkpoint(name, files)
                yield f"{name}: deleted in the store" + (", it was incomplete" if is_partial else "")

    def _require_same_run(self) -> None:
        """Reject a store that holds another run of this name."""
        index = self._remote.read_index()
        if index is not None and index.run_id != self._run_id():
            raise ConfigError("checkpoint.remote.url", f"{self._remote.url} holds another run; choose another run.name")

    def _run_id(self) -> str:
        run_id = read_run_id(self._run)
        if run_id is None:
            run_id = new_run_id()
            write_run_id(self._run, run_id)
        return run_id


def new_run_id() -> str:
    return secrets.token_hex(8)


def write_run_id(run: RunDir, run_id: str) -> None:
    """Record which run in the store belongs to this directory."""
    write_atomically(run.path / ID_FILE, json.dumps({"id": run_id}))


def read_run_id(run: RunDir) -> str | None:
    """The id of the run in the store that this directory was uploaded to or came from; None: neither.

    A file that cannot be read is a `StorageError`: a new id would make this another run than the one in the store.
    """
    path = run.path / ID_FILE
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise integrity.storage_error(path, error) from None
    except (ValueError, KeyError, TypeError):
        problem = 'is damaged; write {"id": ID} into it, with the id in run.json of the store'
        raise StorageError(errno.EINVAL, problem, str(path)) from None


def _content(path: Path) -> bytes | None:
    """The content of a file; None if there is none, or it cannot be read now."""
    with suppress(OSError):
        return path.read_bytes()
    return None


def _blocks(path: Path, start: int, *, whole_lines: bool) -> Iterator[bytes]:
    """The content of a file from `start` on, in blocks of `PIECE_BYTES`; of a log without an incomplete last line."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(start)
        while block := file.read(min(PIECE_BYTES, size - file.tell())):
            is_last = len(block) < PIECE_BYTES
            yield block[: block.rfind(b"\n") + 1] if whole_lines and is_last else block


@contextmanager
def _pinned(path: Path) -> Iterator[Path]:
    """A directory with hard links to the files of a checkpoint, which stay if the run deletes it; `FileNotFoundError`
    if it is gone."""
    pinned = path.with_name(f"{PINNED}{path.name}")
    shutil.rmtree(pinned, ignore_errors=True)
    pinned.mkdir()
    try:
        try:
            for file in path.iterdir():
                if not file.name.startswith(".") or file.name == ".metadata":
                    os.link(file, pinned / file.name)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
                raise StorageError(error.errno, str(error.strerror), str(path)) from None
            shutil.copytree(path, pinned, dirs_exist_ok=True)  # a file system without hard links
        yield pinned
    finally:
        shutil.rmtree(pinned, ignore_errors=True)
