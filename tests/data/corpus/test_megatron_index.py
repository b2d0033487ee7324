"""Megatron's pairs: byte for byte what megatron-core writes, and every broken index is rejected in one line."""

from __future__ import annotations

import struct
import tracemalloc
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.errors import ConfigError
from harness.data.corpus.token_files import IndexedWriter
from tests.data.token_files import (
    CODES,
    DOCUMENTS,
    check_rejected,
    fresh_directory,
    index_bytes,
    opened,
    pair,
    write_pair,
)

INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16")


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = "megatron-core is not installed"
        module: ModuleType = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=reason)
    return module


@settings(deadline=None, max_examples=60)
@given(data=st.data(), documents=DOCUMENTS)
def test_a_position_finds_its_document(data: st.DataObject, documents: list[list[int]]) -> None:
    """Against a list of all positions; documents of zero, one and several sequences, as Megatron allows."""
    lengths = [len(document) for document in documents]
    inner = data.draw(st.lists(st.integers(0, len(lengths)), max_size=6))
    marks = [0, *sorted(inner), len(lengths)]
    owners = [
        number for number in range(len(marks) - 1) for _ in range(sum(lengths[marks[number] : marks[number + 1]]))
    ]
    with fresh_directory() as directory:
        file = opened(pair(directory, index_bytes(lengths, marks=marks), 2 * sum(lengths)))
        assert file.num_documents == len(marks) - 1
        for position, owner in enumerate(owners):
            first = owners.index(owner)
            expected = (owner, first, first + owners.count(owner))
            assert file.document_at(position) == expected
            assert file.document(owner) == expected[1:]


def test_the_layout_is_the_published_one(tmp_path: Path) -> None:
    write_pair(tmp_path / "corpus", [[1, 2, 3], [], [500]])
    assert (tmp_path / "corpus.bin").read_bytes() == bytes([1, 0, 2, 0, 3, 0, 244, 1])
    expected = (
        "4d4d494449445800 00"  # magic
        "0100000000000000"  # version
        "08"  # uint16
        "0300000000000000"  # sequences
        "0400000000000000"  # document marks
        "03000000 00000000 01000000"  # lengths
        "0000000000000000 0600000000000000 0600000000000000"  # pointers
        "0000000000000000 0100000000000000 0200000000000000 0300000000000000"  # marks
    )
    assert (tmp_path / "corpus.idx").read_bytes() == bytes.fromhex(expected)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_megatron_writes_the_same_bytes_and_reads_ours(tmp_path: Path, megatron: ModuleType, dtype: str) -> None:
    documents = [[5, 6, 7], [], [8], list(range(100))]
    write_pair(tmp_path / "ours", documents, dtype)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()

    dataset = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [dataset[number].tolist() for number in range(len(dataset))] == documents
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]


def test_megatrons_multimodal_files_are_read(tmp_path: Path, megatron: ModuleType) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.int32, multimodal=True)
    builder.add_document(np.array([1, 2, 3]), [1, 2], [0, 1])
    builder.add_document(np.array([4]), [1], [0])
    builder.finalize(str(tmp_path / "corpus.idx"))
    file = opened(tmp_path / "corpus")
    assert file.read(0, 4).tolist() == [1, 2, 3, 4]
    assert [file.document(0), file.document(1)] == [(0, 3), (3, 4)]


@pytest.mark.parametrize("dtype", CODES)
def test_every_integer_code_is_read(tmp_path: Path, dtype: str) -> None:
    tokens = np.array([1, 2, 100], dtype=dtype)
    prefix = pair(tmp_path, index_bytes([3], code=CODES[dtype], itemsize=tokens.itemsize), 0)
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    file = opened(prefix)
    assert file.dtype == tokens.dtype
    assert file.read(0, 3).tolist() == [1, 2, 100]


@pytest.mark.parametrize(
    ("index", "num_bytes", "message"),
    [
        (b"MMIDIDX\x00", 6, "truncated within its header"),
        (b"TNTIDX\x00\x00\x00" + bytes(40), 6, "is not a Megatron index"),
        (index_bytes([3]).replace(struct.pack("<Q", 1), struct.pack("<Q", 2), 1), 6, "version 2, allowed is 1"),
        (index_bytes([3], code=11), 6, "unknown dtype code 11"),
        (index_bytes([3], code=0), 6, "unknown dtype code 0"),
        (index_bytes([3], code=6, itemsize=8), 24, "contains float64; token ids must be integers"),
        (index_bytes([3], code=7, itemsize=4), 12, "contains float32; token ids must be integers"),
        (index_bytes([3, 4])[:-1], 14, "must be 82 bytes .* is 81: truncated"),
        (index_bytes([3]) + bytes(3), 6, "truncated or of another format"),
        (index_bytes([]), 6, "contains no documents"),
        (index_bytes([3], marks=[0]), 6, "must mark|contains no documents"),
        (index_bytes([3], marks=[]), 6, "must mark|contains no documents"),
        (index_bytes([3]), 8, "does not match its data: it covers 6 bytes, corpus.bin has 8"),
        (index_bytes([3], pointers=[2]), 8, "begins at byte 2"),
        (index_bytes([1, 2, 1], pointers=[0, 4, 6]), 8, "sequence 0 does not end where the next one begins"),
        (index_bytes([1, 2, 1], pointers=[0, 2, 2]), 4, "sequence 1 does not end where the next one begins"),
        (index_bytes([4, -2, 2], pointers=[0, 8, 4]), 8, "sequence 1 does not end where"),
        (index_bytes([1, 2, 1], marks=[0, 1, 2]), 8, "from sequence 0 to 3, but marks 0 to 2"),
        (index_bytes([1, 2, 1], marks=[1, 2, 3]), 8, "from sequence 0 to 3, but marks 1 to 3"),
        (index_bytes([1, 2, 1], marks=[0, 3, 1, 3]), 8, "document 1 ends before it begins"),
        (index_bytes([1, 2, 1], marks=[0, 7, 3]), 8, "document 0 ends before it begins"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, index: bytes, num_bytes: int, message: str) -> None:
    prefix = pair(tmp_path, index, num_bytes)
    check_rejected(prefix, message, names=prefix.with_suffix(".idx"))


def test_every_truncation_of_the_data_is_rejected(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    write_pair(prefix, [[1, 2], [3], []])
    content = prefix.with_suffix(".bin").read_bytes()
    for length in range(1, len(content)):
        prefix.with_suffix(".bin").write_bytes(content[:length])
        check_rejected(prefix, "is truncated: corpus.idx covers 6 bytes", names=prefix.with_suffix(".bin"))


def test_every_truncation_of_the_index_is_rejected(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    write_pair(prefix, [[1, 2], [3]])
    path = prefix.with_suffix(".idx")
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        check_rejected(prefix, "truncated|is empty", names=path)


@pytest.mark.parametrize("wrong", [-2, 0, 2 * 507, 2**40])
def test_damage_between_the_probes_is_reported_at_lookup(tmp_path: Path, wrong: int) -> None:
    lengths = [1] * 1000
    pointers = [2 * number for number in range(1000)]
    pointers[505] = pointers[506] = wrong
    file = opened(pair(tmp_path, index_bytes(lengths, pointers=pointers), 2000))
    assert file.document_at(400) == (400, 400, 401)
    with pytest.raises(ConfigError, match=r"corpus\.idx: is broken: "):
        file.document_at(505)


@pytest.mark.parametrize("wrong", [-2, 3, 2023, 2800])
@pytest.mark.parametrize("field", ["lengths", "pointers", "marks"])
def test_a_damaged_entry_never_moves_a_boundary(tmp_path: Path, field: str, wrong: int) -> None:
    """Document 505 begins where document 504 ends; damage to that boundary is found from either side."""
    lengths, pointers, marks = [2] * 1000, [4 * number for number in range(1000)], list(range(1001))
    {"lengths": lengths, "pointers": pointers, "marks": marks}[field][505] = wrong
    file = opened(pair(tmp_path, index_bytes(lengths, pointers=pointers, marks=marks), 4000))
    assert file.document(300) == (600, 602)
    broken = r"^data\.sources\.main\.paths: .*corpus\.idx: is broken"
    for number in (505,) if field == "lengths" else (504, 505):
        with pytest.raises(ConfigError, match=broken):
            file.document(number)


def test_lookup_does_not_scan_the_documents(tmp_path: Path) -> None:
    num_documents = 2**21
    with IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
        writer._lengths.extend([1] * num_documents)
        writer._data.write(bytes(2 * num_documents))
    tracemalloc.start()
    file = opened(tmp_path / "corpus")
    for position in range(0, num_documents, 99_991):
        assert file.document_at(position) == (position, position, position + 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
