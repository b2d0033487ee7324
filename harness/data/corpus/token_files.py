"""Token files: memory-mapped in microseconds whatever their size, read by position, with their document boundaries.

Why: a corpus of a trillion tokens must cost neither start-up time nor memory. A file that is truncated, or does not
match its index, must be rejected with one line before the first step.
How: a file is mapped and never copied or scanned; its format is found from its content
(`harness.data.corpus.megatron_index`, `harness.data.corpus.headerless`). Sizes are checked against headers when a file
is opened, and against the file system at each read: touching a page beyond the end of a file that shrank would kill the
process (SIGBUS).
A file in an object store is read through a cache (`harness.data.corpus.remote_cache`): blocks are fetched before they
are touched.
Left out: a check of token ids, which would need a scan.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from harness.config.data import TokenDtype
from harness.config.errors import ConfigError, StorageError, require
from harness.core.object_store import is_url
from harness.core.transient_io import TRANSIENT_ERRORS, retry_transient
from harness.data.corpus.headerless import HEAD_BYTES, flat_layout, probed_ranges
from harness.data.corpus.mapped_file import map_file
from harness.data.corpus.megatron_index import WRITABLE, MegatronIndex, write_index
from harness.data.corpus.remote_cache import (
    RemoteRanges,
    cached_file,
    local_path,
    local_paths,
    recorded_path,
    remote_cache,
)

Tokens = NDArray[np.integer[Any]]

ENDINGS = (".bin", ".npy")
PATTERN = frozenset("*?[")
NO_TOKENS = ".counts.npy"
"""Written by `harness data prepare` beside its tokens; a pattern does not match it."""

LONGEST_DOCUMENT = 2**31 - 1
PROBE_BYTES = 4096
NUM_PROBES = 16
INDEX_PROBES = 64
MAX_PROBES = 4096
"""Most probes of one kind when a source is opened, over all its files; each file still gets at least two."""


def expand(paths: Sequence[str], *, key: str) -> list[Path]:
    """Expand prefixes, file names and patterns (`*`, `?`, `[..]`, `**`) to data files; sorted, without duplicates.

    A URL becomes its file in the cache, whose content is fetched when it is read.
    """
    found: set[Path] = set()
    urls: list[str] = []
    for given in paths:
        if is_url(given):
            _require_pattern(given, key=key)
            urls += remote_cache().expand(given, key=key, endings=ENDINGS, pattern=PATTERN)
            continue
        try:
            found |= _expand_path(given, key=key)
        except OSError as error:
            raise read_error(given, error, key=key) from None
    found.update(local_paths(urls, key=key))
    return sorted(found, key=lambda file: Path(recorded_path(file)))


def _expand_path(given: str, *, key: str) -> set[Path]:
    """The data files of a local path or pattern."""
    try:
        path = Path(given).expanduser()
    except RuntimeError:
        raise ConfigError(key, f"{given}: there is no such home directory") from None
    if path.exists() or not PATTERN.intersection(given):
        return {_data_file(path, key=key)}
    _require_pattern(given, key=key)
    matches = [match for match in _glob(path) if _num_hidden(match) <= _num_hidden(path)]
    files = [match.with_suffix(".bin") if match.suffix == ".idx" else match for match in matches]
    files = [file for file in files if file.suffix in ENDINGS and not file.name.endswith(NO_TOKENS)]
    require(bool(files), key, f"{given}: matches no {' or '.join(ENDINGS)} file")
    return {_data_file(file, key=key) for file in files}


def _require_pattern(given: str, *, key: str) -> None:
    """Reject `**` beside other characters: neither pathlib nor fsspec has a meaning for it."""
    is_valid = all(part == "**" or "**" not in part for part in given.split("/"))
    require(is_valid, key, f"{given}: ** must be a whole part of the path, for example data/**/*.bin")


def _glob(pattern: Path) -> Iterator[Path]:
    return Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))


def _num_hidden(path: Path) -> int:
    """Parts of a path that begin with a dot. As in a shell, a pattern matches them only if it has the dot itself."""
    return sum(part.startswith(".") and part != ".." for part in path.parts)


def read_error(
    path: str | Path, error: OSError, *, key: str, problem: str = "cannot be read"
) -> ConfigError | StorageError:
    """The exception for a token file that cannot be read: StorageError if the storage failed, which may answer at the
    next start, else ConfigError."""
    if error.errno in TRANSIENT_ERRORS:
        return StorageError(error.errno, f"cannot be read: {error.strerror}", str(path))
    return ConfigError(key, f"{path}: {problem} ({error.strerror})")


def probes_per_file(most: int, num_files: int) -> int:
    """Probes per file: `most` for a few files, fewer for many."""
    return max(2, min(most, MAX_PROBES // num_files))


def open_tokens(path: str | Path, *, dtype: TokenDtype, key: str, num_files: int = 1) -> TokenFile:
    """Map a token file: Megatron's pair (by either name or their prefix), flat, llm.c, or NumPy.

    `dtype` is the dtype of a file without a header; if there is a header, the two must agree.
    `num_files` is the number of files of the source: the more there are, the fewer probes per file.
    """
    given = local_path(path, key=key).expanduser()
    try:
        data_path = _data_file(given, key=key)
    except OSError as error:
        raise read_error(given, error, key=key) from None
    mapped = _map(data_path, key=key)
    cached = cached_file(data_path)
    index_path = data_path.with_suffix(".idx")
    if data_path.suffix == ".bin" and index_path.exists():
        index = MegatronIndex(
            index_path,
            _map(index_path, key=key).data,
            bin_path=data_path,
            num_bytes=len(mapped),
            key=key,
            num_probes=probes_per_file(INDEX_PROBES, num_files),
        )
        file = TokenFile(data_path, np.frombuffer(mapped, dtype=index.dtype), key=key, index=index)
    else:
        num_probes = probes_per_file(NUM_PROBES, num_files)
        probed = [(0, min(HEAD_BYTES, len(mapped))), *probed_ranges(len(mapped), num_probes)]
        with nullcontext() if cached is None else cached.holding(probed):
            stored, offset, count = flat_layout(data_path, mapped.data, dtype=dtype, key=key, num_probes=num_probes)
        file = TokenFile(data_path, np.frombuffer(mapped, dtype=stored, count=count, offset=offset), key=key)
    agrees = dtype is TokenDtype.auto or file.dtype == np.dtype(dtype.value)
    require(agrees, key, f"{data_path}: contains {file.dtype}, but the source's dtype is {dtype.value}")
    return file


@final
class TokenFile:
    """A mapped stream of tokens; safe to read from several threads."""

    def __init__(self, path: Path, tokens: Tokens, *, key: str, index: MegatronIndex | None = None) -> None:
        self.path = path
        self.dtype: np.dtype[Any] = tokens.dtype
        self.num_tokens = len(tokens)
        self.num_documents = 1 if index is None else index.num_documents
        self.has_documents = index is not None
        """Whether document boundaries are known; without an index the whole file is one document."""
        self._tokens = tokens
        self._index = index
        self._key = key
        self.num_bytes = path.stat().st_size
        self.name = recorded_path(path)
        """Its path, or the URL it is cached from."""
        self._cached = cached_file(path)
        self._offset_bytes = self.num_bytes - self.num_tokens * self.dtype.itemsize
        """Where the tokens begin: headers come first, and nothing follows the tokens."""

    def read(self, first: int, count: int) -> Tokens:
        """Tokens by position in the stream: a read-only view, or a copy if the file is in an object store."""
        assert 0 <= first <= first + count <= self.num_tokens
        self.check_presence()
        if self._cached is None:
            return self._tokens[first : first + count]
        with self.holding([(first, first + count)]):
            return self._tokens[first : first + count].copy()

    @property
    def is_remote(self) -> bool:
        return self._cached is not None

    def remote_ranges(self, ranges: Iterable[tuple[int, int]]) -> list[RemoteRanges]:
        """The bytes of these ranges (first token, end), for `fetch_ranges`; empty if the file is local."""
        return [] if self._cached is None else [(self._cached, self._bytes_of(ranges))]

    def holding(self, ranges: Iterable[tuple[int, int]]) -> AbstractContextManager[None]:
        """Fetch what is missing of these ranges (first token, end) of a file in an object store; the cache keeps them
        until the `with` block ends."""
        return nullcontext() if self._cached is None else self._cached.holding(self._bytes_of(ranges))

    def _bytes_of(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        size, offset = self.dtype.itemsize, self._offset_bytes
        return [(offset + size * first, offset + size * end) for first, end in ranges]

    def windows(self, length: int, stride: int) -> Tokens:
        """All windows of `length` tokens that begin at multiples of `stride`, as rows of a view. Does not call
        `check_presence`; a file in an object store must be read while `holding` the tokens."""
        if self.num_tokens < length:
            return np.empty((0, length), dtype=self.dtype)
        return sliding_window_view(self._tokens, length)[::stride]

    def document_at(self, position: int) -> tuple[int, int, int]:
        """Number, first token and end of the document that contains the token; O(log documents)."""
        assert 0 <= position < self.num_tokens
        return (0, 0, self.num_tokens) if self._index is None else self._index.document_at(position)

    def document(self, number: int) -> tuple[int, int]:
        """First token and end of a document; equal if it is empty."""
        assert 0 <= number < self.num_documents
        return (0, self.num_tokens) if self._index is None else self._index.document(number)

    def fingerprint(self, num_probes: int = NUM_PROBES) -> str:
        """Short hexadecimal hash of sizes and a few blocks, equal for equal files whatever their path."""
        facts = (self.dtype.str, self.num_tokens, self.num_documents)
        digest = blake2b(repr(facts).encode(), digest_size=8)
        count = min(self.num_tokens, PROBE_BYTES // self.dtype.itemsize)
        for probe in range(num_probes):
            digest.update(self.read((self.num_tokens - count) * probe // (num_probes - 1), count).data)
            digest.update(repr(self.document((self.num_documents - 1) * probe // (num_probes - 1))).encode())
        return digest.hexdigest()

    def check_presence(self) -> None:
        """Raise if the file was removed or resized: reading its map could kill the process."""
        try:
            num_bytes = os.stat(self.path).st_size  # noqa: PTH116 -- half the time of Path.stat, in the path of a batch
        except OSError:
            num_bytes = self._size_after_error()
        if num_bytes != self.num_bytes:
            message = f"{self.path}: changed during the run, from {self.num_bytes} to {num_bytes} bytes"
            raise ConfigError(self._key, message)

    def _size_after_error(self) -> int:
        """The size of a file that could not be looked at just now: a file system may fail for a moment."""
        try:
            return retry_transient(self.path.stat).st_size
        except OSError as error:
            raise read_error(self.path, error, key=self._key, problem="was removed during the run") from None


@final
class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx in Megatron's layout, byte for byte.

    Neither file exists, or changes, before `close`; the index is renamed last. If the `with` block fails, nothing is
    left behind.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        allowed = ", ".join(known.name for known in WRITABLE)
        if dtype not in WRITABLE:
            raise ValueError(f"{prefix}: Megatron has no code for tokens of {dtype}, allowed are {allowed}")
        self._prefix = prefix
        self._dtype = dtype
        self._range = np.iinfo(dtype)
        self._lengths = array("i")
        self._data = self._temporary(".bin").open("wb")

    def add(self, tokens: Tokens) -> None:
        """Append one document; it may be empty."""
        if len(tokens) > LONGEST_DOCUMENT:
            message = f"document {len(self._lengths)} has {len(tokens)} tokens, allowed are {LONGEST_DOCUMENT}"
            raise ValueError(f"{self._prefix}: {message}")
        if tokens.dtype != self._dtype and len(tokens):
            smallest, largest = int(tokens.min()), int(tokens.max())
            if smallest < self._range.min or largest > self._range.max:
                message = f"document {len(self._lengths)} has ids {smallest} .. {largest}, too wide for {self._dtype}"
                raise ValueError(f"{self._prefix}: {message}")
        self._data.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self._lengths.append(len(tokens))

    def close(self) -> None:
        """Sync both files and rename them to their final names; an older pair is replaced."""
        _finish(self._data)
        with self._temporary(".idx").open("wb") as index:
            write_index(index, self._dtype, self._lengths)
            _finish(index)
        self._named(".idx").unlink(missing_ok=True)
        for ending in (".bin", ".idx"):
            self._temporary(ending).replace(self._named(ending))

    def discard(self) -> None:
        """Delete what was written."""
        with suppress(OSError):  # a full disk does not take what is still to be written
            self._data.close()
        for ending in (".bin", ".idx"):
            self._temporary(ending).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()
            return
        try:
            self.close()
        except OSError:
            self.discard()
            raise

    def _named(self, ending: str) -> Path:
        return self._prefix.with_name(self._prefix.name + ending)

    def _temporary(self, ending: str) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}{ending}.tmp")


def _finish(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _data_file(path: Path, *, key: str) -> Path:
    """The file that contains the tokens: `path` itself, the `.bin` of an `.idx`, or the `.bin` of a prefix with
    both."""
    beside = {ending: path.with_name(path.name + ending) for ending in (".bin", ".idx")}
    if path.suffix == ".idx":
        data_path = path.with_suffix(".bin")
        require(data_path.is_file(), key, f"{data_path}: is missing, {path.name} is its index")
        return data_path
    if path.is_file():
        return path
    if beside[".bin"].is_file():
        message = f"is missing beside {beside['.bin'].name}; a flat file needs its ending in the path"
        require(beside[".idx"].is_file(), key, f"{beside['.idx']}: {message}")
        return beside[".bin"]
    require(not beside[".idx"].is_file(), key, f"{beside['.bin']}: is missing, {beside['.idx'].name} is its index")
    require(not path.is_dir(), key, f"{path}: is a directory; name its files, for example {path}/*.bin")
    raise ConfigError(key, f"{path}: no such file, nor {beside['.bin'].name} with {beside['.idx'].name}")


def _map(path: Path, *, key: str) -> NDArray[np.uint8]:
    """Map a file; pages are read when they are touched."""
    try:
        mapped = map_file(path)
    except OSError as error:
        raise read_error(path, error, key=key) from None
    require(len(mapped) > 0, key, f"{path}: is empty")
    return mapped
