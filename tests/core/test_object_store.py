"""Object stores through fsspec, with a directory as the store; tests with a real S3 server are in the full tier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.config.data import RemoteDataConfig, TokenDtype
from harness.config.errors import ConfigError, StorageError
from harness.core.object_store import ObjectStore, is_url
from harness.data.corpus.remote_cache import use_cache
from harness.data.corpus.token_files import expand, open_tokens

KEY = "checkpoint.remote.url"


def test_objects_are_written_listed_read_and_deleted(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}", key=KEY, retry_s=0)
    assert store.find_all("none") == {}
    assert store.look_up("none") is None
    (tmp_path / "a").mkdir()
    store.write("a/b", b"0123456789")
    store.upload(tmp_path / "a" / "b", "c")
    assert {name: found.num_bytes for name, found in store.find_all().items()} == {"a/b": 10, "c": 10}
    assert store.read("a/b", 2, 5) == b"234"
    assert b"".join(store.chunks("c", 10)) == b"0123456789"
    before = store.look_up("c")
    store.delete(["a/b", "a/b", "none"])
    assert list(store.find_all()) == ["c"]
    store.write("c", b"other")
    assert store.look_up("c") != before
    with pytest.raises(FileNotFoundError):
        store.read("none")


def test_errors_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(f"file://{tmp_path}", key=KEY, retry_s=0)
    for raised, expected in (
        (PermissionError("no"), ConfigError),
        (ConnectionError("down\nfor now"), StorageError),
        (RuntimeError("of a client"), StorageError),
    ):

        def fail(*_: object, error: Exception = raised, **__: object) -> None:
            raise error

        monkeypatch.setattr(store._system, "cat_file", fail)
        with pytest.raises(expected) as caught:
            store.read("c")
        assert f"file://{tmp_path}/c: " in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be opened"):
        ObjectStore("nonsense://bucket", key=KEY, retry_s=0)


def test_a_request_is_repeated_until_it_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(f"file://{tmp_path}", key=KEY, retry_s=5)
    monkeypatch.setattr("harness.core.object_store.FIRST_PAUSE_S", 0.01)
    attempts = []

    def fail_twice(*_: object, **__: object) -> bytes:
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError
        return b"content"

    monkeypatch.setattr(store._system, "cat_file", fail_twice)
    assert store.read("c") == b"content"


def test_token_files_are_read_through_the_cache(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    tokens = np.random.default_rng(0).integers(0, 60_000, 200_000).astype(np.uint16)
    tokens.tofile(tmp_path / "store" / "a.bin")
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=64))
    url = f"file://{tmp_path}/store/a.bin"
    assert is_url(url)
    (path,) = expand([f"file://{tmp_path}/store/*.bin"], key=KEY)
    assert path.is_relative_to(tmp_path / "cache")
    file = open_tokens(url, dtype=TokenDtype.uint16, key=KEY)
    assert file.name == url
    assert file.read(100_000, 50_000).tolist() == tokens[100_000:150_000].tolist()
