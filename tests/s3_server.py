"""A real S3 server over HTTP (moto's, in a process of its own), behind a TCP relay that tests can cut and restore.

The relay is there because the server keeps its objects in memory: it must not be killed to be unreachable.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final
from unittest.mock import patch
from urllib.request import urlopen

BUCKET = "bucket"


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
class S3Server:
    """The server, its relay and the environment that leads clients to it."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._log = log
        self._output = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=self._output,
            stderr=self._output,
        )
        self._wait(port, log)
        self.relay = Relay(port)
        self.environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{self.relay.port}",
        }
        self.direct = f"http://127.0.0.1:{port}"

    def system(self) -> Any:
        """fsspec's client of this server, past the relay."""
        import s3fs

        return s3fs.S3FileSystem(
            key="test", secret="test", endpoint_url=self.direct, use_listings_cache=False, skip_instance_cache=True
        )

    def count_requests(self, start: str) -> int:
        """How often the server has answered requests that begin like this."""
        self._output.flush()
        return sum(f'"{start}' in line for line in self._log.read_text().splitlines())

    def _wait(self, port: int, log: Path) -> None:
        for _ in range(600):
            assert self._process.poll() is None, log.read_text()
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5) as answer:
                assert answer.status == 200
                return
            time.sleep(0.1)
        raise AssertionError(f"no answer of the S3 server: {log.read_text()}")

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
def s3_server(directory: Path) -> Iterator[S3Server]:
    """A running server with an empty bucket; the environment of this process leads to it."""
    with S3Server(directory / "s3-server.log") as server, patch.dict(os.environ, server.environment):
        import fsspec

        fsspec.config.set_conf_env(fsspec.config.conf)
        server.system().mkdir(BUCKET)
        try:
            yield server
        finally:
            fsspec.config.conf.clear()
