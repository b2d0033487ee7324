"""The coordinator of an elastic run is lost: who decides next, over real sockets. No ranks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace

import pytest

from harness.core.locking import directory_lease
from harness.core.locking.lease_holder import this_process
from harness.core.rundir import RunDir
from launch.local import succession
from launch.local.node_group import SPARE, NodeGroup
from launch.local.spare import wait_as_spare
from launch.node_record import read_node_faults
from launch.restart_budget import RestartDecision
from tests.launch.local.test_rendezvous import drop_connections, wait_until
from tests.launch.local.test_spare import Hosts, lose, names, restarted, run, stack

__all__ = ["names", "run", "stack"]


def kill(group: NodeGroup) -> None:
    """A launcher dies: it closes all connections, and nobody answers at its ports."""
    for listener in (group.listener, group.succession, group.store_socket):
        if listener is not None:
            listener.close()
    drop_connections(group)


def test_the_next_node_coordinates_and_a_spare_replaces_node_0(
    stack: ExitStack, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    first, second, spare = hosts.all()
    assert [number for number, _, _ in second.successors] == [1, 2] == [number for number, _, _ in spare.successors]
    kill(first)
    wait_until(lambda: None not in (second.failure, spare.failure))
    assert wait_as_spare(spare, []) is None
    decisions = hosts.agree(hosts.history(), second, spare)
    assert decisions == [RestartDecision(True, "restart 1, host2 replaces host0")] * 2
    assert [(group.node_rank, group.roster, group.coordinator) for group in (second, spare)] == [
        (1, (2, 1), 1),
        (0, (2, 1), 1),
    ]
    assert (second.store_port, second.address) == (spare.store_port, spare.address)
    assert "harness: host1 coordinates the run from now on\n" in capsys.readouterr().err
    (event,) = restarted(run)
    assert (event.out, event.replaced_by) == ({"host0": "node 0 (host0) is gone"}, {"host0": "host2"})
    assert [(fault.node, fault.kind) for fault in read_node_faults(run)] == [("host0", "lost")]

    lose(spare, second)
    (decision,) = hosts.agree(hosts.history(), second)
    assert decision.reason == "node 0 (host2) is gone, no spare is left, and the run needs 2 nodes"


def test_if_the_next_in_line_is_lost_too_the_one_after_it_coordinates(
    stack: ExitStack, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "FOLLOW_WITHIN_S", 1.0)
    hosts = Hosts(stack, run, 2, spares=2, allowed=(2,))
    first, second, *spares = hosts.all()
    kill(second)
    kill(first)
    wait_until(lambda: all(spare.has_lost_coordinator for spare in spares))
    decisions = hosts.agree(hosts.history(), *spares)
    assert [decision.again for decision in decisions] == [True, True]
    assert [(spare.coordinator, spare.roster) for spare in spares] == [(2, (2, 3))] * 2


def test_a_coordinator_that_still_writes_the_run_is_not_replaced(
    stack: ExitStack, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is cut off from the others, and its rank 0 renews the lease."""
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    first, second, spare = hosts.all()
    holder = replace(this_process(lease_s=0.6), machine="another machine")
    lease = directory_lease.acquire(run.lease, holder, on_lost=lambda _: None)
    kill(first)
    wait_until(lambda: second.failure is not None)
    (decision,) = hosts.agree(hosts.history(), second)
    lease.release()
    assert decision == RestartDecision(False, "")
    error = f"the run cannot be taken over: run.name: {run.path} is in use by pid {os.getpid()} "
    assert error in capsys.readouterr().err
    assert restarted(run) == []
    assert spare.node_rank == SPARE


def test_without_spares_and_min_nodes_nobody_takes_over(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 2, spares=0, allowed=(2,))
    first, second = hosts.all()
    second.succeed = None
    kill(first)
    wait_until(lambda: second.failure is not None)
    assert hosts.agree(hosts.history(), second) == [RestartDecision(False, "")]
