"""A webhook on loopback that answers as a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

PATH = "/services/hunter2"


class WebhookServer(ThreadingHTTPServer):
    """Keeps the bodies of the requests that it answered with status 200."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), WebhookHandler)
        self.bodies: list[dict[str, Any]] = []
        self.num_refused = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{PATH}"

    @property
    def texts(self) -> list[str]:
        return [body["text"] for body in self.bodies]


class WebhookHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, WebhookServer)
        assert self.path == PATH
        assert self.headers["Content-Type"] == "application/json"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.server.status
        if status == 200:
            self.server.bodies.append(body)
        else:
            self.server.num_refused += 1
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", f"{self.server.url}?login")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        """A login page, behind a redirect."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def webhook_server() -> Iterator[WebhookServer]:
    with WebhookServer() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
