"""Rendezvous: the nodes of a run connect to node 0 and wait until all have joined.

Why: a global rank must follow from the rank of its node, not from the order of arrival; otherwise logs and findings
name the wrong machine. A host name that does not resolve and a node that never joins are reported in one line.
How: node 0 listens at the given address, or on the loopback for a single node. The others connect to it and send who
they are. Once all have joined, node 0 sends the name of this start and the port of torch's TCPStore. The connections
stay open (`launch.local.node_group`). Node 0 rejects connections that do not belong to the run.
Many systems resolve their own host name to the loopback. Node 0 then listens on its other address, or on all addresses
during the rendezvous if it has several. The store lives as long as the run and listens on one address only, the one
that the other nodes connected to.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from harness.config.errors import ConfigError
from launch.local.node_group import POLL_S, Link, NodeGroup, RendezvousSpec

HELLO_TIMEOUT_S = 5.0
REMIND_S = 60.0
DISCARD_PORT = 9
SIOCGIFADDR = 0x8915
"""ioctl of Linux that returns the address of a network interface."""


class RendezvousError(Exception):
    """Not all nodes joined; the message is one line."""


class StopRequested(Exception):  # noqa: N818 -- a request, not an error
    """A stop was requested during the rendezvous."""


def join_nodes(
    spec: RendezvousSpec, *, run: str, nproc: int, within_s: float, silent_s: float, stop_requested: Callable[[], bool]
) -> NodeGroup:
    """Wait until all nodes of the run have joined."""
    address = resolve_host(spec, deadline_s=time.monotonic() + min(within_s, HELLO_TIMEOUT_S))
    if spec.node_rank > 0:
        hello = {
            "run": run,
            "node": spec.node_rank,
            "nodes": spec.num_nodes,
            "nproc": nproc,
            "host": socket.gethostname(),
        }
        return join_as_peer(spec, address, hello, within_s=within_s, silent_s=silent_s, stop_requested=stop_requested)
    group = NodeGroup(spec, address, time.strftime("%Y%m%d-%H%M%S"), 0, None, silent_s)
    if spec.num_nodes == 1:
        open_store_socket(group)
        return group
    bound = address if is_reachable(spec.host, address) else choose_listen_address(spec, list_own_addresses())
    with close_on_failure(group), open_listener(bound, spec.port, spec) as listener:
        admit_nodes(group, listener, {"run": run, "nproc": nproc, "nodes": spec.num_nodes}, within_s, stop_requested)
        group.address = bound or agree_on_address(group)
        open_store_socket(group)
        for link in group.links.values():
            link.last_seen_s = time.monotonic()
            link.send(go=True, start=group.start_name, store_port=group.store_port)
    return group


def open_store_socket(group: NodeGroup) -> None:
    """Open the socket of torch's TCPStore, on the address of node 0 and no other."""
    group.store_socket = open_listener(group.address, 0, group.spec)
    group.store_port = group.store_socket.getsockname()[1]


def agree_on_address(group: NodeGroup) -> str:
    """Return the address of node 0 that the others connected to; it must be one, since all use its store."""
    found = sorted({str(link.connection.getsockname()[0]) for link in group.links.values()})
    if len(found) > 1:
        message = f"the other nodes reach node 0 at {' and '.join(found)}; give --rendezvous one of them"
        for link in group.links.values():
            link.send(refused=f"rendezvous: {message}")
        raise ConfigError("rendezvous", message)
    return found[0]


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


@contextmanager
def close_on_failure(group: NodeGroup) -> Iterator[None]:
    """Close all connections if the rendezvous fails, so that the waiting nodes see it."""
    try:
        yield
    except BaseException:
        for other in (group.store_socket, *(link.connection for link in group.links.values())):
            if other is not None:
                other.close()
        raise


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
        raise RendezvousError(f"rendezvous: cannot listen on {spec.host}:{port}: {error.strerror}") from None
    listener.listen(max(128, spec.num_nodes))
    return listener


def admit_nodes(
    group: NodeGroup,
    listener: socket.socket,
    expected: dict[str, Any],
    within_s: float,
    stop_requested: Callable[[], bool],
) -> None:
    """Node 0: accept connections until all nodes have joined."""
    deadline_s, remind_s = time.monotonic() + within_s, time.monotonic() + REMIND_S
    listener.settimeout(POLL_S)
    while missing := sorted(set(range(1, group.spec.num_nodes)) - set(group.links)):
        if stop_requested():
            raise StopRequested
        listed = f"node {', '.join(map(str, missing))} of {group.spec.num_nodes}"
        if time.monotonic() > deadline_s:
            raise RendezvousError(f"rendezvous: {listed} did not join within {within_s:.0f} s")
        if time.monotonic() > remind_s:
            remind_s += REMIND_S
            print(f"harness: waiting for {listed}", file=sys.stderr, flush=True)
        with suppress(TimeoutError):
            admit_node(group, listener.accept()[0], expected)


def admit_node(group: NodeGroup, connection: socket.socket, expected: dict[str, Any]) -> None:
    """Accept a node that identifies itself; reject one that does not belong to this run."""
    connection.settimeout(HELLO_TIMEOUT_S)
    link = Link(-1, "", connection, time.monotonic())
    try:
        (hello, *_) = link.read_messages() or [{}]
        link.node_rank, link.host = int(hello["node"]), str(hello["host"])
    except (ValueError, KeyError, TypeError):
        connection.close()
        return
    if (
        hello.get("run") != expected["run"]
        or link.node_rank in group.links
        or not 0 < link.node_rank < group.spec.num_nodes
    ):
        link.send(refused=f"rendezvous: node {link.node_rank} of run {hello.get('run')!r} is not expected here")
        connection.close()
        return
    group.links[link.node_rank] = link
    for key in ("nodes", "nproc"):
        if hello.get(key) != expected[key]:
            message = f"{expected[key]} on node 0, but {hello.get(key)} on node {link.node_rank} ({link.host})"
            for other in group.links.values():
                other.send(refused=f"launch.{key}: {message}")
            raise ConfigError(f"launch.{key}", message)


def join_as_peer(
    spec: RendezvousSpec,
    address: str,
    hello: dict[str, Any],
    *,
    within_s: float,
    silent_s: float,
    stop_requested: Callable[[], bool],
) -> NodeGroup:
    """Every other node: connect to node 0, and wait for its go message."""
    deadline_s = time.monotonic() + within_s
    link = Link(0, spec.host, connect_to_node_0(spec, address, deadline_s, stop_requested), time.monotonic())
    group = NodeGroup(spec, address, "", 0, None, silent_s, {0: link})
    with close_on_failure(group):
        link.send(**hello)
        link.connection.settimeout(POLL_S)
        message = wait_for_go(group, link, deadline_s, stop_requested)
    link.connection.settimeout(HELLO_TIMEOUT_S)
    link.last_seen_s = time.monotonic()
    group.start_name, group.store_port = message["start"], message["store_port"]
    return group


def wait_for_go(group: NodeGroup, link: Link, deadline_s: float, stop_requested: Callable[[], bool]) -> dict[str, Any]:
    """Wait for the message that node 0 sends when all nodes have joined."""
    spec = group.spec
    while True:
        messages = link.read_messages()
        if stop_requested():
            raise StopRequested
        for message in messages or ():
            if "refused" in message:
                raise ConfigError("", message["refused"])
            if "go" in message:
                return message
        if messages is None:
            raise RendezvousError(f"rendezvous: node 0 ({spec.host}) disconnected before all nodes had joined")
        if time.monotonic() > deadline_s:
            raise RendezvousError(f"rendezvous: not all {spec.num_nodes} nodes joined in time")


def connect_to_node_0(
    spec: RendezvousSpec, address: str, deadline_s: float, stop_requested: Callable[[], bool]
) -> socket.socket:
    problem = ""
    while time.monotonic() < deadline_s and not stop_requested():
        try:
            return socket.create_connection((address, spec.port), timeout=max(POLL_S, HELLO_TIMEOUT_S))
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(POLL_S)
    if stop_requested():
        raise StopRequested
    raise RendezvousError(f"rendezvous: node 0 does not answer at {spec.host}:{spec.port}: {problem}")
