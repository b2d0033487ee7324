"""File maps are read-only, need no descriptor, and are removed with their last view."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.data.corpus.mapped_file import map_file
from tests.data.token_files import index_bytes
from tests.forks import ROOT

NUM_FILES = 5000
NUM_TOKENS = 33

OPEN_ALL = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
import numpy as np
from harness.config.data import DataKind, SourceConfig, SyntheticConfig
from harness.data.corpus.corpora import build_corpus
from harness.data.corpus.corpus import SampleShape
settings = {"num_samples": 9, "zipf_exponent": 1.0, "repeat_probability": 0.5, "rare_tokens": 0}
synthetic = SyntheticConfig(**settings, rare_probability=0.0)
source = SourceConfig(kind=DataKind.files, paths=[sys.argv[1]])
corpus = build_corpus("main", source, shape=SampleShape(16, 256), synthetic=synthetic, seed=0)
rows = corpus.rows(np.arange(corpus.num_samples))
print(corpus.num_samples, int(rows[:, 0].sum()), int(corpus.documents(1)[-1]), len(os.listdir("/proc/self/fd")))
"""


def maps_of(path: Path) -> int:
    return sum(line.rstrip().endswith(str(path)) for line in Path("/proc/self/maps").read_text().splitlines())


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.full
def test_five_thousand_pairs_are_open_under_a_limit_of_1024_descriptors(tmp_path: Path) -> None:
    index = index_bytes([20, NUM_TOKENS - 20])
    for number in range(NUM_FILES):
        (tmp_path / f"{number:04d}.bin").write_bytes(np.full(NUM_TOKENS, number % 251, dtype=np.uint16).tobytes())
        (tmp_path / f"{number:04d}.idx").write_bytes(index)
    result = subprocess.run(
        [sys.executable, "-c", OPEN_ALL, str(tmp_path / "*.bin")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-500:]
    num_samples, total, last_document, num_descriptors = map(int, result.stdout.split())
    assert num_samples == 2 * NUM_FILES
    assert total == 2 * sum(number % 251 for number in range(NUM_FILES)), "every file was read"
    assert last_document == 1
    assert num_descriptors < 20


def test_map_needs_no_descriptor_and_is_freed_with_its_last_view(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    before = num_descriptors()
    content = map_file(path)
    assert num_descriptors() == before
    view = content[10:20]
    del content
    gc.collect()
    assert maps_of(path) == 1
    assert view.tolist() == list(range(10, 20))
    del view
    gc.collect()
    assert maps_of(path) == 0


def test_a_map_cannot_be_written_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    content = map_file(path)
    with pytest.raises(ValueError, match="read-only"):
        content[0] = 1
    assert content.data.readonly


def test_file_that_cannot_be_mapped_raises_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "none")
    with pytest.raises(OSError, match=str(tmp_path)):
        map_file(tmp_path)
    (tmp_path / "empty").touch()
    assert len(map_file(tmp_path / "empty")) == 0
