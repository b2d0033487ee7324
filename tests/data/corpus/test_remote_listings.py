"""A directory of an object store is listed once for all paths of a source, and again for what it does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.data import RemoteDataConfig
from harness.config.errors import ConfigError
from harness.core.object_store import ObjectStore, StoredObject
from harness.data.corpus.remote_cache import use_cache
from harness.data.corpus.token_files import expand
from tests.data.token_files import write_pair

pytest.importorskip("fsspec")

KEY = "data.sources.main.paths"
NUM_FILES = 10


@pytest.fixture
def listings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that were listed, of a store with pairs of files."""
    (tmp_path / "store").mkdir()
    for number in range(NUM_FILES):
        write_pair(tmp_path / "store" / str(number), [[1, 2, 3]])
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), retry_s=0))
    listed: list[str] = []
    find_all = ObjectStore.find_all

    def count_and_find(store: ObjectStore, path: str = "") -> dict[str, StoredObject]:
        listed.append(path)
        return find_all(store, path)

    monkeypatch.setattr(ObjectStore, "find_all", count_and_find)
    return listed


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_many_paths_need_one_listing(tmp_path: Path, listings: list[str], ending: str) -> None:
    paths = expand([f"file://{tmp_path}/store/{number}{ending}" for number in range(NUM_FILES)], key=KEY)
    assert [path.name for path in paths] == [f"{number}.bin" for number in range(NUM_FILES)]
    assert len(listings) == 1


def test_objects_that_were_written_since_are_found(tmp_path: Path, listings: list[str]) -> None:
    expand([f"file://{tmp_path}/store/0"], key=KEY)
    (tmp_path / "store" / "later.bin").write_bytes(b"\x01\x00" * 3)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"later\.idx: is missing beside "):
            expand([f"file://{tmp_path}/store/later"], key=KEY)
    write_pair(tmp_path / "store" / "later", [[1, 2, 3]])
    assert [path.name for path in expand([f"file://{tmp_path}/store/later"], key=KEY)] == ["later.bin"]
    write_pair(tmp_path / "store" / "last", [[1, 2, 3]])
    assert [path.name for path in expand([f"file://{tmp_path}/store/last.bin"], key=KEY)] == ["last.bin"]
    assert len(listings) == 5
