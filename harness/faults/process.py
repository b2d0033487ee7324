"""Faults of processes: a rank that sleeps, stops or dies, a machine that goes, a scheduler's signal, a dead server.

How: each does what the kernel, the scheduler or the machine would do, with the same signals to the same processes.
What dies takes nothing back: the strike is on disk before it, and the next start goes on without it.
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
from harness.faults.plan import FaultKind
from harness.faults.site import Site


@final
class Sleep:
    """This rank is late in every iteration that it is struck in: a hot device, a bad link, a noisy neighbour."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            seconds = self._site.fault.factor
            self._site.tell(f"sleeps {seconds:g} s")
            time.sleep(seconds)

    def after(self, iteration: int) -> None:
        """Nothing to undo."""


@final
class Signal:
    """hung_rank: SIGSTOP; kill_rank: SIGKILL; kill_node: SIGKILL of everybody on this machine; preemption: SIGUSR1."""

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
                self._site.tell(f"kills launcher {launcher} and all it started with SIGKILL")
                for pid in (launcher, *children_of(launcher)):
                    if pid != os.getpid():
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                self._send("kills itself with SIGKILL", signal.SIGKILL)

    def after(self, iteration: int) -> None:
        """Nothing to undo."""

    def _send(self, words: str, number: signal.Signals) -> None:
        self._site.tell(words)
        os.kill(os.getpid(), number)


@final
class TrackingDown:
    """The tracking server dies in the middle of the run."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._group = tracking_group(site.run.directory) if site.is_here else 0

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            self._site.tell(f"kills tracking server {self._group} with SIGKILL")
            with suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)

    def after(self, iteration: int) -> None:
        """Nothing to undo: whoever started the server starts it again."""


def tracking_group(run: RunDir) -> int:
    """The process group of the tracking server that was started for this drill."""
    try:
        return int(run.tracking_pid.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        message = "names no tracking server; start this drill with harness drill"
        raise ConfigError(str(run.tracking_pid), message) from None


def children_of(parent: int) -> list[int]:
    """Processes that a process started, itself left out."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(entry) == parent]


def _parent(entry: Path) -> int:
    """Of a process in /proc; 0 where it is gone. Its name, in parentheses, may hold anything."""
    try:
        return int((entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
