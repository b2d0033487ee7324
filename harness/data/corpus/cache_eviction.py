"""Keeps the cache of remote corpora below a limit: the least recently used blocks are freed first.

Why: a corpus may be larger than the disks of a machine.
How: a process that has fetched some blocks adds up what the files of the whole cache occupy. Near the limit it frees
blocks, of any object and of any run, until `KEEP_SHARE` of the limit is left. A block is freed under its exclusive
lock, and only if nobody else has it locked: readers hold a shared lock while they copy from it. Its hash is erased
first, so a process that is killed in between leaves a block without a hash, which nobody reads; the next eviction frees
it, as well as what a killed fetch has left. One process of the machine evicts at a time. The cache may exceed its limit
for a moment, by what others fetch meanwhile.
Left out: companions (.idx, ...), which are mapped as long as a run lives; folders of a version without eviction, until
a run opens them.
"""

from __future__ import annotations

import fcntl
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, final

from harness.core.stderr_lines import print_warning
from harness.data.corpus import cache_blocks
from harness.data.corpus.cache_blocks import BLOCKS, DIGEST_BYTES, NO_DIGEST, SOURCE

LOCK = "eviction.lock"
EVICTABLE = (".bin", ".npy")
NOT_EVICTABLE = (".counts.npy",)
KEEP_SHARE, BEGIN_SHARE = 0.90, 0.95
"""Shares of the limit: what an eviction leaves, and from where on it begins."""
SCAN_SHARE = 0.01
"""A process adds up the cache again once it has fetched this share of the limit, ..."""
SCAN_S, RETRY_S = 10.0, 1.0
"""... or at its first use of a block after so many seconds, because another process was killed before it could evict;
sooner if an eviction could not free enough."""


class StoredBlock(NamedTuple):
    """A block that can be freed; sorted by its last use."""

    used: float
    path: Path
    """The file with the content."""
    block: int
    block_bytes: int


@final
class CacheEviction:
    """Frees blocks of the cache in `root` when it occupies more than `limit_bytes`."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._limit_bytes = limit_bytes
        self._fetched_bytes = 0
        self._mutex = threading.Lock()
        self._is_evicting = False
        self._next_scan_s = -math.inf
        self._has_warned = False

    def on_used(self, num_fetched_bytes: int) -> None:
        """Count a use of blocks and the bytes fetched for it, and evict if the cache has become too large. One thread
        does so for all."""
        with self._mutex:
            self._fetched_bytes += num_fetched_bytes
            if self._is_evicting or not self._is_scan_due():
                return
            self._is_evicting = True
        try:
            while True:
                self._evict_if_large()
                with self._mutex:
                    if not self._is_scan_due():  # nor have other threads fetched much meanwhile
                        return
        finally:
            self._is_evicting = False

    def _is_scan_due(self) -> bool:
        """Whether the cache should be added up again; if so, that is counted as done."""
        now_s = time.monotonic()
        is_due = self._fetched_bytes >= SCAN_SHARE * self._limit_bytes or now_s >= self._next_scan_s
        if is_due:
            self._fetched_bytes, self._next_scan_s = 0, now_s + SCAN_S
        return is_due

    def _evict_if_large(self) -> None:
        if occupied_bytes(self._root) <= BEGIN_SHARE * self._limit_bytes:
            return
        descriptor = os.open(self._root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            left_bytes = evict(self._root, int(KEEP_SHARE * self._limit_bytes))
        finally:
            os.close(descriptor)
        if left_bytes > self._limit_bytes:
            self._next_scan_s = time.monotonic() + RETRY_S
            self._warn(left_bytes)

    def _warn(self, left_bytes: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            problem = f"{left_bytes:,} bytes of {self._root} are in use or cannot be freed"
            print_warning(f"data.remote.cache_gb: {problem}")


def occupied_bytes(root: Path) -> int:
    """Bytes that the files of the cache occupy on disk."""
    total = 0
    for folder in _folders(root):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += 512 * entry.stat(follow_symlinks=False).st_blocks
    return total


def evict(root: Path, target_bytes: int) -> int:
    """Free blocks, the least recently used first, until the cache occupies `target_bytes`; returns what it occupies
    then, without what others fetch meanwhile. Files that cannot be read or written keep their space."""
    excess = occupied_bytes(root) - target_bytes
    blocks: list[StoredBlock] = []
    for path, block_bytes in _data_files(root):
        with suppress(OSError):
            stored = _stored_blocks(path, block_bytes)
            if 512 * path.stat().st_blocks > block_bytes * len(stored):
                excess -= _free_orphans(path, block_bytes)
            blocks += stored
    for oldest in sorted(blocks):
        if excess <= 0:
            break
        excess -= free_block(oldest)
    return target_bytes + excess


def free_block(stored: StoredBlock) -> int:
    """Free one block unless it is in use, or was used since it was listed; returns the freed bytes."""
    path, block = stored.path, stored.block
    with suppress(OSError), cache_blocks.digests_file(path).open("r+b", buffering=0) as digests:
        if not cache_blocks.try_lock_block(digests.fileno(), block):
            return 0
        if cache_blocks.last_use(path, block) != stored.used:
            return 0
        return _free_locked(digests.fileno(), path, block, stored.block_bytes)
    return 0


def _free_locked(digests: int, path: Path, block: int, block_bytes: int) -> int:
    """Free a block that this process has locked exclusively."""
    cache_blocks.write_digest(digests, block, NO_DIGEST)  # a crash now leaves a block without a hash
    with path.open("r+b", buffering=0) as content:
        cache_blocks.free_range(content.fileno(), block * block_bytes, block_bytes)
        return min(block_bytes, os.fstat(content.fileno()).st_size - block * block_bytes)


def _free_orphans(path: Path, block_bytes: int) -> int:
    """Free what blocks without a hash occupy: a killed fetch or eviction has left it. Returns the freed bytes."""
    freed = 0
    with suppress(OSError), cache_blocks.digests_file(path).open("r+b", buffering=0) as digests:
        for block in _allocated_blocks(path, block_bytes):
            if any(cache_blocks.read_digest(digests.fileno(), block)):
                continue
            if cache_blocks.try_lock_block(digests.fileno(), block):
                if not any(cache_blocks.read_digest(digests.fileno(), block)):
                    freed += _free_locked(digests.fileno(), path, block, block_bytes)
                cache_blocks.unlock_block(digests.fileno(), block)
    return freed


def _allocated_blocks(path: Path, block_bytes: int) -> list[int]:
    """Blocks of a sparse file that occupy space, even in part."""
    found: list[int] = []
    with path.open("rb", buffering=0) as content:
        size, position = os.fstat(content.fileno()).st_size, 0
        while position < size:
            try:
                position = os.lseek(content.fileno(), position, os.SEEK_DATA)
            except OSError:  # no data until the end
                break
            found.append(position // block_bytes)
            position = (position // block_bytes + 1) * block_bytes
    return found


def _stored_blocks(path: Path, block_bytes: int) -> list[StoredBlock]:
    digests = cache_blocks.digests_file(path).read_bytes()
    num_blocks = len(digests) // DIGEST_BYTES
    used = cache_blocks.read_used(path, num_blocks)
    return [
        StoredBlock(used[block], path, block, block_bytes)
        for block in range(num_blocks)
        if digests[DIGEST_BYTES * block : DIGEST_BYTES * (block + 1)] != NO_DIGEST
    ]


def _data_files(root: Path) -> Iterator[tuple[Path, int]]:
    """The content files whose blocks may be freed, and the size of their blocks."""
    for folder in _folders(root):
        try:
            _, block_bytes, *_ = (folder / SOURCE).read_text(encoding="utf-8").splitlines()
            size = int(block_bytes)
        except (OSError, ValueError):
            continue
        for digests in folder.glob(f"*{BLOCKS}"):
            path = digests.with_name(digests.name.removesuffix(BLOCKS))
            if size > 0 and path.name.endswith(EVICTABLE) and not path.name.endswith(NOT_EVICTABLE):
                yield path, size


def _folders(root: Path) -> list[Path]:
    with suppress(OSError), os.scandir(root) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False) and _is_of_object(entry)]
    return []


def _is_of_object(folder: os.DirEntry[str]) -> bool:
    """Whether a folder holds an object; others, such as lost+found, are no part of the cache."""
    with suppress(OSError):
        return (Path(folder.path) / SOURCE).is_file()
    return False
