"""Samples from files: every window once, documents as written, and every error names the file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.data import DataKind, SourceConfig, SyntheticConfig, TokenDtype
from harness.config.errors import ConfigError
from harness.data.corpus.corpora import build_corpus
from harness.data.corpus.corpus import Corpus, SampleShape, Tokens
from harness.data.corpus.token_files import IndexedWriter

SYNTHETIC = SyntheticConfig(
    num_samples=10, zipf_exponent=1.0, repeat_probability=0.0, rare_tokens=0, rare_probability=0.0
)
LENGTH = 8


def _write(prefix: Path, lengths: list[int], dtype: str = "uint16", first: int = 0) -> Tokens:
    """Documents of these lengths, whose tokens count up from `first`."""
    tokens = np.arange(first, first + sum(lengths))
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            writer.add(document.astype(dtype))
    return tokens


def _open(*paths: Path | str, vocab_size: int = 1000, dtype: TokenDtype = TokenDtype.auto) -> Corpus:
    source = SourceConfig(kind=DataKind.files, paths=[str(path) for path in paths], dtype=dtype)
    return build_corpus("main", source, shape=SampleShape(LENGTH, vocab_size), synthetic=SYNTHETIC, seed=0)


def test_windows_share_one_token_and_never_cross_files(tmp_path: Path) -> None:
    streams = [_write(tmp_path / "a", [20, 7, 30]), _write(tmp_path / "b", [5, 35], first=500)]
    corpus = _open(tmp_path / "*.bin")
    expected = [stream[at : at + LENGTH + 1] for stream in streams for at in range(0, len(stream) - LENGTH, LENGTH)]
    assert corpus.num_samples == len(expected) == 7 + 4
    for index, tokens in enumerate(expected):
        np.testing.assert_array_equal(corpus.sample(index), tokens)
    assert corpus.origin(8).file == str(tmp_path / "b.bin")
    assert corpus.origin(8).first_token == 8
    assert corpus.origin(7)[2:] == (0, 1), "the first window of b holds documents 0 and 1"


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(0, 14), min_size=1, max_size=30))
def test_documents_are_numbered_within_the_sample(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    lengths = [*lengths, 40]
    prefix = tmp_path_factory.mktemp("documents") / "corpus"
    _write(prefix, lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    corpus = _open(prefix)
    for index in range(corpus.num_samples):
        owners = owner[index * LENGTH : index * LENGTH + LENGTH + 1]
        documents = corpus.documents(index)
        np.testing.assert_array_equal(documents, np.unique(owners, return_inverse=True)[1])
        assert documents.dtype == np.int32
        origin = corpus.origin(index)
        assert (origin.first_document, origin.last_document) == (owners[0], owners[-1])


def test_a_flat_file_is_one_document(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "flat.bin")
    np.save(tmp_path / "other.npy", np.arange(100, dtype=np.uint32))
    corpus = _open(tmp_path / "flat.bin", tmp_path / "other.npy", vocab_size=100)
    assert corpus.num_samples == 24
    assert not corpus.documents(3).any()
    np.testing.assert_array_equal(corpus.sample(3), corpus.sample(15))


@pytest.mark.parametrize(("dtype", "bad"), [("uint16", 1000), ("int32", 1000), ("int32", -1), ("int64", 2**40)])
def test_id_outside_the_vocabulary_names_file_position_and_id(tmp_path: Path, dtype: str, bad: int) -> None:
    tokens = np.zeros(100, dtype=dtype)
    tokens[45] = bad
    np.save(tmp_path / "corpus.npy", tokens)
    corpus = _open(tmp_path / "corpus.npy")
    corpus.sample(4)
    with pytest.raises(ConfigError) as caught:
        corpus.sample(5)
    expected = f"{tmp_path}/corpus.npy: token 45 is id {bad}, must be in 0 .. 999 (model.vocab_size)"
    assert str(caught.value) == f"data.sources.main.paths: {expected}"


def test_with_a_report_ids_are_checked_when_opened(tmp_path: Path) -> None:
    tokens = _write(tmp_path / "corpus", [50, 50])
    report = {"tokens": 100, "max_token": 99}
    (tmp_path / "corpus.meta.json").write_text(json.dumps(report))
    np.save(tmp_path / "corpus.counts.npy", np.bincount(tokens, minlength=120))
    with pytest.raises(ConfigError, match=r"^model\.vocab_size: must be above 99, the largest .*corpus\.bin, got 99$"):
        _open(tmp_path / "corpus", vocab_size=99)
    counts = _open(tmp_path / "corpus", vocab_size=110).token_counts()
    assert counts is not None
    assert counts.tolist() == [1] * 100 + [0] * 10
    (tmp_path / "corpus.meta.json").write_text(json.dumps(report | {"tokens": 101}))
    with pytest.raises(ConfigError, match=r"corpus\.meta\.json: reports 101 tokens, but corpus\.bin has 100$"):
        _open(tmp_path / "corpus")
    (tmp_path / "corpus.meta.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"corpus\.meta\.json: is not a report with tokens and max_token$"):
        _open(tmp_path / "corpus")


@pytest.mark.parametrize("damage", ["cut off", "empty", "header", "shape", "dtype"])
def test_damaged_counts_are_named(tmp_path: Path, damage: str) -> None:
    _write(tmp_path / "corpus", [50])
    path = tmp_path / "corpus.counts.npy"
    np.save(path, np.ones((10, 5), dtype=np.int64) if damage == "shape" else np.ones(50, dtype=np.int64))
    content = path.read_bytes()
    match damage:
        case "cut off":
            path.write_bytes(content[:-100])
        case "empty":
            path.write_bytes(b"")
        case "header":
            path.write_bytes(content.replace(b"(50,)", b"(50, "))
        case "dtype":
            np.save(path, np.ones(50))
    problems = {"shape": "contains int64 of shape (10, 5)", "dtype": "contains float64 of shape (50,)"}
    with pytest.raises(ConfigError) as caught:
        _open(tmp_path / "corpus").token_counts()
    problem = "is damaged; delete it, or prepare the data again"
    if damage in problems:
        problem = f"must contain one count for each token id, {problems[damage]}"
    assert str(caught.value) == f"data.sources.main.paths: {path}: {problem}"


def test_without_a_report_token_counts_are_unknown(tmp_path: Path) -> None:
    _write(tmp_path / "corpus", [50])
    assert _open(tmp_path / "corpus").token_counts() is None


def test_too_short_files_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "corpus", [2 * LENGTH + 1])
    with pytest.raises(ConfigError, match=r"^data\.sources\.main\.paths: must contain at least 3 sequences, got 2 "):
        _open(tmp_path / "corpus")


@pytest.mark.parametrize("deed", ["unlink", "truncate"])
def test_removed_or_truncated_file_is_named(tmp_path: Path, deed: str) -> None:
    _write(tmp_path / "corpus", [100])
    corpus, path = _open(tmp_path / "corpus"), tmp_path / "corpus.bin"
    corpus.sample(3)
    path.unlink() if deed == "unlink" else path.write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"^data\.sources\.main\.paths: {path}: (was removed|changed)") as caught:
        corpus.sample(3)
    assert "\n" not in str(caught.value)


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    _write(tmp_path / "a", [60, 40])
    _write(tmp_path / "same", [60, 40])
    _write(tmp_path / "other", [61, 39])
    fingerprints = [_open(tmp_path / name).fingerprint() for name in ("a", "same", "other")]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert _open(tmp_path / "a", tmp_path / "same").fingerprint() not in fingerprints
