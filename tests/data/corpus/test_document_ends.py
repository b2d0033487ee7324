"""Documents of files without an index: as an index numbers them, found in the row itself, and the id must occur."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.data import TokenDtype
from harness.data.corpus import document_ends
from harness.data.corpus.corpus import SampleShape
from harness.data.corpus.document_ends import contains_token, num_searched, number_documents
from harness.data.corpus.token_files import IndexedWriter, TokenFile, open_tokens
from harness.data.corpus.token_windows import FilesCorpus

EOD = 3
LENGTH = 8


def _open(path: Path) -> TokenFile:
    return open_tokens(path, dtype=TokenDtype.auto, key="paths")


def _corpus(*files: TokenFile, eod_token: int | None = EOD) -> FilesCorpus:
    return FilesCorpus(list(files), shape=SampleShape(LENGTH, 1000), key="paths", eod_token=eod_token)


def _flat(path: Path, tokens: list[int] | np.ndarray) -> TokenFile:
    np.asarray(tokens, dtype=np.uint16).tofile(path)
    return _open(path)


def test_the_token_belongs_to_the_document_that_it_ends() -> None:
    tokens = np.array([EOD, 5, 6, EOD, EOD, 7, 8, 9, EOD])
    documents = number_documents(tokens, EOD)
    assert documents.tolist() == [0, 1, 1, 1, 2, 3, 3, 3, 3]
    assert documents.dtype == np.int32


def test_an_id_above_the_dtype_of_the_file_ends_nothing() -> None:
    assert not number_documents(np.arange(200, dtype=np.uint8), 50_256).any()


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(0, 14), min_size=1, max_size=30), ends=st.booleans())
def test_documents_are_those_of_an_index(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], ends: bool
) -> None:
    directory = tmp_path_factory.mktemp("documents")
    documents = [np.append(np.arange(10, 10 + length), EOD) for length in [*lengths, 40]]
    if not ends:
        documents[-1] = documents[-1][:-1]
    with IndexedWriter(directory / "indexed", np.dtype("uint16")) as writer:
        for document in documents:
            writer.add(document)
    indexed = _corpus(_open(directory / "indexed"))
    flat = _corpus(_flat(directory / "flat.bin", np.concatenate(documents)))
    assert flat.num_samples == indexed.num_samples
    for index in range(flat.num_samples):
        found = flat.documents(index)
        np.testing.assert_array_equal(found, indexed.documents(index))
        assert flat.origin(index)[:2] == (str(directory / "flat.bin"), index * LENGTH)
        assert flat.origin(index)[2:] == (0, found[-1])


def test_only_files_without_an_index_use_the_token(tmp_path: Path) -> None:
    tokens = np.full(40, EOD)
    with IndexedWriter(tmp_path / "indexed", np.dtype("uint16")) as writer:
        writer.add(tokens)
    both = _corpus(_open(tmp_path / "indexed"), _flat(tmp_path / "flat.bin", tokens))
    assert [file.path.name for file in both.flat_files] == ["flat.bin"]
    assert not both.documents(0).any()
    assert both.documents(both.num_samples - 1).tolist() == list(range(LENGTH + 1))


def test_the_fingerprint_contains_the_token_where_it_ends_documents(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "indexed", np.dtype("uint16")) as writer:
        writer.add(np.arange(40))
    indexed, flat = _open(tmp_path / "indexed"), _flat(tmp_path / "flat.bin", np.arange(40))
    assert len({_corpus(indexed, eod_token=token).fingerprint() for token in (None, EOD, 5)}) == 1
    assert len({_corpus(flat, eod_token=token).fingerprint() for token in (None, EOD, 5)}) == 3


def test_a_token_is_found_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_ends, "PROBE_TOKENS", 4)
    monkeypatch.setattr(document_ends, "BLOCK_TOKENS", 64)
    empty = _flat(tmp_path / "empty.bin", np.full(1000, 10))
    for place in (0, 63, 64, 130, 777, 999):
        tokens = np.full(1000, 10)
        tokens[place] = EOD
        file = _flat(tmp_path / f"{place}.bin", tokens)
        assert contains_token([file], EOD)
        assert contains_token([empty, file], EOD)
        assert not contains_token([file], 11)
    assert not contains_token([empty], EOD)


def test_the_search_reads_a_limited_number_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_ends, "PROBE_TOKENS", 4)
    monkeypatch.setattr(document_ends, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(document_ends, "SCANNED_TOKENS", 1100)
    first, second = np.full(1000, 10), np.full(1000, 10)
    second[[98, 105]] = 20, 21
    files = [_flat(tmp_path / "first.bin", first), _flat(tmp_path / "second.bin", second)]
    assert num_searched(files) == 1100
    assert num_searched(files[:1]) == 1000
    assert contains_token(files, 20)
    assert not contains_token(files, 21)
