"""The machines of one run gather before it begins.

Why: a rank's number must follow from the place of its machine, not from who came first, or logs and accusations point
at the wrong one; and a name that nobody knows or a machine that never comes must be said in one line, not waited for in
silence.
How: machine 0 listens where it is told, on the loopback for a run on one machine; the others connect to it and say who
they are. When all are there it sends the name of this start and the port of torch's store. The connections stay
(`launch.local.node_group`). A stranger is turned away. Many systems resolve their own name to the loopback. Machine 0
then listens on its other address, or on all of them while the machines gather if it has several. The store, which lives
as long as the run, listens on the one address by which the others came.
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
from launch.local.node_group import POLL_S, Link, Machines, Place

HELLO_WITHIN_S = 5.0
REMIND_EVERY_S = 60.0
DISCARD_PORT = 9
SIOCGIFADDR = 0x8915
"""Asks the Linux kernel for the address of an interface."""


class Absent(Exception):  # noqa: N818 -- says how a gathering ended
    """Machines that never met; the message is one line."""


class Leaving(Exception):  # noqa: N818 -- says how a gathering ended
    """Somebody asked for a stop while the machines were still gathering."""


def gather(
    place: Place, *, run: str, nproc: int, within_s: float, silent_s: float, leaving: Callable[[], bool]
) -> Machines:
    """Wait until all machines of the run are there."""
    address = resolve(place, deadline_s=time.monotonic() + min(within_s, HELLO_WITHIN_S))
    if place.node > 0:
        hello = {"run": run, "node": place.node, "nodes": place.nodes, "nproc": nproc, "host": socket.gethostname()}
        return join(place, address, hello, within_s=within_s, silent_s=silent_s, leaving=leaving)
    machines = Machines(place, address, time.strftime("%Y%m%d-%H%M%S"), 0, None, silent_s)
    if place.nodes == 1:
        open_store(machines)
        return machines
    bound = address if is_reachable(place.host, address) else meeting_address(place, own_addresses())
    with hung_up_on_failure(machines), listen(bound, place.port, place) as listener:
        receive(machines, listener, {"run": run, "nproc": nproc, "nodes": place.nodes}, within_s, leaving)
        machines.address = bound or reached_at(machines)
        open_store(machines)
        for link in machines.links.values():
            link.heard_s = time.monotonic()
            link.send(go=True, start=machines.start, store_port=machines.store_port)
    return machines


def open_store(machines: Machines) -> None:
    """Where torch's store of this run will listen: on the address of machine 0, and no other."""
    machines.store_socket = listen(machines.address, 0, machines.place)
    machines.store_port = machines.store_socket.getsockname()[1]


def reached_at(machines: Machines) -> str:
    """The address of this machine by which the others came; they must agree, since all of them use its store."""
    found = sorted({str(link.connection.getsockname()[0]) for link in machines.links.values()})
    if len(found) > 1:
        message = f"the other machines reach machine 0 at {' and '.join(found)}; give --rendezvous one of them"
        for link in machines.links.values():
            link.send(refused=f"rendezvous: {message}")
        raise ConfigError("rendezvous", message)
    return found[0]


def meeting_address(place: Place, addresses: Sequence[str]) -> str:
    """Where a machine listens whose name resolves to its loopback: its one other address, or all if it has several."""
    if not addresses:
        raise Absent(f"rendezvous: {place.host} is the loopback here, and this machine has no other address")
    return addresses[0] if len(addresses) == 1 else ""


def own_addresses() -> list[str]:
    """The addresses of this machine, without the loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = {address_of(name, probe) for _, name in socket.if_nameindex()}
    return sorted(address for address in found if address and not address.startswith("127."))


def address_of(interface: str, probe: socket.socket) -> str:
    """The first address of a network interface; empty where it has none."""
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])


@contextmanager
def hung_up_on_failure(machines: Machines) -> Iterator[None]:
    """Machines that do not come together keep no connection, so that those who wait hear of it."""
    try:
        yield
    except BaseException:
        for each in (machines.store_socket, *(link.connection for link in machines.links.values())):
            if each is not None:
                each.close()
        raise


def resolve(place: Place, *, deadline_s: float) -> str:
    """The address of machine 0, as a number: a name is looked up once, and complained about here."""
    while True:
        try:
            return str(socket.getaddrinfo(place.host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise Absent(f"rendezvous: no address for {place.host}: {error.strerror}") from None
            time.sleep(POLL_S)


def is_reachable(host: str, address: str) -> bool:
    """Whether others can mean this address too: many systems give their own name one of the loopback."""
    return not address.startswith("127.") or host == "localhost" or host.startswith("127.")


def interface_towards(address: str) -> str | None:
    """The network interface of this machine by which an address is reached; None where it cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, DISCARD_PORT))  # sends nothing, but chooses the way
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if address_of(name, probe) == own), None)
    return None


def listen(address: str, port: int, place: Place) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise Absent(f"rendezvous: cannot listen on {place.host}:{port}: {error.strerror}") from None
    listener.listen(max(128, place.nodes))
    return listener


def receive(
    machines: Machines, listener: socket.socket, expected: dict[str, Any], within_s: float, leaving: Callable[[], bool]
) -> None:
    """Machine 0: take in the others."""
    deadline_s, remind_s = time.monotonic() + within_s, time.monotonic() + REMIND_EVERY_S
    listener.settimeout(POLL_S)
    while missing := sorted(set(range(1, machines.place.nodes)) - set(machines.links)):
        if leaving():
            raise Leaving
        listed = f"machine {', '.join(map(str, missing))} of {machines.place.nodes}"
        if time.monotonic() > deadline_s:
            raise Absent(f"rendezvous: {listed} did not come within {within_s:.0f} s")
        if time.monotonic() > remind_s:
            remind_s += REMIND_EVERY_S
            print(f"harness: waiting for {listed}", file=sys.stderr, flush=True)
        with suppress(TimeoutError):
            admit(machines, listener.accept()[0], expected)


def admit(machines: Machines, connection: socket.socket, expected: dict[str, Any]) -> None:
    """A machine that says who it is; one that does not belong to this run is told so and turned away."""
    connection.settimeout(HELLO_WITHIN_S)
    link = Link(-1, "", connection, time.monotonic())
    try:
        (hello, *_) = link.lines() or [{}]
        link.node, link.host = int(hello["node"]), str(hello["host"])
    except (ValueError, KeyError, TypeError):
        connection.close()
        return
    if hello.get("run") != expected["run"] or link.node in machines.links or not 0 < link.node < machines.place.nodes:
        link.send(refused=f"rendezvous: no place for machine {link.node} of run {hello.get('run')!r}")
        connection.close()
        return
    machines.links[link.node] = link
    for key in ("nodes", "nproc"):
        if hello.get(key) != expected[key]:
            message = f"{expected[key]} on machine 0, but {hello.get(key)} on machine {link.node} ({link.host})"
            for each in machines.links.values():
                each.send(refused=f"launch.{key}: {message}")
            raise ConfigError(f"launch.{key}", message)


def join(
    place: Place,
    address: str,
    hello: dict[str, Any],
    *,
    within_s: float,
    silent_s: float,
    leaving: Callable[[], bool],
) -> Machines:
    """Any other machine: find machine 0, and wait for its word."""
    deadline_s = time.monotonic() + within_s
    link = Link(0, place.host, reach(place, address, deadline_s, leaving), time.monotonic())
    machines = Machines(place, address, "", 0, None, silent_s, {0: link})
    with hung_up_on_failure(machines):
        link.send(**hello)
        link.connection.settimeout(POLL_S)
        words = await_word(machines, link, deadline_s, leaving)
    link.connection.settimeout(HELLO_WITHIN_S)
    link.heard_s = time.monotonic()
    machines.start, machines.store_port = words["start"], words["store_port"]
    return machines


def await_word(machines: Machines, link: Link, deadline_s: float, leaving: Callable[[], bool]) -> dict[str, Any]:
    """What machine 0 says when all are there."""
    place = machines.place
    while True:
        lines = link.lines()
        if leaving():
            raise Leaving
        for words in lines or ():
            if "refused" in words:
                raise ConfigError("", words["refused"])
            if "go" in words:
                return words
        if lines is None:
            raise Absent(f"rendezvous: machine 0 ({place.host}) left before all machines were there")
        if time.monotonic() > deadline_s:
            raise Absent(f"rendezvous: not all {place.nodes} machines came in time")


def reach(place: Place, address: str, deadline_s: float, leaving: Callable[[], bool]) -> socket.socket:
    problem = ""
    while time.monotonic() < deadline_s and not leaving():
        try:
            return socket.create_connection((address, place.port), timeout=max(POLL_S, HELLO_WITHIN_S))
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(POLL_S)
    if leaving():
        raise Leaving
    raise Absent(f"rendezvous: machine 0 does not answer at {place.host}:{place.port}: {problem}")
