"""Addresses of nodes: where node 0 listens, and by which interface the others reach it.

How: many systems resolve their own host name to the loopback. Node 0 then listens on its other address, or on all
addresses during the rendezvous if it has several.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from launch.local.node_group import POLL_S, RendezvousSpec

DISCARD_PORT = 9
SIOCGIFADDR = 0x8915
"""ioctl of Linux that returns the address of a network interface."""


class RendezvousError(Exception):
    """Not all nodes can join; the message is one line."""


def resolve_host(spec: RendezvousSpec, *, deadline_s: float) -> str:
    """Resolve the host of node 0 to an IP address, once; raises RendezvousError after the deadline."""
    while True:
        try:
            return str(socket.getaddrinfo(spec.host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise RendezvousError(f"rendezvous: no address for {spec.host}: {error.strerror}") from None
            time.sleep(POLL_S)


def is_reachable(host: str, address: str) -> bool:
    """Whether other nodes can use this address: many systems resolve their own name to the loopback."""
    return not address.startswith("127.") or host == "localhost" or host.startswith("127.")


def choose_listen_address(spec: RendezvousSpec, addresses: Sequence[str]) -> str:
    """Where node 0 listens if its host name is the loopback: its other address, or all if it has several."""
    if not addresses:
        raise RendezvousError(f"rendezvous: {spec.host} resolves to the loopback, and node 0 has no other address")
    return addresses[0] if len(addresses) == 1 else ""


def list_own_addresses() -> list[str]:
    """The IPv4 addresses of this machine, without the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = {interface_address(name, probe) for _, name in socket.if_nameindex()}
    return sorted(address for address in found if address and not address.startswith("127."))


def interface_address(interface: str, probe: socket.socket) -> str:
    """The first address of a network interface; empty if it has none."""
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])


def find_interface_to(address: str) -> str | None:
    """The network interface that routes to an address; None if it cannot be determined."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, DISCARD_PORT))  # sends nothing, but selects the route
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if interface_address(name, probe) == own), None)
    return None


def open_listener(address: str, port: int, spec: RendezvousSpec) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        where = f"{spec.host}:{port}" if port else address
        raise RendezvousError(f"rendezvous: cannot listen on {where}: {error.strerror}") from None
    listener.listen(max(128, spec.num_nodes))
    return listener
