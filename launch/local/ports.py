"""TCP ports on loopback that the kernel allocates and that stay reserved until a server binds them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port for one server that sets SO_REUSEADDR, as servers do.

    The socket held here is bound and never listens. Linux lets such a server bind the same port, and never hands it out
    as a free port.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
