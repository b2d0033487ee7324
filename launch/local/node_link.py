"""The connection to another launcher: JSON lines over TCP, never pickles, and what is known about that launcher."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, final

MAX_LINE_BYTES = 65536


@final
@dataclass(slots=True)
class Link:
    """The TCP connection to another launcher."""

    number: int
    """Number of that launcher."""
    host: str
    connection: socket.socket
    last_seen_s: float
    buffer: bytes = b""
    is_done: bool = False
    """Its ranks ended without an error; it may disconnect."""
    is_closed: bool = False
    """It is done and has disconnected."""
    stopped: int = -1
    """The last start whose ranks have all ended on that node, by the number of its restart."""
    is_stopping: bool = False
    """That node has received a stop signal."""
    problems: list[str] | None = None
    """What its last health check found; None: not checked."""
    listens_at: tuple[str, int] | None = None
    """Address and port at which that launcher would coordinate the run; None: it never does."""
    _sending: Lock = field(default_factory=Lock)
    """Held for a whole message: several threads send."""

    def read_messages(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived; None once the connection is closed, or no use any more: after half a
        message, whose sender gave up, nothing that follows can be trusted."""
        is_open = self._receive()
        *whole, self.buffer = self.buffer.split(b"\n")
        try:
            return [json.loads(line) for line in whole] if is_open or whole else None
        except ValueError:
            return None

    def read_message(self) -> dict[str, Any] | None:
        """Return the first message that has arrived, and leave those after it to the next read; empty if there is none
        yet, None once the connection is closed."""
        is_open = b"\n" in self.buffer or self._receive()
        line, newline, rest = self.buffer.partition(b"\n")
        if not newline:
            return {} if is_open else None
        self.buffer = rest
        message: dict[str, Any] = json.loads(line)
        return message

    def is_disconnected(self) -> bool:
        """Whether the other side has closed the connection. Reads nothing, and does not wait."""
        readable = select.poll()
        readable.register(self.connection, select.POLLIN)
        try:
            return bool(readable.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _receive(self) -> bool:
        """Add what has arrived to the buffer; False once the connection is closed."""
        try:
            received = self.connection.recv(MAX_LINE_BYTES)
        except TimeoutError:
            return True
        except OSError:
            return False
        is_too_long = len(self.buffer) > MAX_LINE_BYTES
        self.buffer += received
        return bool(received) and not is_too_long

    def send(self, **message: Any) -> None:
        """Send one message."""
        self.send_line(encode_message(message))

    def send_line(self, line: bytes) -> None:
        """Send an encoded message. An undeliverable one is dropped: the timeout of the peer covers that."""
        with self._sending, suppress(OSError):
            self.connection.sendall(line)


def encode_message(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
