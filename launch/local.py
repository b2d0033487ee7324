"""Starts the ranks of a run on this machine and turns how they ended into one exit code.

Why: torchrun exits with 1 whatever its workers said, and gives a stopping run 30 seconds. A run that saves a checkpoint
when it is told to stop needs its own time, and a cluster needs to know whether to requeue.
How: torch's elastic agent runs in a thread with the stop signals blocked; the main thread catches them and passes them
on. Workers inherit the block and lift it once they can answer, so no signal is lost while Python starts. The first
signal asks the workers to stop, a second SIGINT or SIGTERM kills them; SIGUSR1 only ever asks, because a scheduler may
send it to every process and more than once. Workers return their exit code; a worker that dies is reported by rank,
cause, traceback and log. Rank 0 keeps the terminal, the others write to `logs/<start>/`.
Left out: restarts. A run that ends with 75 is resumed by whoever started it. `LOGLEVEL` brings back the agent's log.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from traceback import format_exc
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from harness.config import EXIT_BAD_CONFIG, EXIT_HALTED, EXIT_INTERRUPTED, Config, ConfigError, DeviceKind, require
from harness.requests import STOP_SIGNALS
from harness.rundir import locate, write_atomically

Worker = Callable[[Config], int]

EXIT_CRASHED = 1
POLL_S = 0.1
PID_FILE = "HARNESS_PID_FILE"
"""Environment variable of a worker: where it says that it can be told to stop."""
FALL_FILE = "HARNESS_FALL_FILE"
"""Environment variable of a worker: where it writes the exception that ends it, at the moment it is raised."""
LAST_WORD_S = 1.0
"""How long a worker that raises waits: a peer that was killed leaves no message and must be seen to have died first."""


def num_ranks(cfg: Config) -> int:
    """Ranks to start here: what was asked for, or one for each GPU, or 2 on CPU."""
    num_gpus = 0 if cfg.parallel.device is DeviceKind.cpu else torch.cuda.device_count()
    if cfg.parallel.device is DeviceKind.cuda:
        require(num_gpus > 0, "parallel.device", "no CUDA device on this machine; choose cpu or auto")
    if num_gpus and cfg.launch.nproc:
        message = f"must not exceed the {num_gpus} GPUs of this machine, got {cfg.launch.nproc}"
        require(cfg.launch.nproc <= num_gpus, "launch.nproc", f"{message}; or parallel.device=cpu")
    return cfg.launch.nproc or num_gpus or 2


def launch(cfg: Config, worker: Worker) -> int:
    """Run `worker(cfg)` on every rank; returns the exit code of the contract, 1 for a crash."""
    nproc = num_ranks(cfg)
    logs = RankLogs(locate(cfg).logs / time.strftime("%Y%m%d-%H%M%S"), nproc)
    silence_agent()
    agent = elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            logs_specs=logs,
            run_id="harness",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=POLL_S,
            start_method="spawn",
        ),
        enter_worker,
    )
    with (
        threads_of_a_rank(cfg, nproc),
        stop_requests() as requests,
        ThreadPoolExecutor(max_workers=1, initializer=block_stop_signals) as pool,
    ):
        logs.create()
        start_tracker()
        future: Future[dict[int, int]] = pool.submit(agent, worker, cfg)
        pass_on(requests, future, logs)
        try:
            return max(future.result().values())
        except ChildFailedError as error:
            return report(logs.first_failure(error), stopping=bool(requests))


def enter_worker(worker: Worker, cfg: Config) -> int:
    """The first function of a worker process. Until the worker can stop in order, a stop request just ends it."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        os._exit(EXIT_INTERRUPTED)

    for number in STOP_SIGNALS:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    Path(os.environ[PID_FILE]).write_text(str(os.getpid()))
    try:
        return worker(cfg)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)  # the agent takes it for a silent success and waits for ever
    except Exception as error:
        fall = {"message": str(error), "is_user_error": isinstance(error, ConfigError), "traceback": format_exc()}
        write_atomically(Path(os.environ[FALL_FILE]), json.dumps(fall))
        time.sleep(LAST_WORD_S)
        sys.exit(EXIT_CRASHED)
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)


def block_stop_signals() -> None:
    """In the agent's thread, and so in every process it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def start_tracker() -> None:
    """Start the helper process of `multiprocessing` from here: it would lift the block from the agent's thread, and die
    of a SIGUSR1 that was not blocked when it began."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """The stop signals that arrived so far; the handler only writes them down."""
    requests: list[int] = []
    before = {number: signal.signal(number, lambda number, _frame: requests.append(number)) for number in STOP_SIGNALS}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pass_on(requests: list[int], future: Future[dict[int, int]], logs: RankLogs) -> None:
    """Until the agent is done, hand stop requests to the workers: the first as SIGTERM, one that insists as SIGKILL.

    The workers are the agent's to wait for: asking `multiprocessing` for them here would reap one under its eyes.
    """
    while not requests:
        if wait([future], timeout=POLL_S).done:
            return
    print("harness: stopping in order; a second Ctrl-C or SIGTERM kills the workers", file=sys.stderr)
    told: set[tuple[int, int]] = set()
    while not wait([future], timeout=POLL_S).done:
        insisting = sum(request != signal.SIGUSR1 for request in requests) > 1
        number = signal.SIGKILL if insisting else signal.SIGTERM
        for pid in logs.pids():
            if (pid, number) not in told:
                told.add((pid, number))
                with suppress(ProcessLookupError):
                    os.kill(pid, number)


@contextmanager
def threads_of_a_rank(cfg: Config, nproc: int) -> Iterator[None]:
    """OMP_NUM_THREADS for the workers: it is read when torch is loaded, so it must be there before they start."""
    before = os.environ.get("OMP_NUM_THREADS")
    share = max(1, (os.cpu_count() or 1) // nproc)
    os.environ["OMP_NUM_THREADS"] = str(cfg.launch.threads or before or share)
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def silence_agent() -> None:
    """The agent repeats at length what `report` says in a few lines."""
    if "LOGLEVEL" not in os.environ:
        for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
            logger = logging.getLogger(name)
            logger.addHandler(logging.NullHandler())
            logger.propagate = False


def report(failure: Failure, *, stopping: bool) -> int:
    """Say once why the run ended, where that was no part of the contract; returns the exit code."""
    if failure.exit_code in (EXIT_BAD_CONFIG, EXIT_HALTED, EXIT_INTERRUPTED):
        return failure.exit_code
    if stopping and failure.exit_code < 0:
        return EXIT_INTERRUPTED
    if failure.is_user_error:
        print(f"harness: {failure.message}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    how = f"exited with code {failure.exit_code}"
    if failure.exit_code < 0:
        how = f"was killed by {signal.Signals(-failure.exit_code).name}"
    log = f"its log: {failure.log}" if failure.log else "its log is above"
    lines = [f"harness: rank {failure.rank} {how}; {log}", failure.traceback.rstrip()]
    print("\n".join(filter(None, lines)), file=sys.stderr)
    return EXIT_CRASHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank ended."""

    rank: int
    exit_code: int
    """Negative: the number of the signal that killed it."""
    log: str
    """Where its stderr went; empty: the terminal."""
    message: str = ""
    """Text of the exception; empty where there was none."""
    is_user_error: bool = False
    traceback: str = ""


class RankLogs(LogsSpecs):
    """Rank 0 on the terminal; the streams of the others, and the last exception of each, as files of one directory."""

    def __init__(self, directory: Path, nproc: int) -> None:
        super().__init__(str(directory))
        self.directory = directory
        self.nproc = nproc

    @property
    def root_log_dir(self) -> str:
        return str(self.directory)

    def create(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("run.dir", f"cannot create {self.directory}: {error.strerror}") from None
        for rank in range(self.nproc):
            self.fall_file(rank).unlink(missing_ok=True)
            self.pid_file(rank).unlink(missing_ok=True)

    def fall_file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.fall.json"

    def pid_file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.pid"

    def pids(self) -> list[int]:
        """Processes of the workers that can answer a signal by now."""
        texts = [path.read_text() for rank in range(self.nproc) if (path := self.pid_file(rank)).exists()]
        return [int(text) for text in texts if text]

    def stream(self, rank: int, name: str) -> str:
        """A file, or "" for the terminal."""
        return str(self.directory / f"rank-{rank}.{name}") if rank > 0 else ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for rank, env in envs.items():
            env[FALL_FILE] = str(self.fall_file(rank))
            env[PID_FILE] = str(self.pid_file(rank))
        return LogsDest(
            stdouts={rank: self.stream(rank, "stdout") for rank in envs},
            stderrs={rank: self.stream(rank, "stderr") for rank in envs},
            error_files={rank: str(self.directory / f"rank-{rank}.agent.json") for rank in envs},
        )

    def first_failure(self, error: ChildFailedError) -> Failure:
        """The rank that died first. The agent names one that is dead; an exception elsewhere may be older."""
        rank, process = error.get_first_failure()
        fallen = [each for each in range(self.nproc) if self.fall_file(each).exists()]
        if rank not in fallen:
            return Failure(rank=rank, exit_code=process.exitcode, log=self.stream(rank, "stderr"))
        first = min(fallen, key=lambda each: self.fall_file(each).stat().st_mtime_ns)
        fall = json.loads(self.fall_file(first).read_text(encoding="utf-8"))
        return Failure(rank=first, exit_code=EXIT_CRASHED, log=self.stream(first, "stderr"), **fall)
