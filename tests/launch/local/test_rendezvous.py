"""Machines that gather over real sockets, and what each hears when another one falls. No torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from harness.config.errors import ConfigError
from launch.local import rendezvous
from launch.local.node_group import LOOPBACK, Fall, Machines, Place
from launch.local.ports import reserved_port
from launch.local.rendezvous import Absent, Leaving, gather, interface_towards

FALL = Fall(node=1, host="b", exit_code=1, line="rank 1 on b was killed by SIGKILL")


class Gathering:
    """Several machines in one process."""

    def __init__(self, stack: ExitStack, nodes: int) -> None:
        self.nodes, self.port, self.stack = nodes, stack.enter_context(reserved_port()), stack
        self.pool = stack.enter_context(ThreadPoolExecutor())
        self.is_leaving = False

    def call(self, node: int, *, host: str = LOOPBACK, run: str = "r", nproc: int = 2) -> Future[Machines]:
        place = Place(nodes=self.nodes, node=node, host=host, port=self.port)
        return self.pool.submit(
            gather, place, run=run, nproc=nproc, within_s=5.0, silent_s=1.5, leaving=lambda: self.is_leaving
        )

    def all(self) -> list[Machines]:
        calls = [self.call(node) for node in reversed(range(self.nodes))]
        found = sorted((call.result(10) for call in calls), key=lambda each: each.place.node)
        return [self.stack.enter_context(each) for each in found]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def eventually(is_so: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def vanish(machines: Machines) -> None:
    """As the kernel does for a process that was killed."""
    for link in machines.links.values():
        link.connection.shutdown(socket.SHUT_RDWR)


def test_all_machines_learn_the_same_start_and_store(stack: ExitStack) -> None:
    first, *others = Gathering(stack, 4).all()
    assert sorted(first.links) == [1, 2, 3]
    assert first.store_socket is not None
    assert first.store_socket.getsockname() == (LOOPBACK, first.store_port)
    assert {(each.start, each.store_port) for each in others} == {(first.start, first.store_port)}
    time.sleep(2.5)
    assert [each.fall for each in (first, *others)] == [None] * 4, "lines a second keep a silence of 1.5 s away"


def test_the_first_fall_that_is_told_is_the_one_that_all_report(stack: ExitStack) -> None:
    machines = Gathering(stack, 3).all()
    assert machines[1].tell(FALL) == FALL
    eventually(lambda: all(each.fall == FALL for each in machines))
    assert machines[2].tell(Fall(node=2, host="c", exit_code=1, line="a victim")) == FALL


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_dies_is_noticed_at_once(stack: ExitStack, lost: int) -> None:
    machines = Gathering(stack, 2).all()
    vanish(machines[lost])
    eventually(lambda: machines[1 - lost].fall is not None, within_s=10.0)
    fall = machines[1 - lost].fall
    assert fall is not None
    assert (fall.node, fall.exit_code) == (lost, 1)
    assert fall.line.endswith(") is gone")


def test_a_machine_that_says_nothing_is_taken_for_lost(stack: ExitStack) -> None:
    gathering = Gathering(stack, 2)
    calls = [gathering.call(node) for node in range(2)]
    first, mute = (call.result(10) for call in calls)
    stack.enter_context(first)  # the other one never begins to send
    eventually(lambda: first.fall is not None)
    assert first.fall is not None
    assert "has been silent for " in first.fall.line
    mute.links[0].connection.close()


def test_a_machine_that_is_done_may_leave(stack: ExitStack) -> None:
    first, second = Gathering(stack, 2).all()
    second.done()
    second.__exit__()
    time.sleep(2.0)
    assert first.fall is None


def test_what_differs_between_machines_is_refused_on_both(stack: ExitStack) -> None:
    gathering = Gathering(stack, 2)
    calls = [gathering.call(0), gathering.call(1, nproc=3)]
    for call in calls:
        with pytest.raises(ConfigError, match=r"^launch\.nproc: 2 on machine 0, but 3 on machine 1 \("):
            call.result(10)


def test_a_stranger_is_turned_away_and_the_gathering_goes_on(stack: ExitStack) -> None:
    gathering = Gathering(stack, 2)
    first = gathering.call(0)
    with pytest.raises(ConfigError, match="no place for machine 1 of run 'another'"):
        gathering.call(1, run="another").result(10)
    with socket.create_connection((LOOPBACK, gathering.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(100) == b""
    second = gathering.call(1)
    for call in (first, second):
        assert stack.enter_context(call.result(10)).fall is None


def test_who_never_comes_is_named(stack: ExitStack) -> None:
    gathering = Gathering(stack, 3)
    place = Place(nodes=3, node=0, host=LOOPBACK, port=gathering.port)
    with pytest.raises(Absent, match=r"^rendezvous: machine 1, 2 of 3 did not come within 0 s$"):
        gather(place, run="r", nproc=1, within_s=0.3, silent_s=1.0, leaving=lambda: False)


def test_nobody_at_the_rendezvous_is_one_line(stack: ExitStack) -> None:
    place = Place(nodes=2, node=1, host=LOOPBACK, port=stack.enter_context(reserved_port()))
    with pytest.raises(
        Absent, match=r"^rendezvous: machine 0 does not answer at 127\.0\.0\.1:\d+: Connection refused$"
    ):
        gather(place, run="r", nproc=1, within_s=0.5, silent_s=1.0, leaving=lambda: False)


def test_a_name_that_nobody_knows_is_one_line() -> None:
    place = Place(nodes=2, node=1, host="no-such-host.invalid", port=1)
    with pytest.raises(Absent, match=r"^rendezvous: no address for no-such-host\.invalid: "):
        gather(place, run="r", nproc=1, within_s=0.1, silent_s=1.0, leaving=lambda: False)


@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_ends_the_waiting(stack: ExitStack, node: int) -> None:
    gathering = Gathering(stack, 2)
    call = gathering.call(node)
    time.sleep(0.3)
    gathering.is_leaving = True
    with pytest.raises(Leaving):
        call.result(2)


@pytest.mark.skipif(not rendezvous.own_addresses(), reason="this machine has no address but the loopback's")
@pytest.mark.parametrize("has_several", [False, True])
def test_a_machine_whose_name_is_its_loopback(
    stack: ExitStack, has_several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine 0 has its own name in /etc/hosts as 127.0.1.1; the others know its address."""
    address = rendezvous.own_addresses()[0]
    monkeypatch.setattr(rendezvous, "resolve", lambda place, **_: address if place.node else "127.0.1.1")
    monkeypatch.setattr(rendezvous, "own_addresses", lambda: [address, "192.0.2.99"][: 1 + has_several])
    listened: list[str] = []
    listen = rendezvous.listen

    def noted(bound: str, port: int, place: Place) -> socket.socket:
        listened.append(bound)
        return listen(bound, port, place)

    monkeypatch.setattr(rendezvous, "listen", noted)
    gathering = Gathering(stack, 3)
    calls = [gathering.call(node, host="node0") for node in range(3)]
    first, *others = (stack.enter_context(call.result(10)) for call in calls)
    assert listened == ["" if has_several else address, address], "the store is never on all addresses"
    assert first.store_socket is not None
    assert first.store_socket.getsockname() == (address, first.store_port)
    assert [each.address for each in (first, *others)] == [address] * 3, "what the ranks of all machines are told"
    assert {each.store_port for each in others} == {first.store_port}


def test_a_machine_with_nothing_but_a_loopback_says_so(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "resolve", lambda *_, **__: "127.0.1.1")
    monkeypatch.setattr(rendezvous, "own_addresses", list)
    with pytest.raises(Absent, match=r"^rendezvous: node0 is the loopback here, and .* has no other address$"):
        Gathering(stack, 2).call(0, host="node0").result(10)


def test_others_that_come_by_two_addresses_are_refused(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that listens on one address would be out of reach for some of them."""
    addresses = {0: "127.0.1.1", 1: "127.0.0.2", 2: "127.0.0.3"}
    monkeypatch.setattr(rendezvous, "resolve", lambda place, **_: addresses[place.node])
    monkeypatch.setattr(rendezvous, "own_addresses", lambda: ["192.0.2.98", "192.0.2.99"])
    gathering = Gathering(stack, 3)
    for call in [gathering.call(node, host="node0") for node in range(3)]:
        with pytest.raises(ConfigError, match=r"^rendezvous: .* reach machine 0 at 127\.0\.0\.2 and 127"):
            call.result(10)


def test_the_interface_follows_the_address() -> None:
    assert interface_towards(LOOPBACK) == "lo"
