"""Token files for tests: valid ones, hand-made ones, and a check that a broken one is rejected."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from harness.config.data import TokenDtype
from harness.config.errors import ConfigError
from harness.data.corpus.token_files import IndexedWriter, TokenFile, open_tokens

KEY = "data.sources.main.paths"
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8, "uint32": 9, "uint64": 10}
DOCUMENTS = st.lists(st.lists(st.integers(0, 127), max_size=9), min_size=1, max_size=12).filter(any)


def opened(path: str | Path, dtype: TokenDtype = TokenDtype.auto) -> TokenFile:
    return open_tokens(path, dtype=dtype, key=KEY)


def write_pair(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> None:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(np.array(document, dtype=dtype))


def index_bytes(
    lengths: list[int],
    *,
    code: int = 8,
    itemsize: int = 2,
    marks: list[int] | None = None,
    pointers: list[int] | None = None,
) -> bytes:
    """A hand-made index, after the published layout."""
    if marks is None:
        marks = list(range(len(lengths) + 1))
    if pointers is None:
        pointers = [itemsize * sum(lengths[:number]) for number in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(marks))
    count = len(lengths)
    return head + struct.pack(f"<{count}i", *lengths) + struct.pack(f"<{count}q{len(marks)}q", *pointers, *marks)


def pair(directory: Path, index: bytes, num_bytes: int) -> Path:
    prefix = directory / "corpus"
    prefix.with_suffix(".bin").write_bytes(bytes(num_bytes))
    prefix.with_suffix(".idx").write_bytes(index)
    return prefix


def check_rejected(path: str | Path, message: str, *, names: Path, dtype: TokenDtype = TokenDtype.auto) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        opened(path, dtype)
    assert str(caught.value).startswith(f"{KEY}: {names}: ")
    assert "\n" not in str(caught.value)


@contextmanager
def fresh_directory() -> Iterator[Path]:
    """A new directory for each hypothesis example."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)
