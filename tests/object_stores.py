"""Real servers of S3 (moto's) and GCS (gcp-storage-emulator) over HTTP, each in a process of its own.

Each is behind a TCP relay that tests can cut and restore: the servers keep their objects in memory, so they must not be
killed to be unreachable.
The GCS server has the JSON API and no gRPC, so gcsfs must not ask for the type of a bucket. It drops the last byte of a
small upload that ends with a carriage return: contents of tests must not.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final
from unittest.mock import patch
from urllib.parse import quote
from urllib.request import urlopen

import pytest

BUCKET = "bucket"
PACKAGES = {"s3": ("s3fs", "moto"), "gs": ("gcsfs", "gcp_storage_emulator")}
"""Protocol -> the client and the server that it needs."""

ignore_open_connections = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
"""Clients close their connections when the interpreter ends."""
s3_only = pytest.mark.parametrize("server", ["s3"], indirect=True)
"""For a test in which the store does not matter."""


@final
class Relay:
    """Forwards TCP connections to a port while it is up; refuses and resets them while it is down."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self.num_bytes = 0
        """Bytes that clients have sent."""
        self.cut_after: int | None = None
        """The relay goes down by itself when clients have sent this many bytes."""
        self.up()

    def up(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def down(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                break
            self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, sink, source is client), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while block := source.recv(65536):
                self.num_bytes += len(block) if counts else 0
                if self.cut_after is not None and self.num_bytes > self.cut_after:
                    self.cut_after = None
                    self.down()
                sink.sendall(block)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        source.close()
        self._open.discard(source)


@final
class StoreServer:
    """A server, its relay and the environment that leads clients to it."""

    def __init__(self, protocol: str, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.protocol = protocol
        self._log = log
        self._output = log.open("wb")
        self._direct = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", *self._command(port)], stdout=self._output, stderr=self._output
        )
        self._wait_for_answer()
        self.relay = Relay(port)
        self.environment = self._environment(f"http://127.0.0.1:{self.relay.port}")

    def url(self, path: str) -> str:
        """The URL of a path in the bucket."""
        return f"{self.protocol}://{BUCKET}/{path}"

    def system(self) -> Any:
        """fsspec's client of this server, past the relay."""
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self.protocol == "s3":
            import s3fs

            return s3fs.S3FileSystem(key="test", secret="test", endpoint_url=self._direct, **options)
        from gcsfs.core import GCSFileSystem

        return GCSFileSystem(token="anon", endpoint_url=self._direct, **options)

    def count_reads(self, path: str) -> int:
        """How often the server has answered requests for the content of objects whose path begins like this."""
        self._output.flush()
        lines = self._log.read_text().splitlines()
        if self.protocol == "s3":
            return sum(f'"GET /{BUCKET}/{path}' in line for line in lines)
        return sum(f'"GET /download/storage/v1/b/{BUCKET}/o/{quote(path, safe="")}' in line for line in lines)

    def _command(self, port: int) -> list[str]:
        if self.protocol == "s3":
            return ["moto.server", "-H", "127.0.0.1", "-p", str(port)]
        return ["gcp_storage_emulator", "start", "--in-memory", "-H", "127.0.0.1", "--port", str(port)]

    def _environment(self, endpoint: str) -> dict[str, str]:
        if self.protocol == "s3":
            return {
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
                "FSSPEC_S3_ENDPOINT_URL": endpoint,
            }
        return {
            "STORAGE_EMULATOR_HOST": endpoint,
            "FSSPEC_GS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def _wait_for_answer(self) -> None:
        health = {"s3": "/moto-api/", "gs": "/"}[self.protocol]
        for _ in range(600):
            assert self._process.poll() is None, self._log.read_text()
            with suppress(OSError), urlopen(self._direct + health, timeout=5) as answer:
                assert answer.status == 200
                return
            time.sleep(0.1)
        raise AssertionError(f"no answer of the server of {self.protocol}: {self._log.read_text()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.relay.down()
        self._process.terminate()
        self._process.wait()
        self._output.close()


@contextmanager
def models_read_once() -> Iterator[None]:
    """Let each client of S3 use the same parsed models: parsing them is most of what a new client takes."""
    loader = import_module("botocore.loaders").JSONFileLoader
    read = cache(partial(loader.load_file, loader()))
    with patch.object(loader, "load_file", lambda _loader, path: read(path)):
        yield


@contextmanager
def store_server(protocol: str, directory: Path) -> Iterator[StoreServer]:
    """A running server with an empty bucket; the environment of this process leads to it."""
    with (
        StoreServer(protocol, directory / f"{protocol}-server.log") as server,
        models_read_once() if protocol == "s3" else nullcontext(),
        patch.dict(os.environ, server.environment),
    ):
        import fsspec

        fsspec.config.set_conf_env(fsspec.config.conf)
        if protocol == "gs":
            asks_for_type = "_get_bucket_type" in dir(fsspec.get_filesystem_class(protocol))
            assert not asks_for_type, "gcsfs was imported before its environment was set"
        server.system().mkdir(BUCKET)
        try:
            yield server
        finally:
            fsspec.config.conf.clear()


def server_fixture(fill: Callable[[StoreServer, Path], None] | None = None) -> Any:
    """A fixture of a module, `server`: one store after the other. `fill` uploads what the tests read."""

    @pytest.fixture(scope="module", params=list(PACKAGES))
    def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
        for package in PACKAGES[request.param]:
            if find_spec(package) is None:  # gcsfs reads its environment when it is imported, which is not yet set
                pytest.skip(f"needs {package}")
        directory = tmp_path_factory.mktemp(request.param)
        with store_server(request.param, directory) as server:
            if fill is not None:
                fill(server, directory)
            yield server

    return server
