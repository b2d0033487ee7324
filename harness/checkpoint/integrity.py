"""The manifest of a checkpoint: size and hash of every file, written last, checked before anything else is read.

Why: torch.distributed.checkpoint has no checksums. A flipped bit, a hole of zeros or a file cut short loads without a
word, and its `.metadata` is a pickle, which runs what it holds.
How: SHA-256 of each file as `sha256sum` prints it, and one more over the manifest itself. A name in a manifest is the
plain name of a file beside it; a path or a link that leads elsewhere is damage like any other, and so is a manifest
whose hash fits but whose values have other types than were written: whoever reads one may rely on them.
Left out: signatures. A manifest tells damage, not malice: whoever can write the directory can write a manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, final

from harness.rundir import write_atomically

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


def measure(path: Path, progress: Callable[[int], object] | None = None) -> Entry:
    """Size and hash of a file as it lies on disk; `progress` is told the bytes of each chunk."""
    digest, num_bytes, chunk = hashlib.sha256(), 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            num_bytes += count
            if progress is not None:
                progress(count)
    return Entry(bytes=num_bytes, sha256=digest.hexdigest())


def measure_all(directory: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Size and hash of several files, a few at a time."""
    listed = sorted(names)
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        return dict(zip(listed, pool.map(lambda name: measure(directory / name), listed), strict=True))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint; ValueError, and no file, for what could not be read back."""
    content = {"version": VERSION} | asdict(manifest)
    text = json.dumps(content | {"sha256": _digest(content)}, indent=1)
    _parse(json.loads(text))
    write_atomically(directory / MANIFEST, text)


def read_manifest(directory: Path) -> Manifest:
    """The manifest, whole and leading nowhere else, or `Damaged`."""
    path = directory / MANIFEST
    _size_of(path)
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from None
    except RecursionError:
        raise Damaged(path, "is not a manifest: it is nested too deeply") from None
    except ValueError as error:
        raise Damaged(path, f"is not a manifest: {error}") from None


def verify(
    directory: Path, *, part: int = 0, parts: int = 1, progress: Callable[[int], object] | None = None
) -> Manifest:
    """The manifest, once this part of the files was found to be what it says; or `Damaged`, naming the first that is
    not.

    Ranks share the work: each checks every `parts`-th file, and every rank reads the manifest. `progress` is told the
    bytes that were hashed since it was last called, from several threads.
    """
    manifest = read_manifest(directory)
    mine = sorted(manifest.files)[part::parts]
    for name in mine:
        _check_size(directory / name, manifest.files[name])
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        list(pool.map(lambda name: _check_content(directory / name, manifest.files[name], progress), mine))
    return manifest


def _check_size(path: Path, entry: Entry) -> None:
    """Cheap, and all it takes for most damage."""
    if (num_bytes := _size_of(path)) != entry.bytes:
        raise Damaged(path, f"has {num_bytes:,} bytes, {entry.bytes:,} were saved")


def _size_of(path: Path) -> int:
    """Bytes of a plain file."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise Damaged(path, "is missing") from None
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from None
    if stat.S_ISLNK(status.st_mode):
        raise Damaged(path, "is a link, and a checkpoint holds files only")
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(path, "is not a file")
    return status.st_size


def _check_content(path: Path, entry: Entry, progress: Callable[[int], object] | None) -> None:
    try:
        found = measure(path, progress)
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from None
    if found != entry:
        raise Damaged(path, "its content is not what was saved (sha256 differs)")


def _parse(content: Any) -> Manifest:
    """What JSON says, or ValueError."""
    if not isinstance(content, dict) or "sha256" not in content:
        raise ValueError("it has no sha256")
    stated = content.pop("sha256")
    if stated != _digest(content):
        raise ValueError("its own sha256 differs")
    version = content.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise ValueError(f"it has version {version!r}, allowed is {VERSION}")
    if differing := content.keys() ^ {each.name for each in fields(Manifest)}:
        raise ValueError(f"missing or unknown {sorted(differing)}")
    for key in _COUNTS:
        _require(_is_count(content[key]), key, content[key])
    _require(_is_number(content["time"]) and 0 <= content["time"] < LATEST_TIME_S, "time", content["time"])
    _require(_is_table(content["rollback"], _is_number_or_none), "rollback", content["rollback"])
    _require(_is_table(content["files"], _is_entry), "files", content["files"])
    files = {name: Entry(**entry) for name, entry in content.pop("files").items()}
    for name in files:
        if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
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
