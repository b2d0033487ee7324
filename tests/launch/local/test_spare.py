"""Spares over real sockets: which launcher replaces which, who may join, and what node 0 records. No ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import local

import pytest

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Health
from harness.core import event_json
from harness.core.event_json import to_json
from harness.core.events import EndCause, FindingKind, RunRestarted
from harness.core.rundir import RunDir
from launch.local import node_group, planned_restart, rendezvous
from launch.local.elastic import Elastic
from launch.local.node_address import RendezvousError
from launch.local.node_group import SPARE, NodeFailure, NodeGroup, RendezvousSpec
from launch.local.planned_restart import RestartPlanner
from launch.local.rendezvous import join_nodes
from launch.local.restart import RestartHistory, agree_on_restart
from launch.local.spare import check_this_machine, wait_as_spare
from launch.node_record import NodeRecord, read_node_faults, read_out_nodes
from launch.restart_budget import RestartDecision
from launch.slurm import node_exclusion
from launch.slurm.node_exclusion import NodeFault, NodeFaultKind
from tests import composed
from tests.drills import logs
from tests.launch.local.test_rendezvous import FakeNodes, drop_connections, wait_until

SICK = "GPU 3 has 2 uncorrected ECC errors"
KILLED = NodeFailure(node_rank=1, host="host1", exit_code=1, line="rank 1 was killed", cause=EndCause.killed_rank)
HUNG = NodeFailure(node_rank=1, host="host1", exit_code=1, line="rank 1 hangs", cause=EndCause.hung_rank)
here = local()


class Hosts(FakeNodes):
    """Launchers of an elastic run in one process; launcher K is on hostK."""

    def __init__(self, stack: ExitStack, run: RunDir, num_nodes: int, *, spares: int, allowed: tuple[int, ...]) -> None:
        super().__init__(stack, num_nodes + spares)
        self.run, self.allowed = run, allowed
        self.record = NodeRecord(run, hours=24.0)
        self.within_s = 5.0

    def join(self, node: int, *problems: str) -> Future[NodeGroup]:
        elastic = Elastic(allowed=self.allowed, record=self.record, problems=list(problems))
        spec = RendezvousSpec(num_nodes=self.num_nodes, node_rank=node, port=self.port)
        options = {"run": "r", "nproc": 1, "within_s": self.within_s, "silent_s": 1.5}

        def join_as_host() -> NodeGroup:
            here.name = f"host{node}"
            return join_nodes(spec, **options, stop_requested=lambda: False, elastic=elastic)  # type: ignore[arg-type]

        return self.pool.submit(join_as_host)

    def enter(self, *calls: Future[NodeGroup]) -> list[NodeGroup]:
        groups = [call.result(20) for call in calls]
        self.stack.callback(lambda: list(self.pool.map(NodeGroup.__exit__, groups)))
        return [group.__enter__() for group in groups]

    def all(self) -> list[NodeGroup]:
        return self.enter(*[self.join(node) for node in range(self.num_nodes)])

    def history(self, **limits: object) -> RestartHistory:
        elastic = Elastic(allowed=self.allowed, record=self.record, problems=[])
        launch = composed.load([f"launch.{name}={value}" for name, value in limits.items()]).launch
        return RestartHistory(self.run, launch, None, nproc=1, elastic=elastic, record=self.record)

    def agree(self, history: RestartHistory, *groups: NodeGroup) -> list[RestartDecision]:
        calls = [self.pool.submit(agree_on_restart, group, history, []) for group in groups]
        return [call.result(20) for call in calls]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.config.touch()
    started = replace(logs.started(), machines={"host0": [0], "host1": [1]})
    run.events.write_text("".join(f"{to_json(line)}\n" for line in [started, *logs.steps(1, 5)]))
    return run


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "machine_name", lambda: here.name)


def lose(group: NodeGroup, *others: NodeGroup) -> None:
    """A launcher dies; wait until the others know."""
    drop_connections(group)
    wait_until(lambda: all(other.failure is not None for other in others))


def restarted(run: RunDir) -> list[RunRestarted]:
    return [event for event in event_json.read(run.events) if isinstance(event, RunRestarted)]


def test_a_spare_takes_over_and_the_lost_host_comes_back_as_a_spare(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    first, second, spare = hosts.all()
    history = hosts.history()
    assert [(group.node_rank, group.num_nodes, group.is_spare) for group in (first, second, spare)] == [
        (0, 2, False),
        (1, 2, False),
        (SPARE, 2, True),
    ]
    waiting = hosts.pool.submit(wait_as_spare, spare, [])
    time.sleep(0.1)
    lose(second, first)
    (decision,) = hosts.agree(history, first)
    assert decision == RestartDecision(True, "restart 1, host2 replaces host1")
    assert waiting.result(10) is None
    assert [(group.node_rank, group.roster, group.restarts) for group in (first, spare)] == [
        (0, (0, 2), 1),
        (1, (0, 2), 1),
    ]
    assert spare.store_port == first.store_port
    (event,) = restarted(run)
    assert (event.cause, event.out, event.replaced_by, event.num_nodes) == (
        EndCause.lost_node,
        {"host1": "node 1 (host1) is gone"},
        {"host1": "host2"},
        2,
    )
    (fault,) = read_node_faults(run)
    assert (fault.node, fault.kind, fault.returned) == ("host1", NodeFaultKind.lost, None)
    assert fault.evidence == f"logs/{first.start_name}"
    assert [node.node for node in read_out_nodes(run)] == ["host1"]

    (back,) = hosts.enter(hosts.join(1))
    assert (back.node_rank, back.restarts, back.roster) == (SPARE, 1, (0, 2)), "joins as a spare, at the same restart"
    assert read_node_faults(run)[0].returned is not None
    assert read_out_nodes(run) == []
    wait_until(lambda: 1 in first.links)
    lose(spare, first)
    (decision,) = hosts.agree(history, first)
    assert decision.reason == "restart 2, host1 replaces host2"
    wait_until(lambda: back.node_rank == 1)
    assert (back.restarts, len(history.failures)) == (2, 2), "a lost node counts as a failed start"


def test_a_lost_host_that_comes_back_before_the_decision_keeps_its_node(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 2, spares=0, allowed=(1, 2))
    first, second = hosts.all()
    lose(second, first)
    first.fenced_s = fenced_s = time.monotonic() + 1.0
    (back,) = hosts.enter(hosts.join(1))
    assert back.is_spare, "its ranks must not join a start that has failed"
    wait_until(lambda: 1 in first.links)
    assert hosts.agree(hosts.history(), first) == [RestartDecision(True, "restart 1")]
    assert time.monotonic() > fenced_s, "the ranks of the first launcher may still run"
    wait_until(lambda: back.node_rank == 1)
    assert (first.failure, first.lost, back.failure, back.restarts) == (None, {}, None, 1)
    assert read_node_faults(run) == []
    back.report_failure(KILLED)
    wait_until(lambda: first.failure == KILLED)


def test_a_spare_that_takes_over_before_it_waits_asks_for_the_next_decision(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    first, second, spare = hosts.all()
    history = hosts.history()
    lose(second, first)
    hosts.agree(history, first)
    wait_until(lambda: not spare.is_spare)
    spare.report_failure(KILLED)
    wait_until(lambda: first.failure is not None)
    call = hosts.pool.submit(agree_on_restart, spare, hosts.history(), [])
    wait_until(lambda: first.links[2].stopped == 1)
    assert not call.done(), "node 0 has not decided"
    (decision,) = hosts.agree(history, first)
    assert call.result(10) == decision == RestartDecision(True, "restart 2")
    assert spare.restarts == 2


def test_a_lost_spare_is_no_failure(stack: ExitStack, run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    first, second, spare = hosts.all()
    drop_connections(spare)
    wait_until(lambda: 2 not in first.links)
    assert (first.failure, second.failure) == (None, None)
    assert "harness: the spare node 2 (host2) is gone\n" in capsys.readouterr().err
    assert read_node_faults(run) == []


def test_without_a_spare_the_run_continues_on_fewer_nodes_or_ends(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 3, spares=0, allowed=(2, 3))
    groups = hosts.all()
    history = hosts.history()
    lose(groups[1], groups[0], groups[2])
    decisions = hosts.agree(history, groups[0], groups[2])
    assert decisions == [RestartDecision(True, "restart 1, the run continues on 2 instead of 3 nodes")] * 2
    assert [groups[node].node_rank for node in (0, 2)] == [0, 1], "node ranks have no gap"
    assert (restarted(run)[0].replaced_by, restarted(run)[0].num_nodes) == ({}, 2)
    lose(groups[2], groups[0])
    (decision,) = hosts.agree(history, groups[0])
    reason = "node 1 (host2) is gone, no spare is left, and the run needs 2 nodes"
    assert decision == RestartDecision(False, reason)


def test_a_spare_ends_with_the_run(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    first, _, spare = hosts.all()
    waiting = hosts.pool.submit(wait_as_spare, spare, [])
    first.report_success(75)
    assert waiting.result(10) == 75
    assert hosts.pool.submit(wait_as_spare, spare, [15]).result(10) == 75


@pytest.mark.parametrize("max_restarts", [3, 0])
def test_a_spare_ends_with_a_run_that_is_not_restarted(stack: ExitStack, run: RunDir, max_restarts: int) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    first, second, spare = hosts.all()
    waiting = hosts.pool.submit(wait_as_spare, spare, [])
    second.report_failure(KILLED)
    wait_until(lambda: first.failure is not None)
    decisions = hosts.agree(hosts.history(max_restarts=max_restarts), first, second)
    assert {decision.again for decision in decisions} == {max_restarts > 0}
    if max_restarts == 0:
        assert waiting.result(10) == 1
    else:
        time.sleep(0.2)
        assert not waiting.done(), "the same nodes start again"
        spare.end_code = 0
        assert waiting.result(10) == 0


def test_a_spare_without_node_0_looks_for_another_coordinator_or_ends(
    stack: ExitStack, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    first, _, spare = hosts.all()
    waiting = hosts.pool.submit(wait_as_spare, spare, [])
    drop_connections(first)
    assert waiting.result(10) is None
    spare.succeed = None
    assert wait_as_spare(spare, []) == 1
    assert "stops: node 0 (host0) is gone\n" in capsys.readouterr().err


def test_a_node_that_hangs_twice_is_replaced_and_waits(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    groups = hosts.all()
    history = hosts.history()
    for expected in ("restart 1", "restart 2, host2 replaces host1"):
        groups[1].report_failure(HUNG)
        wait_until(lambda: groups[0].failure is not None)
        assert {decision.reason for decision in hosts.agree(history, groups[0], groups[1])} == {expected}
    wait_until(lambda: (groups[1].node_rank, groups[2].node_rank) == (SPARE, 1))
    assert groups[1].out == {"host1": "rank 1 hangs"}, "its launcher prints why"
    assert restarted(run)[1].out == {"host1": "rank 1 hangs"}
    assert groups[0].links[1].problems is None, "it needs another health check"
    groups[1].send_all(problems=[])
    wait_until(lambda: groups[0].links[1].problems == [])
    lose(groups[2], groups[0])
    (decision,) = hosts.agree(history, groups[0])
    assert decision.reason == "restart 3, host1 replaces host2", "it is out, but the only one left"


def test_a_stopped_node_that_is_unhealthy_is_not_used_again(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(1, 2))
    first, second, spare = hosts.all()
    spare.send_all(problems=[SICK])
    wait_until(lambda: first.links[2].problems == [SICK])
    lose(second, first)
    (decision,) = hosts.agree(hosts.history(), first)
    assert decision.reason == "restart 1, the run continues on 1 instead of 2 nodes"


def test_an_unhealthy_host_does_not_join_and_a_spare_takes_its_place(
    stack: ExitStack, run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "SPARES_WITHIN_S", 0.3)
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    calls = [hosts.join(0), hosts.join(1, SICK), hosts.join(2)]
    with pytest.raises(RendezvousError, match=f"^node 1 .host1. failed its health check and does not join: {SICK}"):
        calls[1].result(20)
    first, spare = hosts.enter(calls[0], calls[2])
    assert (first.roster, spare.node_rank) == ((0, 2), 1)
    (fault,) = read_node_faults(run)
    assert (fault.node, fault.kind, fault.reason) == ("host1", NodeFaultKind.health, SICK)
    assert f"harness: node 1 (host1) failed its health check and does not join: {SICK}\n" in capsys.readouterr().err
    (late,) = hosts.enter(hosts.join(1))
    assert late.is_spare


def test_a_start_without_enough_nodes_continues_on_fewer_or_fails(stack: ExitStack, run: RunDir) -> None:
    for allowed in ((1, 2), (2,)):
        hosts = Hosts(stack, run, 2, spares=0, allowed=allowed)
        hosts.within_s = 0.5
        call = hosts.join(0)
        if len(allowed) == 2:
            (first,) = hosts.enter(call)
            assert first.roster == (0,)
        else:
            with pytest.raises(RendezvousError, match=r"^rendezvous: node 1 of 2 did not join within 0 s$"):
                call.result(10)


def test_a_node_that_comes_first_waits_as_long_as_node_0(stack: ExitStack, run: RunDir) -> None:
    """Node 0 decides after its own time limit on which nodes the run starts."""
    hosts = Hosts(stack, run, 3, spares=0, allowed=(2, 3))
    hosts.within_s = 2.0
    early = hosts.join(1)
    time.sleep(0.7)
    first, second = hosts.enter(hosts.join(0), early)
    assert (first.roster, second.roster) == ((0, 1), (0, 1))


def test_a_host_that_is_out_does_not_train_at_the_next_start(stack: ExitStack, run: RunDir) -> None:
    NodeRecord(run, hours=24.0).add([NodeFault(time.time(), "host1", "weights changed", NodeFaultKind.corrupting)])
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    assert [group.node_rank for group in hosts.all()] == [0, SPARE, 1]


@pytest.mark.parametrize("problem", ["another run", "its number is taken", "another number of ranks"])
def test_a_later_launcher_that_does_not_fit_is_rejected(stack: ExitStack, run: RunDir, problem: str) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    groups = hosts.all()
    drop_connections(groups[2])
    wait_until(lambda: 2 not in groups[0].links)
    spec = RendezvousSpec(num_nodes=3, node_rank=1 if problem == "its number is taken" else 2, port=hosts.port)
    name, nproc = "other" if problem == "another run" else "r", 2 if problem == "another number of ranks" else 1
    here.name = "host9"
    with pytest.raises(Exception, match=r"is not expected here|on node 0 and 2 on node 2"):
        join_nodes(spec, run=name, nproc=nproc, within_s=5.0, silent_s=1.5, stop_requested=lambda: False)
    assert groups[0].failure is None


@pytest.mark.full
def test_ranks_of_a_silent_node_have_time_to_die(
    stack: ExitStack, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_group, "FENCE_S", 1.0)
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    first, silent, spare = (hosts.join(node) for node in range(3))
    groups = hosts.enter(first, spare)
    wait_until(lambda: groups[0].failure is not None, within_s=10.0)
    noticed_s = time.monotonic()
    (decision,) = hosts.agree(hosts.history(), groups[0])
    assert decision.reason == "restart 1, host2 replaces host1"
    assert time.monotonic() - noticed_s > 0.7
    lost = silent.result()
    assert lost.succession is not None
    for opened in (lost.links[0].connection, lost.succession):
        opened.close()


def test_a_lost_node_is_not_blamed_while_the_run_stops_or_if_all_others_are_lost(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 3, spares=0, allowed=(2, 3))
    groups = hosts.all()
    history = hosts.history()
    drop_connections(groups[1])
    wait_until(lambda: len(groups[0].lost) == 1)
    history.record_faults(groups[0], stopping=True)
    assert read_node_faults(run) == []
    drop_connections(groups[2])
    wait_until(lambda: len(groups[0].lost) == 2)
    history.record_faults(groups[0])
    assert read_node_faults(run) == [], "this machine or the network may be at fault"


def save(run: RunDir, step: int) -> None:
    path = run.checkpoints / catalog.name_of(step, 0)
    path.mkdir(parents=True)
    catalog.mark(path, Health.candidate, "by the test")


def make_planner(hosts: Hosts, group: NodeGroup, **limits: object) -> Callable[[], list[str]]:
    planner = RestartPlanner(group, hosts.history(**limits))
    times_s = iter(range(0, 10_000, 10))

    def check() -> list[str]:
        failure = planner.check(float(next(times_s)))
        return [] if failure is None else [failure.line]

    return check


def test_a_node_that_returns_is_taken_back_after_a_checkpoint(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 2, spares=0, allowed=(1, 2))
    first, second = hosts.all()
    history = hosts.history()
    lose(second, first)
    hosts.agree(history, first)
    check = make_planner(hosts, first)
    save(run, 10)
    assert check() == check() == []
    (back,) = hosts.enter(hosts.join(1))
    wait_until(lambda: 1 in first.links)
    assert check() == check() == [], "the checkpoint is older than the machine"
    save(run, 20)
    (line,) = check()
    assert line == ("planned restart after a checkpoint: host1 joins, the run continues on 2 instead of 1 nodes")
    first.report_failure(NodeFailure(node_rank=0, host="host0", exit_code=75, line=line, cause=EndCause.planned))
    (decision,) = hosts.agree(history, first)
    assert decision.again
    wait_until(lambda: back.node_rank == 1)
    assert len(history.failures) == 1, "a planned restart is no failure"
    assert check() == []
    save(run, 30)
    assert check() == [], "nobody is missing"


@pytest.mark.parametrize("replace_running", [True, False])
def test_a_node_that_the_sentinel_named_is_replaced(stack: ExitStack, run: RunDir, replace_running: bool) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    groups = hosts.all()
    check = make_planner(hosts, groups[0], replace_running=str(replace_running).lower())
    save(run, 10)
    assert check() == []
    found = replace(logs.finding(6, FindingKind.weights_changed, ranks=[1]), time=time.time() - 30.0)
    with run.events.open("a") as log:
        log.write(f"{to_json(found)}\n")
    save(run, 20)
    expected = ["planned restart after a checkpoint: host2 replaces host1"] if replace_running else []
    assert check() == expected
    groups[1].report_failure(KILLED)
    wait_until(lambda: groups[0].failure is not None)
    decisions = hosts.agree(hosts.history(), groups[0], groups[1])
    assert {decision.reason for decision in decisions} == {"restart 1, host2 replaces host1"}, "at the next restart"
    assert restarted(run)[0].out == {"host1": found.message}


def test_planner_of_other_nodes_and_runs_does_nothing(stack: ExitStack, run: RunDir) -> None:
    hosts = Hosts(stack, run, 2, spares=1, allowed=(2,))
    first, second, _ = hosts.all()
    assert make_planner(hosts, second)() == []
    assert RestartPlanner(first, RestartHistory(run, composed.load([]).launch, None)).check(0.0) is None
    assert planned_restart.CHECK_EVERY_S < 10.0


@pytest.mark.full
def test_the_health_check_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of Slurm jobs, without the parts that need other nodes."""
    cfg = composed.load(["parallel.device=cpu", f"run.dir={tmp_path}", "run.name=r"])
    (tmp_path / "r").mkdir()
    assert check_this_machine(cfg, computes=True) == []
    assert not list((tmp_path / "r").iterdir())
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '0, 80000, 80000, 2'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    monkeypatch.setattr("launch.local.spare.CHECK_PAUSE_S", 0.01)
    for computes in (False, True):
        assert check_this_machine(cfg, computes=computes) == ["GPU 0 has 2 uncorrected ECC errors"]
    cfg.launch.slurm.health = False
    assert check_this_machine(cfg, computes=True) == []


def test_the_file_is_readable_without_this_code(run: RunDir) -> None:
    NodeRecord(run, hours=24.0).add([NodeFault(1e9, "old", "hangs", NodeFaultKind.hung)])
    now = time.time()
    NodeRecord(run, hours=24.0).add([NodeFault(now, "host1", "is gone", NodeFaultKind.lost, "logs/a")])
    content = json.loads((run.path / "nodes.json").read_text())
    assert content["out"] == [
        {
            "node": "host1",
            "reason": "is gone",
            "num_failures": 1,
            "until": now + 24 * node_exclusion.HOUR_S,
            "kind": "lost",
            "since": now,
            "evidence": "logs/a",
        }
    ]
    assert [fault["node"] for fault in content["faults"]] == ["old", "host1"]
