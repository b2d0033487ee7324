"""Starts ranks cheaply and kills one of them with SIGKILL at a chosen place.

Why: `kill -9` at any instant must be tried at many places, and starting Python and torch takes seconds.
How: one parent process is spawned fresh, imports everything and then only forks: each attempt is a set of forked ranks
with torchrun's environment. The parent has no threads, no process group and runs no large tensor operation, so forking
is safe. A rank dies at a *place*: the n-th call of a function of the harness, before it, after it, or at a chosen point
inside; the function is replaced in that rank only. The other ranks are killed a moment later, as by a launcher.
Left out: losing data that the kernel had not yet written to disk; SIGKILL does not lose it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
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
from typing import Any, NamedTuple

from harness.core.fast_imports import loading
from launch.local.ports import reserved_port
from tests.forks import ROOT, forks

ATTEMPT_TIMEOUT_S = 60.0
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
    arm: Callable[[], None] | None = None
    """Makes the next call die halfway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtPlace:
    """One rank dies at the n-th call of a function."""

    place: Place
    when: When
    nth: int
    rank: int
    grace_s: float
    """How long the other ranks live on."""

    def __str__(self) -> str:
        return f"{self.when} {self.place.phase} {self.nth} on rank {self.rank}, the other {self.grace_s:.2f} s later"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtTime:
    """One rank dies at a time after its start."""

    after_s: float
    rank: int
    grace_s: float

    def __str__(self) -> str:
        return f"{self.after_s:.2f} s after the start on rank {self.rank}, the other {self.grace_s:.2f} s later"


Death = AtPlace | AtTime


class Outcome(NamedTuple):
    exit_codes: list[int]
    results: list[Any]
    """The result of the case on each rank; None for a killed rank."""
    killed: bool
    """Whether the rank was killed; else every rank ran to the end."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(owner: Any, name: str, part: Callable[..., Any]) -> None:
    """Make the next call of `owner.name` run only `part(function, *arguments)` and die."""
    function = getattr(owner, name)

    def last(*arguments: Any, **options: Any) -> None:
        part(function, *arguments, **options)
        die()

    setattr(owner, name, last)


def doom(death: AtPlace) -> None:
    """Replace the function in this process by one that kills the process."""
    module, _, path = death.place.function.partition(":")
    *owners, name = path.split(".")
    owner: Any = attrgetter(".".join(owners))(import_module(module)) if owners else import_module(module)
    function = getattr(owner, name)
    calls = 0

    @wraps(function)
    def mortal(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        now = calls == death.nth
        if now and death.when is When.before:
            die()
        if now and death.when is When.within:
            assert death.place.arm is not None
            death.place.arm()
        result = function(*arguments, **options)
        if now and death.when is When.after:
            die()
        return result

    setattr(owner, name, mortal)


class Mortals:
    """The test's handle of the parent process."""

    def __init__(self, *modules: str) -> None:
        """`modules` are imported once, in the parent."""
        self._orders, theirs = forks().Pipe()
        self._mother = forks().Process(target=_serve, args=(theirs, modules))
        self._mother.start()
        theirs.close()

    def run(self, size: int, case: Callable[..., Any], *arguments: Any, death: Death | None = None) -> Outcome:
        """One attempt on `size` ranks; an exception in a rank fails the test with its traceback."""
        self._orders.send((size, case, arguments, death))
        assert self._orders.poll(START_TIMEOUT_S + ATTEMPT_TIMEOUT_S), "the parent process does not answer"
        outcome = self._orders.recv()
        assert isinstance(outcome, Outcome), outcome
        return outcome

    def close(self) -> None:
        self._orders.send(None)
        self._orders.close()
        self._mother.join()


def _serve(orders: Connection, modules: tuple[str, ...]) -> None:
    os.chdir(ROOT)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  (the console of a run, which nobody reads)
    with loading():
        for module in modules:
            import_module(module)
    threads = list(Path("/proc/self/task").iterdir())
    while (order := orders.recv()) is not None:
        orders.send(_attempt(*order) if len(threads) == 1 else f"{len(threads)} threads cannot be forked")


def _attempt(size: int, case: Callable[..., Any], arguments: tuple[Any, ...], death: Death | None) -> Outcome | str:
    """Fork the ranks, wait for all of them, and return the outcome; a text if a rank raised an exception."""
    with reserved_port() as port:
        born = {rank: _bear(rank, size, str(port), (case, arguments, death)) for rank in range(size)}
        reports, complaint = _watch(born, death)
        for child, results in born.values():
            child.join()
            results.close()
    exit_codes = [child.exitcode or 0 for child, _ in born.values()]
    killed = death is not None and exit_codes[death.rank] == KILLED and not complaint
    failures = [str(report.value) for report in reports.values() if report and not report.ended]
    if not killed and (complaint or failures or None in reports.values()):
        return "\n".join([complaint, f"exit codes {exit_codes}", *failures])
    returned = [report.value if (report := reports[rank]) and report.ended else None for rank in range(size)]
    return Outcome(exit_codes, returned, killed)


class _Report(NamedTuple):
    ended: bool
    value: Any
    """The result of the case, or the traceback of its failure."""


_Born = Mapping[int, tuple[BaseProcess, Connection]]


def _bear(rank: int, size: int, port: str, order: tuple[Any, ...]) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_live, args=(rank, size, port, theirs, order))
    child.start()
    theirs.close()
    return child, ours


def _live(rank: int, size: int, port: str, reports: Connection, order: tuple[Any, ...]) -> None:
    """Runs in a forked rank."""
    import torch

    # Not before the fork: a pool of threads that was forked is made anew by whoever comes first, and two who come at
    # once find none and abort.
    torch.set_num_threads(1)
    case, arguments, death = order
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    if isinstance(death, AtPlace) and death.rank == rank:
        doom(death)
    try:
        reports.send(_Report(True, case(*arguments)))
    except BaseException:
        reports.send(_Report(False, traceback.format_exc()))
        sys.exit(1)


def _watch(born: _Born, death: Death | None) -> tuple[dict[int, _Report | None], str]:
    """Receive every rank's report, None from a dead rank; after a death, kill the other ranks."""
    pending = {results: rank for rank, (_, results) in born.items()}
    reports: dict[int, _Report | None] = {}
    complaint = ""
    until_s = time.monotonic() + ATTEMPT_TIMEOUT_S
    if isinstance(death, AtTime) and not wait(list(pending), timeout=death.after_s):
        born[death.rank][0].kill()
    while pending:
        ready = wait(list(pending), timeout=max(0.0, until_s - time.monotonic()))
        if not ready:
            complaint = complaint or ("" if None in reports.values() else f"no end in {ATTEMPT_TIMEOUT_S:.0f} s")
            for rank in pending.values():
                born[rank][0].kill()
            until_s = time.monotonic() + ATTEMPT_TIMEOUT_S
        for results in ready:
            rank = pending.pop(results)  # type: ignore[call-overload]
            reports[rank] = _receive(results)  # type: ignore[arg-type]
            if reports[rank] is None and death is not None:
                until_s = min(until_s, time.monotonic() + death.grace_s)
    return reports, complaint


def _receive(results: Connection) -> _Report | None:
    try:
        report: _Report = results.recv()
    except EOFError:
        return None
    return report
