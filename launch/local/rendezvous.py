"""Rendezvous: the nodes of a run connect to node 0 and wait until all have joined.

Why: a global rank must follow from the rank of its node, not from the order of arrival; otherwise logs and findings
name the wrong machine. A host name that does not resolve and a node that never joins are reported in one line.
How: node 0 listens at the given address, or on the loopback for a single node. The others connect to it and send who
they are. Once all have joined, node 0 sends the name of this start and the port of torch's TCPStore. The connections
stay open (`launch.local.node_group`). Node 0 rejects connections that do not belong to the run.
In an elastic run (`launch.spares`, `launch.min_nodes`) every launcher checks its machine before it joins, and node 0
chooses which of them run ranks (`launch.local.roster`). A launcher whose machine failed the check is rejected. If
`launch.nodes` others have joined, node 0 waits for the missing ones for SPARES_WITHIN_S; if only `launch.min_nodes`
have, until the time limit of the rendezvous. The missing ones can still join later, as spares.
The store lives as long as the run and listens on one address only, the one that the other nodes connected to
(`launch.local.node_address`).
"""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from secrets import token_hex
from typing import Any

from harness.config.errors import ConfigError
from harness.core.node_name import machine_name
from launch.local.elastic import Elastic
from launch.local.file_limit import warn_about_files
from launch.local.node_address import (
    RendezvousError,
    choose_listen_address,
    is_reachable,
    list_own_addresses,
    open_listener,
    resolve_host,
)
from launch.local.node_group import POLL_S, NodeGroup, RendezvousSpec
from launch.local.node_link import Link, encode_message
from launch.local.roster import unpack_roster
from launch.local.succession import find_coordinator
from launch.node_record import NodeRecord
from launch.slurm.node_exclusion import NodeFault, NodeFaultKind

HELLO_TIMEOUT_S = 5.0
REMIND_S = 60.0
SPARES_WITHIN_S = 30.0
"""How long a start waits for the last launchers if enough others have joined."""


class StopRequested(Exception):  # noqa: N818 -- a request, not an error
    """A stop was requested during the rendezvous."""


def join_nodes(
    spec: RendezvousSpec,
    *,
    run: str,
    nproc: int,
    within_s: float,
    silent_s: float,
    stop_requested: Callable[[], bool],
    elastic: Elastic | None = None,
) -> NodeGroup:
    """Wait until all nodes of the run have joined. Without `elastic`, all launchers run ranks."""
    address = resolve_host(spec, deadline_s=time.monotonic() + min(within_s, HELLO_TIMEOUT_S))
    hello = {"run": run, "nodes": spec.num_nodes, "nproc": nproc}
    if spec.node_rank > 0:
        hello |= {"node": spec.node_rank, "host": machine_name()}
        hello |= {"problems": elastic.problems} if elastic else {}
        return join_as_peer(
            spec, address, hello, within_s=within_s, silent_s=silent_s, stop_requested=stop_requested, elastic=elastic
        )
    start_name = f"{time.strftime('%Y%m%d-%H%M%S')}-{token_hex(2)}"
    group = NodeGroup(spec, address, start_name, 0, None, silent_s)
    group.hosts[0], group.roster = machine_name(), tuple(range(spec.num_nodes))
    if spec.num_nodes == 1:
        open_store_socket(group)
        return group
    warn_about_files(spec.num_nodes, nproc)
    bound = address if is_reachable(spec.host, address) else choose_listen_address(spec, list_own_addresses())
    with close_on_failure(group):
        group.listener = open_listener(bound, spec.port, spec)
        group.listener.settimeout(POLL_S)
        admit_nodes(group, hello, within_s, stop_requested, elastic)
        group.address = bound or agree_on_address(group)
        open_store_socket(group)
        go = encode_message(group.go_message())
        for link in group.links.values():
            link.last_seen_s = time.monotonic()
            link.send_line(go)
        if elastic is None:
            group.listener.close()
            group.listener = None
        else:
            group.admit = lambda connection: admit_node(group, connection, hello, elastic)
    return group


def open_store_socket(group: NodeGroup) -> None:
    """Open the socket of torch's TCPStore, on the address of node 0 and no other; a restart needs another store."""
    if group.store_socket is not None:
        group.store_socket.close()
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


@contextmanager
def close_on_failure(group: NodeGroup) -> Iterator[None]:
    """Close all connections if the rendezvous fails, so that the waiting nodes see it."""
    try:
        yield
    except BaseException:
        for other in (
            group.store_socket,
            group.listener,
            group.succession,
            *(link.connection for link in group.links.values()),
        ):
            if other is not None:
                other.close()
        raise


def admit_nodes(
    group: NodeGroup,
    expected: dict[str, Any],
    within_s: float,
    stop_requested: Callable[[], bool],
    elastic: Elastic | None,
) -> None:
    """Node 0: accept connections until all nodes have joined, or enough of them for some time; sets the roster."""
    assert group.listener is not None
    first_s = time.monotonic()
    deadline_s, remind_s, enough_s = first_s + within_s, first_s + REMIND_S, math.inf
    wanted = group.roster[: elastic.num_nodes] if elastic else group.roster
    while len(group.links) < group.spec.num_nodes - 1 or drop_gone(group):
        if stop_requested():
            raise StopRequested
        if elastic is not None and len(group.links) >= len(wanted) - 1:
            enough_s = min(enough_s, time.monotonic())
            if time.monotonic() > min(enough_s + SPARES_WITHIN_S, deadline_s):
                break
        if time.monotonic() > deadline_s:
            if elastic is not None and len(group.links) + 1 >= elastic.allowed[0]:
                break
            raise RendezvousError(f"rendezvous: {list_missing(group)} did not join within {within_s:.0f} s")
        if time.monotonic() > remind_s:
            remind_s += REMIND_S
            print(f"harness: waiting for {list_missing(group)}", file=sys.stderr, flush=True)
        try:
            connection = group.listener.accept()[0]
        except TimeoutError:
            drop_gone(group)
            continue
        link = admit_node(group, connection, expected, elastic, is_start=True)
        if link is not None:
            group.links[link.number], group.hosts[link.number] = link, link.host
    if elastic is not None:
        roster = elastic.choose(group, wanted)
        assert roster is not None, "all are there, or enough"
        group.roster = roster


def drop_gone(group: NodeGroup) -> bool:
    """Forget launchers that ended before the start: they may join again. Returns whether there was one."""
    gone = [link for link in group.links.values() if link.is_disconnected()]
    for link in gone:
        line = f"node {link.number} ({link.host}) has gone before the start; waiting for it"
        print(f"harness: {line}", file=sys.stderr, flush=True)
        group.links.pop(link.number).connection.close()
    return bool(gone)


def list_missing(group: NodeGroup) -> str:
    """The nodes that have not joined, in words."""
    missing = sorted(set(range(1, group.spec.num_nodes)) - set(group.links))
    return f"node {', '.join(map(str, missing))} of {group.spec.num_nodes}"


def admit_node(
    group: NodeGroup,
    connection: socket.socket,
    expected: dict[str, Any],
    elastic: Elastic | None,
    *,
    is_start: bool = False,
) -> Link | None:
    """Identify a launcher that connects; None if it does not belong to this run, or its machine is unhealthy.

    At the start, a launcher with another number of nodes or ranks ends the rendezvous; later, it is only rejected.
    """
    link = Link(-1, "", connection, time.monotonic())
    try:
        hello = read_hello(link)
        link.number, link.host, link.problems = int(hello["node"]), str(hello["host"]), hello.get("problems")
        link.stopped, link.is_stopping = int(hello.get("stopped", -1)), bool(hello.get("stopping"))
        if "port" in hello:
            link.listens_at = connection.getpeername()[0], int(hello["port"])
    except (OSError, ValueError, KeyError, TypeError):
        connection.close()
        return None
    refusal = ""
    if is_start and link.number in group.links:
        drop_gone(group)
    if hello.get("run") != expected["run"] or link.number in group.links or not 0 < link.number < group.spec.num_nodes:
        refusal = f"rendezvous: node {link.number} of run {hello.get('run')!r} is not expected here"
    elif differing := [key for key in ("nodes", "nproc") if hello.get(key) != expected[key]]:
        key = differing[0]
        theirs = f"{hello.get(key)} on node {link.number} ({link.host})"
        message = f"must be equal on all nodes, got {expected[key]} on node 0 and {theirs}"
        refusal = f"launch.{key}: {message}"
        if is_start:
            for other in (link, *group.links.values()):
                other.send(refused=refusal)
            connection.close()
            raise ConfigError(f"launch.{key}", message)
    if refusal:
        link.send(refused=refusal)
    elif elastic is not None and (unhealthy := record_health(link, elastic.record)):
        link.send(unhealthy=unhealthy)
    else:
        return link
    connection.close()
    return None


def read_hello(link: Link) -> dict[str, Any]:
    """The first message of a launcher, which may arrive in parts; empty if it does not arrive in time."""
    deadline_s = time.monotonic() + HELLO_TIMEOUT_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        link.connection.settimeout(left_s)
        hello = link.read_message()
        if hello is None or hello:
            break
    link.connection.settimeout(HELLO_TIMEOUT_S)
    return hello or {}


def record_health(link: Link, record: NodeRecord) -> str:
    """Record what the health check of a launcher found; returns why it may not join, or an empty string."""
    if not link.problems:
        record.mark_returned(link.host)
        return ""
    problem = "; ".join(link.problems)
    record.add([NodeFault(time.time(), link.host, problem, NodeFaultKind.health)])
    line = f"node {link.number} ({link.host}) failed its health check and does not join: {problem}"
    print(f"harness: {line}", file=sys.stderr, flush=True)
    return f"{line}; start it again when this is repaired"


def join_as_peer(
    spec: RendezvousSpec,
    address: str,
    hello: dict[str, Any],
    *,
    within_s: float,
    silent_s: float,
    stop_requested: Callable[[], bool],
    elastic: Elastic | None = None,
) -> NodeGroup:
    """Every other node: connect to node 0, and wait for its go message.

    Node 0 listens by then, so its own time limit ends before that of this wait: it decides whether enough have joined.
    """
    connection = connect_to_node_0(spec, address, time.monotonic() + within_s, stop_requested)
    link = Link(0, spec.host, connection, time.monotonic())
    deadline_s = time.monotonic() + within_s + 2 * HELLO_TIMEOUT_S
    group = NodeGroup(spec, address, "", 0, None, silent_s, {0: link})
    with close_on_failure(group):
        if elastic is not None:
            prepare_succession(group, link, hello, elastic)
        link.send(**hello)
        link.connection.settimeout(POLL_S)
        message = wait_for_go(group, link, deadline_s, stop_requested)
    link.connection.settimeout(HELLO_TIMEOUT_S)
    link.last_seen_s = time.monotonic()
    group.start_name, group.store_port = message["start"], message["store_port"]
    group.roster, group.restarts = unpack_roster(message["roster"]), message["restarts"]
    group.learn_succession(message["succession"])
    link.host = group.hosts.get(0, link.host) if elastic is not None else link.host
    return group


def prepare_succession(group: NodeGroup, link: Link, hello: dict[str, Any], elastic: Elastic) -> None:
    """Listen for the case that this launcher must coordinate the run, and name the port in the hello."""
    group.succession = open_listener(link.connection.getsockname()[0], 0, group.spec)
    group.succession.settimeout(POLL_S)
    hello["port"] = group.succession.getsockname()[1]

    def admit(connection: socket.socket) -> Link | None:
        return admit_node(group, connection, hello, elastic if group.is_coordinator else None)

    def succeed(is_stopping: bool) -> bool:
        return find_coordinator(group, hello | {"stopping": is_stopping}, admit, elastic.record)

    group.succeed = succeed


def wait_for_go(group: NodeGroup, link: Link, deadline_s: float, stop_requested: Callable[[], bool]) -> dict[str, Any]:
    """Wait for the message that node 0 sends when all nodes have joined."""
    spec = group.spec
    while True:
        message = link.read_message()  # one: the failure of a start may follow it at once
        if stop_requested():
            raise StopRequested
        if message is None:
            raise RendezvousError(f"rendezvous: node 0 ({spec.host}) disconnected before all nodes had joined")
        if "refused" in message:
            raise ConfigError("", message["refused"])
        if "unhealthy" in message:
            raise RendezvousError(message["unhealthy"])
        if "go" in message:
            return message
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
