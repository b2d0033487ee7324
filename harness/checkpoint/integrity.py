"""The manifest of a checkpoint: size and hash of every file, written last, checked before anything else is read.

Why: torch.distributed.checkpoint has no checksums. A flipped bit, a hole of zeros or a file cut short loads without a
word, and its `.metadata` is a pickle, which runs what it holds.
How: SHA-256 of each file as `sha256sum` prints it, and one more over the manifest itself. A name in a manifest is the
plain name of a file beside it; a path that leads elsewhere is refused. A manifest that was read has values of the types
that were written.
Three things can go wrong, and they are kept apart:
- `Damaged`: a size or hash that does not fit, a file that is missing beside others, or a link in its place. It is said
  only after a second look, past this machine's page cache. Only this condemns a checkpoint.
- `StorageError`: the storage answered with an error, or the whole directory is gone. The checkpoint may be whole.
- `OtherVersion`: the hash fits, but this version does not understand the content. Later versions must keep the rule of
  the manifest's own hash, so that this one can tell their manifests from damaged ones.
Left out: signatures. A manifest tells damage, not malice: whoever can write the directory can write a manifest.
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
"""Files hashed at once by one process; hashing releases the interpreter lock."""

CHUNK_BYTES = 2**20
"""Read at a time; hashing that much takes longer than asking for the next."""
LATEST_TIME_S = 1e12
"""A time beyond it was not read from a clock."""

_PLAIN_NAME = re.compile(r"\.?\w[\w.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COUNTS = ("step", "generation", "iteration", "tokens", "world_size")


@final
class Damaged(Exception):  # noqa: N818 -- says what the checkpoint is
    """A checkpoint that must not be loaded; the message names the file and what is wrong with it."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type[Damaged], tuple[Path, str]]:
        return Damaged, (self.path, self.problem)


@final
class OtherVersion(ConfigError):  # noqa: N818 -- says what the checkpoint is
    """A whole checkpoint that this version cannot read; it is refused and left as it is."""

    def __init__(self, path: Path, problem: str) -> None:
        message = f"was written by another version, or is no checkpoint of this program: {problem}; nothing was changed"
        super().__init__(str(path), message)
        self.path, self.problem = path, problem

    def __reduce__(self) -> Any:
        return OtherVersion, (self.path, self.problem)


def storage_error(path: Path, error: OSError) -> StorageError:
    """An I/O error, with the file and the machine that got it."""
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
    """When it was written, in seconds since 1970."""
    world_size: int
    files: dict[str, Entry]
    """Every file of the directory but this one and what is written later."""
    rollback: dict[str, float | None] = field(default_factory=dict)
    """What going back would cost at the cadence the run was saved with; None: not known."""

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def is_plain_name(name: str) -> bool:
    """Whether a name can only stand for a file beside the manifest."""
    return _PLAIN_NAME.fullmatch(name) is not None


def hash_file(path: Path, progress: Callable[[int], object] | None = None) -> Entry:
    """Size and hash of a file as it lies on disk; `progress` is told the bytes of each chunk."""
    digest, num_bytes, chunk = hashlib.sha256(), 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            num_bytes += count
            if progress is not None:
                progress(count)
    return Entry(bytes=num_bytes, sha256=digest.hexdigest())


def hash_files(directory: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Size and hash of several files, a few at a time."""
    listed = sorted(names)
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        return dict(zip(listed, pool.map(lambda name: hash_file(directory / name), listed), strict=True))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint; ValueError, and no file, for what could not be read back."""
    content = {"version": VERSION} | asdict(manifest)
    text = json.dumps(content | {"sha256": _digest(content)}, indent=1)
    _parse(_check_own_hash(json.loads(text)))
    write_atomically(directory / MANIFEST, text)


def read_manifest(directory: Path) -> Manifest:
    """The manifest, whole and leading nowhere else; `Damaged`, `StorageError` or `OtherVersion` if not."""
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
        raise Damaged(path, "is not a manifest: it is nested too deeply") from None
    except ValueError as error:
        raise Damaged(path, f"is not a manifest: {error}") from None
    try:
        return _parse(content)
    except ValueError as error:
        raise OtherVersion(path, str(error)) from None


def verify(
    directory: Path,
    *,
    part: int = 0,
    parts: int = 1,
    progress: Callable[[int], object] | None = None,
    manifest: Manifest | None = None,
) -> Manifest:
    """The manifest, once this part of the files was found to be what it says; or `Damaged`, naming the first that is
    not. `StorageError` where that could not be found out.

    Ranks share the work: each checks every `parts`-th file. Every caller reads the manifest, unless it has it already.
    `progress` is told the bytes that were hashed since it was last called, from several threads.
    """
    manifest = manifest or read_manifest(directory)
    mine = sorted(manifest.files)[part::parts]
    for name in mine:
        _check_size(directory / name, manifest.files[name])
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        list(pool.map(lambda name: _check_content(directory / name, manifest.files[name], progress), mine))
    return manifest


def _check_twice(look: Callable[[bool], T]) -> T:
    """What a look at a file came to; what seems damaged is looked at again, and `look` is told that it is the second
    time."""
    try:
        return look(False)
    except Damaged:
        return look(True)


def _check_size(path: Path, entry: Entry) -> None:
    """Cheap, and all it takes for most damage."""

    def look(_again: bool) -> None:
        if (num_bytes := _size_of(path)) != entry.bytes:
            raise Damaged(path, f"has {num_bytes:,} bytes, {entry.bytes:,} were saved")

    _check_twice(look)


def _size_of(path: Path) -> int:
    """Bytes of a plain file."""
    try:
        status = path.lstat()
    except FileNotFoundError as error:
        raise _missing(path, error) from None
    except OSError as error:
        raise storage_error(path, error) from None
    if stat.S_ISLNK(status.st_mode):
        raise Damaged(path, "is a link, and a checkpoint holds files only")
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(path, "is not a file")
    return status.st_size


def _missing(path: Path, error: OSError) -> Damaged | StorageError:
    """A file is lost if its directory can be listed and holds other files without it; else the mount may be gone."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError as worse:
        return storage_error(path.parent, worse)
    if not names or path.name in names:
        return storage_error(path, error)
    return Damaged(path, "is missing")


def _check_content(path: Path, entry: Entry, progress: Callable[[int], object] | None) -> None:
    def look(again: bool) -> None:
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

    _check_twice(look)


def drop_page_cache(path: Path) -> None:
    """Drop what this machine's page cache holds of a file, so that the next read asks the storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _check_own_hash(content: Any) -> dict[str, Any]:
    """What JSON says, if its own hash fits; or ValueError."""
    if not isinstance(content, dict) or "sha256" not in content:
        raise ValueError("it has no sha256")
    if content.pop("sha256") != _digest(content):
        raise ValueError("its own sha256 differs")
    return content


def _parse(content: dict[str, Any]) -> Manifest:
    """What a manifest says whose hash fits, or ValueError where this version does not understand it."""
    version = content.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise ValueError(f"it has version {str(version)[:20]!r}, this one reads {VERSION}")
    if differing := content.keys() ^ {each.name for each in fields(Manifest)}:
        raise ValueError(f"missing or unknown {sorted(differing)}")
    for key in _COUNTS:
        _require(_is_count(content[key]), key, content[key])
    _require(_is_number(content["time"]) and 0 <= content["time"] < LATEST_TIME_S, "time", content["time"])
    _require(_is_table(content["rollback"], _is_number_or_none), "rollback", content["rollback"])
    _require(_is_table(content["files"], _is_entry), "files", content["files"])
    files = {name: Entry(**entry) for name, entry in content.pop("files").items()}
    for name in files:
        if not is_plain_name(name) or name == MANIFEST:
            raise ValueError(f"{name!r} is not the name of a file beside it")
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
    return isinstance(value, dict) and all(valid(each) for each in value.values())


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"bytes", "sha256"}:
        return False
    sha256 = value["sha256"]
    return _is_count(value["bytes"]) and isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
