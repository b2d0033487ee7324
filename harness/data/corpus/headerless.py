"""Layout of a token file without an index: dtype, offset and number of tokens, from its header or its content.

Why: three formats share two file endings. A wrong guess does not fail, it trains on noise; so the content decides, not
the name.
How: a NumPy file and an llm.c file state in their header what they contain, and their size must agree. Anything else is
tokens from the first byte to the last (nanoGPT's `.bin`, OLMo's `.npy`), of the configured dtype, or uint16 if none is
configured; then a few probes reject text, and data that can only be of 32 or 64 bits.
Left out: NumPy arrays of more than one dimension; text that is not UTF-8.
"""

from __future__ import annotations

import codecs
import struct
from io import BytesIO
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np

from harness.config.data import TokenDtype
from harness.config.errors import ConfigError, require

NUMPY_MAGIC = b"\x93NUMPY"
HEADER_ERRORS = (ValueError, TypeError, TokenError)
"""What NumPy raises for a damaged header: it parses the header as Python."""

LLMC_HEADER_BYTES = 1024
LLMC_TOKENS: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""Magic -> (version, dtype of the tokens): GPT-2, Llama 3."""
LLMC_EVALUATION = 20240522

HEAD_BYTES = 4096
"""Bytes read to find the format; no supported header is longer."""

PROBE_TOKENS = 1024
CONTROL_BYTES = frozenset(range(0x20)).difference(b"\t\n\v\f\r") | {0x7F}
"""Bytes that text does not contain. Token ids do: their high bytes are small."""
UTF8_CONTINUATION = bytes(range(0x80, 0xC0))

LARGEST_HIGH_HALF = 15
"""High half of ids below 2 ** 20, above all vocabularies."""


class FlatLayout(NamedTuple):
    dtype: np.dtype[Any]
    offset_bytes: int
    num_tokens: int


def flat_layout(path: Path, mapped: memoryview, *, dtype: TokenDtype, key: str, num_probes: int) -> FlatLayout:
    """The layout of a file without an index; ConfigError if it cannot be a stream of tokens."""
    head = bytes(mapped[:HEAD_BYTES])
    if head.startswith(NUMPY_MAGIC):
        return _numpy_layout(path, head, len(mapped), key=key)
    if len(head) >= 12:
        magic, version, num_tokens = struct.unpack_from("<3i", head)
        message = f"{path}: is an llm.c evaluation file, which contains questions, not a stream of tokens"
        require((magic, version) != (LLMC_EVALUATION, 1), key, message)
        if magic in LLMC_TOKENS:
            return _llmc_layout(path, (magic, version, num_tokens), len(mapped), key=key)
    return _raw_layout(path, mapped, dtype=dtype, key=key, num_probes=num_probes)


def check_size(path: Path, layout: FlatLayout, num_bytes: int, *, key: str) -> None:
    """Check the header's count against the file's size."""
    expected = layout.offset_bytes + layout.num_tokens * layout.dtype.itemsize
    problem = "is truncated" if num_bytes < expected else "is longer than its header says"
    message = (
        f"{path}: {problem}: {layout.num_tokens} tokens of {layout.dtype} need {expected} bytes, it has {num_bytes}"
    )
    require(num_bytes == expected, key, message)
    require(layout.num_tokens > 0, key, f"{path}: contains no tokens")


def _numpy_layout(path: Path, head: bytes, num_bytes: int, *, key: str) -> FlatLayout:
    file = BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = read(file)
    except (KeyError, *HEADER_ERRORS):
        raise ConfigError(key, f"{path}: has a NumPy header that cannot be read") from None
    require(dtype.kind in "iu", key, f"{path}: contains {dtype}; token ids must be integers")
    require(len(shape) == 1, key, f"{path}: must have one dimension, has shape {shape}")
    layout = FlatLayout(dtype, file.tell(), shape[0])
    check_size(path, layout, num_bytes, key=key)
    return layout


def _llmc_layout(path: Path, header: tuple[int, int, int], num_bytes: int, *, key: str) -> FlatLayout:
    magic, version, num_tokens = header
    allowed, dtype = LLMC_TOKENS[magic]
    require(version == allowed, key, f"{path}: is an llm.c file of version {version}, allowed is {allowed}")
    layout = FlatLayout(dtype, LLMC_HEADER_BYTES, num_tokens)
    check_size(path, layout, num_bytes, key=key)
    return layout


def _raw_layout(path: Path, mapped: memoryview, *, dtype: TokenDtype, key: str, num_probes: int) -> FlatLayout:
    stored = np.dtype("<u2" if dtype is TokenDtype.auto else dtype.value)
    if dtype is TokenDtype.auto:
        advice = "tokenize it with harness data prepare, or set the source's dtype if it contains token ids"
        require(not _looks_like_text(mapped, num_probes), key, f"{path}: looks like text; {advice}")
    num_tokens, odd_bytes = divmod(len(mapped), stored.itemsize)
    message = f"{path}: has {len(mapped)} bytes, which is not a multiple of {stored.itemsize}, the size of {stored}"
    require(odd_bytes == 0, key, message)
    layout = FlatLayout(stored, 0, num_tokens)
    if dtype is TokenDtype.auto:
        message = f"{path}: looks like uint32 but has no header; set the source's dtype (to uint16 if it is that)"
        require(not _looks_like_uint32(np.frombuffer(mapped, dtype=stored), num_probes), key, message)
    return layout


def probed_ranges(num_bytes: int, num_probes: int) -> list[tuple[int, int]]:
    """The byte ranges of a file without a header that `flat_layout` reads."""
    starts = _probe_starts(num_bytes // 2, num_probes)
    return [(2 * int(start), min(2 * int(start + PROBE_TOKENS), num_bytes)) for start in starts]


def _probe_starts(num_halves: int, num_probes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    starts = np.linspace(0, max(0, num_halves - PROBE_TOKENS), num_probes).astype(np.int64)
    return starts // 2 * 2


def _looks_like_text(mapped: memoryview, num_probes: int) -> bool:
    """Whether all probes are UTF-8 without control characters. A probe may begin and end within a character."""
    for first, end in probed_ranges(len(mapped), num_probes):
        probe = bytes(mapped[first:end])
        try:
            codecs.getincrementaldecoder("utf-8")().decode(probe[:3].lstrip(UTF8_CONTINUATION) + probe[3:])
        except UnicodeDecodeError:
            return False
        if CONTROL_BYTES.intersection(probe):
            return False
    return True


def _looks_like_uint32(tokens: np.ndarray[Any, np.dtype[Any]], num_probes: int) -> bool:
    """Whether every second uint16, and only those, is as small as the high half of a token id; for ids of bytes, 0."""
    starts = _probe_starts(len(tokens), num_probes)
    halves = np.concatenate([tokens[start : start + PROBE_TOKENS] for start in starts])
    low, high = halves[::2], halves[1::2]
    if len(high) < PROBE_TOKENS // 2 or high.max() > LARGEST_HIGH_HALF:
        return False
    return bool(low.max() > (255 if high.any() else 0))
