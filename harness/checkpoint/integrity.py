"""The checkpoint manifest: size and SHA-256 of every file, written last and verified before anything else is read.

Why: torch.distributed.checkpoint has no checksums. A flipped bit, a hole of zeros or a truncated file loads without an
error, and its `.metadata` is a pickle, which can run code.
How: the SHA-256 of each file as `sha256sum` prints it, and one over the manifest itself. A file name in a manifest must
be a plain name beside it; any other path is rejected. The values of a manifest are type-checked when it is read.
Three failures are kept apart:
- `Damaged`: a size or hash differs, a file is missing beside others, or a link is in its place. It is raised only after
  a second read that bypasses this machine's page cache. Only this error leads to quarantine.
- `StorageError`: the storage returned an error, or the whole directory is gone. The checkpoint may be intact.
- `OtherVersion`: the hash matches, but this version does not understand the content. Later versions must hash their
  manifests in the same way, so that this version can tell them from damaged ones.
Left out: signatures. A manifest detects damage, not malice: whoever can write the directory can write a manifest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, final

from harness.config.errors import ConfigError, StorageError
from harness.core.rundir import write_atomically

T = TypeVar("T")

MANIFEST = "manifest.json"
VERSION = 1
READERS = 4
"""Files that one process hashes in parallel; hashing releases the GIL."""

CHUNK_BYTES = 2**20
"""Bytes per read; hashing them takes longer than the system call."""
PIECE_BYTES = 2**24
"""Bytes of memory that one thread hashes at a time."""
LATEST_TIME_S = 1e12
"""A later time is invalid."""

_PLAIN_NAME = re.compile(r"\.?\w[\w.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COUNTS = ("step", "generation", "iteration", "tokens", "world_size")


@final
class Damaged(Exception):  # noqa: N818 -- names the state of the checkpoint
    """A checkpoint that must not be loaded; the message names the file and the problem."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type[Damaged], tuple[Path, str]]:
        return Damaged, (self.path, self.problem)


@final
class OtherVersion(ConfigError):  # noqa: N818 -- names the state of the checkpoint
    """An intact checkpoint that this version cannot read; it is rejected and left unchanged."""

    def __init__(self, path: Path, problem: str) -> None:
        message = f"was written by another version, or not by this program: {problem}; nothing was changed"
        super().__init__(str(path), message)
        self.path, self.problem = path, problem

    def __reduce__(self) -> Any:
        return OtherVersion, (self.path, self.problem)


def storage_error(path: Path, error: OSError) -> StorageError:
    """A `StorageError` that names the file and the host of an I/O error."""
    problem = f"cannot be read on {socket.gethostname()}: {error.strerror or error}"
    return StorageError(error.errno or errno.EIO, problem, str(path))


@final
@dataclass(frozen=True, slots=True)
class Entry:
    bytes: int
    sha256: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    step: int
    generation: int
    iteration: int
    tokens: int
    time: float
    """When it was written, in seconds since the epoch."""
    world_size: int
    files: dict[str, Entry]
    """Every file of the directory except the manifest and files that are written later (health)."""
    rollback: dict[str, float | None] = field(default_factory=dict)
    """Cost of a rollback with the run's checkpoint interval (`RollbackCost`); None: unknown."""

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def is_plain_name(name: str) -> bool:
    """Whether a name is a plain file name, which cannot lead out of the directory."""
    return _PLAIN_NAME.fullmatch(name) is not None


def hash_file(path: Path, progress: Callable[[int], object] | None = None) -> Entry:
    """Size and SHA-256 of a file; calls `progress` with the bytes of each chunk."""
    digest, num_bytes, chunk = hashlib.sha256(), 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            num_bytes += count
            if progress is not None:
                progress(count)
    return Entry(bytes=num_bytes, sha256=digest.hexdigest())


def hash_files(directory: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Size and SHA-256 of several files, `READERS` in parallel."""
    listed = sorted(names)
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        return dict(zip(listed, pool.map(lambda name: hash_file(directory / name), listed), strict=True))


def hash_buffer(buffer: memoryview) -> str:
    """SHA-256 over the SHA-256 of each piece of `PIECE_BYTES`; pieces are hashed in parallel."""
    pieces = [buffer[start : start + PIECE_BYTES] for start in range(0, len(buffer), PIECE_BYTES)]
    if len(pieces) == 1:
        digests = [hashlib.sha256(pieces[0]).digest()]
    else:
        with ThreadPoolExecutor(max_workers=READERS) as pool:
            digests = list(pool.map(lambda piece: hashlib.sha256(piece).digest(), pieces))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def write_checkpoint_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the last file of a checkpoint; raises ValueError, and writes nothing, if it could not be read back."""
    content = {"version": VERSION} | asdict(manifest)
    text = json.dumps(content | {"sha256": _digest(content)}, indent=1)
    _parse(_check_own_hash(json.loads(text)))
    write_atomically(directory / MANIFEST, text)


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest; raises `Damaged`, `StorageError` or `OtherVersion`."""
    return _check_twice(lambda again: _read_manifest(directory / MANIFEST, again=again))


def _read_manifest(path: Path, *, again: bool) -> Manifest:
    _size_of(path)
    try:
        if again:
            drop_page_cache(path)
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise storage_error(path, error) from None
    except ValueError as error:
        raise Damaged(path, f"is not a manifest: {error}") from None
    try:
        content = _check_own_hash(json.loads(text))
    except RecursionError:
        raise Damaged(path, "is not a manifest: nested too deeply") from None
    except ValueError as error:
        raise Damaged(path, f"is not a manifest: {error}") from None
    try:
        return _parse(content)
    except ValueError as error:
        raise OtherVersion(path, str(error)) from None


def parse_manifest(text: str) -> Manifest:
    """The manifest in this text; ValueError if it is damaged or of another version."""
    return _parse(_check_own_hash(json.loads(text)))


def verify(
    directory: Path,
    *,
    part: int = 0,
    parts: int = 1,
    progress: Callable[[int], object] | None = None,
    manifest: Manifest | None = None,
) -> Manifest:
    """Verify this caller's part of the files and return the manifest. Raises `Damaged`, naming the first file that
    differs, or `StorageError` if a file cannot be read.

    Ranks share the work: each checks every `parts`-th file. Reads the manifest unless it is given.
    `progress` is called from several threads with the bytes hashed since its last call.
    """
    manifest = manifest or read_manifest(directory)
    mine = sorted(manifest.files)[part::parts]
    for name in mine:
        _check_size(directory / name, manifest.files[name])
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        list(pool.map(lambda name: _check_content(directory / name, manifest.files[name], progress), mine))
    return manifest


def _check_twice(check: Callable[[bool], T]) -> T:
    """Run a check; if it finds damage, run it once more, with True as its argument."""
    try:
        return check(False)
    except Damaged:
        return check(True)


def _check_size(path: Path, entry: Entry) -> None:
    """Compare the size: cheap, and finds most damage."""

    def check(_again: bool) -> None:
        if (num_bytes := _size_of(path)) != entry.bytes:
            raise Damaged(path, f"has {num_bytes:,} bytes, {entry.bytes:,} were saved")

    _check_twice(check)


def _size_of(path: Path) -> int:
    """Bytes of a regular file; anything else is damage."""
    try:
        status = path.lstat()
    except FileNotFoundError as error:
        raise _missing(path, error) from None
    except OSError as error:
        raise storage_error(path, error) from None
    if stat.S_ISLNK(status.st_mode):
        raise Damaged(path, "is a link; a checkpoint contains regular files only")
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(path, "is not a file")
    return status.st_size


def _missing(path: Path, error: OSError) -> Damaged | StorageError:
    """A file is missing if its directory lists other files; if it lists none, the mount may be gone."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError as worse:
        return storage_error(path.parent, worse)
    if not names or path.name in names:
        return storage_error(path, error)
    return Damaged(path, "is missing")


def _check_content(path: Path, entry: Entry, progress: Callable[[int], object] | None) -> None:
    def check(again: bool) -> None:
        try:
            if again:
                drop_page_cache(path)
            found = hash_file(path, None if again else progress)
        except FileNotFoundError as error:
            raise _missing(path, error) from None
        except OSError as error:
            raise storage_error(path, error) from None
        if found != entry:
            raise Damaged(path, "its content is not what was saved (sha256 differs)")

    _check_twice(check)


def drop_page_cache(path: Path) -> None:
    """Drop a file from this machine's page cache, so that the next read goes to the storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _check_own_hash(content: Any) -> dict[str, Any]:
    """Return the manifest's content without its own hash; ValueError if that hash is missing or differs."""
    if not isinstance(content, dict) or "sha256" not in content:
        raise ValueError("it has no sha256")
    if content.pop("sha256") != _digest(content):
        raise ValueError("its own sha256 differs")
    return content


def _parse(content: dict[str, Any]) -> Manifest:
    """Parse a manifest whose hash matches; ValueError if this version does not understand it."""
    version = content.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise ValueError(f"it has version {str(version)[:20]!r}, this program reads {VERSION}")
    if differing := content.keys() ^ {item.name for item in fields(Manifest)}:
        raise ValueError(f"missing or unknown {sorted(differing)}")
    for key in _COUNTS:
        _require(_is_count(content[key]), key, content[key])
    _require(_is_number(content["time"]) and 0 <= content["time"] < LATEST_TIME_S, "time", content["time"])
    _require(_is_table(content["rollback"], _is_number_or_none), "rollback", content["rollback"])
    _require(_is_table(content["files"], _is_entry), "files", content["files"])
    files = {name: Entry(**entry) for name, entry in content.pop("files").items()}
    for name in files:
        if not is_plain_name(name) or name == MANIFEST:
            raise ValueError(f"{name!r} is not a plain file name")
    return Manifest(files=files, **content)


def _require(valid: bool, key: str, value: Any) -> None:
    if not valid:
        raise ValueError(f"{key} cannot be {str(value)[:200]!r}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_table(value: Any, valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(valid(item) for item in value.values())


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"bytes", "sha256"}:
        return False
    sha256 = value["sha256"]
    return _is_count(value["bytes"]) and isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
