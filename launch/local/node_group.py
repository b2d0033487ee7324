"""The machines of a run that has begun: each hears within seconds when another one falls.

Why: an agent of torch that waits for a machine that is gone waits for minutes, and a collective waits for as long as
`parallel.timeout_s` says; meanwhile all other machines stand still.
How: every machine keeps the connection to machine 0 over which it joined (`launch.local.rendezvous`), and both sides
send a line a second. A fall is told at once; a process that dies closes its connection, which is as good as telling; a
machine or a cable that is gone is silent, and taken for fallen after `silent_s`. The first fall that is told is the one
that everybody reports, so that the cause is named and not its victims. Lines are JSON, never pickles.
Left out: going on with fewer machines without a new start. Whoever started the run starts it again.
"""

from __future__ import annotations

import json
import math
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Lock, Thread
from typing import Any, Self, final

BEAT_S = 1.0
POLL_S = 0.2
LINGER_S = 2.0
"""How long the last words of a machine may take to reach the others."""
LONGEST_LINE_BYTES = 65536
LOOPBACK = "127.0.0.1"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This machine among those of a run."""

    nodes: int = 1
    node: int = 0
    host: str = LOOPBACK
    """Of machine 0: where the others find it."""
    port: int = 0
    """0: any that is free; for one machine alone."""


ALONE = Place()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """Why a run comes down."""

    node: int
    host: str
    exit_code: int
    line: str


@final
@dataclass(slots=True)
class Link:
    """The connection to another machine."""

    node: int
    host: str
    connection: socket.socket
    heard_s: float
    rest: bytes = b""
    is_done: bool = False
    """Its ranks have ended as they should; it may leave."""

    def lines(self) -> list[dict[str, Any]] | None:
        """What has arrived; None at the end."""
        try:
            received = self.connection.recv(LONGEST_LINE_BYTES)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not received or len(self.rest) > LONGEST_LINE_BYTES:
            return None
        *whole, self.rest = (self.rest + received).split(b"\n")
        return [json.loads(line) for line in whole]

    def send(self, **words: Any) -> None:
        """What cannot be delivered is lost; the silence of the other side will tell."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(words).encode() + b"\n")


@final
@dataclass(slots=True)
class Machines:
    """All machines of a run that has begun, seen from this one."""

    place: Place
    address: str
    """Of machine 0, as a number."""
    start: str
    """The name of this start of the run, the same everywhere."""
    store_port: int
    store_socket: socket.socket | None
    """Where torch's store will listen; on machine 0."""
    silent_s: float
    links: dict[int, Link] = field(default_factory=dict)
    """Machine 0 has one to every other; the others have one to machine 0."""
    fall: Fall | None = None
    """The first that was told."""
    _lock: Lock = field(default_factory=Lock)
    _closing_s: float = math.inf
    _thread: Thread | None = None

    def __enter__(self) -> Self:
        if self.links:
            self._thread = Thread(target=self._listen, name="machines", daemon=True)
            self._thread.start()
        return self

    def tell(self, fall: Fall) -> Fall:
        """Let everybody know; returns what everybody reports, which is what was told first."""
        with self._lock:
            if self.fall is None:
                self.fall = fall
                for link in self.links.values():
                    link.send(fall=asdict(fall))
            return self.fall

    def done(self) -> None:
        """Our ranks have ended as they should."""
        for link in self.links.values():
            link.send(done=True)

    def __exit__(self, *_: object) -> None:
        """Leave once the others that can still be reached have read our last words, or soon after."""
        now_s = time.monotonic()
        reachable = any(now_s - link.heard_s < self.silent_s for link in self.links.values())
        self._closing_s = now_s + (LINGER_S if reachable else 0.0)
        if self.store_socket is not None:
            self.store_socket.close()
        for link in self.links.values():
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_WR)
        if self._thread is not None:
            self._thread.join(LINGER_S + BEAT_S)

    def _listen(self) -> None:
        next_beat_s = 0.0
        with selectors.DefaultSelector() as selector:
            for link in self.links.values():
                selector.register(link.connection, selectors.EVENT_READ, link)
            while selector.get_map() and time.monotonic() < self._closing_s:
                for key, _ in selector.select(timeout=POLL_S):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + BEAT_S
                    self._beat()
        for link in self.links.values():
            link.connection.close()

    def _hear(self, link: Link) -> bool:
        """Take in what a machine says; False once it has left."""
        lines = link.lines()
        link.heard_s = time.monotonic()
        for words in lines or ():
            if "fall" in words:
                self.tell(Fall(**words["fall"]))
            link.is_done = link.is_done or "done" in words
        if lines is None and not link.is_done:
            self._lost(link, "is gone")
        return lines is not None

    def _beat(self) -> None:
        for link in self.links.values():
            silent_s = time.monotonic() - link.heard_s
            if silent_s > self.silent_s and not link.is_done:
                self._lost(link, f"has been silent for {silent_s:.0f} s")
            if self.fall is None:
                link.send(beat=True)

    def _lost(self, link: Link, how: str) -> None:
        if math.isinf(self._closing_s):
            line = f"machine {link.node} ({link.host}) {how}"
            self.tell(Fall(node=link.node, host=link.host, exit_code=1, line=line))
