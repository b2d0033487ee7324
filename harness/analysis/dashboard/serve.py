"""A page that stays live: a small server over one run directory that reads and never writes.

How: the log is read on as it grows, when somebody asks; an answer holds the rows that the asker does not have yet, and
nothing at all where there is nothing new. It listens on this machine alone unless it is told otherwise, and then it
answers only to this machine's names, so that no other site of the same browser can read a run through it. GET and HEAD
are all there is; of files, those of incident folders, by their plain names.
Left out: encryption and passwords. Whoever opens it to a network puts something in front that has them.
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

from harness.analysis.dashboard.page import finite, render
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
TABLES = ("steps", "probes", "evals")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:"
"""For a file of the run: it may be looked at, and run nothing."""


@final
class Desk:
    """One run, read on for whoever asks."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._story = Story()
        self._lock = Lock()

    def page(self) -> str:
        """The document, as of now."""
        with self._lock:
            self._story.read_more(self.run)
            return render(page_data(self.run, self._story, now_s=time.time(), live=True))

    def news(self, *, first: dict[str, int], seen: str) -> str | None:
        """What came after the rows `first`, as JSON; None where the asker has seen everything."""
        with self._lock:
            self._story.read_more(self.run)
            now_s = time.time()
            if revision_of(self.run, self._story, now_s=now_s) == seen:
                return None
            data = {"facts": facts_of(self.run, self._story, now_s=now_s)} | tables(self._story, first=first)
        return json.dumps(finite(data), separators=(",", ":"), allow_nan=False)

    def file(self, number: str, name: str) -> Path | None:
        """A file of an incident's folder; nothing outside of it, whatever a link says."""
        path = (self.run.incidents / number / name).resolve()
        inside = path.is_relative_to(self.run.incidents.resolve())
        return path if inside and path.is_file() and path.suffix in TYPES else None


@final
class Handler(BaseHTTPRequestHandler):
    """One request."""

    def __init__(self, desk: Desk, hosts: frozenset[str] | None, *arguments: Any) -> None:
        self._desk, self._hosts = desk, hosts
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
        """Status, type, body and policy of the answer."""
        plain = "text/plain; charset=utf-8"
        if self._hosts is not None and host_of(self.headers.get("Host", "")) not in self._hosts:
            return HTTPStatus.FORBIDDEN, plain, b"this page answers to this machine's names alone\n", POLICY
        asked = urlsplit(self.path)
        if asked.path in ("/", "/dashboard.html"):
            return HTTPStatus.OK, TYPES[".html"], self._desk.page().encode(), ""
        if asked.path == "/data.json":
            words = parse_qs(asked.query)
            first = {name: whole(words.get(name, ["0"])[0]) for name in TABLES}
            news = self._desk.news(first=first, seen=words.get("seen", [""])[0])
            status = HTTPStatus.NO_CONTENT if news is None else HTTPStatus.OK
            return status, TYPES[".json"], (news or "").encode(), POLICY
        if (named := FILE.fullmatch(asked.path)) and (path := self._desk.file(*named.groups())):
            return HTTPStatus.OK, TYPES[path.suffix], path.read_bytes(), POLICY
        return HTTPStatus.NOT_FOUND, plain, b"there is no such page\n", POLICY

    def log_message(self, format: str, *arguments: Any) -> None:
        """Silent: the terminal belongs to whoever started it."""


@final
class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no news."""


def open_server(run: RunDir, *, host: str, port: int) -> Server:
    """A server that listens; `serve_forever` answers."""
    hosts = frozenset({*LOOPBACK, host}) if host in LOOPBACK else None
    return Server((host, port), partial(Handler, Desk(run), hosts))


def host_of(header: str) -> str:
    """The name in a Host header, without its port."""
    return (urlsplit(f"//{header}").hostname or "").lower()


def whole(text: str) -> int:
    """A row number of a query; what is none is the first."""
    return int(text) if text.isascii() and text.isdigit() else 0
