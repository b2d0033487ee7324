"""Object stores through fsspec, with a directory as the store; tests with real servers are in the full tier."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from harness.config.data import RemoteDataConfig, TokenDtype
from harness.config.errors import ConfigError, StorageError
from harness.core.object_store import ObjectStore, is_url
from harness.data.corpus.remote_cache import use_cache
from harness.data.corpus.token_files import expand, open_tokens
from tests.object_stores import ignore_open_connections

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


def test_directories_of_a_local_store_are_created(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/mirror", key=KEY, retry_s=0)
    store.write("run/files/a", b"1")
    store.upload(tmp_path / "mirror/run/files/a", "run/checkpoints/b")
    assert sorted(store.find_all()) == ["run/checkpoints/b", "run/files/a"]
    store.require_bucket()


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


def test_a_store_that_cannot_be_connected_is_opened_again(capfd: pytest.CaptureFixture[str]) -> None:
    """The file system of FTP connects when it is created."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"ftp://127.0.0.1:{server.getsockname()[1]}/runs"
    store = ObjectStore(url, key=KEY, retry_s=0.1)
    with pytest.raises(StorageError, match=f"^{url}/c: the store does not answer: "):
        store.read("c")
    with pytest.raises(StorageError, match=f"^{url}/: the store does not answer: "):
        store.find_all()
    assert capfd.readouterr().err.count("trying again in 0.1 s") == 2
    with pytest.raises(ConfigError, match=f"^{KEY}: ftp://127.0.0.1:port/runs cannot be opened: "):
        ObjectStore("ftp://127.0.0.1:port/runs", key=KEY, retry_s=60).read("c")


def test_a_closed_store_repeats_no_request(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c").mkdir()  # opening it fails, as a store that does not answer
    store = ObjectStore(f"file://{tmp_path}", key=KEY, retry_s=60)
    closing = threading.Timer(0.2, store.close)
    closing.start()
    begun_s = time.monotonic()
    with pytest.raises(StorageError, match="/c: the store does not answer: "):
        store.read("c")
    closing.join()
    with pytest.raises(StorageError, match="/c: the store does not answer: "):
        store.read("c")
    assert time.monotonic() - begun_s < 30
    assert capfd.readouterr().err.count("trying again in") == 1
    store.write("d", b"content")
    assert store.read("d") == b"content"
    with pytest.raises(StorageError, match="/d: the store was closed"):
        list(store.chunks("d", 7))


@pytest.mark.parametrize(("url", "extra"), [("s3://bucket/a", "remote"), ("gs://bucket/a", "gcs")])
def test_without_fsspec_the_message_names_the_extra(url: str, extra: str) -> None:
    with patch.dict(sys.modules, {"fsspec": None}), pytest.raises(ConfigError) as caught:
        ObjectStore(url, key=KEY, retry_s=0)
    assert str(caught.value) == f"{KEY}: {url} needs fsspec: pip install 'pretraining-harness[{extra}]'"


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3://bucket/a", ": pip install 'pretraining-harness[remote]'"),
        ("gs://bucket/a", ": pip install 'pretraining-harness[gcs]'"),
        ("abfs://bucket/a", ""),
    ],
)
def test_without_its_client_the_message_names_the_extra(url: str, advice: str) -> None:
    missing = ImportError("Install its client")
    with patch("fsspec.get_filesystem_class", side_effect=missing), pytest.raises(ConfigError) as caught:
        ObjectStore(url, key=KEY, retry_s=0)
    assert str(caught.value) == f"{KEY}: {url} cannot be opened: Install its client{advice}"


@contextmanager
def gcs_that_answers(status: int, message: str) -> Iterator[list[str]]:
    """A server on loopback that answers each request of gcsfs alike, or not at all if the status is 0; yields the paths
    of the requests."""
    paths: list[str] = []
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            if status == 0:
                is_over.wait(60)
                return
            content = json.dumps({"error": {"code": status, "message": message}}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    environment = {"FSSPEC_GS_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, patch.dict(os.environ, environment):
        os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{server.server_address[1]}"
        import fsspec

        fsspec.config.set_conf_env(fsspec.config.conf)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield paths
        finally:
            is_over.set()
            server.shutdown()
            fsspec.config.conf.clear()


@pytest.mark.full
@ignore_open_connections
@pytest.mark.skipif(find_spec("gcsfs") is None, reason="needs gcsfs")
@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (403, "does not have storage.objects.get access", ConfigError),
        (401, "Anonymous caller does not have storage.objects.get access", ConfigError),
        (401, "Invalid Credentials", StorageError),
        (503, "Backend Error", StorageError),
        (0, "", StorageError),
    ],
    ids=["403", "401", "expired token", "503", "no answer"],
)
def test_gcs_requests_fail_once_and_denied_access_is_not_repeated(
    status: int, message: str, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.core.object_store.TIMEOUT_S", 0.2)
    with gcs_that_answers(status, message) as paths:
        store = ObjectStore("gs://bucket/runs", key=KEY, retry_s=0)
        with pytest.raises(expected) as caught:
            store.read("c")
    assert "gs://bucket/runs/c: " in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(paths) == 1, "gcsfs does not repeat the request by itself"


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
