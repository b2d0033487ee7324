"""HTTP server for the live dashboard of one run directory; it only reads.

How: each request reads what was added to the event log. `data.json` returns only rows that the client does not have,
and status 204 if nothing is new. By default it listens on the loopback interface and answers only requests whose Host
header names it, so that another site in the same browser cannot read the run (DNS rebinding). It answers GET and HEAD;
the only files it serves are those of incident folders, by plain name.
Left out: encryption and passwords. To open it to a network, put a proxy with both in front.
"""

from __future__ import annotations

import json
import re
import time
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, final
from urllib.parse import parse_qs, urlsplit

from harness.analysis.dashboard.page import render, replace_non_finite
from harness.analysis.dashboard.page_data import facts_of, page_data, revision_of, tables
from harness.analysis.dashboard.story import Story
from harness.core.rundir import RunDir

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".md": "text/plain; charset=utf-8",
    ".png": "image/png",
}
FILE = re.compile(r"/incidents/(\d{3,})/([\w-][\w.-]*)")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
TABLES = ("steps", "probes", "evals", "tasks")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:"
"""Content-Security-Policy for a file of the run: it is displayed and runs no script."""


@final
class LiveRun:
    """The story of one run, updated from its log at each request."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._story = Story()
        self._lock = Lock()

    def page(self) -> str:
        """The current HTML document."""
        with self._lock:
            self._story.read_more(self.run)
            return render(page_data(self.run, self._story, now_s=time.time(), live=True))

    def new_data(self, *, first: dict[str, int], seen: str, load: str) -> str | None:
        """Facts and the rows from `first` on, as JSON; None if `seen` is the current revision. The load of the machines
        only if `load` is not its current revision."""
        with self._lock:
            self._story.read_more(self.run)
            now_s = time.time()
            if revision_of(self.run, self._story, now_s=now_s) == seen:
                return None
            data = {"facts": facts_of(self.run, self._story, now_s=now_s)} | tables(self._story, first=first)
            if data["facts"]["load"] == load:
                del data["system"]
        return json.dumps(replace_non_finite(data), separators=(",", ":"), allow_nan=False)

    def file(self, number: str, name: str) -> Path | None:
        """A file of an incident's folder; None if it is missing or a link leads outside."""
        path = (self.run.incidents / number / name).resolve()
        inside = path.is_relative_to(self.run.incidents.resolve())
        return path if inside and path.is_file() and path.suffix in TYPES else None


@final
class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    def __init__(self, live_run: LiveRun, hosts: frozenset[str] | None, *arguments: Any) -> None:
        self._live_run, self._hosts = live_run, hosts
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        status, kind, body, policy = self._route()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if policy:
            self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _route(self) -> tuple[HTTPStatus, str, bytes, str]:
        """Status, content type, body and Content-Security-Policy of the response."""
        plain = "text/plain; charset=utf-8"
        if self._hosts is not None and host_of(self.headers.get("Host", "")) not in self._hosts:
            return HTTPStatus.FORBIDDEN, plain, b"this server only answers requests to localhost\n", POLICY
        url = urlsplit(self.path)
        if url.path in ("/", "/dashboard.html"):
            return HTTPStatus.OK, TYPES[".html"], self._live_run.page().encode(), ""
        if url.path == "/data.json":
            query = parse_qs(url.query)
            first = {name: row_number(query.get(name, ["0"])[0]) for name in TABLES}
            seen, load = query.get("seen", [""])[0], query.get("load", [""])[0]
            data = self._live_run.new_data(first=first, seen=seen, load=load)
            status = HTTPStatus.NO_CONTENT if data is None else HTTPStatus.OK
            return status, TYPES[".json"], (data or "").encode(), POLICY
        if (match := FILE.fullmatch(url.path)) and (path := self._live_run.file(*match.groups())):
            return HTTPStatus.OK, TYPES[path.suffix], path.read_bytes(), POLICY
        return HTTPStatus.NOT_FOUND, plain, b"not found\n", POLICY

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: requests would fill the terminal."""


@final
class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of a request, such as a browser that closes the connection."""


def open_server(run: RunDir, *, host: str, port: int) -> Server:
    """A listening server; `serve_forever` handles requests."""
    hosts = frozenset({*LOOPBACK, host}) if host in LOOPBACK else None
    return Server((host, port), partial(Handler, LiveRun(run), hosts))


def host_of(header: str) -> str:
    """The host name in a Host header, without its port."""
    return (urlsplit(f"//{header}").hostname or "").lower()


def row_number(text: str) -> int:
    """A row number from a query; 0 if it is not a number."""
    return int(text) if text.isascii() and text.isdigit() else 0
