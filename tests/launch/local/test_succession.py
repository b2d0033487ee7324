"""The coordinator of an elastic run is lost: who decides next, over real sockets. No ranks."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import ExitStack
from dataclasses import replace

import pytest

from harness.core.locking import directory_lease
from harness.core.locking.lease_holder import this_process
from harness.core.rundir import RunDir
from launch.local import file_limit, succession
from launch.local.node_group import SPARE, NodeGroup
from launch.local.restart import agree_on_restart
from launch.local.spare import wait_as_spare
from launch.node_record import node_record_path, read_node_faults
from launch.restart_budget import RestartDecision
from tests.launch.local.test_rendezvous import drop_connections, wait_until
from tests.launch.local.test_spare import KILLED, Hosts, lose, names, restarted, run, stack

__all__ = ["names", "run", "stack"]


def kill(group: NodeGroup) -> None:
    """A launcher dies: it closes all connections, and nobody answers at its ports."""
    for listener in (group.listener, group.succession, group.store_socket):
        if listener is not None:
            listener.close()
    if group.lease is not None:
        group.lease.release()
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


def test_the_next_coordinator_raises_its_limit_of_open_files(
    stack: ExitStack, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another process than node 0."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    first, second, spare = hosts.all()
    kill(first)
    wait_until(lambda: None not in (second.failure, spare.failure))
    monkeypatch.setattr(file_limit, "files_needed", lambda num_nodes, nproc: 1000 + 10 * num_nodes + nproc)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    hosts.agree(hosts.history(), second, spare)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1031


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


def test_a_launcher_that_follows_after_the_decision_is_a_spare(
    stack: ExitStack, run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks took long to die."""
    monkeypatch.setattr(succession, "FOLLOW_WITHIN_S", 0.5)
    hosts = Hosts(stack, run, 4, spares=0, allowed=(2, 3, 4))
    first, second, late, fourth = hosts.all()
    history = hosts.history()
    kill(first)
    wait_until(lambda: None not in (second.failure, late.failure, fourth.failure))
    decisions = hosts.agree(history, second, fourth)
    assert [(decision.again, second.roster) for decision in decisions] == [(True, (1, 3))] * 2
    assert hosts.agree(hosts.history(), late) == decisions[:1]
    assert (late.coordinator, late.roster, late.restarts, late.node_rank) == (1, (1, 3), 1, SPARE)
    assert (late.store_port, late.failure) == (second.store_port, None)
    assert "harness: node 2 (host2) has joined as a spare\n" in capsys.readouterr().err

    second.report_failure(KILLED)
    wait_until(lambda: fourth.failure is not None)
    decisions = hosts.agree(history, second, fourth)
    assert decisions[0].reason == "restart 2, host2 joins, the run continues on 3 instead of 2 nodes"
    wait_until(lambda: late.restarts == 2)
    assert [group.roster for group in (second, late, fourth)] == [(1, 3, 2)] * 3
    late.report_failure(replace(KILLED, node_rank=2))
    wait_until(lambda: None not in (second.failure, fourth.failure))


def test_a_launcher_that_follows_before_the_decision_keeps_its_node(
    stack: ExitStack, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was counted as lost already."""
    monkeypatch.setattr(succession, "FOLLOW_WITHIN_S", 0.3)
    hosts = Hosts(stack, run, 3, spares=0, allowed=(2, 3))
    first, second, third = hosts.all()
    kill(first)
    wait_until(lambda: None not in (second.failure, third.failure))
    assert second.succeed is not None
    assert second.succeed(False)
    assert sorted(second.lost) == [0, 2]
    follower = hosts.pool.submit(agree_on_restart, third, hosts.history(), [])
    wait_until(lambda: 2 in second.links)
    decisions = [*hosts.agree(hosts.history(), second), follower.result(10)]
    assert decisions == [RestartDecision(True, "restart 1, the run continues on 2 instead of 3 nodes")] * 2
    assert (second.roster, second.failure, second.lost) == ((1, 2), None, {})
    assert [fault.node for fault in read_node_faults(run)] == ["host0"]


@pytest.mark.parametrize("told", [1, 2], ids=["the next coordinator", "the other launcher"])
def test_a_coordinator_is_lost_while_it_sends_its_decision(stack: ExitStack, run: RunDir, told: int) -> None:
    """One launcher knows of a start that the other has not heard of."""
    hosts = Hosts(stack, run, 3, spares=0, allowed=(2, 3))
    first, *others = hosts.all()
    first.report_failure(KILLED)
    wait_until(lambda: None not in (others[0].failure, others[1].failure))
    others[told - 1].take_decision(
        {
            "again": True,
            "reason": "",
            "restarts": 1,
            "store_port": 1,
            "roster": [[0, 2]],
            "exit_code": 1,
            "out": {},
            "lease": "",
        }
    )
    kill(first)
    wait_until(lambda: all(group.has_lost_coordinator for group in others))
    decisions = hosts.agree(hosts.history(), *others)
    assert [decision.again for decision in decisions] == [True, True]
    wait_until(lambda: [(group.restarts, group.roster) for group in others] == [(2, (1, 2))] * 2)


def test_a_launcher_waits_for_a_decision_until_its_coordinator_has_ended(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 3, spares=0, allowed=(2, 3))
    first, second, third = hosts.all()
    second.report_failure(KILLED)
    wait_until(lambda: third.failure is not None)
    waiting = hosts.pool.submit(agree_on_restart, third, hosts.history(), [])
    first.report_success(0)  # its own ranks ended before it read of the failure
    wait_until(lambda: third.end_code == 0)
    assert not waiting.done(), "it may still decide"
    first.__exit__()
    assert waiting.result(10) == RestartDecision(False, "")
    assert third.coordinator == 0, "the run has ended: nobody takes over"


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
    err = capsys.readouterr().err
    assert f"the run cannot be taken over: run.name: {run.path} is in use by pid {os.getpid()} " in err
    assert "coordinates the run from now on" not in err
    assert not second.is_coordinator, "it must not write the end of the run"
    assert restarted(run) == []
    assert spare.node_rank == SPARE


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_launcher_that_is_cut_off_takes_nothing_over_before_the_next_rank_0_begins_nor_after_the_end(
    stack: ExitStack,
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_ended: bool,
) -> None:
    """The coordinator has decided, and the ranks of the next start are slow; or they have halted, and the run is
    free."""
    monkeypatch.setattr(succession, "FOLLOW_WITHIN_S", 0.3)
    hosts = Hosts(stack, run, 3, spares=0, allowed=(2, 3))
    first, cut_off, third = hosts.all()
    lose(cut_off, first, third)
    wait_until(lambda: cut_off.has_lost_coordinator)
    decisions = hosts.agree(hosts.history(), first, third)
    assert [decision.again for decision in decisions] == [True, True]
    assert first.lease is not None
    assert first.lease_offered_by == third.lease_offered_by == first.lease.me.owner
    written = node_record_path(run).read_text()
    if has_ended:
        first.lease.release()

    assert hosts.agree(hosts.history(), cut_off) == [RestartDecision(False, "")]
    problem = "it went on without this machine, and has ended" if has_ended else f"run.name: {run.path} is in use by "
    assert f"the run cannot be taken over: {problem}" in capsys.readouterr().err
    assert not cut_off.is_coordinator
    assert len(restarted(run)) == 1
    assert node_record_path(run).read_text() == written
    assert [fault.node for fault in read_node_faults(run)] == ["host1"]


@pytest.mark.parametrize("stopped", [1, 2], ids=["the next coordinator", "the other launcher"])
def test_a_stop_signal_of_one_launcher_ends_the_run_if_the_coordinator_is_lost(
    stack: ExitStack, run: RunDir, stopped: int
) -> None:
    hosts = Hosts(stack, run, 3, spares=0, allowed=(1, 2, 3))
    first, *others = hosts.all()
    kill(first)
    wait_until(lambda: all(group.has_lost_coordinator for group in others))
    signals = {stopped: [signal.SIGTERM]}
    calls = [
        hosts.pool.submit(agree_on_restart, group, hosts.history(), signals.get(group.number, [])) for group in others
    ]
    assert [call.result(20) for call in calls] == [RestartDecision(False, "a stop was requested")] * 2
    assert restarted(run) == []


def test_a_coordinator_whose_run_was_taken_over_writes_nothing(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 2, spares=0, allowed=(1, 2))
    first, second = hosts.all()
    lose(second, first)
    lease = directory_lease.acquire(
        run.lease, replace(this_process(lease_s=0.6), machine="another machine"), on_lost=lambda _: None
    )
    (decision,) = hosts.agree(hosts.history(), first)
    lease.release()
    assert not decision.again
    assert f"{run.path} is in use by pid {os.getpid()} " in decision.reason
    assert (restarted(run), read_node_faults(run)) == ([], [])


def test_without_spares_and_min_nodes_nobody_takes_over(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 2, spares=0, allowed=(2,))
    first, second = hosts.all()
    second.succeed = None
    kill(first)
    wait_until(lambda: second.failure is not None)
    assert hosts.agree(hosts.history(), second) == [RestartDecision(False, "")]
