"""Processes held in reserve, each to become one rank of this machine: forked from a launcher that has imported torch.

Why: to import torch and the trainer takes two seconds of a core. Ranks that are started anew take them again each,
eight times on a machine with eight GPUs, and only after the launcher has taken them too.
How: once everything is imported, and before there is a thread, a socket or CUDA in this process, it forks; each fork
waits on a pipe for its orders: its environment, where its words go, what to call. Whatever a thread could hold at that
moment would be held in the fork for ever, and CUDA does not outlive a fork: where either is there already, where torch
was loaded for another number of threads (`launch.threads`), and on systems that do not fork well, new processes are
started, which import everything again, and all else stays the same. The kernel kills a rank whose launcher is gone.
Stop signals are blocked from the first moment until `enter_worker` can answer them, so none is lost.
Left out: `multiprocessing`'s fork server, which would import everything once more beside the launcher, and which ranks
keep alive, and it them, when the launcher is killed.
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
from launch.local.ranks import FALL_FILE, PID_FILE, STACKS_FILE
from launch.local.thread_count import THREADS
from launch.local.worker import Worker

THREADS_OF_TORCH = os.environ.get(THREADS)
"""For how many it was loaded here."""
IMPORTED_LATE = ("torch._dynamo",)
"""What torch brings in with the first step of an optimizer: for half a second, once here and not in every rank."""
LAST_WORD_S = 1.0
"""How long a worker that raises waits: a peer that was killed leaves no message and must be seen to have died first."""
DISMISSED_WITHIN_S = 5.0
SHOW_STACKS = signal.SIGUSR2
"""Asks a worker where each of its threads stands."""
STDOUT, STDERR = 1, 2
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a process in reserve is to do."""

    call: Callable[..., int]
    arguments: tuple[Any, ...] = ()
    name: str = ""
    """How `ps` and `top` call the process."""
    environment: dict[str, str] = field(default_factory=dict)
    """Beside the launcher's."""
    stdout: str = ""
    """A file; empty: the launcher's."""
    stderr: str = ""


@final
class Reserved:
    """One process that waits for its orders, or follows them."""

    def __init__(self, method: str) -> None:
        context: Any = get_context(method)  # what the contexts share is not in their types
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=stand_by, args=(os.getpid(), theirs))
        self._returned: int | None = None
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    @property
    def exit_code(self) -> int | None:
        """How the process ended: None while it is there, the negative number of a signal that killed it."""
        code: int | None = self._process.exitcode
        return code

    def begin(self, orders: Orders) -> None:
        with suppress(OSError):  # it is dead, and will be found to be
            self._pipe.send(orders)

    def returned(self, within_s: float = 0.0) -> int | None:
        """What the call of its orders came to; None while it goes on, and if it never returned."""
        if self._returned is None:
            with suppress(EOFError, OSError):
                if self._pipe.poll(within_s):
                    self._returned = self._pipe.recv()
        return self._returned

    def tell(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def dismiss(self) -> None:
        """Send it home, whether it has returned or was never needed."""
        with suppress(OSError):
            self._pipe.send(None)

    def end(self, within_s: float) -> None:
        self._process.join(within_s)
        self.tell(signal.SIGKILL)
        self._process.join()
        self._pipe.close()


@contextmanager
def reserve(num_processes: int, *, forked: bool) -> Iterator[list[Reserved]]:
    """Processes for the ranks of this machine; gone when this is left."""
    if forked:
        with loading():
            for name in IMPORTED_LATE:
                import_module(name)
        sys.stdout.flush()
        sys.stderr.flush()
    else:
        start_tracker()
    processes: list[Reserved] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        try:
            for _ in range(num_processes):
                processes.append(Reserved("fork" if forked else "spawn"))  # noqa: PERF401 -- one may fail
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield processes
    finally:
        for process in processes:
            process.dismiss()
        deadline_s = time.monotonic() + DISMISSED_WITHIN_S
        for process in processes:
            process.end(max(0.0, deadline_s - time.monotonic()))


def can_fork() -> bool:
    """Whether a fork of this process is a whole process."""
    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return sys.platform == "linux" and alone and sys.stdout is sys.__stdout__


def start_tracker() -> None:
    """Start the helper process of `multiprocessing` while nothing is blocked: it would lift the block, and die of a
    SIGUSR1 that was not blocked when it began."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def stand_by(launcher: int, pipe: Connection) -> None:
    """The first function of a process in reserve. It stays until it is sent home: a number that is free again might be
    given to a stranger, whom the next signal to the ranks would hit."""
    control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(EXIT_CRASHED)  # it was killed before the kernel knew that this process should follow
    orders = pipe.recv()
    if orders is None:
        return
    os.environ.update(orders.environment)
    for descriptor, path in ((STDOUT, orders.stdout), (STDERR, orders.stderr)):
        if path:
            with Path(path).open("wb") as file:
                os.dup2(file.fileno(), descriptor)
    control_process(PR_SET_NAME, orders.name.encode())
    pipe.send(orders.call(*orders.arguments))
    pipe.recv()


def control_process(option: int, value: Any) -> None:
    """What the kernel is asked to do for this process; Linux alone can do it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def enter_worker(worker: Worker, cfg: Config) -> int:
    """The first function of a rank. Until the worker can stop in order, a stop request just ends it."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        os._exit(EXIT_INTERRUPTED)

    for number in STOP_SIGNALS:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    Path(os.environ[PID_FILE]).write_text(str(os.getpid()))
    try:
        with shows_stacks(Path(os.environ[STACKS_FILE])):
            return worker(cfg)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        write_atomically(Path(os.environ[FALL_FILE]), json.dumps(fall_of(error)))
        time.sleep(LAST_WORD_S)
        leave_at_once(EXIT_CRASHED)
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)


def leave_at_once(exit_code: int) -> NoReturn:
    """End the process without waiting for its threads or its process group: both may wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def fall_of(error: Exception) -> dict[str, Any]:
    """How a rank ended that raised, inside the `except`; see `launch.local.ranks.Failure`."""
    fall = {"message": str(error), "is_user_error": isinstance(error, (ConfigError, StorageError))}
    code = {"exit_code": EXIT_INTERRUPTED} if isinstance(error, StorageError) else {}
    return fall | code | {"traceback": format_exc()}


@contextmanager
def shows_stacks(path: Path) -> Iterator[None]:
    """Where the worker stands, for the supervisor that is about to kill it; C code that hangs cannot prevent it."""
    with path.open("w") as file:
        faulthandler.register(SHOW_STACKS, file=file)
        try:
            yield
        finally:
            faulthandler.unregister(SHOW_STACKS)
    if not path.stat().st_size:
        path.unlink()
