"""How all nodes agree on a restart, over real sockets, and what the launcher records. No ranks."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core import event_json, transient_io
from harness.core.event_json import to_json
from harness.core.events import EndCause, RunRestarted
from harness.core.rundir import RunDir
from harness.telemetry.heartbeat import replace_file
from launch.local import restart
from launch.local.node_group import NodeFailure, NodeGroup
from launch.local.restart import RestartHistory, agree_on_restart
from launch.local.roster import pack_roster
from launch.local.start_failure import record_failure
from launch.restart_budget import RestartDecision
from tests import composed
from tests.drills import logs
from tests.launch.local.test_rendezvous import FakeNodes, drop_connections, wait_until

KILLED = NodeFailure(
    node_rank=1, host="b", exit_code=1, line="rank 1 on b was killed by SIGKILL", cause=EndCause.killed_rank
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.config.touch()
    lines = [logs.started(), *logs.steps(1, 5)]
    run.events.write_text("".join(f"{to_json(line)}\n" for line in lines))
    replace_file(run.status, {"state": "running", "step": 5, "eta_s": 3.0})
    return run


def agree(nodes: FakeNodes, group: NodeGroup, run: RunDir, *, stopping: bool = False) -> Future[RestartDecision]:
    history = RestartHistory(run, composed.load([]).launch, None)
    return nodes.pool.submit(agree_on_restart, group, history, [signal.SIGTERM] if stopping else [])


def fail_all(groups: list[NodeGroup], failure: NodeFailure = KILLED) -> None:
    groups[failure.node_rank].report_failure(failure)
    wait_until(lambda: all(group.failure == failure for group in groups))


def test_nodes_restart_together_once_all_have_stopped(stack: ExitStack, run: RunDir) -> None:
    nodes = FakeNodes(stack, 3)
    groups = nodes.all()
    ports = {group.store_port for group in groups}
    fail_all(groups)
    early = [agree(nodes, groups[node], run) for node in (0, 1)]
    time.sleep(0.3)
    assert not any(call.done() for call in early), "the ranks of node 2 may still run"
    calls = [*early, agree(nodes, groups[2], run)]
    assert [call.result(10) for call in calls] == [RestartDecision(True, "restart 1")] * 3
    assert [(group.restarts, group.failure) for group in groups] == [(1, None)] * 3
    (port,) = {group.store_port for group in groups}
    assert port not in ports, "another store"
    assert {group.attempt_name for group in groups} == {f"{groups[0].start_name}-restart-1"}
    for group in groups:
        group._process_message(next(iter(group.links.values())), {"failure": vars_of(KILLED), "restarts": 0})
    assert [group.failure for group in groups] == [None] * 3, "a failure of the last start"

    fail_all(groups)
    last = [agree(nodes, group, run) for group in groups]
    assert {call.result(10).again for call in last} == {True}
    assert [group.restarts for group in groups] == [2] * 3
    restarted = [event for event in event_json.read(run.events) if isinstance(event, RunRestarted)]
    assert [(event.step, event.reason, event.cause) for event in restarted] == [
        (5, KILLED.line, EndCause.killed_rank)
    ] * 2
    status = json.loads(run.status.read_text())
    assert (status["state"], status["reason"], status["step"]) == ("restarting", KILLED.line, 5)


def vars_of(failure: NodeFailure) -> dict[str, object]:
    return {"node_rank": failure.node_rank, "host": failure.host, "exit_code": 1, "line": failure.line}


def test_a_failure_that_follows_the_decision_at_once_is_not_lost(stack: ExitStack, run: RunDir) -> None:
    """Node 1 has read the decision, but its launcher has not continued yet."""
    nodes = FakeNodes(stack, 2)
    groups = nodes.all()
    fail_all(groups)
    groups[1].send_all(stopped=0, stopping=False)
    assert agree(nodes, groups[0], run).result(10).again
    groups[0].report_failure(KILLED)
    wait_until(lambda: (groups[1].restarts, groups[1].failure) == (1, KILLED))


def test_a_launcher_that_waits_sees_the_decision_though_a_failure_follows_at_once(
    stack: ExitStack, run: RunDir
) -> None:
    nodes = FakeNodes(stack, 2)
    first, second = nodes.all()
    fail_all([first, second])
    waiting = agree(nodes, second, run)
    wait_until(lambda: first.links[1].stopped == 0)
    decision = {"again": True, "restarts": 1, "reason": "restart 1", "store_port": 1, "exit_code": 1, "out": {}}
    with second.changed:  # its launcher cannot look in between
        second.take_decision(decision | {"roster": pack_roster(second.roster), "lease": ""})
        second.report_failure(KILLED)
    assert waiting.result(10) == RestartDecision(True, "restart 1")
    assert second.failure == KILLED


def test_a_node_that_fails_after_node_0_has_ended_ends_too(stack: ExitStack, run: RunDir) -> None:
    nodes = FakeNodes(stack, 2)
    first, second = nodes.all()
    first.report_success(0)
    first.__exit__()
    second.report_failure(KILLED)
    assert agree(nodes, second, run).result(10) == RestartDecision(False, "")


@pytest.mark.full
def test_a_node_0_that_is_done_and_then_silent_has_ended(stack: ExitStack, run: RunDir) -> None:
    nodes = FakeNodes(stack, 2)
    calls = [nodes.call(node) for node in range(2)]
    first, second = (call.result(10) for call in calls)
    first.report_success(0)  # it is never entered, so that it sends no heartbeats
    stack.enter_context(second)
    wait_until(lambda: second.links[0].is_done)
    second.report_failure(KILLED)
    assert agree(nodes, second, run).result(10) == RestartDecision(False, "")
    assert second.lost == {}
    for opened in (first.links[1].connection, first.store_socket):
        assert opened is not None
        opened.close()


def test_a_node_waits_for_the_decision_until_a_second_stop_signal(stack: ExitStack, run: RunDir) -> None:
    nodes = FakeNodes(stack, 2)
    groups = nodes.all()
    fail_all(groups)
    stop_signals: list[int] = []
    history = RestartHistory(run, composed.load([]).launch, None)
    waiting = nodes.pool.submit(agree_on_restart, groups[1], history, stop_signals)
    wait_until(lambda: groups[0].links[1].stopped == 0)
    assert not groups[0].links[1].is_stopping
    stop_signals += [signal.SIGTERM, signal.SIGUSR1]
    wait_until(lambda: groups[0].links[1].is_stopping)
    assert not waiting.done()
    stop_signals.append(signal.SIGTERM)
    assert waiting.result(10) == RestartDecision(False, "")


def test_a_start_after_node_0_was_done_detects_its_loss(stack: ExitStack, run: RunDir) -> None:
    """Its ranks have ended, those of node 1 fail, and all start again."""
    nodes = FakeNodes(stack, 2)
    groups = nodes.all()
    fail_all(groups)
    groups[0].report_success(0)
    calls = [agree(nodes, group, run) for group in groups]
    assert [call.result(10).again for call in calls] == [True, True]
    assert groups[1].end_code is None
    drop_connections(groups[0])
    wait_until(lambda: groups[1].has_lost_coordinator)


def test_no_file_is_read_while_heartbeats_wait(stack: ExitStack, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that stalls would silence the coordinator."""
    nodes = FakeNodes(stack, 2)
    groups = nodes.all()
    fail_all(groups)
    looked: list[tuple[str, bool]] = []

    def record(module: object, name: str) -> None:
        call = getattr(module, name)

        def recorded(path: object, *args: object, **options: object) -> object:
            if str(path).startswith(str(run.path)):
                looked.append((str(path), any(group.changed._is_owned() for group in groups)))  # type: ignore[attr-defined]
            return call(path, *args, **options)

        monkeypatch.setattr(module, name, recorded)

    for module, name in ((os, "stat"), (os, "open"), (io, "open")):
        record(module, name)
    calls = [agree(nodes, group, run) for group in groups]
    assert [call.result(10).again for call in calls] == [True, True]
    assert str(run.stop) in [path for path, _ in looked]
    assert [path for path, is_held in looked if is_held] == []


def test_a_lost_node_is_not_answered_with_a_restart(stack: ExitStack, run: RunDir) -> None:
    nodes = FakeNodes(stack, 3)
    groups = nodes.all()
    fail_all(groups)
    calls = [agree(nodes, groups[node], run) for node in (0, 1)]
    drop_connections(groups[2])
    decisions = [call.result(10) for call in calls]
    assert [decision.again for decision in decisions] == [False, False]
    assert decisions[0].reason.endswith(") is gone")
    assert not [event for event in event_json.read(run.events) if isinstance(event, RunRestarted)]


def test_a_node_that_was_lost_first_ends_the_run_on_all_nodes(stack: ExitStack, run: RunDir) -> None:
    nodes = FakeNodes(stack, 3)
    groups = nodes.all()
    drop_connections(groups[2])
    wait_until(lambda: all(group.failure is not None for group in groups[:2]), within_s=10.0)
    calls = [agree(nodes, groups[node], run) for node in (0, 1)]
    assert [call.result(10) for call in calls] == [RestartDecision(False, "")] * 2


@pytest.mark.parametrize("stopping", [0, 1], ids=["node 0", "another node"])
def test_a_stop_request_on_any_node_ends_the_run(stack: ExitStack, run: RunDir, stopping: int) -> None:
    nodes = FakeNodes(stack, 2)
    groups = nodes.all()
    fail_all(groups)
    calls = [agree(nodes, group, run, stopping=node == stopping) for node, group in enumerate(groups)]
    assert [call.result(10) for call in calls] == [RestartDecision(False, "a stop was requested")] * 2


def test_a_stop_file_ends_the_run(stack: ExitStack, run: RunDir) -> None:
    nodes = FakeNodes(stack, 1)
    (group,) = nodes.all()
    run.stop.touch()
    group.report_failure(KILLED)
    assert agree(nodes, group, run).result(10) == RestartDecision(False, "a stop was requested")


@pytest.mark.parametrize("num_failures", [1, math.inf], ids=["for a moment", "for good"])
@pytest.mark.parametrize("name", ["STOP", "events.jsonl", "config.yaml"])
def test_an_io_error_does_not_keep_a_run_from_its_restart(
    stack: ExitStack, run: RunDir, monkeypatch: pytest.MonkeyPatch, name: str, num_failures: float
) -> None:
    monkeypatch.setattr(transient_io, "PAUSE_S", 0.01)
    nodes = FakeNodes(stack, 1)
    (group,) = nodes.all()
    group.report_failure(KILLED)
    fail_reads(monkeypatch, run.path / name, num_failures)
    assert agree(nodes, group, run).result(10) == RestartDecision(True, "restart 1")
    monkeypatch.undo()
    written = [event for event in event_json.read(run.events) if isinstance(event, RunRestarted)]
    assert len(written) == (name == "STOP" or num_failures == 1)


def fail_reads(monkeypatch: pytest.MonkeyPatch, failing: Path, num_failures: float) -> None:
    """The file system answers ESTALE for a path, so many times."""
    errors = iter(range(10**9 if math.isinf(num_failures) else int(num_failures)))

    def patch(module: object, name: str) -> None:
        call = getattr(module, name)

        def fail_first(path: object, *args: object, **options: object) -> object:
            if str(path) == str(failing) and next(errors, None) is not None:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return call(path, *args, **options)

        monkeypatch.setattr(module, name, fail_first)

    patch(os, "stat")
    patch(io, "open")


@pytest.mark.parametrize("name", ["STOP", "events.jsonl", "config.yaml"])
def test_an_io_error_keeps_the_exit_code_of_a_run_whose_storage_failed(
    stack: ExitStack, run: RunDir, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(transient_io, "PAUSE_S", 0.01)
    nodes = FakeNodes(stack, 1)
    (group,) = nodes.all()
    failure = replace(KILLED, exit_code=75, cause=EndCause.lost_storage)
    group.report_failure(failure)
    fail_reads(monkeypatch, run.path / name, math.inf)
    assert agree(nodes, group, run).result(10) == RestartDecision(False, "interrupted, resumable")
    assert record_failure(run, 75, failure) == (name == "STOP")


def test_without_a_port_for_the_store_the_run_ends(stack: ExitStack, run: RunDir) -> None:
    """The address of node 0 is gone. The other nodes get the decision."""
    nodes = FakeNodes(stack, 2)
    groups = nodes.all()
    fail_all(groups)
    groups[0].address = "192.0.2.1"
    calls = [agree(nodes, group, run) for group in groups]
    line = "rendezvous: cannot listen on 192.0.2.1: Cannot assign requested address"
    assert [call.result(10) for call in calls] == [RestartDecision(False, line)] * 2


def test_a_node_whose_ranks_do_not_stop_prevents_a_restart(
    stack: ExitStack, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "STOP_WITHIN_S", 0.3)
    nodes = FakeNodes(stack, 2)
    groups = nodes.all()
    fail_all(groups)
    assert agree(nodes, groups[0], run).result(10) == RestartDecision(False, "node 1 did not stop its ranks within 0 s")


def test_progress_is_the_last_logged_step_and_that_of_the_failed_rank(run: RunDir) -> None:
    history = RestartHistory(run, composed.load([]).launch, None)
    assert restart.read_reached(run) == (0, 5)
    history.decide(KILLED, obstacle="")
    history.decide(NodeFailure(node_rank=0, host="a", exit_code=1, line="", step=7), obstacle="")
    assert [failure.reached for failure in history.failures] == [(0, 5), (0, 7)]
    run.events.unlink()
    assert restart.read_reached(run) is None
