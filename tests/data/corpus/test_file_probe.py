"""A file is identified by its sizes and a few blocks, at a cost that does not depend on its size."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.config.data import DataKind, SourceConfig
from harness.config.errors import ConfigError
from harness.data.corpus.file_probe import BLOCK_BYTES, READS_PER_FILE, list_files, positions, probe, stat_file
from harness.data.corpus.remote_cache import use_cache
from tests import composed
from tests.data.token_files import KEY, write_pair


def probe_of(path: Path) -> str:
    return probe(stat_file(path, key=KEY), key=KEY)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    write_pair(tmp_path / "a", [draw.integers(0, 250, 500).tolist() for _ in range(400)])
    return tmp_path / "a.bin"


def test_the_first_and_the_last_block_and_some_between_are_read() -> None:
    for num_bytes in (1, BLOCK_BYTES, BLOCK_BYTES + 1, 10**6, 10**12):
        places = positions(num_bytes, 4)
        assert places[0] == 0
        assert num_bytes <= places[-1] + BLOCK_BYTES
        assert len(places) <= 4
        assert places == positions(num_bytes, 4)


def test_reads_do_not_grow_with_the_file(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    pread = os.pread

    def counted(descriptor: int, num_bytes: int, position: int) -> bytes:
        reads.append(num_bytes)
        return pread(descriptor, num_bytes, position)

    monkeypatch.setattr(os, "pread", counted)
    probe_of(pair)
    assert len(reads) == READS_PER_FILE
    assert sum(reads) == READS_PER_FILE * BLOCK_BYTES


def test_equal_files_have_equal_probes_and_another_block_another(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for ending in (".bin", ".idx"):
        (tmp_path / "there" / f"b{ending}").write_bytes(pair.with_suffix(ending).read_bytes())
    other = tmp_path / "there" / "b.bin"
    assert probe_of(pair) == probe_of(other)
    for path in (other, other.with_suffix(".idx")):
        kept = path.read_bytes()
        for place in (0, len(kept) - 1):
            corrupted = bytearray(kept)
            corrupted[place] ^= 1
            path.write_bytes(corrupted)
            assert probe_of(other) != probe_of(pair)
        path.write_bytes(kept)
    other.with_suffix(".idx").unlink()
    assert probe_of(other) != probe_of(pair)


def test_removed_file_is_named(pair: Path) -> None:
    file = stat_file(pair, key=KEY)
    pair.unlink()
    for read_file in (lambda: probe(file, key=KEY), lambda: stat_file(pair, key=KEY)):
        with pytest.raises(ConfigError, match=rf"^{KEY}: {pair}: cannot be read"):
            read_file()


def files_of(**paths: list[str]) -> dict[str, SourceConfig]:
    return {name: SourceConfig(kind=DataKind.files, paths=given) for name, given in paths.items()}


def test_a_file_under_two_names_is_refused(pair: Path, tmp_path: Path) -> None:
    """Its last windows are held out under one name and trained on under the other."""
    (tmp_path / "latest.bin").symlink_to(pair)
    (tmp_path / "hard").mkdir()
    (tmp_path / "hard" / "b.bin").hardlink_to(pair)
    use_cache(replace(composed.load([]).data.remote, cache_dir=str(tmp_path / "cache")))
    others = [f"{tmp_path}/../{tmp_path.name}/a.bin", str(tmp_path / "hard" / "b.bin")]
    urls = [f"file://{pair}", f"local://{tmp_path}/hard/../a.bin"]
    line = r"^data\.sources\.main\.paths: .* and .* of source main are the same file"
    for paths in ([str(tmp_path / "*.bin")], *([str(pair), other] for other in others + urls), urls):
        with pytest.raises(ConfigError, match=line):
            list_files(files_of(main=paths))
    assert len(list_files(files_of(main=[str(pair), str(tmp_path / "a")]))["main"]) == 1


def test_files_of_one_content_are_two_files(pair: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.bin"
    shutil.copy2(pair, other)  # with its size and its time
    assert len(list_files(files_of(main=[str(pair), str(other)]))["main"]) == 2


def test_sources_share_all_their_files_or_none(pair: Path, tmp_path: Path) -> None:
    write_pair(tmp_path / "b", [[1, 2, 3]])
    everything, one = [str(tmp_path / "*.bin")], [str(pair)]
    with pytest.raises(
        ConfigError, match=rf"^data\.sources\.code\.paths: {pair} and {pair} of source web are the same file"
    ):
        list_files(files_of(web=everything, code=one))
    assert len(list_files(files_of(web=everything, code=everything))["code"]) == 2


def test_hidden_files_match_no_pattern(pair: Path, tmp_path: Path) -> None:
    """Copies that editors and file systems leave, such as `.ipynb_checkpoints/a-checkpoint.bin` and `._a.bin`."""
    (tmp_path / ".copies").mkdir()
    for copy in (tmp_path / "._a.bin", tmp_path / ".copies" / "a.bin"):
        copy.write_bytes(pair.read_bytes())
    (listed,) = list_files(files_of(main=[str(tmp_path / "**" / "*.bin")]))["main"]
    assert listed.path == str(pair)
    (named,) = list_files(files_of(main=[str(tmp_path / ".copies" / "*.bin")]))["main"]
    assert named.path == str(tmp_path / ".copies" / "a.bin")
    (file,) = list_files(files_of(main=[str(tmp_path / "._a.bin")]))["main"]
    assert file.path == str(tmp_path / "._a.bin")
