"""Starts the ranks of a run on this node and maps how they ended to one exit code.

Why: torchrun exits with 1 whatever its workers returned, and gives a stopping run 30 seconds. A run that saves a
checkpoint on a stop signal needs more time, and a cluster needs to know whether to requeue.
How: the processes of the ranks are forked from a template (`launch.local.worker_pool`). Then torch's elastic agent runs
in a thread with the stop signals blocked; the main thread receives them and forwards them. The first signal asks the
workers to stop and is the reason that they report; a second SIGINT or SIGTERM kills them. SIGUSR1 never kills, because
a cluster scheduler may send it to every process and more than once. Workers return their exit code. A worker that dies
is reported with rank, cause, traceback and log, and the others are stopped within seconds, also those of other nodes
(`launch.local.node_group`). Then all ranks start again, within a budget (`launch.local.restart`). A worker dies with
the process that started it. A launcher without a node waits as a spare (`launch.local.spare`).
Rank 0 keeps the terminal, the others write to `logs/<start>/`.
Left out: a run that ends with 75 is resumed by whoever started it. `LOGLEVEL` enables the agent's own log.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from harness.analysis.plan.machine_memory import check_memory
from harness.config.errors import (
    EXIT_BAD_CONFIG,
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    ConfigError,
)
from harness.config.schema import Config, check_world
from harness.control.stop_requests import STOP_CLEARED
from harness.core.events import EndCause
from harness.core.locking.run_lease import OFFERED_BY, clearing_dead_lease, io_error, is_in_use
from harness.core.node_name import machine_name
from harness.core.rundir import locate
from harness.core.safe_stream import safe_output
from harness.core.transient_io import retry_transient
from harness.telemetry import heartbeat
from harness.telemetry.event_log import log_size
from harness.telemetry.rank_progress import HangLimits
from harness.telemetry.sinks.sink_process import send_last_alerts
from launch.local.agent import POLL_S, run_agent
from launch.local.elastic import Elastic
from launch.local.exit_file import write_exit_file
from launch.local.node_address import RendezvousError, find_interface_to
from launch.local.node_group import SINGLE_NODE, NodeFailure, NodeGroup, RendezvousSpec
from launch.local.out_of_memory import MemoryWatch
from launch.local.planned_restart import RestartPlanner
from launch.local.rank_watch import RankWatch
from launch.local.ranks import RankLogs, run_exit_code
from launch.local.rendezvous import StopRequested, join_nodes
from launch.local.restart import RestartHistory, agree_on_restart, is_forced, print_decision
from launch.local.shared_memory import run_and_clean_up
from launch.local.spare import check_this_machine, wait_as_spare
from launch.local.start_failure import existing_parents, print_failure, record_failure, remove_rejected_run
from launch.local.stop_signals import block_stop_signals, collect_stop_signals
from launch.local.supervisor import Supervisor
from launch.local.this_machine import measure_machine, ranks_to_start
from launch.local.thread_count import THREADS_VARIABLE, rank_thread_environment
from launch.local.worker import Worker
from launch.local.worker_pool import (
    STACKS_SIGNAL,
    TORCH_NUM_THREADS,
    PooledWorker,
    WorkerPool,
    WorkerTask,
    can_fork,
    enter_worker,
)
from launch.node_record import NodeRecord

GRACE_S = 0.5
"""How long workers may take to exit by themselves after another one has failed."""
SILENT_NODE_S = 30.0
"""A node that has sent nothing for this long counts as lost."""
ANSWER_WITHIN_S = 2.0
"""How long ranks may take to write their stacks and collectives after a hang; a stopped process writes none."""
INTERFACE = "GLOO_SOCKET_IFNAME"


@safe_output()
def launch(cfg: Config, worker: Worker, spec: RendezvousSpec = SINGLE_NODE, *, comes_back: bool = False) -> int:
    """Run `worker(cfg)` on every rank of this node; returns the exit code of the run, 1 for a crash.

    comes_back: the run is in progress, and this machine joins it as a spare.
    """
    nproc = ranks_to_start(cfg)
    silence_agent()
    elastic = plan_elastic(cfg, spec, nproc=nproc, comes_back=comes_back)
    if elastic is not None and spec.node_rank == 0 and elastic.problems:
        problem = "; ".join(elastic.problems)
        print(f"harness: node 0 ({machine_name()}) failed its health check: {problem}", file=sys.stderr)
        return EXIT_CRASHED
    with (
        clearing_dead_lease(locate(cfg).path),
        rank_thread_environment(cfg, nproc),
        collect_stop_signals() as stop_signals,
        WorkerPool(forked=can_fork() and os.environ[THREADS_VARIABLE] == TORCH_NUM_THREADS) as pool,
    ):
        try:
            group = join_nodes(
                spec,
                run=str(cfg.run.name),
                nproc=nproc,
                within_s=cfg.launch.start_within_s,
                silent_s=min(SILENT_NODE_S, cfg.launch.hang_after_s),
                stop_requested=lambda: bool(stop_signals),
                elastic=elastic,
            )
        except StopRequested:
            return EXIT_INTERRUPTED
        except RendezvousError as error:
            print(f"harness: {error}", file=sys.stderr)
            return EXIT_CRASHED
        with group:
            history = RestartHistory.begin(cfg, nproc=nproc, elastic=elastic)
            with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hang-report") as explainer:
                code = run_and_clean_up(
                    cfg, lambda: run_until_final(cfg, worker, group, pool, stop_signals, history, explainer)
                )
            if group.is_coordinator:
                write_exit_file(code)
            return code


def count_active_nodes(cfg: Config, num_launchers: int) -> int:
    """How many of the launchers run ranks; the others are spares."""
    return min(num_launchers, cfg.launch.nodes) if cfg.launch.spares else num_launchers


def plan_elastic(cfg: Config, spec: RendezvousSpec, *, nproc: int, comes_back: bool) -> Elastic | None:
    """On which numbers of nodes the run may continue, and whether this machine is healthy; None if it needs all."""
    num_nodes = count_active_nodes(cfg, spec.num_nodes)
    if spec.num_nodes == 1 or not cfg.launch.is_elastic:
        return None
    machine, allowed = measure_machine(cfg, nproc), []
    for size in range(min(cfg.launch.min_nodes or num_nodes, num_nodes), num_nodes + 1):
        with suppress(ConfigError):
            check_world(cfg, size * nproc)
            check_memory(cfg, machine, world_size=size * nproc)
            allowed.append(size)
    record = NodeRecord(locate(cfg), hours=cfg.launch.slurm.exclude_hours)
    return Elastic(allowed=tuple(allowed), record=record, problems=check_this_machine(cfg, computes=comes_back))


def run_until_final(
    cfg: Config,
    worker: Worker,
    group: NodeGroup,
    pool: WorkerPool,
    stop_signals: list[int],
    history: RestartHistory,
    explainer: Executor,
) -> int:
    """Start the ranks, and start them again after a failure as long as the budget allows; returns the exit code."""
    run = locate(cfg)
    try:
        existing, log_bytes = retry_transient(lambda: (existing_parents(run.path), log_size(run.events)))
    except OSError as error:
        raise io_error(run.path, "cannot read", error) from None
    while True:
        if group.is_spare and (code_of_run := wait_as_spare(group, stop_signals)) is not None:
            return code_of_run
        code = EXIT_CRASHED
        if not group.is_spare:  # a spare without a coordinator has no ranks to stop
            with pool.start_workers(history.nproc) as processes:
                planner = RestartPlanner(group, history)
                code = run_ranks(cfg, worker, group, processes, stop_signals, planner, explainer)
        failure = group.failure
        if failure is None or (code == EXIT_DONE and failure.cause == EndCause.lost_node):
            if group.is_coordinator:
                history.record_faults(group, stopping=True)
            return code
        decision = agree_on_restart(group, history, stop_signals)
        print_decision(decision, group, has_crashed=code == EXIT_CRASHED and cfg.launch.max_restarts > 0)
        if not decision.again:
            break
        if group.is_spare:
            group.send_all(problems=check_this_machine(cfg, computes=True))
    if group.is_coordinator and not is_in_use(run.path):
        if record_failure(run, code, failure):
            send_last_alerts(run, cfg.telemetry, log_bytes=log_bytes)
        if code == EXIT_BAD_CONFIG and group.spec.num_nodes == 1:
            remove_rejected_run(run, existing, group.start_name)
    return code


def run_ranks(
    cfg: Config,
    worker: Worker,
    group: NodeGroup,
    processes: Sequence[PooledWorker],
    stop_signals: list[int],
    planner: RestartPlanner,
    explainer: Executor,
) -> int:
    """Run the workers of one start and supervise them to their end; returns the exit code of the start."""
    nproc, node_rank = len(processes), group.node_rank
    logs = RankLogs(locate(cfg).logs / group.attempt_name, range(node_rank * nproc, (node_rank + 1) * nproc))
    memory = MemoryWatch.start(cfg, measure_machine(cfg, nproc), world_size=group.num_nodes * nproc)

    def on_failure(error: ChildFailedError) -> None:
        failure, host = memory.explain(logs.first_failure(error)), machine_name()
        line = failure.message if failure.is_user_error else f"rank {failure.rank} on {host} {failure.describe()}"
        beat = heartbeat.read(heartbeat.heartbeat_file(locate(cfg), failure.rank))
        group.report_failure(
            NodeFailure(
                node_rank=node_rank,
                host=host,
                exit_code=run_exit_code(failure, stopping=bool(stop_signals)),
                line=line,
                cause=failure.cause,
                step=-1 if beat is None else beat.step,
                error=failure.kind,
            )
        )

    logs.create()
    environment = gloo_environment(group.address) | {OFFERED_BY: group.lease_offered_by}
    tasks = build_tasks(cfg, worker, logs, environment)
    with ThreadPoolExecutor(max_workers=1, initializer=block_stop_signals) as executor:
        supervisor = Supervisor(locate(cfg), logs.ranks, HangLimits(cfg.launch, cfg.parallel.timeout_s))
        future = executor.submit(run_agent, group, processes, tasks, on_failure=on_failure)
        with RankWatch(group, supervisor, planner, logs, stop_signals) as watch:
            supervise(future, stop_signals, processes, group, watch, memory)
        try:
            code = max(future.result().values())
        except ChildFailedError as error:
            failure = memory.explain(logs.first_failure(error))
            stopping = bool(stop_signals)
            return print_failure(failure, logs, group, stopping=stopping, hung=watch.hung, explainer=explainer)
        except RendezvousError as error:
            assert group.failure is not None, "the agent has reported it, or another node was first"
            print(f"harness: {error}", file=sys.stderr)
            return group.failure.exit_code
        group.report_success(code)
        return code


def build_tasks(cfg: Config, worker: Worker, logs: RankLogs, environment: dict[str, str]) -> list[WorkerTask]:
    """The task of each rank."""
    return [
        WorkerTask(
            call=enter_worker,
            arguments=(worker, cfg),
            name=f"rank-{rank}",
            environment=environment | logs.environment(rank) | {STOP_CLEARED: "1"},
            stdout=logs.stream(rank, "stdout"),
            stderr=logs.stream(rank, "stderr"),
        )
        for rank in logs.ranks
    ]


def supervise(
    future: Future[dict[int, int]],
    stop_signals: list[int],
    processes: Sequence[PooledWorker],
    group: NodeGroup,
    watch: RankWatch,
    memory: MemoryWatch,
) -> None:
    """Forward stop signals until the agent is done: the first as it is, a repeated one as SIGKILL.

    After the failure of a rank or a node, the remaining workers are killed. Reads no file of the run, so that a file
    system that stalls or fails delays no signal.
    """
    sent: set[tuple[int, int]] = set()
    kill_s = math.inf
    while not wait([future], timeout=POLL_S).done:
        memory.observe([process.pid for process in processes], time.monotonic())
        if group.failure is not None:
            is_hang = group.failure.cause == EndCause.hung_rank
            if is_hang:
                signal_workers(processes, STACKS_SIGNAL, sent)
            wait_s = 0.0 if watch.has_answers else ANSWER_WITHIN_S if is_hang else GRACE_S
            kill_s = min(kill_s, time.monotonic() + wait_s)
        is_first_signal = bool(stop_signals) and not sent
        if is_forced(stop_signals) or time.monotonic() > kill_s:
            signal_workers(processes, signal.SIGKILL, sent)
        elif stop_signals:
            signal_workers(processes, signal.Signals(stop_signals[0]), sent)
        if is_first_signal:
            print("harness: stopping gracefully; a second Ctrl-C or SIGTERM kills the workers", file=sys.stderr)


def signal_workers(
    processes: Sequence[PooledWorker], signal_number: signal.Signals, sent: set[tuple[int, int]]
) -> None:
    """Send a signal to each worker once. A worker that cannot handle it yet gets it as soon as it can."""
    for process in processes:
        if (process.pid, signal_number) not in sent:
            sent.add((process.pid, signal_number))
            process.send_signal(signal_number)


def gloo_environment(address: str) -> dict[str, str]:
    """Bind gloo to the interface that routes to node 0.

    By default gloo uses the address of the host name, which other nodes may not reach, and which should not be exposed
    for a run on one machine.
    """
    interface = None if INTERFACE in os.environ else find_interface_to(address)
    return {} if interface is None else {INTERFACE: interface}


def silence_agent() -> None:
    """Disable the agent's log, which repeats at length what `print_failure` says in a few lines."""
    if "LOGLEVEL" not in os.environ:
        for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
            logger = logging.getLogger(name)
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
