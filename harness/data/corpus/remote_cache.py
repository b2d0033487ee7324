"""Corpora in an object store: a local cache of verified blocks, shared by the ranks and runs of one machine.

Why: a corpus may be larger than what a machine wants to copy before the first step, and a store that fails for a minute
must not end a run.
How: each object becomes a sparse file of the same size in the cache, which is memory-mapped like any other token file.
A block is fetched when a window first needs it, and its SHA-256 is written beside the file. A process that reads a
block for the first time compares content and hash; a block that differs was damaged on disk, or its write was cut
short, and is fetched again. A lock on the hash of a block lets one process of the machine fetch it while the others
wait, and keeps it in the cache while somebody reads it (`harness.data.corpus.cache_blocks`). With
`data.remote.cache_gb` the least recently used blocks are freed (`harness.data.corpus.cache_eviction`). The directory in
the cache depends on URL and version of the object, so no run finds blocks of another version. A run that reads an
object while it is replaced gets new content until the version is compared again, at most once in `RECHECK_S`; it ends
then, and the next one that wants the old version fetches it anew. Small companions (.idx, .meta.json, ...) are fetched
as a whole when the file is opened.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from harness.config.data import RemoteDataConfig
from harness.config.errors import ConfigError, StorageError, require
from harness.core.object_store import ObjectStore, StoredObject, is_url
from harness.core.processes import never
from harness.data.corpus import cache_blocks
from harness.data.corpus.cache_blocks import DIGEST_BYTES, NO_DIGEST, REPLACED
from harness.data.corpus.cache_eviction import CacheEviction

NUM_FETCHES = 16
"""Blocks that one process fetches at the same time."""
RECHECK_S = 60.0
"""An object is compared with its recorded version at most this often."""
LISTING_S = 60.0
"""A listing of a directory is used for this long: hundreds of files of one directory are opened one after the other."""
MARK_S = 1.0
"""A use of a block is recorded at most this often, in seconds."""
COMPANIONS = (".idx", ".meta.json", ".counts.npy", ".tokenizer.json")
KEY = "data.remote"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of the cache's disk that another start may not meet; others are wrong settings."""


@final
class CachedFile:
    """One object of the store as a local file of the same size; it has content where `require` was called.

    Another process may free a block at any time, unless this one is `holding` it.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        found: StoredObject,
        path: Path,
        *,
        key: str,
        block_bytes: int,
        on_used: Callable[[int], None] | None = None,
    ) -> None:
        self.url = f"{store.url}/{name}"
        self.path = path
        self._store = store
        self._name = name
        self._found = found
        self._key = key
        self._block_bytes = block_bytes
        self._on_used = on_used
        self._digests = cache_blocks.digests_file(path)
        self._verified = bytearray(-(-found.num_bytes // block_bytes))
        """Whether this process has compared content and hash of each block."""
        self._marked_s = [-MARK_S] * len(self._verified)
        self._checked_s = time.monotonic()
        _make_sparse(path, found.num_bytes)
        _make_sparse(self._digests, DIGEST_BYTES * len(self._verified))

    def require(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Return when the bytes of all these ranges (start, end) are in the file and verified.

        Raises `StorageError` if the store does not answer for `data.remote.retry_s` seconds, and `ConfigError` if the
        object was replaced or removed.
        """
        fetch_ranges([(self, ranges)])

    def require_all(self) -> None:
        self.require([self.whole])

    @property
    def whole(self) -> tuple[int, int]:
        """The range of all its bytes."""
        return 0, self._found.num_bytes

    def missing_blocks(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        """The blocks of these ranges that `obtain` has to verify or fetch."""
        with self._reporting_errors(), self._digests.open("r+b", buffering=0) as digests:
            return self._missing(digests.fileno(), self._blocks(ranges))

    @contextmanager
    def holding(self, ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
        """As `require`; nobody frees these bytes until the `with` block ends.

        Whoever waits for an exclusive lock has only locked blocks before that one, so processes that need several
        never wait for each other.
        """
        blocks = self._blocks(ranges)
        self.require(ranges)
        with self._reporting_errors():
            digests = self._digests.open("r+b", buffering=0)
        with digests:  # closing it releases the locks
            num_fetched = 0
            with self._reporting_errors():
                cache_blocks.share_blocks(digests.fileno(), blocks)
                if self._missing(digests.fileno(), blocks):  # freed meanwhile
                    cache_blocks.unlock_all(digests.fileno())
                    num_fetched = sum(self._lock_for_reading(digests.fileno(), block) for block in blocks)
                self._mark_used(blocks)
            yield
        self._report_use(num_fetched)

    def _blocks(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        """The blocks that contain these ranges, in order."""
        size, last = self._block_bytes, len(self._verified)
        return sorted({block for start, end in ranges for block in range(start // size, min(-(-end // size), last))})

    def _missing(self, digests: int, blocks: Sequence[int]) -> list[int]:
        """Blocks that this process has not verified yet, or that were freed since.

        The hashes are not mapped: on a tmpfs that is full, touching a page of a sparse file kills the process (SIGBUS).
        """
        return [
            block for block in blocks if not (self._verified[block] and any(cache_blocks.read_digest(digests, block)))
        ]

    def obtain(self, block: int) -> None:
        """Verify a block on disk, or fetch it; other processes that need it wait for the lock."""
        with self._reporting_errors(), self._digests.open("r+b", buffering=0) as digests:
            cache_blocks.lock_block(digests.fileno(), block)  # released when `digests` is closed
            num_fetched = self._obtain_locked(digests.fileno(), block)
            self._mark_used([block])
        self._report_use(num_fetched)

    def _lock_for_reading(self, digests: int, block: int) -> int:
        """Lock a block against being freed; fetches it if that has just happened. Returns the fetched bytes."""
        cache_blocks.lock_block(digests, block, shared=True)
        if self._verified[block] and any(cache_blocks.read_digest(digests, block)):
            return 0
        cache_blocks.unlock_block(digests, block)
        cache_blocks.lock_block(digests, block)
        num_fetched = self._obtain_locked(digests, block)
        cache_blocks.lock_block(digests, block, shared=True)  # the kernel changes the lock at once
        return num_fetched

    def _obtain_locked(self, digests: int, block: int) -> int:
        """Verify or fetch a block that is locked exclusively; returns the fetched bytes."""
        start = block * self._block_bytes
        end = min(start + self._block_bytes, self._found.num_bytes)
        expected = cache_blocks.read_digest(digests, block)
        with self.path.open("r+b", buffering=0) as file:
            is_there = any(expected) and _sha256(os.pread(file.fileno(), end - start, start)) == expected
            if not is_there:
                content = self._fetch(start, end)
                cache_blocks.write_digest(digests, block, NO_DIGEST)  # a crash now leaves a block without a hash
                cache_blocks.write_all(file.fileno(), content, start)
                cache_blocks.write_digest(digests, block, _sha256(content))
        self._verified[block] = 1
        return 0 if is_there else end - start

    def _mark_used(self, blocks: Sequence[int]) -> None:
        now_s = time.monotonic()
        marked = [block for block in blocks if now_s - self._marked_s[block] >= MARK_S]
        if marked:
            cache_blocks.mark_used(self.path, marked, time.time())
        for block in marked:
            self._marked_s[block] = now_s

    def _report_use(self, num_fetched_bytes: int) -> None:
        if self._on_used is not None:
            with self._reporting_errors():
                self._on_used(num_fetched_bytes)

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Turn an error of the cache's file system into one line."""
        try:
            yield
        except (ConfigError, StorageError):
            raise
        except OSError as error:
            problem = f"the cache of {self.url} cannot be used: {error.strerror or error}"
            raise StorageError(error.errno or errno.EIO, problem, str(error.filename or self.path)) from None

    def _fetch(self, start: int, end: int) -> bytes:
        if time.monotonic() - self._checked_s > RECHECK_S:
            self._require_unchanged()
        try:
            content = self._store.read(self._name, start, end)
        except FileNotFoundError:
            raise ConfigError(self._key, f"{self.url}: was removed during the run") from None
        if len(content) != end - start:
            self._require_unchanged()
            problem = f"returned {len(content)} of the {end - start} bytes from {start} on"
            raise StorageError(errno.EIO, problem, self.url)
        return content

    def _require_unchanged(self) -> None:
        now = self._store.look_up(self._name)
        if now != self._found:
            with suppress(OSError):
                (self.path.parent / REPLACED).touch()
        require(now == self._found, self._key, f"{self.url}: changed during the run, from {self._found} to {now}")
        self._checked_s = time.monotonic()


RemoteRanges = tuple[CachedFile, Sequence[tuple[int, int]]]
"""Byte ranges (start, end) of an object."""


@final
class RemoteCache:
    """The objects that this process has opened."""

    def __init__(self, cfg: RemoteDataConfig) -> None:
        self._cfg = cfg
        self._root = Path(cfg.cache_dir).expanduser() if cfg.cache_dir else _default_root()
        self._stores: dict[str, ObjectStore] = {}
        self._listings: dict[str, tuple[float, dict[str, StoredObject]]] = {}
        self._opened: dict[str, CachedFile] = {}
        self._by_path: dict[Path, CachedFile] = {}
        self._eviction: CacheEviction | None = None

    def expand(self, given: str, *, key: str, endings: Sequence[str], pattern: frozenset[str]) -> list[str]:
        """URLs of the data files that a URL means: itself, the .bin of an .idx or of a prefix, or what it matches."""
        bucket, name = _split(given, key)
        store = self._store(bucket, key)
        if pattern.intersection(name):
            names = [
                found.removesuffix(".idx") + ".bin" if found.endswith(".idx") else found for found in store.glob(name)
            ]
            names = [found for found in names if found.endswith(tuple(endings)) and not found.endswith(".counts.npy")]
            require(bool(names), key, f"{given}: matches no {' or '.join(endings)} file")
            return [f"{bucket}/{found}" for found in sorted(set(names))]
        base = name.removesuffix(".idx") + ".bin" if name.endswith(".idx") else name
        listed = self._list(store, name, key, wanted=({base}, {f"{name}.bin", f"{name}.idx"}))
        for candidate in (base, f"{name}.bin"):
            if candidate in listed:
                is_prefix = candidate != base
                message = f"{given}.idx: is missing beside {given}.bin; a flat file needs its ending in the path"
                require(not is_prefix or f"{name}.idx" in listed, key, message)
                return [f"{bucket}/{candidate}"]
        raise ConfigError(key, f"{given}: no such object, nor {given}.bin with {given}.idx")

    def open(self, urls: Sequence[str], *, key: str) -> list[CachedFile]:
        """The local files of objects, made on the first call. Their companions are fetched together."""
        made = {url: self._make(url, key) for url in dict.fromkeys(urls) if url not in self._opened}
        fetch_ranges([(companion, [companion.whole]) for files in made.values() for companion in files[1:]])
        for url, files in made.items():
            self._opened[url] = self._by_path[files[0].path] = files[0]
        return [self._opened[url] for url in urls]

    def _make(self, url: str, key: str) -> list[CachedFile]:
        """The local files of an object and of its companions, without content."""
        bucket, name = _split(url, key)
        store = self._store(bucket, key)
        listed = self._list(store, name, key, wanted=({name},))
        require(name in listed, key, f"{url}: no such object")
        stem = name.rpartition(".")[0]
        beside = [stem + ending for ending in COMPANIONS if stem + ending in listed and name.endswith((".bin", ".npy"))]
        parts = [(each, listed[each].num_bytes, listed[each].version) for each in [name, *beside]]
        digest = hashlib.sha256(json.dumps([bucket, parts, self._cfg.block_kb]).encode()).hexdigest()
        folder = self._root / digest[:32]
        block_bytes = 1024 * self._cfg.block_kb
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            eviction = self._make_eviction()  # before anything is written: the disk may be full
            folder.mkdir(exist_ok=True)
            cache_blocks.forget_replaced(folder)
            cache_blocks.write_source(folder, url, block_bytes)
            return [
                CachedFile(
                    store,
                    each,
                    listed[each],
                    folder / each.rpartition("/")[2],
                    key=key,
                    block_bytes=block_bytes,
                    on_used=None if eviction is None else eviction.on_used,
                )
                for each in [name, *beside]
            ]
        except OSError as error:
            place = error.filename or folder
            if error.errno in DISK_ERRORS:
                problem = f"the cache of {url} cannot be used: {error.strerror}"
                raise StorageError(error.errno, problem, str(place)) from None
            raise ConfigError(f"{KEY}.cache_dir", f"{place} cannot be used: {error.strerror}") from None

    def close(self) -> None:
        """Repeat no failed request from now on; what is open stays readable."""
        for store in self._stores.values():
            store.close()

    def _make_eviction(self) -> CacheEviction | None:
        """The eviction of this process, if there is a limit; the cache directory must exist. A cache above the limit is
        made smaller."""
        limit_bytes = self._cfg.limit_bytes()
        if limit_bytes is not None and self._eviction is None:
            message = f"the file system of {self._root} cannot free parts of a file; set it to null"
            require(cache_blocks.can_free_ranges(self._root), f"{KEY}.cache_gb", message)
            self._eviction = CacheEviction(self._root, limit_bytes)
            self._eviction.on_used(0)
        return self._eviction

    def find(self, path: Path) -> CachedFile | None:
        """The object whose local file this is; None for any other file."""
        return self._by_path.get(path)

    def _store(self, bucket: str, key: str) -> ObjectStore:
        if bucket not in self._stores:
            self._stores[bucket] = ObjectStore(bucket, key=key, retry_s=self._cfg.retry_s, is_stopping=stop_requested)
        return self._stores[bucket]

    def _list(self, store: ObjectStore, name: str, key: str, *, wanted: Sequence[set[str]]) -> dict[str, StoredObject]:
        """All objects in the directory of an object, by their path in the bucket.

        A recent listing is used if it has all objects of one set in `wanted`; they may have been written since.
        """
        folder = name.rpartition("/")[0]
        place = f"{store.url}/{folder}"
        listed_s, listing = self._listings.get(place, (float("-inf"), {}))
        is_recent = time.monotonic() - listed_s <= LISTING_S
        if not (is_recent and any(names <= listing.keys() for names in wanted)):
            prefix = f"{folder}/" if folder else ""
            listing = {prefix + each: found for each, found in store.find_all(folder).items()}
            require(bool(listing), key, f"{place}: has no objects")
            self._listings[place] = (time.monotonic(), listing)
        return listing


_cache: RemoteCache | None = None
_settings = RemoteDataConfig()
_pool: ThreadPoolExecutor | None = None
_is_stopping: Callable[[], bool] = never


@contextmanager
def stopping_by(is_stopping: Callable[[], bool]) -> Iterator[None]:
    """Context in which a stop request of this process ends its waits for a store: a request that fails is not repeated.
    Only a start uses it. A run that trains needs its next batch to save and stop."""
    global _is_stopping
    before, _is_stopping = _is_stopping, is_stopping
    try:
        yield
    finally:
        _is_stopping = before


def stop_requested() -> bool:
    """Whether this process waits for no store any more, because it was asked to stop."""
    return _is_stopping()


def use_cache(cfg: RemoteDataConfig) -> None:
    """Set cache directory, block size and retries of this process; the files that are open stay open if nothing
    changes."""
    global _cache, _settings
    if cfg != _settings:
        _cache, _settings = None, cfg


def remote_cache() -> RemoteCache:
    """The cache of this process."""
    global _cache
    if _cache is None:
        _cache = RemoteCache(_settings)
    return _cache


def close_cache() -> None:
    """Let no thread of this process wait for a store that does not answer. Whoever opens a URL later gets a new
    cache."""
    global _cache
    if _cache is not None:
        _cache.close()
        _cache = None


def local_path(path: str | Path, *, key: str) -> Path:
    """The local file of a path or of a URL."""
    return local_paths([path], key=key)[0]


def local_paths(paths: Sequence[str | Path], *, key: str) -> list[Path]:
    """As `local_path`; what is missing of several objects is fetched together."""
    urls = [str(path) for path in paths if is_url(str(path))]
    opened = iter(remote_cache().open(urls, key=key) if urls else [])
    return [next(opened).path if is_url(str(path)) else Path(path) for path in paths]


def cached_file(path: Path) -> CachedFile | None:
    """The object behind a local file of the cache; None for any other file."""
    return None if _cache is None else _cache.find(path)


def recorded_path(path: Path) -> str:
    """How records and messages name a file: by its URL if it is in the cache."""
    cached = cached_file(path)
    return str(path) if cached is None else cached.url


def fetch_ranges(wanted: Iterable[RemoteRanges]) -> None:
    """Return when these ranges of several objects are in their files: `NUM_FETCHES` blocks are fetched at a time, of
    whichever objects. Raises as `CachedFile.require`."""
    missing = [(file, block) for file, ranges in wanted for block in file.missing_blocks(ranges)]
    if len(missing) == 1:
        _obtain(missing[0])
    elif missing:
        list(_fetches().map(_obtain, missing))


def _obtain(missing: tuple[CachedFile, int]) -> None:
    file, block = missing
    file.obtain(block)


def _fetches() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=NUM_FETCHES, thread_name_prefix="blocks")
    return _pool


def _split(url: str, key: str) -> tuple[str, str]:
    """Protocol with bucket, and the rest of a URL."""
    protocol, _, rest = url.partition("://")
    bucket, _, name = rest.partition("/")
    if not bucket and name:  # file:///folder/name
        bucket, _, name = f"/{name}".rpartition("/")
    require(bool(bucket and name), key, f"{url}: must be PROTOCOL://BUCKET/NAME")
    return f"{protocol}://{bucket}", name


def _default_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "pretraining-harness" / "corpora"


def _make_sparse(path: Path, num_bytes: int) -> None:
    """Create a file of this size without content; an existing one stays as it is."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(descriptor).st_size != num_bytes:
            os.ftruncate(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
