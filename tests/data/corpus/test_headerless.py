"""Files without an index: every published format is read, every broken file is rejected in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config.data import TokenDtype
from harness.data.corpus.token_files import Tokens
from tests.data.token_files import (
    CODES,
    check_rejected,
    opened,
    write_pair,
)


@pytest.mark.parametrize("dtype", list(TokenDtype))
@pytest.mark.parametrize("name", ["train.bin", "part-0-00000.npy", "tokens"])
def test_flat_tokens_are_of_the_named_dtype(tmp_path: Path, name: str, dtype: TokenDtype) -> None:
    """nanoGPT's `.bin` and OLMo's `.npy`: no header at all."""
    stored = "uint16" if dtype is TokenDtype.auto else dtype.value
    (tmp_path / name).write_bytes(np.arange(100, dtype=stored).tobytes())
    file = opened(tmp_path / name, dtype)
    assert file.dtype == np.dtype(stored)
    assert file.num_documents == 1
    assert file.read(10, 5).tolist() == [10, 11, 12, 13, 14]
    assert file.document_at(99) == (0, 0, 100)
    assert file.document(0) == (0, 100)


@pytest.mark.parametrize("dtype", [TokenDtype.auto, TokenDtype.uint32])
def test_odd_bytes_are_refused(tmp_path: Path, dtype: TokenDtype) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(7))
    check_rejected(
        tmp_path / "train.bin", "has 7 bytes, which is not a multiple", names=tmp_path / "train.bin", dtype=dtype
    )


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
@pytest.mark.parametrize("largest", [256, 50_000, 200_000, 300_000, 1_000_000])
def test_wider_tokens_are_not_read_as_uint16(tmp_path: Path, largest: int, dtype: str) -> None:
    """Of every size: the ids of bytes, and those of the largest vocabularies."""
    path = tmp_path / "part.npy"
    tokens = np.random.default_rng(0).integers(0, largest, 5000, dtype=dtype)
    path.write_bytes(tokens.tobytes())
    check_rejected(path, "looks like uint32", names=path)
    assert opened(path, TokenDtype(dtype)).num_tokens == 5000
    assert opened(path, TokenDtype.uint16).num_tokens == tokens.nbytes // 2


@pytest.mark.parametrize("text", ["The quick brown fox.\r\n\tIt jumps.\n", "Füchse springen über 狐狸 \U0001f98a\n"])
@pytest.mark.parametrize("count", [1, 3000])
def test_text_is_not_read_as_tokens(tmp_path: Path, text: str, count: int) -> None:
    """Also a file with an odd number of bytes, and probes that begin or end within a character."""
    path = tmp_path / "prose.txt"
    for start in range(2):
        path.write_text((text * count)[start:], encoding="utf-8")
        check_rejected(path, "looks like text; tokenize it with harness data prepare", names=path)
    path.write_text(2 * text, encoding="utf-8")
    assert opened(path, TokenDtype.uint16).num_tokens == len(text.encode())


@pytest.mark.parametrize("vocab_size", [1, 2, 16, 300, 65536])
def test_uint16_is_accepted(tmp_path: Path, vocab_size: int) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(np.random.default_rng(0).integers(0, vocab_size, 5000, dtype=np.uint16).tobytes())
    assert opened(path).num_tokens == 5000


def _llmc(magic: int, version: int, tokens: Tokens, count: int | None = None) -> bytes:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_llmc_headers_are_read(tmp_path: Path, magic: int, version: int, dtype: str) -> None:
    path = tmp_path / "fineweb_train_000001.bin"
    tokens = np.array([50256, 1, 2, 3], dtype=dtype)
    path.write_bytes(_llmc(magic, version, tokens))
    file = opened(path)
    assert file.dtype == tokens.dtype
    assert file.read(0, 4).tolist() == [50256, 1, 2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_llmc(20240520, 2, np.arange(9, dtype=np.uint16)), "version 2, allowed is 1"),
        (_llmc(20240801, 1, np.arange(9, dtype=np.uint32)), "version 1, allowed is 7"),
        (_llmc(20240520, 1, np.arange(9, dtype=np.uint16), 10), "is truncated: 10 tokens of uint16 need 1044 bytes"),
        (_llmc(20240520, 1, np.arange(9, dtype=np.uint16), 8), "is longer than its header says"),
        (_llmc(20240520, 1, np.arange(9, dtype=np.uint16))[:500], "is truncated"),
        (_llmc(20240520, 1, np.arange(0, dtype=np.uint16)), "contains no tokens"),
        (_llmc(20240520, 1, np.arange(9, dtype=np.uint16), -1), "is longer than its header says"),
        (_llmc(20240522, 1, np.arange(9, dtype=np.uint16)), "evaluation file"),
    ],
)
def test_a_broken_llmc_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    check_rejected(path, message, names=path)


@pytest.mark.parametrize("dtype", [*CODES, ">u2", ">i4"])
@pytest.mark.parametrize("name", ["tokens.npy", "tokens.bin"])
def test_numpy_files_are_read(tmp_path: Path, name: str, dtype: str) -> None:
    with (tmp_path / name).open("wb") as file:
        np.save(file, np.arange(50, dtype=dtype))
    tokens = opened(tmp_path / name)
    assert tokens.dtype == np.dtype(dtype)
    assert tokens.read(3, 4).tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(5), "contains float64; token ids must be integers"),
        (np.zeros(5, dtype=bool), "contains bool"),
        (np.array(["a"]), "contains <U1"),
        (np.zeros((5, 2), dtype=np.int32), r"has shape \(5, 2\)"),
        (np.asfortranarray(np.zeros((5, 2), dtype=np.int32)), r"has shape \(5, 2\)"),
        (np.array(3), r"has shape \(\)"),
        (np.zeros(0, dtype=np.int32), "contains no tokens"),
    ],
)
def test_numpy_file_without_token_ids_is_rejected(tmp_path: Path, array: np.ndarray[Any, Any], message: str) -> None:
    np.save(tmp_path / "tokens.npy", array)
    check_rejected(tmp_path / "tokens.npy", message, names=tmp_path / "tokens.npy")


def test_every_truncation_of_a_numpy_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(5, dtype=np.int32))
    content = path.read_bytes()
    for length in range(6, len(content)):
        path.write_bytes(content[:length])
        check_rejected(path, "is truncated|cannot be read", names=path)
    path.write_bytes(content + b"\x00")
    check_rejected(path, "is longer than its header says", names=path)
    path.write_bytes(content.replace(b"NUMPY\x01", b"NUMPY\x07"))
    check_rejected(path, "cannot be read", names=path)
    path.write_bytes(content.replace(b"(5,)", b"(5, "))
    check_rejected(path, "has a NumPy header that cannot be read", names=path)


@pytest.mark.parametrize("kind", ["pair", "numpy", "llmc"])
def test_a_header_that_contradicts_the_configuration_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "corpus.bin"
    match kind:
        case "pair":
            write_pair(tmp_path / "corpus", [[1, 2]])
        case "numpy":
            with path.open("wb") as file:
                np.save(file, np.arange(5, dtype=np.uint16))
        case _:
            path.write_bytes(_llmc(20240520, 1, np.arange(9, dtype=np.uint16)))
    check_rejected(path, "contains uint16, but the source's dtype is int32", names=path, dtype=TokenDtype.int32)
    assert opened(path, TokenDtype.uint16).dtype == np.uint16


@pytest.mark.parametrize("name", ["train.bin", "train.npy"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    check_rejected(tmp_path / name, "is empty", names=tmp_path / name)
