"""Worker processes for the ranks of this node, forked from a process that has already imported torch.

Why: importing torch and the trainer takes two seconds of a core. Newly started ranks would each pay that again, eight
times on a node with eight GPUs, and once more at every restart.
How: the launcher forks one template process after all imports and before it has a thread, a socket or CUDA. The
template never does anything but fork: at the start and at every restart inside the job it forks one process for each
rank. A new process waits on a pipe for its task: environment, output files, function. It is forked twice, so that
the launcher becomes its parent: the launcher reads its exit code, and the kernel kills it if the launcher dies. A lock
held by a thread at the fork would stay locked in the child, and CUDA does not survive a fork. If either exists, if
torch was loaded for another number of threads (`launch.threads`), or if the system is not Linux, new processes are
spawned instead; they import everything again and behave the same.
Stop signals and STACKS_SIGNAL are blocked until `enter_worker` can handle them, so none is lost.
Left out: the fork server of `multiprocessing`. It imports everything once more, and it and the ranks keep each other
alive when the launcher is killed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
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
from traceback import extract_tb, format_exc
from types import FrameType
from typing import Any, NoReturn, Self, final

import torch

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_CRASHED, EXIT_INTERRUPTED, ConfigError, StorageError
from harness.config.schema import Config
from harness.control.stop_requests import STOP_SIGNALS
from harness.core.child_process import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, control_process, die_with
from harness.core.fast_imports import loading
from harness.core.node_name import machine_name
from harness.core.rundir import write_atomically
from harness.core.safe_stream import is_original_stdout, safe_output
from launch.local.collective_dump import dump_collectives_on_signal
from launch.local.out_of_memory import describe_shortage
from launch.local.ranks import COLLECTIVES_FILE, FAILURE_FILE, PID_FILE, STACKS_FILE
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
POLL_S = 0.01
TEMPLATE_NAME = "rank-template"


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
class AdoptedProcess:
    """A process that the template forked. It is a child of this process, because the process in between has exited."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None
        self._lock = threading.Lock()

    @property
    def exitcode(self) -> int | None:
        with self._lock:
            if self._exit_code is None:
                reaped, status = os.waitpid(self.pid, os.WNOHANG)
                self._exit_code = os.waitstatus_to_exitcode(status) if reaped else None
            return self._exit_code

    def join(self, timeout: float | None = None) -> None:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while self.exitcode is None and (deadline_s is None or time.monotonic() < deadline_s):
            time.sleep(POLL_S)


@final
class PooledWorker:
    """A process that waits for its task, or runs it."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe
        self._result: int | None = None

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


@final
class WorkerTemplate:
    """The process from which the workers are forked."""

    def __init__(self) -> None:
        control_process(PR_SET_CHILD_SUBREAPER, 1)
        self._requests, theirs = socket.socketpair()
        context: Any = get_context("fork")
        self._process = context.Process(target=fork_on_request, args=(os.getpid(), self._requests, theirs))
        self._process.start()
        theirs.close()

    def fork_worker(self) -> PooledWorker:
        ours, theirs = get_context("fork").Pipe()
        with theirs:
            socket.send_fds(self._requests, [b"fork"], [theirs.fileno()])
        pid = self._requests.recv(64)
        if not pid:
            raise ChildProcessError("the template of the workers is gone")
        return PooledWorker(AdoptedProcess(int(pid)), ours)

    def close(self) -> None:
        self._requests.close()
        self._process.join(DISMISS_TIMEOUT_S)
        self._process.kill()
        self._process.join()


@final
class WorkerPool:
    """Starts the processes of the ranks of this node, any number of times."""

    def __init__(self, *, forked: bool) -> None:
        self._forked = forked

    def __enter__(self) -> Self:
        self._template: WorkerTemplate | None = None
        if not self._forked:
            return self
        with loading():
            for name in LAZY_IMPORTS:
                import_module(name)
        sys.stdout.flush()
        sys.stderr.flush()
        with blocked_signals():
            self._template = WorkerTemplate()
        return self

    def __exit__(self, *_: object) -> None:
        if self._template is not None:
            self._template.close()

    @contextmanager
    def start_workers(self, num_processes: int) -> Iterator[list[PooledWorker]]:
        """Start this many processes, which wait for their tasks; ends them on exit."""
        processes: list[PooledWorker] = []
        try:
            for _ in range(num_processes):
                processes.append(self._start_worker())  # noqa: PERF401 -- one may fail
            yield processes
        finally:
            for process in processes:
                process.dismiss()
            deadline_s = time.monotonic() + DISMISS_TIMEOUT_S
            for process in processes:
                process.join_or_kill(max(0.0, deadline_s - time.monotonic()))

    def _start_worker(self) -> PooledWorker:
        if self._template is not None:
            with suppress(OSError):  # the template is gone: killed for memory, for example
                return self._template.fork_worker()
        start_resource_tracker()
        context: Any = get_context("spawn")  # the common interface of the contexts is not typed
        ours, theirs = context.Pipe()
        with theirs, blocked_signals():
            process = context.Process(target=wait_for_task, args=(os.getpid(), theirs))
            process.start()
        return PooledWorker(process, ours)


@contextmanager
def open_worker(*, forked: bool) -> Iterator[PooledWorker]:
    """One process, for a task of the launcher itself."""
    with WorkerPool(forked=forked) as pool, pool.start_workers(1) as (process,):
        yield process


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Processes that start inside inherit blocked stop signals and STACKS_SIGNAL."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, STACKS_SIGNAL))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def can_fork() -> bool:
    """Whether a fork of this process is safe: one thread, no CUDA, Linux."""
    is_forkable = threading.active_count() == 1 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return sys.platform == "linux" and is_forkable and is_original_stdout()


def start_resource_tracker() -> None:
    """Start the helper process of `multiprocessing` before signals are blocked.

    It would unblock them, and it dies of a SIGUSR1 that was not blocked when it started.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def fork_on_request(launcher: int, requests: socket.socket, replies: socket.socket) -> None:
    """Entry point of the template: forks a worker for every pipe that the launcher sends."""
    die_with(launcher)
    requests.close()  # the launcher's end
    control_process(PR_SET_NAME, TEMPLATE_NAME.encode())
    while descriptors := socket.recv_fds(replies, 16, 1)[1]:
        (pipe,) = descriptors
        replies.sendall(str(fork_adopted(launcher, pipe, replies)).encode())
        os.close(pipe)


def fork_adopted(launcher: int, pipe: int, replies: socket.socket) -> int:
    """Fork a worker whose parent will be the launcher; returns its pid.

    A process in between forks it and exits; the kernel gives the worker to the launcher, its nearest ancestor that
    adopts orphans.
    """
    context: Any = get_context("fork")
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        worker = context.Process(target=run_adopted_worker, args=(launcher, os.getpid(), pipe, replies))
        worker.start()
        os.write(write, str(worker.pid).encode())
        os._exit(0)
    os.close(write)
    pid = int(os.read(read, 64))
    os.close(read)
    os.waitpid(between, 0)
    return pid


def run_adopted_worker(launcher: int, between: int, pipe: int, replies: socket.socket) -> None:
    """Entry point of a worker that the template forked."""
    replies.close()
    while os.getppid() == between:
        time.sleep(POLL_S / 10)
    wait_for_task(launcher, Connection(pipe))


def wait_for_task(launcher: int, pipe: Connection) -> None:
    """Run one task. Stays alive until dismissed; otherwise a reused PID could receive our signals."""
    die_with(launcher)
    task = pipe.recv()
    if task is None:
        return
    os.environ.update(task.environment)
    for descriptor, path in ((STDOUT, task.stdout), (STDERR, task.stderr)):
        if path:
            with Path(path).open("wb") as file:
                os.dup2(file.fileno(), descriptor)
    control_process(PR_SET_NAME, task.name.encode())
    with safe_output():
        pipe.send(task.call(*task.arguments))
    pipe.recv()


def enter_worker(worker: Worker, cfg: Config) -> int:
    """Entry point of a rank. A stop signal ends it at once until the worker installs its own handler."""

    def exit_interrupted(_signal: int, _frame: FrameType | None) -> None:
        os._exit(EXIT_INTERRUPTED)

    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, exit_interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    with suppress(OSError):
        Path(os.environ[PID_FILE]).write_text(str(os.getpid()))
    try:
        with (
            dump_collectives_on_signal(Path(os.environ[COLLECTIVES_FILE]), STACKS_SIGNAL),
            dump_stacks_on_signal(Path(os.environ[STACKS_FILE])),
        ):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACKS_SIGNAL])
            return worker(cfg)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        failure = describe_error(error)
        try:
            write_atomically(Path(os.environ[FAILURE_FILE]), json.dumps(failure))
        except OSError:  # a full disk: the exit code has to say enough to the launcher
            with suppress(OSError):
                print(
                    f"harness: {failure['message']}" if failure["is_user_error"] else failure["traceback"],
                    file=sys.stderr,
                )
        time.sleep(EXIT_DELAY_S)
        exit_immediately(failure["exit_code"])
    finally:
        for signal_number in STOP_SIGNALS:
            signal.signal(signal_number, signal.SIG_DFL)


def exit_immediately(exit_code: int) -> NoReturn:
    """Exit without waiting for threads or the process group: both may wait for other ranks."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk
            stream.flush()
    os._exit(exit_code)


def describe_error(error: Exception) -> dict[str, Any]:
    """The error that ends a rank, for `launch.local.ranks.RankFailure`; call it inside the `except` block."""
    *_, place = extract_tb(error.__traceback__)
    is_user_error = isinstance(error, (ConfigError, StorageError))
    named = ""
    if isinstance(error, (ConfigError, StorageError)) and error.is_of_one_rank and not error.is_shared:
        named = f"rank {os.environ['RANK']} on {machine_name()}: "
    failure = {
        "message": f"{named}{error}",
        "is_user_error": is_user_error,
        "error": f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}",
    }
    code = {ConfigError: EXIT_BAD_CONFIG, StorageError: EXIT_INTERRUPTED}
    failure["exit_code"] = next((code[kind] for kind in code if isinstance(error, kind)), EXIT_CRASHED)
    shortage = {"shortage": found} if (found := describe_shortage(error)) else {}
    return failure | shortage | {"traceback": format_exc()}


@contextmanager
def dump_stacks_on_signal(path: Path) -> Iterator[None]:
    """Write all stacks to a file on STACKS_SIGNAL; works even if C code hangs."""
    file = path.open("w")
    faulthandler.register(STACKS_SIGNAL, file=file, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(STACKS_SIGNAL)
        with suppress(OSError):  # a file that cannot be tidied away must not change the exit code of the rank
            file.close()
            if not path.stat().st_size:
                path.unlink()
