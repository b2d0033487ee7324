"""Starts the ranks of a run on this machine and turns how they ended into one exit code.

Why: torchrun exits with 1 whatever its workers said, and gives a stopping run 30 seconds. A run that saves a checkpoint
when it is told to stop needs its own time, and a cluster needs to know whether to requeue.
How: the processes of the ranks are forked from this one before anything else happens (`launch.local.worker_pool`). Then
torch's elastic agent runs in a thread with the stop signals blocked; the main thread catches them and passes them on.
The first signal asks the workers to stop, a second SIGINT or SIGTERM kills them; SIGUSR1 only ever asks, because a
scheduler may send it to every process and more than once. Workers return their exit code; a worker that dies is
reported by rank, cause, traceback and log, and takes the others down within seconds, those of other machines too
(`launch.local.rendezvous`). A worker dies with the process that started it. Rank 0 keeps the terminal, the others write
to `logs/<start>/`.
Left out: restarts. A run that ends with 75 is resumed by whoever started it. `LOGLEVEL` brings back the agent's log.
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
from launch.local.node_group import ALONE, Fall, Machines, Place
from launch.local.ranks import RankLogs, exit_code_of, render
from launch.local.rendezvous import Absent, Leaving, gather, interface_towards
from launch.local.supervisor import Supervisor
from launch.local.thread_count import THREADS, threads_of_a_rank
from launch.local.worker import Worker
from launch.local.worker_pool import SHOW_STACKS, THREADS_OF_TORCH, Orders, Reserved, can_fork, enter_worker, reserve

ECHO_S = 0.25
COUNTED_WITHIN_S = 60.0
GRACE_S = 3.0
"""How long workers may take to end by themselves after another one has fallen."""
SILENT_MACHINE_S = 30.0
"""A machine that has not been heard of for so long is taken for lost."""
STACKS_WITHIN_S = 0.5
INTERFACE = "GLOO_SOCKET_IFNAME"


def num_ranks(cfg: Config) -> int:
    """Ranks to start here: what was asked for, or one for each GPU, or 2 on CPU."""
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
    """Counted in a process of its own: where NVML cannot be asked, counting brings up CUDA, and no process that is
    forked from this one could use it any more."""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return 0
    with reserve(1, forked=can_fork()) as (scout,):
        scout.begin(Orders(call=torch.cuda.device_count))
        return scout.returned(COUNTED_WITHIN_S) or 0


def launch(cfg: Config, worker: Worker, place: Place = ALONE) -> int:
    """Run `worker(cfg)` on every rank of this machine; returns the exit code of the contract, 1 for a crash."""
    nproc = num_ranks(cfg)
    silence_agent()
    with (
        clearing_dead_lease(locate(cfg).path),
        threads_of_a_rank(cfg, nproc),
        stop_requests() as requests,
        reserve(nproc, forked=can_fork() and os.environ[THREADS] == THREADS_OF_TORCH) as processes,
    ):
        try:
            machines = gather(
                place,
                run=str(cfg.run.name),
                nproc=nproc,
                within_s=cfg.launch.start_within_s,
                silent_s=min(SILENT_MACHINE_S, cfg.launch.hang_after_s),
                leaving=lambda: bool(requests),
            )
        except Leaving:
            return EXIT_INTERRUPTED
        except Absent as error:
            print(f"harness: {error}", file=sys.stderr)
            return EXIT_CRASHED
        with machines:
            return run_ranks(cfg, worker, machines, processes, requests)


def run_ranks(
    cfg: Config, worker: Worker, machines: Machines, processes: Sequence[Reserved], requests: list[int]
) -> int:
    """Let the workers begin and see them through to their end."""
    nproc, node = len(processes), machines.place.node
    logs = RankLogs(locate(cfg).logs / machines.start, range(node * nproc, (node + 1) * nproc))

    def noticed(error: ChildFailedError) -> None:
        failure = logs.first_failure(error)
        line = failure.message if failure.is_user_error else f"rank {failure.rank} on {gethostname()} {failure.how()}"
        code = exit_code_of(failure, stopping=bool(requests))
        machines.tell(Fall(node=node, host=gethostname(), exit_code=code, line=line))

    logs.create()
    orders = orders_of(cfg, worker, logs, gloo_environment(machines.address))
    with ThreadPoolExecutor(max_workers=1, initializer=block_stop_signals) as pool:
        future = pool.submit(run_agent, machines, processes, orders, noticed=noticed)
        hung = see_through(future, requests, logs, machines, Supervisor(locate(cfg), logs.ranks, cfg.launch))
        try:
            code = max(future.result().values())
        except ChildFailedError as error:
            code = report(error, logs, machines, stopping=bool(requests), hung=hung)
            if node == 0 and machines.fall is not None:
                mark_ended(locate(cfg), code, machines.fall.line)
            return code
        machines.done()
        return code


def orders_of(cfg: Config, worker: Worker, logs: RankLogs, environment: dict[str, str]) -> list[Orders]:
    """What the process of each rank is told."""
    return [
        Orders(
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
    """In the agent's thread: the main thread hears them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """The stop signals that arrived so far; the handler only writes them down. One that follows on another's heels is
    its echo: Slurm sends SIGTERM twice at a job's limit, and nobody insists within the blink of an eye."""
    requests: list[int] = []
    last_s = -math.inf

    def hear(number: int, _frame: FrameType | None) -> None:
        nonlocal last_s
        is_echo, last_s = time.monotonic() - last_s < ECHO_S, time.monotonic()
        if not is_echo:
            requests.append(number)

    before = {number: signal.signal(number, hear) for number in STOP_SIGNALS}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def see_through(
    future: Future[dict[int, int]], requests: list[int], logs: RankLogs, machines: Machines, supervisor: Supervisor
) -> str | None:
    """Until the agent is done, hand stop requests to the workers: the first as SIGTERM, one that insists as SIGKILL.
    Once a rank or a machine has fallen, take down what is left of them. Returns a line about a rank that hung here.

    The workers are the agent's to wait for: asking `multiprocessing` for them here would reap one under its eyes.
    """
    told: set[tuple[int, int]] = set()
    kill_s = math.inf
    hung: str | None = None
    while not wait([future], timeout=POLL_S).done:
        if machines.fall is not None:
            kill_s = min(kill_s, time.monotonic() + GRACE_S)
        elif hung := supervisor.look(time.monotonic()):
            machines.tell(Fall(node=machines.place.node, host=gethostname(), exit_code=EXIT_CRASHED, line=hung))
            tell_workers(logs, SHOW_STACKS, told)
            kill_s = time.monotonic() + STACKS_WITHIN_S
        if requests and not told:
            told.add((0, 0))
            print("harness: stopping in order; a second Ctrl-C or SIGTERM kills the workers", file=sys.stderr)
        insisting = sum(request != signal.SIGUSR1 for request in requests) > 1
        if insisting or time.monotonic() > kill_s:
            tell_workers(logs, signal.SIGKILL, told)
        elif requests:
            tell_workers(logs, signal.SIGTERM, told)
    return hung


def tell_workers(logs: RankLogs, number: signal.Signals, told: set[tuple[int, int]]) -> None:
    """Send a signal to each worker once."""
    for pid in logs.pids():
        if (pid, number) not in told:
            told.add((pid, number))
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def gloo_environment(address: str) -> dict[str, str]:
    """Gloo would take the address that the machine's name stands for, which others may not reach and which, for a run
    on this machine alone, others should not reach: it is told the interface by which machine 0 is reached."""
    interface = None if INTERFACE in os.environ else interface_towards(address)
    return {} if interface is None else {INTERFACE: interface}


def silence_agent() -> None:
    """The agent repeats at length what `report` says in a few lines."""
    if "LOGLEVEL" not in os.environ:
        for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
            logger = logging.getLogger(name)
            logger.addHandler(logging.NullHandler())
            logger.propagate = False


def report(error: ChildFailedError, logs: RankLogs, machines: Machines, *, stopping: bool, hung: str | None) -> int:
    """Say once why the run ended: the machine where it began says everything, the others one line."""
    fall = machines.fall
    if fall is not None and fall.node != machines.place.node:
        where = f"machine {machines.place.node} ({gethostname()}) comes down"
        print(f"harness: {where}: {fall.line}", file=sys.stderr)
        return fall.exit_code
    if hung:
        print(f"harness: {hung}; where each rank stood: {logs.directory}/*.stacks", file=sys.stderr)
        return EXIT_CRASHED
    failure = logs.first_failure(error)
    if text := render(failure, stopping=stopping):
        print(text, file=sys.stderr)
    return exit_code_of(failure, stopping=stopping)
