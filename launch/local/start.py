"""Starts the ranks of a run on this node and maps how they ended to one exit code.

Why: torchrun exits with 1 whatever its workers returned, and gives a stopping run 30 seconds. A run that saves a
checkpoint on a stop signal needs more time, and a cluster needs to know whether to requeue.
How: the processes of the ranks are forked first (`launch.local.worker_pool`). Then torch's elastic agent runs in a
thread with the stop signals blocked; the main thread receives them and forwards them. The first signal asks the workers
to stop, a second SIGINT or SIGTERM kills them. SIGUSR1 never kills, because a cluster scheduler may send it to every
process and more than once. Workers return their exit code. A worker that dies is reported with rank, cause, traceback
and log, and the others are stopped within seconds, also those of other nodes (`launch.local.node_group`). A worker dies
with the process that started it. Rank 0 keeps the terminal, the others write to `logs/<start>/`.
Left out: restarts. Whoever started a run that ends with 75 resumes it. `LOGLEVEL` enables the agent's own log.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
from socket import gethostname
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from harness.config.errors import EXIT_CRASHED, EXIT_INTERRUPTED, require
from harness.config.parallel import DeviceKind
from harness.config.schema import Config
from harness.control.stop_requests import STOP_SIGNALS
from harness.core.locking.run_lease import clearing_dead_lease
from harness.core.rundir import locate
from harness.precision.fp8.engine import require_engine_installed
from harness.telemetry.heartbeat import mark_ended
from launch.local.agent import POLL_S, run_agent
from launch.local.node_group import SINGLE_NODE, NodeFailure, NodeGroup, RendezvousSpec
from launch.local.ranks import RankLogs, render_failure, run_exit_code
from launch.local.rendezvous import RendezvousError, StopRequested, find_interface_to, join_nodes
from launch.local.supervisor import Supervisor
from launch.local.thread_count import THREADS_VARIABLE, rank_thread_environment
from launch.local.worker import Worker
from launch.local.worker_pool import (
    STACKS_SIGNAL,
    TORCH_NUM_THREADS,
    PooledWorker,
    WorkerTask,
    can_fork,
    enter_worker,
    open_worker_pool,
)

DUPLICATE_S = 0.25
COUNT_TIMEOUT_S = 60.0
GRACE_S = 3.0
"""How long workers may take to exit by themselves after another one has failed."""
SILENT_NODE_S = 30.0
"""A node that has sent nothing for this long counts as lost."""
STACKS_TIMEOUT_S = 0.5
INTERFACE = "GLOO_SOCKET_IFNAME"


def ranks_to_start(cfg: Config) -> int:
    """Ranks to start here: `launch.nproc`, or one for each GPU, or 2 on CPU."""
    gpus = 0 if cfg.parallel.device is DeviceKind.cpu else num_gpus()
    if cfg.parallel.device is DeviceKind.cuda:
        require(gpus > 0, "parallel.device", "no CUDA device on this machine; choose cpu or auto")
    require_engine_installed(cfg.precision, has_gpu=gpus > 0)
    if gpus and cfg.launch.nproc:
        message = f"must not exceed the {gpus} GPUs of this machine, got {cfg.launch.nproc}"
        require(cfg.launch.nproc <= gpus, "launch.nproc", f"{message}; or parallel.device=cpu")
    return cfg.launch.nproc or gpus or 2


@cache
def num_gpus() -> int:
    """Count the GPUs in a separate process.

    Without NVML, counting initializes CUDA, and processes forked from this one could not use it any more.
    """
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return 0
    with open_worker_pool(1, forked=can_fork()) as (counter,):
        counter.assign(WorkerTask(call=torch.cuda.device_count))
        return counter.poll_result(COUNT_TIMEOUT_S) or 0


def launch(cfg: Config, worker: Worker, spec: RendezvousSpec = SINGLE_NODE) -> int:
    """Run `worker(cfg)` on every rank of this node; returns the exit code of the run, 1 for a crash."""
    nproc = ranks_to_start(cfg)
    silence_agent()
    with (
        clearing_dead_lease(locate(cfg).path),
        rank_thread_environment(cfg, nproc),
        collect_stop_signals() as stop_signals,
        open_worker_pool(nproc, forked=can_fork() and os.environ[THREADS_VARIABLE] == TORCH_NUM_THREADS) as processes,
    ):
        try:
            group = join_nodes(
                spec,
                run=str(cfg.run.name),
                nproc=nproc,
                within_s=cfg.launch.start_within_s,
                silent_s=min(SILENT_NODE_S, cfg.launch.hang_after_s),
                stop_requested=lambda: bool(stop_signals),
            )
        except StopRequested:
            return EXIT_INTERRUPTED
        except RendezvousError as error:
            print(f"harness: {error}", file=sys.stderr)
            return EXIT_CRASHED
        with group:
            return run_ranks(cfg, worker, group, processes, stop_signals)


def run_ranks(
    cfg: Config, worker: Worker, group: NodeGroup, processes: Sequence[PooledWorker], stop_signals: list[int]
) -> int:
    """Start the workers and supervise them to their end."""
    nproc, node_rank = len(processes), group.spec.node_rank
    logs = RankLogs(locate(cfg).logs / group.start_name, range(node_rank * nproc, (node_rank + 1) * nproc))

    def on_failure(error: ChildFailedError) -> None:
        failure, host = logs.first_failure(error), gethostname()
        line = failure.message if failure.is_user_error else f"rank {failure.rank} on {host} {failure.describe()}"
        code = run_exit_code(failure, stopping=bool(stop_signals))
        group.report_failure(NodeFailure(node_rank=node_rank, host=host, exit_code=code, line=line))

    logs.create()
    tasks = build_tasks(cfg, worker, logs, gloo_environment(group.address))
    with ThreadPoolExecutor(max_workers=1, initializer=block_stop_signals) as pool:
        future = pool.submit(run_agent, group, processes, tasks, on_failure=on_failure)
        hung = supervise(future, stop_signals, logs, group, Supervisor(locate(cfg), logs.ranks, cfg.launch))
        try:
            code = max(future.result().values())
        except ChildFailedError as error:
            code = print_failure(error, logs, group, stopping=bool(stop_signals), hung=hung)
            if node_rank == 0 and group.failure is not None:
                mark_ended(locate(cfg), code, group.failure.line)
            return code
        group.report_success()
        return code


def build_tasks(cfg: Config, worker: Worker, logs: RankLogs, environment: dict[str, str]) -> list[WorkerTask]:
    """The task of each rank."""
    return [
        WorkerTask(
            call=enter_worker,
            arguments=(worker, cfg),
            name=f"rank-{rank}",
            environment=environment | logs.environment(rank),
            stdout=logs.stream(rank, "stdout"),
            stderr=logs.stream(rank, "stderr"),
        )
        for rank in logs.ranks
    ]


def block_stop_signals() -> None:
    """Run in the agent's thread, so that the main thread receives the stop signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@contextmanager
def collect_stop_signals() -> Iterator[list[int]]:
    """The stop signals received so far; the handler only records them.

    A signal within DUPLICATE_S of another is ignored: Slurm sends SIGTERM twice at the time limit of a job.
    """
    stop_signals: list[int] = []
    last_s = -math.inf

    def on_signal(signal_number: int, _frame: FrameType | None) -> None:
        nonlocal last_s
        is_duplicate, last_s = time.monotonic() - last_s < DUPLICATE_S, time.monotonic()
        if not is_duplicate:
            stop_signals.append(signal_number)

    before = {signal_number: signal.signal(signal_number, on_signal) for signal_number in STOP_SIGNALS}
    try:
        yield stop_signals
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def supervise(
    future: Future[dict[int, int]], stop_signals: list[int], logs: RankLogs, group: NodeGroup, supervisor: Supervisor
) -> str | None:
    """Forward stop signals until the agent is done: the first as SIGTERM, a repeated one as SIGKILL.

    After the failure of a rank or a node, the remaining workers are killed. Returns a line about a rank that hung here.
    Only the agent waits for the workers: asking `multiprocessing` for them here could reap one first.
    """
    sent: set[tuple[int, int]] = set()
    kill_s = math.inf
    hung: str | None = None
    while not wait([future], timeout=POLL_S).done:
        if group.failure is not None:
            kill_s = min(kill_s, time.monotonic() + GRACE_S)
        elif hung := supervisor.check(time.monotonic()):
            group.report_failure(
                NodeFailure(node_rank=group.spec.node_rank, host=gethostname(), exit_code=EXIT_CRASHED, line=hung)
            )
            signal_workers(logs, STACKS_SIGNAL, sent)
            kill_s = time.monotonic() + STACKS_TIMEOUT_S
        if stop_signals and not sent:
            sent.add((0, 0))
            print("harness: stopping gracefully; a second Ctrl-C or SIGTERM kills the workers", file=sys.stderr)
        is_repeated = sum(stop_signal != signal.SIGUSR1 for stop_signal in stop_signals) > 1
        if is_repeated or time.monotonic() > kill_s:
            signal_workers(logs, signal.SIGKILL, sent)
        elif stop_signals:
            signal_workers(logs, signal.SIGTERM, sent)
    return hung


def signal_workers(logs: RankLogs, signal_number: signal.Signals, sent: set[tuple[int, int]]) -> None:
    """Send a signal to each worker once."""
    for pid in logs.pids():
        if (pid, signal_number) not in sent:
            sent.add((pid, signal_number))
            with suppress(ProcessLookupError):
                os.kill(pid, signal_number)


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


def print_failure(
    error: ChildFailedError, logs: RankLogs, group: NodeGroup, *, stopping: bool, hung: str | None
) -> int:
    """Print why the run ended: in full on the node where it began, one line on the others."""
    node_failure = group.failure
    if node_failure is not None and node_failure.node_rank != group.spec.node_rank:
        where = f"node {group.spec.node_rank} ({gethostname()}) stops"
        print(f"harness: {where}: {node_failure.line}", file=sys.stderr)
        return node_failure.exit_code
    if hung:
        print(f"harness: {hung}; stacks of all threads: {logs.directory}/*.stacks", file=sys.stderr)
        return EXIT_CRASHED
    failure = logs.first_failure(error)
    if text := render_failure(failure, stopping=stopping):
        print(text, file=sys.stderr)
    return run_exit_code(failure, stopping=stopping)
