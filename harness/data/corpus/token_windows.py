"""A corpus of token files: fixed-length windows of each file in turn.

Why: opening must be cheap, and a token id outside the vocabulary must stop the run with the name of the file instead of
a device-side assertion.
How: files are cut into windows of `sequence_length + 1` tokens that share one token, never across files; a sample is
found by bisection over the files. Ids are checked against the vocabulary when a file is opened if `harness data
prepare` left a report beside it, and otherwise in every sample that is read, in the thread that reads it. The documents
of a file come from its index, or without an index from `data.eod_token` (`harness.data.corpus.document_ends`).
Left out: the tokens of a file after its last full window.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from harness.config.errors import ConfigError, require
from harness.data.corpus.corpus import MIN_SAMPLES, SampleOrigin, SampleShape, Tokens, digest
from harness.data.corpus.document_ends import number_documents
from harness.data.corpus.headerless import HEADER_ERRORS
from harness.data.corpus.remote_cache import RemoteRanges, fetch_ranges
from harness.data.corpus.token_files import NUM_PROBES, TokenFile, probes_per_file, read_error


@final
class FilesCorpus:
    """Windows of each file in turn; tokens after the last full window of a file are not read."""

    def __init__(self, files: list[TokenFile], *, shape: SampleShape, key: str, eod_token: int | None = None) -> None:
        self._files = files
        self._length = shape.sequence_length
        self._eod_token = eod_token
        self._key = key
        self.vocab_size = shape.vocab_size
        num_windows = [max(0, file.num_tokens - 1) // self._length for file in files]
        self._ends = list(accumulate(num_windows))
        self.num_samples = self._ends[-1]
        found = f"{self.num_samples} sequences of train.sequence_length={self._length}"
        message = f"must contain at least {MIN_SAMPLES} sequences, got {found}"
        require(self.num_samples >= MIN_SAMPLES, key, message)
        self._windows = [file.windows(self._length + 1, self._length) for file in files]
        self._unsigned = [np.dtype(file.dtype.str.replace("i", "u")) for file in files]
        """Unsigned dtype for the comparison of ids, in which a negative id is above every vocabulary."""
        self.is_remote = any(file.is_remote for file in files)
        """Whether a file is in an object store, so that it is worth fetching `remote_ranges` in advance."""
        self._is_trusted = [self._fits(file) for file in files]

    def sample(self, index: int) -> Tokens:
        assert 0 <= index < self.num_samples
        row: Tokens = self.rows(np.array([index], dtype=np.int64))[0]
        return row

    def rows(self, indices: NDArray[np.int64]) -> Tokens:
        if len(self._files) == 1:
            return self._rows_of(0, indices)
        numbers = np.searchsorted(self._ends, indices, side="right")
        fetch_ranges(self.remote_ranges(indices))  # of all files at once
        rows = np.empty((len(indices), self._length + 1), dtype=np.int64)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            rows[here] = self._rows_of(number, indices[here] - (self._ends[number - 1] if number else 0))
        return rows

    def documents(self, index: int) -> NDArray[np.int32]:
        number, first = self._window(index)
        file = self._files[number]
        if self._eod_token is not None and not file.has_documents:
            return number_documents(file.read(first, self._length + 1), self._eod_token)
        begins = np.zeros(self._length + 1, dtype=np.int32)
        document, _, end = file.document_at(first)
        while end < first + self._length + 1:
            begins[end - first] = 1
            document += 1
            _, end = file.document(document)
        return np.cumsum(begins, dtype=np.int32)

    def origin(self, index: int) -> SampleOrigin:
        number, first = self._window(index)
        file = self._files[number]
        if self._eod_token is not None and not file.has_documents:
            return SampleOrigin(file.name, first, 0, int(self.documents(index)[-1]))
        documents = (file.document_at(position)[0] for position in (first, first + self._length))
        return SampleOrigin(file.name, first, *documents)

    def path_of(self, name: str) -> Path:
        """The local file that a `SampleOrigin` names; that of a URL is in the cache, with its companions beside it."""
        return next(file.path for file in self._files if file.name == name)

    def num_windows(self, num_files: int) -> int:
        """Samples of the first `num_files` files."""
        return self._ends[num_files - 1] if num_files else 0

    @property
    def flat_files(self) -> list[TokenFile]:
        """The files without an index."""
        return [file for file in self._files if not file.has_documents]

    def token_counts(self) -> NDArray[np.int64] | None:
        total = np.zeros(self.vocab_size, dtype=np.int64)
        for file in self._files:
            path = file.path.with_suffix(".counts.npy")
            if not path.is_file():
                return None
            counts = self._read_counts(path)[: self.vocab_size]
            total[: len(counts)] += counts
        return total

    def _read_counts(self, path: Path) -> NDArray[np.int64]:
        """The counts beside a file; ConfigError if they are damaged."""
        try:
            with path.open("rb") as file:
                counts = np.lib.format.read_array(file, allow_pickle=False)
        except OSError as error:
            raise read_error(path, error, key=self._key) from None
        except HEADER_ERRORS:
            raise ConfigError(self._key, f"{path}: is damaged; delete it, or prepare the data again") from None
        is_valid = counts.ndim == 1 and np.can_cast(counts.dtype, np.int64)
        message = f"{path}: must contain one count for each token id, contains {counts.dtype} of shape {counts.shape}"
        require(is_valid, self._key, message)
        return counts.astype(np.int64)

    def fingerprint(self) -> str:
        num_probes = probes_per_file(NUM_PROBES, len(self._files))
        ends_documents = self._eod_token is not None and bool(self.flat_files)
        parameters = (self._length, self._eod_token) if ends_documents else (self._length,)
        return digest("".join(file.fingerprint(num_probes) for file in self._files).encode(), *parameters)

    def _rows_of(self, number: int, windows: NDArray[np.int64]) -> Tokens:
        """Windows of one file, with their ids checked; one fancy index into the map reads them all."""
        file = self._files[number]
        file.check_presence()
        with file.holding(self._ranges(windows)) if file.is_remote else nullcontext():
            rows: Tokens = self._windows[number][windows]
        if self._is_trusted[number] or rows.view(self._unsigned[number]).max() < self.vocab_size:
            return rows
        row, position = np.argwhere((rows < 0) | (rows >= self.vocab_size))[0].tolist()
        where = f"{file.name}: token {int(windows[row]) * self._length + position}"
        message = f"{where} is id {rows[row, position]}, must be in 0 .. {self.vocab_size - 1} (model.vocab_size)"
        raise ConfigError(self._key, message)

    def remote_ranges(self, indices: NDArray[np.int64]) -> list[RemoteRanges]:
        """What these samples need from object stores, for `fetch_ranges`; local files need nothing."""
        if not self.is_remote:
            return []
        numbers = np.searchsorted(self._ends, indices, side="right")
        wanted: list[RemoteRanges] = []
        for number in np.unique(numbers).tolist():
            first = self._ends[number - 1] if number else 0
            wanted += self._files[number].remote_ranges(self._ranges(indices[numbers == number] - first))
        return wanted

    def _ranges(self, windows: NDArray[np.int64]) -> list[tuple[int, int]]:
        """First token and end of these windows."""
        return [(start, start + self._length + 1) for start in (windows * self._length).tolist()]

    def _window(self, index: int) -> tuple[int, int]:
        """Number of the file, and position of the window in it."""
        assert 0 <= index < self.num_samples
        number = bisect_right(self._ends, index)
        return number, (index - (self._ends[number - 1] if number else 0)) * self._length

    def _fits(self, file: TokenFile) -> bool:
        """Whether all ids are known to be below the vocabulary size, by their dtype or by the report beside the
        file."""
        path = file.path.with_suffix(".meta.json")
        if not path.is_file():
            return file.dtype.kind == "u" and np.iinfo(file.dtype).max < self.vocab_size
        try:
            report = json.loads(path.read_bytes())
            num_tokens, largest = int(report["tokens"]), int(report["max_token"])
        except OSError as error:
            raise read_error(path, error, key=self._key) from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(self._key, f"{path}: is not a report with tokens and max_token") from None
        message = f"{path}: reports {num_tokens} tokens, but {file.path.name} has {file.num_tokens}"
        require(num_tokens == file.num_tokens, self._key, message)
        message = f"must be above {largest}, the largest token id in {file.name}, got {self.vocab_size}"
        require(largest < self.vocab_size, "model.vocab_size", message)
        return True
