"""A pool of worker processes, one for each rank of this node, forked from a launcher that has already imported torch.

Why: importing torch and the trainer takes two seconds of a core. Newly started ranks would each pay that again, eight
times on a node with eight GPUs, and only after the launcher has paid it too.
How: the launcher forks after all imports and before it has a thread, a socket or CUDA. Each fork waits on a pipe for
its task: environment, output files, function. A lock held by a thread at the fork would stay locked in the child, and
CUDA does not survive a fork. If either exists, if torch was loaded for another number of threads (`launch.threads`), or
if the system is not Linux, new processes are spawned instead; they import everything again and behave the same.
The kernel kills a rank whose launcher has died. Stop signals are blocked until `enter_worker` can handle them, so none
is lost.
Left out: the fork server of `multiprocessing`. It imports everything once more, and it and the ranks keep each other
alive when the launcher is killed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import format_exc
from types import FrameType
from typing import Any, NoReturn, final

import torch

from harness.config.errors import EXIT_CRASHED, EXIT_INTERRUPTED, ConfigError, StorageError
from harness.config.schema import Config
from harness.control.stop_requests import STOP_SIGNALS
from harness.core.fast_imports import loading
from harness.core.rundir import write_atomically
from launch.local.ranks import FAILURE_FILE, PID_FILE, STACKS_FILE
from launch.local.thread_count import THREADS_VARIABLE
from launch.local.worker import Worker

TORCH_NUM_THREADS = os.environ.get(THREADS_VARIABLE)
"""Value of OMP_NUM_THREADS when torch was loaded here."""
LAZY_IMPORTS = ("torch._dynamo",)
"""What torch imports at the first optimizer step (0.5 s): imported once here, not in every rank."""
EXIT_DELAY_S = 1.0
"""How long a worker that raises waits: the death of a killed peer, which leaves no message, must be seen first."""
DISMISS_TIMEOUT_S = 5.0
STACKS_SIGNAL = signal.SIGUSR2
"""Makes a worker write the stacks of its threads."""
STDOUT, STDERR = 1, 2
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """What a pooled worker runs."""

    call: Callable[..., int]
    arguments: tuple[Any, ...] = ()
    name: str = ""
    """Process name in `ps` and `top`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the launcher's."""
    stdout: str = ""
    """A file; empty: the launcher's stdout."""
    stderr: str = ""


@final
class PooledWorker:
    """A process that waits for its task, or runs it."""

    def __init__(self, method: str) -> None:
        context: Any = get_context(method)  # the common interface of the contexts is not typed
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=wait_for_task, args=(os.getpid(), child_pipe))
        self._result: int | None = None
        self._process.start()
        child_pipe.close()

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    @property
    def exit_code(self) -> int | None:
        """None while the process lives; negative: the signal that killed it."""
        code: int | None = self._process.exitcode
        return code

    def assign(self, task: WorkerTask) -> None:
        with suppress(OSError):  # the process is dead; the agent sees its exit code
            self._pipe.send(task)

    def poll_result(self, within_s: float = 0.0) -> int | None:
        """Return value of the task; None while it runs, and if it never returned."""
        if self._result is None:
            with suppress(EOFError, OSError):
                if self._pipe.poll(within_s):
                    self._result = self._pipe.recv()
        return self._result

    def send_signal(self, signal_number: signal.Signals) -> None:
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def dismiss(self) -> None:
        """Let the process exit, whether its task has returned or it never had one."""
        with suppress(OSError):
            self._pipe.send(None)

    def join_or_kill(self, within_s: float) -> None:
        self._process.join(within_s)
        self.send_signal(signal.SIGKILL)
        self._process.join()
        self._pipe.close()


@contextmanager
def open_worker_pool(num_processes: int, *, forked: bool) -> Iterator[list[PooledWorker]]:
    """Start the processes for the ranks of this node; ends them on exit."""
    if forked:
        with loading():
            for name in LAZY_IMPORTS:
                import_module(name)
        sys.stdout.flush()
        sys.stderr.flush()
    else:
        start_resource_tracker()
    processes: list[PooledWorker] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        try:
            for _ in range(num_processes):
                processes.append(PooledWorker("fork" if forked else "spawn"))  # noqa: PERF401 -- one may fail
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield processes
    finally:
        for process in processes:
            process.dismiss()
        deadline_s = time.monotonic() + DISMISS_TIMEOUT_S
        for process in processes:
            process.join_or_kill(max(0.0, deadline_s - time.monotonic()))


def can_fork() -> bool:
    """Whether a fork of this process is safe: one thread, no CUDA, Linux."""
    is_forkable = threading.active_count() == 1 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return sys.platform == "linux" and is_forkable and sys.stdout is sys.__stdout__


def start_resource_tracker() -> None:
    """Start the helper process of `multiprocessing` before signals are blocked.

    It would unblock them, and it dies of a SIGUSR1 that was not blocked when it started.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def wait_for_task(launcher: int, pipe: Connection) -> None:
    """Entry point of a pooled worker. Stays alive until dismissed; otherwise a reused PID could receive our signals."""
    control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(EXIT_CRASHED)  # the launcher died before prctl took effect
    task = pipe.recv()
    if task is None:
        return
    os.environ.update(task.environment)
    for descriptor, path in ((STDOUT, task.stdout), (STDERR, task.stderr)):
        if path:
            with Path(path).open("wb") as file:
                os.dup2(file.fileno(), descriptor)
    control_process(PR_SET_NAME, task.name.encode())
    pipe.send(task.call(*task.arguments))
    pipe.recv()


def control_process(option: int, value: Any) -> None:
    """Call prctl for this process; does nothing on other systems than Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def enter_worker(worker: Worker, cfg: Config) -> int:
    """Entry point of a rank. A stop signal ends it at once until the worker installs its own handler."""

    def exit_interrupted(_signal: int, _frame: FrameType | None) -> None:
        os._exit(EXIT_INTERRUPTED)

    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, exit_interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    Path(os.environ[PID_FILE]).write_text(str(os.getpid()))
    try:
        with dump_stacks_on_signal(Path(os.environ[STACKS_FILE])):
            return worker(cfg)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        write_atomically(Path(os.environ[FAILURE_FILE]), json.dumps(describe_error(error)))
        time.sleep(EXIT_DELAY_S)
        exit_immediately(EXIT_CRASHED)
    finally:
        for signal_number in STOP_SIGNALS:
            signal.signal(signal_number, signal.SIG_DFL)


def exit_immediately(exit_code: int) -> NoReturn:
    """Exit without waiting for threads or the process group: both may wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def describe_error(error: Exception) -> dict[str, Any]:
    """The error that ends a rank, for `launch.local.ranks.RankFailure`; call it inside the `except` block."""
    failure = {"message": str(error), "is_user_error": isinstance(error, (ConfigError, StorageError))}
    code = {"exit_code": EXIT_INTERRUPTED} if isinstance(error, StorageError) else {}
    return failure | code | {"traceback": format_exc()}


@contextmanager
def dump_stacks_on_signal(path: Path) -> Iterator[None]:
    """Write all stacks to a file on STACKS_SIGNAL; works even if C code hangs."""
    with path.open("w") as file:
        faulthandler.register(STACKS_SIGNAL, file=file)
        try:
            yield
        finally:
            faulthandler.unregister(STACKS_SIGNAL)
    if not path.stat().st_size:
        path.unlink()
