"""Restarts inside the job: all nodes agree whether the ranks start again after a failure, and on which machines.

Why: a job that ends because one rank was killed goes through the queue, or waits for a person. Starting its ranks again
on the nodes that it has takes seconds.
How: when a rank dies, hangs or raises, or a node is lost, every node stops its ranks and tells node 0. Node 0 decides
for all (`launch.restart_budget`) once no rank of the run is alive, opens another store for the next start, and sends
the decision. In an elastic run it also chooses the machines: a spare takes over the node rank of one that is lost or
out, or the run continues with fewer (`launch.local.roster`). Where the run resumes is decided by the ranks, as in every
start. If node 0 itself is lost, the next in line decides (`launch.local.succession`). In an elastic run the launcher
that decides holds the lease of the run meanwhile, and writes nothing without it. Exit codes 2, 3 and 75, and the
loss of a node that nobody can replace, are never answered with a restart; then the launchers end, and a scheduler may
requeue the job.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self, final

from harness.checkpoint.catalog import Health
from harness.config.errors import ConfigError
from harness.config.launch import LaunchConfig
from harness.config.schema import Config
from harness.core.events import EndCause, Event, StepRecord
from harness.core.locking.run_lease import clear_dead_lease, take_over_lease
from harness.core.node_name import machine_name
from harness.core.rundir import RunDir, locate
from harness.core.stderr_lines import print_warning
from harness.core.transient_io import retry_transient
from harness.telemetry.event_log import TAIL_BYTES, record_restart, tail
from harness.telemetry.heartbeat import mark_restarting
from launch.local.elastic import Elastic
from launch.local.node_address import RendezvousError
from launch.local.node_group import POLL_S, NodeFailure, NodeGroup
from launch.local.rendezvous import open_store_socket
from launch.local.roster import Roster, pack_roster
from launch.node_record import NodeRecord, faults_of_findings
from launch.restart_budget import FailedStart, Reached, RestartDecision, decide_restart, newest_checkpoint
from launch.slurm.node_exclusion import NodeFault, NodeFaultKind

STOP_WITHIN_S = 60.0
"""How long node 0 waits until the other nodes have stopped their ranks."""
FINDINGS_BYTES = 4 << 20
"""How much of the end of the log is searched for findings about machines."""


@final
@dataclass(slots=True)
class RestartHistory:
    """The failed starts of this launcher, on node 0."""

    run: RunDir
    limits: LaunchConfig
    before: Reached | None
    """What earlier launchers had reached."""
    nproc: int = 1
    """Ranks of a node."""
    elastic: Elastic | None = None
    """None: every node is needed."""
    record: NodeRecord | None = None
    """Faults of the machines; None: not recorded."""
    failures: list[FailedStart] = field(default_factory=list)

    @classmethod
    def begin(cls, cfg: Config, *, nproc: int = 1, elastic: Elastic | None = None) -> Self:
        run = locate(cfg)
        record = NodeRecord(run, hours=cfg.launch.slurm.exclude_hours) if elastic is None else elastic.record
        return cls(run, cfg.launch, read_reached(run), nproc, elastic, record)

    def record_faults(self, group: NodeGroup, *, stopping: bool = False) -> None:
        """Record on node 0 which machines were at fault in the start that has just ended.

        A machine that is lost while the run is stopped is not blamed, nor are all others at once: then the network or
        this machine is the likely cause.
        """
        if self.record is None or group.spec.num_nodes == 1:
            return
        failure, hosts = group.failure, [group.hosts.get(number, "") for number in group.roster]
        where = f"logs/{group.attempt_name}"
        events = read_log_end(self.run, FINDINGS_BYTES)
        faults = faults_of_findings(events, hosts, nproc=self.nproc)
        if failure is not None and failure.cause == EndCause.hung_rank:
            host = group.host_of(failure.node_rank)
            faults.append(NodeFault(group.noticed, host, failure.line, NodeFaultKind.hung, where))
        if not stopping and not len(group.lost) == group.num_nodes - 1 > 1:
            faults += [
                NodeFault(group.noticed, lost.host, lost.line, NodeFaultKind.lost, where)
                for lost in group.lost.values()
            ]
        self.record.add(faults)

    def decide(self, failure: NodeFailure, *, obstacle: str) -> RestartDecision:
        """Add a failed start, and decide what follows it."""
        reached = read_reached(self.run)
        if reached is not None or failure.step > 0:
            generation, step = reached or (0, 0)
            reached = (generation, max(step, failure.step))
        self.failures.append(
            FailedStart(
                exit_code=failure.exit_code,
                time_s=time.monotonic(),
                reached=reached,
                error=failure.error,
                step=failure.step,
            )
        )
        return decide_restart(self.failures, self.limits, before=self.before, obstacle=obstacle)


def read_reached(run: RunDir) -> Reached | None:
    """Generation of the newest checkpoint, and the last logged step; None without a step."""
    saved = newest_checkpoint(run, Health.good, Health.candidate)
    step = next((event.step for event in reversed(read_log_end(run)) if isinstance(event, StepRecord)), None)
    if step is None:
        return saved
    return (0 if saved is None else saved[0], step)


def read_log_end(run: RunDir, num_bytes: int = TAIL_BYTES) -> list[Event]:
    """The last events of the log; none, with a warning, if storage fails: that start counts as one without progress."""
    try:
        return retry_transient(lambda: tail(run.events, num_bytes))
    except OSError as error:
        print_warning(f"cannot read {run.events}: {error.strerror}")
        return []


def has_stop_file(run: RunDir) -> bool:
    """Whether the file that stops a run exists. If storage fails, the ranks of the next start look for it."""
    try:
        return retry_transient(run.stop.exists)
    except OSError as error:
        print_warning(f"cannot look for {run.stop}: {error.strerror}")
        return False


def is_forced(stop_signals: Sequence[int]) -> bool:
    """Whether these signals ask to kill the ranks: SIGINT or SIGTERM after another signal. SIGUSR1 never does."""
    return sum(number != signal.SIGUSR1 for number in stop_signals) > 1


def agree_on_restart(group: NodeGroup, history: RestartHistory, stop_signals: Sequence[int]) -> RestartDecision:
    """Decide together with all nodes whether the ranks start again; call it when those of this node are gone.

    If they do, the group is ready for the next start. `stop_signals` may grow meanwhile.
    """
    failure = group.failure
    assert failure is not None, "the ranks failed"
    if group.node_rank == 0 and not (group.is_coordinator and history.elastic is not None):
        # A coordinator elsewhere, and a start with one rank, which knows no launcher, cannot see that rank 0 is dead.
        clear_dead_lease(history.run.path)
    while not group.is_coordinator:
        decision = await_decision(group, stop_signals)
        if decision is not None:
            return decision
        if is_forced(stop_signals) or group.succeed is None or not group.succeed(bool(stop_signals)):
            return RestartDecision(False, "")
    try:
        obstacle = find_obstacle(group, history, stop_signals)
        history.record_faults(group, stopping=bool(stop_signals))
    except ConfigError as error:  # another launcher has taken the run over
        obstacle = str(error)
    roster = choose_next_roster(group, history)
    if roster is None and failure.cause == EndCause.lost_node and history.elastic is None:
        decision = RestartDecision(False, "")
    elif failure.cause == EndCause.planned and roster is not None:
        decision = RestartDecision(not obstacle, obstacle)
    else:
        decision = history.decide(failure, obstacle=obstacle or ("" if roster else explain_shortage(group, history)))
    out: dict[str, str] = {}
    number = max(group.restarts, *(link.stopped for link in group.links.values()), 0)
    if decision.again:
        try:
            open_store_socket(group)
        except RendezvousError as error:
            decision = RestartDecision(False, str(error))
    if decision.again:
        assert roster is not None, "without a roster there is an obstacle"
        change = describe_change(group, roster, history)
        out = change.out
        number += 1
        decision = RestartDecision(True, ", ".join(filter(None, [f"restart {number}", change.text])))
        record_restart(
            history.run,
            failure.line,
            EndCause(failure.cause),
            number=number,
            noticed=group.noticed,
            stopped_s=time.time() - group.noticed,
            machines={"out": change.out, "replaced_by": change.replaced_by, "num_nodes": len(roster)},
        )
        mark_restarting(history.run, failure.line)
    message = {
        "again": decision.again,
        "restarts": number,
        "reason": decision.reason,
        "store_port": group.store_port,
        "roster": pack_roster(roster if decision.again and roster is not None else group.roster),
        "exit_code": failure.exit_code,
        "out": out,
        "lease": group.lease.me.owner if group.lease is not None else "",
    }
    with group.changed:
        group.take_decision(message)
        group.send_all(decision=message, succession=group.describe_succession())
        for lost in list(group.lost.values()) if decision.again else ():
            group.report_failure(lost)  # after the choice
    return decision


def choose_next_roster(group: NodeGroup, history: RestartHistory) -> Roster | None:
    """The machines of the next start; None if there are not enough."""
    if history.elastic is not None:
        return history.elastic.choose(group, group.roster)
    return None if group.lost else group.roster


def explain_shortage(group: NodeGroup, history: RestartHistory) -> str:
    """Why no machines are left to start again on."""
    line = next((lost.line for lost in group.lost.values()), "a node is lost")
    if history.elastic is None:
        return line
    return f"{line}, no spare is left, and the run needs {min(history.elastic.allowed)} nodes"


class RosterChange(NamedTuple):
    """What a restart changes about the machines of a run."""

    out: dict[str, str]
    """Machine that the run no longer uses because of its faults -> why."""
    replaced_by: dict[str, str]
    """Machine that the run no longer uses -> the spare that has its node rank."""
    text: str
    """The change in a few words; empty if there is none."""


def describe_change(group: NodeGroup, roster: Roster, history: RestartHistory) -> RosterChange:
    """Compare the roster of the next start with that of the last one."""
    exclusions = {} if history.record is None else history.record.find_out()
    reasons: Mapping[str, str] = {host: exclusion.reason for host, exclusion in exclusions.items()} | {
        lost.host: lost.line for lost in group.lost.values()
    }
    before, after = set(group.roster), set(roster)
    gone = [number for number in group.roster if number not in after]
    new = [number for number in roster if number not in before]
    same_seats = len(roster) == len(group.roster)
    replaced = {old: number for old, number in zip(group.roster, roster, strict=False) if same_seats and old != number}
    texts = [f"{group.hosts[number]} replaces {group.hosts[old]}" for old, number in replaced.items()]
    texts += [f"{group.hosts[number]} joins" for number in new if number not in replaced.values()]
    if len(roster) != len(group.roster):
        texts.append(f"the run continues on {len(roster)} instead of {len(group.roster)} nodes")
    return RosterChange(
        out={host: reasons[host] for number in gone if (host := group.hosts[number]) in reasons},
        replaced_by={group.hosts[old]: group.hosts[number] for old, number in replaced.items()},
        text=", ".join(texts),
    )


def find_obstacle(group: NodeGroup, history: RestartHistory, stop_signals: Sequence[int]) -> str:
    """Wait until all nodes have stopped their ranks; returns why no restart is possible, or an empty string. Raises
    ConfigError if another process has taken the run over.

    The ranks of a lost node die with its launcher. Those of a silent one are killed by their launcher, which notices
    the silence as well; that takes until `fenced_s`. In an elastic run the lease is taken as soon as rank 0 is dead. No
    file is read while `changed` is held: if the file system stalled, this launcher would send no heartbeats.
    """
    deadline_s = time.monotonic() + STOP_WITHIN_S
    if history.elastic is not None:
        with group.changed:
            first = group.roster[0]
            is_dead = group.changed.wait_for(lambda: is_stopped(group, first), timeout=STOP_WITHIN_S)
        if is_dead:
            hold_lease(group, history.run)
    with group.changed:
        waiting = [number for number in group.roster if number != group.number]

        def is_settled() -> bool:  # called for every message: it must not look at all nodes each time
            while waiting and is_stopped(group, waiting[-1]):
                waiting.pop()
            return not waiting

        group.changed.wait_for(is_settled, timeout=deadline_s - time.monotonic())
        if unstopped := list_unstopped(group):
            return f"node {', '.join(map(str, unstopped))} did not stop its ranks within {STOP_WITHIN_S:.0f} s"
        if any(link.is_done for link in group.active_links().values()):
            return "the ranks of another node have ended"
        is_stopping = any(link.is_stopping for link in group.active_links().values())
    if stop_signals or is_stopping or has_stop_file(history.run):
        return "a stop was requested"
    time.sleep(max(0.0, group.fenced_s - time.monotonic()))
    if history.elastic is not None:
        hold_lease(group, history.run)  # this launcher may have been stopped since
    return ""


def hold_lease(group: NodeGroup, run: RunDir) -> None:
    """Hold the lease of the run until rank 0 of the next start takes it over; as in a first start if storage fails now.

    Raises ConfigError if another process has the lease.
    """
    try:
        if group.lease is None or not group.lease.is_newest():
            group.lease = None
            group.lease = take_over_lease(run.path)
    except OSError as error:
        print_warning(f"cannot take the lease of {run.path}: {error.strerror}")


def list_unstopped(group: NodeGroup) -> list[int]:
    """Ranks of the nodes whose ranks of this start may still run."""
    return [node_rank for node_rank, number in enumerate(group.roster) if not is_stopped(group, number)]


def is_stopped(group: NodeGroup, number: int) -> bool:
    """Whether all ranks of this start have ended on the node of a launcher; those of a lost one die with it."""
    link = group.links.get(number)
    return link is None or link.stopped >= group.restarts or link.is_done


def await_decision(group: NodeGroup, stop_signals: Sequence[int]) -> RestartDecision | None:
    """Every node but node 0: report that the ranks are gone, and wait for the decision; None if node 0 is lost.

    Without a decision, the run ends here once node 0 has ended, and at a repeated stop signal.
    """
    start, reported = group.restarts, None
    while True:
        stopping = bool(stop_signals)
        with group.changed:
            if group.decision is not None:
                return RestartDecision(group.decision["again"], group.decision["reason"])
            if group.restarts != start:  # a failure of the next start has followed the decision at once
                return RestartDecision(True, f"restart {group.restarts}")
            if group.has_lost_coordinator:
                return None
            if group.has_coordinator_ended or is_forced(stop_signals):
                return RestartDecision(False, "")
            if reported != stopping:
                group.send_all(stopped=start, stopping=stopping)
                reported = stopping
            group.changed.wait(POLL_S)


def print_decision(decision: RestartDecision, group: NodeGroup, *, has_crashed: bool) -> None:
    """Print what follows a failure whose message is already on the terminal."""
    if decision.again and not group.is_spare:
        where = f"node {group.node_rank} ({machine_name()}): " if group.spec.num_nodes > 1 else ""
        print(f"harness: {where}{decision.reason}: all ranks start again", file=sys.stderr, flush=True)
    elif decision.reason and has_crashed and group.is_coordinator:
        print(f"harness: not restarted: {decision.reason}", file=sys.stderr, flush=True)
