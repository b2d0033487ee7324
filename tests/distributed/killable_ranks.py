"""Forks ranks from one preloaded process and kills one of them with SIGKILL at a chosen point.

Why: `kill -9` is tested at many points of a run, and starting Python and torch takes seconds.
How: one parent process is spawned fresh, imports everything and then only forks: each attempt is a set of forked ranks
with torchrun's environment. The parent has no threads, no process group and runs no large tensor operation, so forking
is safe. A rank is killed at the n-th call of a function of the harness: before, after, or at a chosen point inside. The
function is replaced in that rank only. The other ranks are killed a moment later, as by a launcher.
Left out: losing data that the kernel had not yet written to disk; SIGKILL does not lose it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from harness.core.fast_imports import loading
from launch.local.ports import reserved_port
from tests.forks import ROOT, forks

ATTEMPT_TIMEOUT_S = 200.0
"""Many times what an attempt takes: a busy disk can stretch each of its dozens of fsync calls to seconds."""
START_TIMEOUT_S = 120.0
KILLED = -signal.SIGKILL


class When(StrEnum):
    before = "before"
    within = "within"
    after = "after"


@dataclass(frozen=True, slots=True)
class Place:
    """A function of the harness, by where it is looked up: `package.module:name` or `package.module:Class.name`."""

    phase: str
    function: str
    install_kill_within: Callable[[], None] | None = None
    """Patches a function so that the process is killed halfway through the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAtCall:
    """One rank is killed at the n-th call of a function."""

    place: Place
    when: When
    nth: int
    rank: int
    grace_s: float
    """How long the other ranks keep running."""

    def __str__(self) -> str:
        return f"{self.when} {self.place.phase} {self.nth} on rank {self.rank}, the other {self.grace_s:.2f} s later"


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAtTime:
    """One rank is killed a given time after its start."""

    after_s: float
    rank: int
    grace_s: float

    def __str__(self) -> str:
        return f"{self.after_s:.2f} s after the start on rank {self.rank}, the other {self.grace_s:.2f} s later"


KillPoint = KillAtCall | KillAtTime


class Outcome(NamedTuple):
    exit_codes: list[int]
    results: list[Any]
    """The result of the case on each rank; None for a killed rank."""
    killed: bool
    """Whether the rank was killed; else every rank ran to the end."""


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in(owner: Any, name: str, part: Callable[..., Any]) -> None:
    """Make the next call of `owner.name` run only `part(function, *arguments)` and kill the process."""
    function = getattr(owner, name)

    def last_call(*arguments: Any, **options: Any) -> None:
        part(function, *arguments, **options)
        kill_self()

    setattr(owner, name, last_call)


def install_kill(kill_point: KillAtCall) -> None:
    """Replace the function in this process by one that kills the process."""
    module, _, path = kill_point.place.function.partition(":")
    *owners, name = path.split(".")
    owner: Any = attrgetter(".".join(owners))(import_module(module)) if owners else import_module(module)
    function = getattr(owner, name)
    calls = 0

    @wraps(function)
    def replacement(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        now = calls == kill_point.nth
        if now and kill_point.when is When.before:
            kill_self()
        if now and kill_point.when is When.within:
            assert kill_point.place.install_kill_within is not None
            kill_point.place.install_kill_within()
        result = function(*arguments, **options)
        if now and kill_point.when is When.after:
            kill_self()
        return result

    setattr(owner, name, replacement)


class KillableRanks:
    """Handle of the parent process that forks the ranks."""

    def __init__(self, *modules: str) -> None:
        """`modules` are imported once, in the parent."""
        self._pipe, child_end = forks().Pipe()
        self._parent = forks().Process(target=_serve, args=(child_end, modules))
        self._parent.start()
        child_end.close()

    def run(self, size: int, case: Callable[..., Any], *arguments: Any, kill_point: KillPoint | None = None) -> Outcome:
        """One attempt on `size` ranks; an exception in a rank fails the test with its traceback."""
        self._pipe.send((size, case, arguments, kill_point))
        assert self._pipe.poll(START_TIMEOUT_S + ATTEMPT_TIMEOUT_S), "the parent process did not respond"
        outcome = self._pipe.recv()
        assert isinstance(outcome, Outcome), outcome
        return outcome

    def close(self) -> None:
        self._pipe.send(None)
        self._pipe.close()
        self._parent.join()


def _serve(pipe: Connection, modules: tuple[str, ...]) -> None:
    os.chdir(ROOT)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  (the console output is not needed)
    with loading():
        for module in modules:
            import_module(module)
    threads = list(Path("/proc/self/task").iterdir())
    while (request := pipe.recv()) is not None:
        pipe.send(_attempt(*request) if len(threads) == 1 else f"{len(threads)} threads cannot be forked")


def _attempt(
    size: int, case: Callable[..., Any], arguments: tuple[Any, ...], kill_point: KillPoint | None
) -> Outcome | str:
    """Fork the ranks, wait for all of them, and return the outcome; a text if a rank raised an exception."""
    with reserved_port() as port:
        children = {rank: _fork_rank(rank, size, str(port), (case, arguments, kill_point)) for rank in range(size)}
        reports, problem = _watch(children, kill_point)
        for child in children.values():
            child.process.join()
            child.results.close()
            child.stacks.close()
    exit_codes = [child.process.exitcode or 0 for child in children.values()]
    killed = kill_point is not None and exit_codes[kill_point.rank] == KILLED and not problem
    failures = [str(report.value) for report in reports.values() if report and not report.ended]
    if not killed and (problem or failures or None in reports.values()):
        return "\n".join([problem, f"exit codes {exit_codes}", *failures])
    returned = [report.value if (report := reports[rank]) and report.ended else None for rank in range(size)]
    return Outcome(exit_codes, returned, killed)


class _Report(NamedTuple):
    ended: bool
    value: Any
    """The result of the case, or the traceback of its failure."""


class _Child(NamedTuple):
    """A forked rank."""

    process: BaseProcess
    results: Connection
    stacks: IO[bytes]
    """The rank writes the stacks of its threads here at SIGUSR1."""

    def read_stacks(self) -> str:
        """The stacks of its threads, asked for now."""
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        time.sleep(1.0)
        self.stacks.seek(0)
        return self.stacks.read().decode()


_Children = Mapping[int, _Child]


def _fork_rank(rank: int, size: int, port: str, request: tuple[Any, ...]) -> _Child:
    context = multiprocessing.get_context("fork")
    parent_end, child_end = context.Pipe(duplex=False)
    stacks = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the attempt has ended)
    process = context.Process(target=_run_rank, args=(rank, size, port, child_end, stacks, request))
    process.start()
    child_end.close()
    return _Child(process, parent_end, stacks)


def _run_rank(
    rank: int, size: int, port: str, reports: Connection, stacks: IO[bytes], request: tuple[Any, ...]
) -> None:
    """Runs in a forked rank."""
    import torch

    faulthandler.register(signal.SIGUSR1, file=stacks)
    # After the fork, not before: a forked process has none of the threads of its pool. The first user creates them
    # again, and two concurrent first users abort.
    torch.set_num_threads(1)
    case, arguments, kill_point = request
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    if isinstance(kill_point, KillAtCall) and kill_point.rank == rank:
        install_kill(kill_point)
    try:
        reports.send(_Report(True, case(*arguments)))
    except BaseException:
        reports.send(_Report(False, traceback.format_exc()))
        sys.exit(1)


def _watch(children: _Children, kill_point: KillPoint | None) -> tuple[dict[int, _Report | None], str]:
    """Receive every rank's report, None from a killed rank; then kill the other ranks after the grace period."""
    pending = {child.results: rank for rank, child in children.items()}
    reports: dict[int, _Report | None] = {}
    problem = ""
    until_s = time.monotonic() + ATTEMPT_TIMEOUT_S
    if isinstance(kill_point, KillAtTime) and not wait(list(pending), timeout=kill_point.after_s):
        children[kill_point.rank].process.kill()
    while pending:
        ready = wait(list(pending), timeout=max(0.0, until_s - time.monotonic()))
        if not ready:
            if None not in reports.values():
                stacks = [f"rank {rank}:\n{children[rank].read_stacks()}" for rank in pending.values()]
                problem = problem or "\n".join([f"no end in {ATTEMPT_TIMEOUT_S:.0f} s", *stacks])
            for rank in pending.values():
                children[rank].process.kill()
            until_s = time.monotonic() + ATTEMPT_TIMEOUT_S
        for results in ready:
            rank = pending.pop(results)  # type: ignore[call-overload]
            reports[rank] = _receive(results)  # type: ignore[arg-type]
            if reports[rank] is None and kill_point is not None:
                until_s = min(until_s, time.monotonic() + kill_point.grace_s)
    return reports, problem


def _receive(results: Connection) -> _Report | None:
    try:
        report: _Report = results.recv()
    except EOFError:
        return None
    return report
