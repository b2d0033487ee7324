"""Blocks and companions of many remote files are fetched at the same time, whichever file they belong to."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from harness.config.data import DataKind, RemoteDataConfig, SourceConfig, SyntheticConfig
from harness.core.object_store import ObjectStore
from harness.data.corpus.corpora import build_corpus
from harness.data.corpus.corpus import SampleShape
from harness.data.corpus.corpus_record import FileRecord
from harness.data.corpus.remote_cache import NUM_FETCHES, use_cache
from tests.data.token_files import write_pair

pytest.importorskip("fsspec")

SYNTHETIC = SyntheticConfig(num_samples=3, zipf_exponent=1, repeat_probability=0, rare_tokens=0, rare_probability=0)
NUM_FILES = 2 * NUM_FETCHES
LENGTH = 16


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with many pairs, each read of which waits until as many reads as possible are under way."""
    (tmp_path / "store").mkdir()
    for number in range(NUM_FILES):
        write_pair(tmp_path / "store" / f"{number:02}", [list(range(number, number + 3 * LENGTH + 1))])
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), retry_s=0))
    barrier, read = threading.Barrier(NUM_FETCHES, timeout=10), ObjectStore.read

    def read_together(store: ObjectStore, path: str, start: int | None = None, end: int | None = None) -> bytes:
        barrier.wait()
        return read(store, path, start, end)

    monkeypatch.setattr(ObjectStore, "read", read_together)
    return f"file://{tmp_path}/store"


def expected_rows() -> list[list[int]]:
    """The second window of each file."""
    return [list(range(number + LENGTH, number + 2 * LENGTH + 1)) for number in range(NUM_FILES)]


@pytest.mark.parametrize("names", ["pattern", "prefixes", "recorded"])
def test_companions_and_rows_of_many_files(url: str, tmp_path: Path, names: str) -> None:
    prefixes = [f"{url}/{number:02}" for number in range(NUM_FILES)]
    num_bytes, index_bytes = [(tmp_path / "store" / name).stat().st_size for name in ("00.bin", "00.idx")]
    recorded = [FileRecord(path=f"{prefix}.bin", num_bytes=num_bytes, index_bytes=index_bytes) for prefix in prefixes]
    corpus = build_corpus(
        "main",
        SourceConfig(kind=DataKind.files, paths=[f"{url}/*.bin"] if names == "pattern" else prefixes),
        shape=SampleShape(LENGTH, 1000),
        synthetic=SYNTHETIC,
        seed=0,
        files=recorded if names == "recorded" else None,
    )
    assert corpus.rows(np.arange(NUM_FILES) * 3 + 1).tolist() == expected_rows()
