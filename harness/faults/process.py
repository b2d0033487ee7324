"""Injects process faults: a rank that sleeps, hangs, raises or dies, a collective of one rank only, a lost machine, a
signal of preemption, a dead server.

Each sends the signals that the kernel, the scheduler or a failing machine would send, to the same processes. The strike
is logged before the signal, so that the next start does not repeat it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import final

from harness.config.errors import ConfigError
from harness.core.rundir import RunDir
from harness.distributed.collectives import call_unmatched_barrier
from harness.faults.fault_plan import FaultKind
from harness.faults.site import Site


@final
class RankSleep:
    """slow_rank: delays every affected iteration, like a hot device, a bad link or another tenant."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            seconds = self._site.fault.factor
            self._site.log_strike(f"sleeps {seconds:g} s")
            time.sleep(seconds)

    def after(self, iteration: int) -> None:
        """Nothing to undo."""


@final
class ProcessSignal:
    """hung_rank: SIGSTOP; kill_rank: SIGKILL; kill_node: SIGKILL of all processes of this node; preemption: SIGUSR1."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def before(self, iteration: int) -> None:
        if not self._site.strikes(iteration):
            return
        match self._site.fault.kind:
            case FaultKind.hung_rank:
                self._send("stops itself with SIGSTOP", signal.SIGSTOP)
            case FaultKind.preemption:
                self._send("gets SIGUSR1, as from a scheduler", signal.SIGUSR1)
            case FaultKind.kill_node:
                launcher = os.getppid()
                self._site.log_strike(f"kills launcher {launcher} and all it started with SIGKILL")
                for pid in (launcher, *children_of(launcher)):
                    if pid != os.getpid():
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                self._send("kills itself with SIGKILL", signal.SIGKILL)

    def after(self, iteration: int) -> None:
        """Nothing to undo."""

    def _send(self, message: str, number: signal.Signals) -> None:
        self._site.log_strike(message)
        os.kill(os.getpid(), number)


@final
class InjectedError(RuntimeError):
    """The exception of the fault raised_error."""


@final
class RaisedError:
    """raised_error: an exception that nothing in the worker handles."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            self._site.log_strike("raises an exception")
            raise InjectedError(f"injected in iteration {iteration}")

    def after(self, iteration: int) -> None:
        """Nothing to undo."""


@final
class UnhealthyNode:
    """unhealthy_node: nothing to do in a rank, since the machine never runs one. The drill runner injects it."""

    def before(self, iteration: int) -> None:
        """Nothing to inject."""

    def after(self, iteration: int) -> None:
        """Nothing to undo."""


@final
class MismatchedCollective:
    """mismatched_collective: a collective of one rank only, as from a branch that not every rank takes."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            self._site.log_strike("calls a barrier that no other rank calls")
            call_unmatched_barrier()

    def after(self, iteration: int) -> None:
        """Nothing to undo."""


@final
class TrackingDown:
    """tracking_down: kills the tracking server during the run."""

    def __init__(self, site: Site) -> None:
        self._site = site
        if site.is_here and site.fault.at_s is None:
            tracking_group(site.run.directory)  # fails before the first step if there is none

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            group = tracking_group(self._site.run.directory)
            self._site.log_strike(f"kills tracking server {group} with SIGKILL")
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def after(self, iteration: int) -> None:
        """Nothing to undo: the drill runner starts the server again."""


def tracking_group(run: RunDir) -> int:
    """The process group of the tracking server that was started for this drill."""
    try:
        return int(run.tracking_pid.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        message = "must name the tracking server of the drill; start this drill with harness drill"
        raise ConfigError(str(run.tracking_pid), message) from None


def children_of(parent: int) -> list[int]:
    """Pids of the child processes of a process."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(entry) == parent]


def _parent(entry: Path) -> int:
    """Parent pid of a process in /proc; 0 if it is gone. Its name, in parentheses, may contain any character."""
    try:
        return int((entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
