"""The identity of a corpus file: its sizes and a hash of a few blocks, cheap for a file of any size.

How: `list_files` needs one `stat` for each file. `probe` reads 4 blocks of a data file (the first, the last, and two at
positions that follow from its size) and 2 of its index. It finds a file that was written anew, cut, or swapped; it does
not find a change of a few tokens in the middle of a large file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from harness.config.data import DataKind, SourceConfig
from harness.config.errors import ConfigError
from harness.data.corpus.token_files import expand

BLOCK_BYTES = 4096
DATA_BLOCKS = 4
INDEX_BLOCKS = 2
READS_PER_FILE = DATA_BLOCKS + INDEX_BLOCKS


class ListedFile(NamedTuple):
    """A data file without a look inside."""

    path: str
    num_bytes: int
    index_bytes: int
    """Of the .idx beside it; 0: it has none."""


def list_files(sources: Mapping[str, SourceConfig]) -> dict[str, list[ListedFile]]:
    """The files of every source that has files, in the order of their names."""
    found = {}
    for name, source in sources.items():
        if source.kind is DataKind.files:
            key = f"data.sources.{name}.paths"
            found[name] = [stat_file(path, key=key) for path in expand(source.paths, key=key)]
    return found


def stat_file(path: Path, *, key: str) -> ListedFile:
    """Sizes as they are now."""
    index = path.with_suffix(".idx")
    try:
        index_bytes = index.stat().st_size if path.suffix == ".bin" and index.exists() else 0
        return ListedFile(str(path), path.stat().st_size, index_bytes)
    except OSError as error:
        raise ConfigError(key, f"{path}: cannot be read ({error.strerror})") from None


def probe(file: ListedFile, *, key: str) -> str:
    """Short hexadecimal text that is equal for equal files, wherever they lie."""
    path = Path(file.path)
    digest = blake2b(repr(file[1:]).encode(), digest_size=8)
    try:
        _add_blocks(digest, path, file.num_bytes, DATA_BLOCKS)
        if file.index_bytes:
            _add_blocks(digest, path.with_suffix(".idx"), file.index_bytes, INDEX_BLOCKS)
    except OSError as error:
        raise ConfigError(key, f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def positions(num_bytes: int, num_blocks: int) -> list[int]:
    """Where the blocks begin: at the start, at the end, and in between at places that follow from the size."""
    last = max(0, num_bytes - BLOCK_BYTES)
    words = [blake2b(f"{num_bytes} {number}".encode(), digest_size=8).digest() for number in range(num_blocks - 2)]
    return sorted({0, last, *(int.from_bytes(word, "little") % (last + 1) for word in words)})


def _add_blocks(digest: blake2b, path: Path, num_bytes: int, num_blocks: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for position in positions(num_bytes, num_blocks):
            digest.update(os.pread(descriptor, BLOCK_BYTES, position))
    finally:
        os.close(descriptor)
