"""The rendezvous over real sockets, and how each node detects the failure of another. No torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict

import pytest

from harness.config.errors import ConfigError
from launch.local import node_address, rendezvous
from launch.local.node_address import RendezvousError, find_interface_to, open_listener
from launch.local.node_group import LOOPBACK, NodeFailure, NodeGroup, RendezvousSpec
from launch.local.node_link import encode_message
from launch.local.ports import reserved_port
from launch.local.rendezvous import StopRequested, join_nodes

FAILURE = NodeFailure(node_rank=1, host="b", exit_code=1, line="rank 1 on b was killed by SIGKILL")


class FakeNodes:
    """Several nodes in one process."""

    def __init__(self, stack: ExitStack, num_nodes: int) -> None:
        self.num_nodes, self.port, self.stack = num_nodes, stack.enter_context(reserved_port()), stack
        self.pool = stack.enter_context(ThreadPoolExecutor())
        self.is_stopping = False

    def call(self, node: int, *, host: str = LOOPBACK, run: str = "r", nproc: int = 2) -> Future[NodeGroup]:
        spec = RendezvousSpec(num_nodes=self.num_nodes, node_rank=node, host=host, port=self.port)
        return self.pool.submit(
            join_nodes, spec, run=run, nproc=nproc, within_s=5.0, silent_s=1.5, stop_requested=lambda: self.is_stopping
        )

    def all(self) -> list[NodeGroup]:
        calls = [self.call(node) for node in reversed(range(self.num_nodes))]
        found = sorted((call.result(10) for call in calls), key=lambda group: group.spec.node_rank)
        self.stack.callback(
            lambda: list(self.pool.map(NodeGroup.__exit__, found))
        )  # together: each waits for its peers
        return [group.__enter__() for group in found]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def wait_until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def drop_connections(group: NodeGroup) -> None:
    """As the kernel does for a killed process."""
    for link in group.links.values():
        with suppress(OSError):  # the other side was killed first
            link.connection.shutdown(socket.SHUT_RDWR)


def test_all_nodes_get_the_same_start_and_store(stack: ExitStack) -> None:
    first, *others = FakeNodes(stack, 4).all()
    assert sorted(first.links) == [1, 2, 3]
    assert first.store_socket is not None
    assert first.store_socket.getsockname() == (LOOPBACK, first.store_port)
    assert {(each.start_name, each.store_port) for each in others} == {(first.start_name, first.store_port)}
    time.sleep(2.5)
    assert [each.failure for each in (first, *others)] == [None] * 4, (
        "a heartbeat every second prevents the 1.5 s timeout"
    )


def test_all_nodes_report_the_first_failure(stack: ExitStack) -> None:
    groups = FakeNodes(stack, 3).all()
    assert groups[1].report_failure(FAILURE) == FAILURE
    wait_until(lambda: all(group.failure == FAILURE for group in groups))
    assert groups[2].report_failure(NodeFailure(node_rank=2, host="c", exit_code=1, line="a victim")) == FAILURE


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_dies_is_detected_at_once(stack: ExitStack, lost: int) -> None:
    groups = FakeNodes(stack, 2).all()
    drop_connections(groups[lost])
    wait_until(lambda: groups[1 - lost].failure is not None, within_s=10.0)
    failure = groups[1 - lost].failure
    assert failure is not None
    assert (failure.node_rank, failure.exit_code) == (lost, 1)
    assert failure.line.endswith(") is gone")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_sends_half_a_message_counts_as_lost(stack: ExitStack, lost: int) -> None:
    """A message that does not fit into the buffer of a process that is stopped is given up in the middle."""
    groups = FakeNodes(stack, 2).all()
    (link,) = groups[lost].links.values()
    link.connection.sendall(b'{"decision": {"again"')
    link.send(beat=True)
    wait_until(lambda: groups[1 - lost].failure is not None, within_s=10.0)
    failure = groups[1 - lost].failure
    assert failure is not None
    assert failure.line.endswith(") is gone")


def test_a_silent_node_counts_as_lost(stack: ExitStack) -> None:
    nodes = FakeNodes(stack, 2)
    calls = [nodes.call(node) for node in range(2)]
    first, silent = (call.result(10) for call in calls)
    stack.enter_context(first)  # the other one never sends a heartbeat
    wait_until(lambda: first.failure is not None)
    assert first.failure is not None
    assert "has been silent for " in first.failure.line
    silent.links[0].connection.close()


def test_a_node_that_is_done_may_disconnect(stack: ExitStack) -> None:
    first, second = FakeNodes(stack, 2).all()
    second.report_success()
    second.__exit__()
    time.sleep(2.0)
    assert first.failure is None


def test_different_configs_are_rejected_on_both_nodes(stack: ExitStack) -> None:
    nodes = FakeNodes(stack, 2)
    calls = [nodes.call(0), nodes.call(1, nproc=3)]
    for call in calls:
        with pytest.raises(
            ConfigError, match=r"^launch\.nproc: must be equal on all nodes, got 2 on node 0 and 3 on node 1 \("
        ):
            call.result(10)


def test_a_foreign_connection_is_rejected_and_the_rendezvous_continues(stack: ExitStack) -> None:
    nodes = FakeNodes(stack, 2)
    first = nodes.call(0)
    with pytest.raises(ConfigError, match="node 1 of run 'another' is not expected here"):
        nodes.call(1, run="another").result(10)
    with socket.create_connection((LOOPBACK, nodes.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert client.recv(100) == b""
    second = nodes.call(1)
    for call in (first, second):
        assert stack.enter_context(call.result(10)).failure is None


def test_a_hello_may_arrive_in_parts_and_a_message_after_it_is_not_lost(stack: ExitStack) -> None:
    nodes = FakeNodes(stack, 2)
    first = nodes.call(0)
    with connect(nodes.port) as client:
        hello = encode_message({"run": "r", "nodes": 2, "nproc": 2, "node": 1, "host": "b"})
        client.sendall(hello[:20])
        time.sleep(0.2)
        client.sendall(hello[20:] + encode_message({"failure": asdict(FAILURE), "restarts": 0}))
        group = stack.enter_context(first.result(10))
        client.sendall(encode_message({"beat": True}))
        wait_until(lambda: group.failure == FAILURE)


def connect(port: int) -> socket.socket:
    """Connect to node 0, which may not listen yet."""
    deadline = time.monotonic() + 5.0
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((LOOPBACK, port))
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failure_that_arrives_together_with_go_is_not_lost(stack: ExitStack) -> None:
    nodes = FakeNodes(stack, 2)
    spec = RendezvousSpec(num_nodes=2, port=nodes.port)
    first = NodeGroup(spec, LOOPBACK, "start", 1, None, 1.5, roster=(0, 1))
    with open_listener(LOOPBACK, nodes.port, spec) as listener:
        second = nodes.call(1)
        connection, _ = listener.accept()
        with connection:
            failed = encode_message({"failure": asdict(FAILURE), "restarts": 0})
            connection.sendall(encode_message(first.go_message()) + failed)
        group = stack.enter_context(second.result(10))  # node 0 has died meanwhile
        wait_until(lambda: group.failure is not None)
        assert group.failure == FAILURE


def test_missing_nodes_are_named(stack: ExitStack) -> None:
    nodes = FakeNodes(stack, 3)
    spec = RendezvousSpec(num_nodes=3, node_rank=0, host=LOOPBACK, port=nodes.port)
    with pytest.raises(RendezvousError, match=r"^rendezvous: node 1, 2 of 3 did not join within 0 s$"):
        join_nodes(spec, run="r", nproc=1, within_s=0.3, silent_s=1.0, stop_requested=lambda: False)


def test_a_node_that_ends_before_all_have_joined_may_join_again(
    stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pod that is replaced, or a person who starts the command again."""
    nodes = FakeNodes(stack, 3)
    first = nodes.call(0)
    with connect(nodes.port) as client:
        client.sendall(encode_message({"run": "r", "nodes": 3, "nproc": 2, "node": 1, "host": "b"}))
        time.sleep(0.3)
    second = nodes.call(1)
    time.sleep(0.3)
    third = nodes.call(2)
    groups = [stack.enter_context(call.result(10)) for call in (first, second, third)]
    time.sleep(0.5)
    assert [group.failure for group in groups] == [None] * 3
    assert "harness: node 1 (b) has gone before the start; waiting for it\n" in capsys.readouterr().err


def test_a_node_that_ends_before_all_have_joined_is_missing(stack: ExitStack) -> None:
    nodes = FakeNodes(stack, 3)
    spec = RendezvousSpec(num_nodes=3, node_rank=0, host=LOOPBACK, port=nodes.port)
    options = {"run": "r", "nproc": 2, "within_s": 1.0, "silent_s": 1.0, "stop_requested": lambda: False}
    first = nodes.pool.submit(join_nodes, spec, **options)  # type: ignore[arg-type]
    hello = {"run": "r", "nodes": 3, "nproc": 2, "host": "b"}
    with connect(nodes.port) as client:
        client.sendall(encode_message({**hello, "node": 1}))
    with connect(nodes.port) as other:
        other.sendall(encode_message({**hello, "node": 2}))
        with pytest.raises(RendezvousError, match=r"^rendezvous: node 1 of 3 did not join within 1 s$"):
            first.result(10)


def test_an_unreachable_node_0_is_one_line(stack: ExitStack) -> None:
    spec = RendezvousSpec(num_nodes=2, node_rank=1, host=LOOPBACK, port=stack.enter_context(reserved_port()))
    with pytest.raises(
        RendezvousError, match=r"^rendezvous: node 0 does not answer at 127\.0\.0\.1:\d+: Connection refused$"
    ):
        join_nodes(spec, run="r", nproc=1, within_s=0.5, silent_s=1.0, stop_requested=lambda: False)


def test_an_unknown_host_is_one_line() -> None:
    spec = RendezvousSpec(num_nodes=2, node_rank=1, host="no-such-host.invalid", port=1)
    with pytest.raises(RendezvousError, match=r"^rendezvous: no address for no-such-host\.invalid: "):
        join_nodes(spec, run="r", nproc=1, within_s=0.1, silent_s=1.0, stop_requested=lambda: False)


@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_request_ends_the_rendezvous(stack: ExitStack, node: int) -> None:
    nodes = FakeNodes(stack, 2)
    call = nodes.call(node)
    time.sleep(0.3)
    nodes.is_stopping = True
    with pytest.raises(StopRequested):
        call.result(2)


@pytest.mark.skipif(not node_address.list_own_addresses(), reason="this machine has no address but the loopback's")
@pytest.mark.parametrize("has_several", [False, True])
def test_node_0_whose_name_is_its_loopback(
    stack: ExitStack, has_several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 has its own name in /etc/hosts as 127.0.1.1; the others resolve its real address."""
    address = node_address.list_own_addresses()[0]
    monkeypatch.setattr(rendezvous, "resolve_host", lambda spec, **_: address if spec.node_rank else "127.0.1.1")
    monkeypatch.setattr(rendezvous, "list_own_addresses", lambda: [address, "192.0.2.99"][: 1 + has_several])
    listened: list[str] = []
    open_listener = node_address.open_listener

    def record_listen(bound: str, port: int, spec: RendezvousSpec) -> socket.socket:
        listened.append(bound)
        return open_listener(bound, port, spec)

    monkeypatch.setattr(rendezvous, "open_listener", record_listen)
    nodes = FakeNodes(stack, 3)
    calls = [nodes.call(node, host="node0") for node in range(3)]
    first, *others = (stack.enter_context(call.result(10)) for call in calls)
    assert listened == ["" if has_several else address, address], "the store is never on all addresses"
    assert first.store_socket is not None
    assert first.store_socket.getsockname() == (address, first.store_port)
    assert [each.address for each in (first, *others)] == [address] * 3, "all nodes use one address"
    assert {each.store_port for each in others} == {first.store_port}


def test_node_0_with_only_a_loopback_is_an_error(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "resolve_host", lambda *_, **__: "127.0.1.1")
    monkeypatch.setattr(rendezvous, "list_own_addresses", list)
    with pytest.raises(
        RendezvousError, match=r"^rendezvous: node0 resolves to the loopback, and node 0 has no other address$"
    ):
        FakeNodes(stack, 2).call(0, host="node0").result(10)


def test_nodes_that_use_two_addresses_are_rejected(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that listens on one address would be unreachable for some of them."""
    addresses = {0: "127.0.1.1", 1: "127.0.0.2", 2: "127.0.0.3"}
    monkeypatch.setattr(rendezvous, "resolve_host", lambda spec, **_: addresses[spec.node_rank])
    monkeypatch.setattr(rendezvous, "list_own_addresses", lambda: ["192.0.2.98", "192.0.2.99"])
    nodes = FakeNodes(stack, 3)
    for call in [nodes.call(node, host="node0") for node in range(3)]:
        with pytest.raises(ConfigError, match=r"^rendezvous: .* reach node 0 at 127\.0\.0\.2 and 127"):
            call.result(10)


def test_the_interface_follows_the_address() -> None:
    assert find_interface_to(LOOPBACK) == "lo"
