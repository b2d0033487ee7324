"""Megatron's `.idx` file: which tokens of the `.bin` file beside it form which document.

Why: most tokenized corpora already have this layout, and its document boundaries are known.
How: the file is 34 bytes of header (magic, version, dtype code, number of sequences, number of document marks), then
the length of each sequence (int32, tokens), its offset in the `.bin` file (int64, bytes), the first sequence of each
document (int64, one mark more than there are documents), and, in multimodal files, one mode byte per sequence, which is
ignored. All numbers are little-endian. The index is memory-mapped, not read. Opening checks sizes, ends and a fixed
number of probes in between, so its cost does not grow with the corpus; a lookup is a bisection over a few pages.
Left out: a check of every entry (a lookup compares those it uses with their neighbours, and raises if they do not fit),
and fairseq's layout of the same magic.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np

from harness.config.errors import ConfigError, require

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of document marks."""

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
    9: np.dtype("<u4"),
    10: np.dtype("<u8"),
}
"""dtype by code. Megatron defines 1 to 8; other writers of its layout continue with 9 and 10."""

WRITABLE: dict[np.dtype[Any], int] = {dtype: code for code, dtype in DTYPES.items() if code <= 8 and dtype.kind in "iu"}
"""dtypes that tokens can be written in so that Megatron's own reader accepts them."""

CHUNK_ENTRIES = 1 << 20


def write_index(file: BinaryIO, dtype: np.dtype[Any], lengths: array[int]) -> None:
    """Write the index of documents with one sequence each; `lengths` are their tokens."""
    num_sequences = len(lengths)
    file.write(HEADER.pack(MAGIC, VERSION, WRITABLE[dtype], num_sequences, num_sequences + 1))
    sizes = np.frombuffer(lengths, dtype=np.int32) if num_sequences else np.empty(0, dtype=np.int32)
    file.write(sizes.astype("<i4", copy=False).data)
    pointer = 0
    for first in range(0, num_sequences, CHUNK_ENTRIES):
        ends = pointer + np.cumsum(sizes[first : first + CHUNK_ENTRIES], dtype=np.int64) * dtype.itemsize
        file.write(np.concatenate([[pointer], ends[:-1]]).astype("<i8").data)
        pointer = int(ends[-1])
    for first in range(0, num_sequences + 1, CHUNK_ENTRIES):
        file.write(np.arange(first, min(first + CHUNK_ENTRIES, num_sequences + 1), dtype="<i8").data)


@final
class MegatronIndex:
    """The documents of one `.bin` file, looked up in the mapped `.idx` file."""

    def __init__(
        self, path: Path, view: memoryview, *, bin_path: Path, num_bytes: int, key: str, num_probes: int
    ) -> None:
        self.path = path
        self._key = key
        self._require(len(view) >= HEADER.size, f"is truncated within its header of {HEADER.size} bytes")
        magic, version, code, num_sequences, num_marks = HEADER.unpack_from(view)
        self._require(magic == MAGIC, f"is not a Megatron index: begins with {bytes(view[:9])!r}, not {MAGIC!r}")
        self._require(version == VERSION, f"has version {version}, allowed is {VERSION}")
        self._require(code in DTYPES, f"has the unknown dtype code {code}, allowed are {', '.join(map(str, DTYPES))}")
        self.dtype = DTYPES[code]
        message = f"says that {bin_path.name} contains {self.dtype}; token ids must be integers"
        self._require(self.dtype.kind in "iu", message)
        expected = HEADER.size + 12 * num_sequences + 8 * num_marks
        with_modes = expected + num_sequences
        message = f"must be {expected} bytes for {num_sequences} sequences and {num_marks} document marks, "
        self._require(len(view) in (expected, with_modes), f"{message}is {len(view)}: truncated or of another format")
        self._require(num_sequences > 0, "contains no documents")
        self._lengths, rest = _cut(view[HEADER.size :], "i", num_sequences)
        self._pointers, rest = _cut(rest, "q", num_sequences)
        self._marks, _ = _cut(rest, "q", num_marks)
        self._num_bytes = num_bytes
        self.num_documents = num_marks - 1
        self._check_cover(bin_path, num_probes)

    def document(self, number: int) -> tuple[int, int]:
        """First token and end of a document."""
        assert 0 <= number < self.num_documents
        first, end = self._first_token(self._marks[number]), self._first_token(self._marks[number + 1])
        nearby = self._marks[max(0, number - 1) : number + 3].tolist()
        is_ordered = first <= end and nearby == sorted(nearby)
        self._require(is_ordered, f"is broken: document {number} or one beside it ends before it begins")
        return first, end

    def document_at(self, position: int) -> tuple[int, int, int]:
        """Number, first token and end of the document that contains the token."""
        sequence = bisect_right(self._pointers, position * self.dtype.itemsize) - 1
        number = bisect_right(self._marks, sequence) - 1
        sequence_end = self._first_token(sequence) + self._lengths[sequence]
        if 0 <= number < self.num_documents and position < sequence_end:
            first, end = self.document(number)
            if first <= position < end:
                return number, first, end
        raise ConfigError(self._key, f"{self.path}: is broken: no document contains token {position}")

    def _first_token(self, sequence: int) -> int:
        """Where a sequence begins, or the end of the data; the sequence before must end there."""
        fits = 0 <= sequence <= len(self._pointers)
        self._require(fits, f"is broken: a document begins at sequence {sequence}")
        first = self._pointers[sequence] if sequence < len(self._pointers) else self._num_bytes
        message = f"is broken: sequence {sequence - 1} does not end where the next one begins"
        self._require(first == (self._end_byte(sequence - 1) if sequence else 0), message)
        return first // self.dtype.itemsize

    def _end_byte(self, sequence: int) -> int:
        return self._pointers[sequence] + self._lengths[sequence] * self.dtype.itemsize

    def _check_cover(self, bin_path: Path, num_probes: int) -> None:
        """Check that the documents cover the data file without gaps: at both ends and at `num_probes` probes."""
        last = len(self._pointers) - 1
        end = self._end_byte(last)
        found = f"{bin_path.name} has {self._num_bytes}"
        self._require(self._pointers[0] == 0, f"begins at byte {self._pointers[0]} of {bin_path.name}, allowed is 0")
        if end > self._num_bytes:
            raise ConfigError(self._key, f"{bin_path}: is truncated: {self.path.name} covers {end} bytes, {found}")
        self._require(end == self._num_bytes, f"does not match its data: it covers {end} bytes, {found}")
        self._require(self.num_documents >= 1, "contains no documents")
        ends = (self._marks[0], self._marks[self.num_documents])
        message = f"must mark documents from sequence 0 to {last + 1}, but marks {ends[0]} to {ends[1]}"
        self._require(ends == (0, last + 1), message)
        for probe in range(num_probes):
            sequence = last * probe // num_probes
            if sequence < last:
                fits = self._lengths[sequence] >= 0 and self._end_byte(sequence) == self._pointers[sequence + 1]
                self._require(fits, f"is broken: sequence {sequence} does not end where the next one begins")
            mark = (self.num_documents - 1) * probe // num_probes
            fits = 0 <= self._marks[mark] <= self._marks[mark + 1] <= last + 1
            self._require(fits, f"is broken: document {mark} ends before it begins")

    def _require(self, condition: bool, message: str) -> None:
        require(condition, self._key, f"{self.path}: {message}")


def _cut(view: memoryview, kind: str, count: int) -> tuple[memoryview[int], memoryview]:
    """The first `count` numbers, and the rest. Views, because numpy would copy unaligned arrays to bisect."""
    num_bytes = struct.calcsize(kind) * count
    numbers: memoryview[int] = view[:num_bytes].cast(kind)  # type: ignore[call-overload]
    return numbers, view[num_bytes:]
