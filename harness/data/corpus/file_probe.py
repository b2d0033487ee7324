"""Identifies a corpus file by its size and a hash of a few blocks; cheap for a file of any size.

How: `list_files` needs a few `stat`s per file. `probe` reads 4 blocks of a data file (the first, the last, and two at
positions derived from its size) and 2 of its index. It detects a file that was rewritten, truncated or replaced. It
does not detect a change of a few tokens in the middle of a large file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from harness.config.data import DataKind, SourceConfig
from harness.config.errors import require
from harness.core.object_store import canonical_name, is_url
from harness.data.corpus.remote_cache import cached_file, local_path, recorded_path
from harness.data.corpus.token_files import expand, read_error

BLOCK_BYTES = 4096
DATA_BLOCKS = 4
INDEX_BLOCKS = 2
READS_PER_FILE = DATA_BLOCKS + INDEX_BLOCKS


class ListedFile(NamedTuple):
    """Path and sizes of a data file, without its content."""

    path: str
    num_bytes: int
    index_bytes: int
    """Size of the .idx beside it; 0: it has none."""


def list_files(sources: Mapping[str, SourceConfig]) -> dict[str, list[ListedFile]]:
    """The files of every source of kind files, sorted by name."""
    expanded = {
        name: expand(source.paths, key=_key(name)) for name, source in sources.items() if source.kind is DataKind.files
    }
    require_distinct(expanded)
    return {name: [stat_file(path, key=_key(name)) for path in paths] for name, paths in expanded.items()}


def require_distinct(expanded: Mapping[str, Sequence[Path]]) -> None:
    """Reject a file that is read twice: under two names, or in sources whose other files differ.

    The held-out windows are the tail of a source, so the second copy would be trained on.
    """
    owners: dict[str, tuple[str, Path]] = {}
    first_names: dict[tuple[int, ...], str] = {}
    files = {name: [_identify(path, first_names) for path in paths] for name, paths in expanded.items()}
    for name, paths in expanded.items():
        for path, file in zip(paths, files[name], strict=True):
            other, twin = owners.setdefault(file, (name, path))
            message = f"{recorded_path(path)} and {recorded_path(twin)} of source {other} are the same file"
            is_twice = twin != path if other == name else files[other] != files[name]
            require(not is_twice, _key(name), f"{message}: what is held out would be trained on; name it once")


def _identify(path: Path, first_names: dict[tuple[int, ...], str]) -> str:
    """A text that is equal for all names of one file or object; of hard links it names the first that was asked for.

    Size and time are compared too, because a file system in user space may number its files anew or all with 0.
    """
    cached = cached_file(path)
    name = str(path) if cached is None else canonical_name(cached.url)
    if is_url(name):
        return name
    real = os.path.realpath(name)
    try:
        status = Path(real).stat()
    except OSError:
        return real  # reported where its sizes are read
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return first_names.setdefault(key, real) if status.st_ino else real


def _key(source: str) -> str:
    return f"data.sources.{source}.paths"


def stat_file(path: Path, *, key: str) -> ListedFile:
    """The current sizes of a data file and its index."""
    index = path.with_suffix(".idx")
    try:
        index_bytes = index.stat().st_size if path.suffix == ".bin" and index.exists() else 0
        return ListedFile(recorded_path(path), path.stat().st_size, index_bytes)
    except OSError as error:
        raise read_error(path, error, key=key) from None


def probe(file: ListedFile, *, key: str) -> str:
    """Short hexadecimal hash, equal for equal files whatever their path."""
    path = local_path(file.path, key=key)
    digest = blake2b(repr(file[1:]).encode(), digest_size=8)
    cached, starts = cached_file(path), positions(file.num_bytes, DATA_BLOCKS)
    ranges = [(start, min(start + BLOCK_BYTES, file.num_bytes)) for start in starts]
    with nullcontext() if cached is None else cached.holding(ranges):
        try:
            _add_blocks(digest, path, file.num_bytes, DATA_BLOCKS)
            if file.index_bytes:
                _add_blocks(digest, path.with_suffix(".idx"), file.index_bytes, INDEX_BLOCKS)
        except OSError as error:
            raise read_error(path, error, key=key) from None
    return digest.hexdigest()


def positions(num_bytes: int, num_blocks: int) -> list[int]:
    """Offsets of the blocks: the first, the last, and others derived from the size."""
    last = max(0, num_bytes - BLOCK_BYTES)
    hashes = [blake2b(f"{num_bytes} {number}".encode(), digest_size=8).digest() for number in range(num_blocks - 2)]
    return sorted({0, last, *(int.from_bytes(value, "little") % (last + 1) for value in hashes)})


def _add_blocks(digest: blake2b, path: Path, num_bytes: int, num_blocks: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for position in positions(num_bytes, num_blocks):
            digest.update(os.pread(descriptor, BLOCK_BYTES, position))
    finally:
        os.close(descriptor)
