"""Connects the nodes of a running job, so that each of them detects the failure of another within seconds.

Why: without this, torch's elastic agent waits minutes for a lost node, and a collective waits `parallel.timeout_s`.
How: every node keeps the TCP connection to node 0 that it opened at the rendezvous (`launch.local.rendezvous`). Both
sides send a heartbeat every second. A failure is sent at once. A process that dies closes its connection. A node or
cable that is lost goes silent and counts as failed after `silent_s`. All nodes report the first failure that was
sent, which names the cause and not its victims. Messages are JSON lines, never pickles.
Left out: continuing on fewer nodes without a restart. Whoever started the run restarts it.
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

HEARTBEAT_S = 1.0
POLL_S = 0.2
LINGER_S = 2.0
"""How long to wait at exit for the last messages to reach the other nodes."""
MAX_LINE_BYTES = 65536
LOOPBACK = "127.0.0.1"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousSpec:
    """The rank of this node, the number of nodes, and the address where they meet."""

    num_nodes: int = 1
    node_rank: int = 0
    host: str = LOOPBACK
    """Host name or address of node 0."""
    port: int = 0
    """Port on node 0; 0 lets the kernel choose, for a single node."""


SINGLE_NODE = RendezvousSpec()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """The failure that ends a run, with the node it happened on."""

    node_rank: int
    host: str
    exit_code: int
    line: str


@final
@dataclass(slots=True)
class Link:
    """The TCP connection to another node."""

    node_rank: int
    host: str
    connection: socket.socket
    last_seen_s: float
    buffer: bytes = b""
    is_done: bool = False
    """Its ranks ended without an error; it may disconnect."""

    def read_messages(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived; None once the connection is closed."""
        try:
            received = self.connection.recv(MAX_LINE_BYTES)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not received or len(self.buffer) > MAX_LINE_BYTES:
            return None
        *whole, self.buffer = (self.buffer + received).split(b"\n")
        return [json.loads(line) for line in whole]

    def send(self, **message: Any) -> None:
        """Send one message. An undeliverable one is dropped: the timeout of the peer covers that."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")


@final
@dataclass(slots=True)
class NodeGroup:
    """All nodes of a running job, seen from this one."""

    spec: RendezvousSpec
    address: str
    """IP address of node 0."""
    start_name: str
    """Name of this start of the run, equal on all nodes."""
    store_port: int
    store_socket: socket.socket | None
    """Where torch's TCPStore will listen; only on node 0."""
    silent_s: float
    links: dict[int, Link] = field(default_factory=dict)
    """Node 0 has a link to every other node; the others have one to node 0."""
    failure: NodeFailure | None = None
    """The first failure that was reported."""
    _lock: Lock = field(default_factory=Lock)
    _closing_s: float = math.inf
    _thread: Thread | None = None

    def __enter__(self) -> Self:
        if self.links:
            self._thread = Thread(target=self._listen, name="node-group", daemon=True)
            self._thread.start()
        return self

    def report_failure(self, failure: NodeFailure) -> NodeFailure:
        """Send a failure to all nodes; returns the one that all report, which is the first."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
                for link in self.links.values():
                    link.send(failure=asdict(failure))
            return self.failure

    def report_success(self) -> None:
        """Send that the ranks of this node ended without an error."""
        for link in self.links.values():
            link.send(done=True)

    def __exit__(self, *_: object) -> None:
        """Disconnect after the reachable nodes have read our last message, or after LINGER_S."""
        now_s = time.monotonic()
        reachable = any(now_s - link.last_seen_s < self.silent_s for link in self.links.values())
        self._closing_s = now_s + (LINGER_S if reachable else 0.0)
        if self.store_socket is not None:
            self.store_socket.close()
        for link in self.links.values():
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_WR)
        if self._thread is not None:
            self._thread.join(LINGER_S + HEARTBEAT_S)

    def _listen(self) -> None:
        next_beat_s = 0.0
        with selectors.DefaultSelector() as selector:
            for link in self.links.values():
                selector.register(link.connection, selectors.EVENT_READ, link)
            while selector.get_map() and time.monotonic() < self._closing_s:
                for key, _ in selector.select(timeout=POLL_S):
                    if not self._receive(key.data):
                        selector.unregister(key.fileobj)
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + HEARTBEAT_S
                    self._send_heartbeats()
        for link in self.links.values():
            link.connection.close()

    def _receive(self, link: Link) -> bool:
        """Process what a node sent; returns False once it has disconnected."""
        messages = link.read_messages()
        link.last_seen_s = time.monotonic()
        for message in messages or ():
            if "failure" in message:
                self.report_failure(NodeFailure(**message["failure"]))
            link.is_done = link.is_done or "done" in message
        if messages is None and not link.is_done:
            self._report_lost(link, "is gone")
        return messages is not None

    def _send_heartbeats(self) -> None:
        for link in self.links.values():
            silent_s = time.monotonic() - link.last_seen_s
            if silent_s > self.silent_s and not link.is_done:
                self._report_lost(link, f"has been silent for {silent_s:.0f} s")
            if self.failure is None:
                link.send(beat=True)

    def _report_lost(self, link: Link, problem: str) -> None:
        if math.isinf(self._closing_s):
            line = f"node {link.node_rank} ({link.host}) {problem}"
            self.report_failure(NodeFailure(node_rank=link.node_rank, host=link.host, exit_code=1, line=line))
