"""Stop requests: signals, the file STOP, and Ctrl-C, collected on a rank until the step's all-reduce shares them.

A signal handler only appends a number. On rank 0 a thread also polls for the file STOP in the run directory
(`harness.control.watcher`); the loop itself never waits for the file system. The loop puts the request into every
step's all-reduce, and all ranks read it `sentinel.lag` steps later. So at most lag + 1 further steps begin after a
signal: one because it may arrive just after the loop has looked. The file STOP stays while the run is stopped, as a
record that somebody wanted this. The launcher of the next start removes it before it starts ranks; without a launcher,
rank 0 does at once.

Left out: other commands (`harness.control.inbox`), and withdrawing a request. Once seen, it holds for this start.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import final

from harness.control.commands import one_line
from harness.core.events import Intervention
from harness.core.locking import run_lease
from harness.core.rundir import RunDir, write_atomically

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Slurm sends SIGUSR1 some time before the job's time limit."""
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable of torchrun and of our launcher: how often the ranks were restarted inside the job."""
STOP_CLEARED = "HARNESS_STOP_CLEARED"
"""Environment variable of ranks whose launcher has removed the file STOP of the last start."""
LONGEST_STOP_BYTES = 65536
ELSEWHERE = "a signal to another rank"


@final
@dataclass(slots=True)
class StopRequest:
    """True once this rank was asked to stop. Created before the process group, so that no signal is lost."""

    received: list[int] = field(default_factory=list)
    _file_says: str = ""
    """The reason from the file STOP, once it was seen; empty before."""

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler. A second Ctrl-C raises KeyboardInterrupt, unless a launcher started this rank: it
        forwards the first one, which the terminal has sent to this rank too, and kills the ranks after a second one.
        """
        if number == signal.SIGINT and signal.SIGINT in self.received and RESTART_COUNT not in os.environ:
            raise KeyboardInterrupt
        self.received.append(number)

    def look(self, run: RunDir) -> None:
        """Look for the file STOP. Only rank 0 calls it, to spare the file system."""
        if self._file_says:
            return
        try:
            run.stop.stat()
        except OSError:
            return
        asked = read(run)
        self._file_says = "STOP file" if asked is None else asked.in_words()

    def __bool__(self) -> bool:
        return bool(self.received) or bool(self._file_says)

    @property
    def reason(self) -> str:
        """Who or what requested the stop."""
        if self.received:
            return signal.Signals(self.received[0]).name
        return self._file_says or ELSEWHERE


@contextmanager
def signals_to(stop: StopRequest) -> Iterator[None]:
    """Install the handler for all stop signals."""
    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StopFile:
    """Content of the file STOP, if `harness ctl` wrote it."""

    who: str
    time: float
    """Seconds since 1970."""
    reason: str

    def in_words(self) -> str:
        return f"asked by {self.who}: {self.reason}" if self.reason else f"asked by {self.who}"


def ask(run: RunDir, *, who: str, reason: str) -> None:
    """Write the file STOP: the run saves a checkpoint and exits."""
    write_atomically(run.stop, json.dumps(asdict(StopFile(who=who, time=time.time(), reason=reason))) + "\n")


def read(run: RunDir) -> StopFile | None:
    """Parse the file STOP; None if there is none, or if it has no readable content."""
    try:
        with run.stop.open("rb") as file:
            content = json.loads(file.read(LONGEST_STOP_BYTES))
        who, reason = (one_line(str(content[key])) for key in ("who", "reason"))
        return StopFile(who=who, time=float(content["time"]), reason=reason)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def stop_event(run: RunDir, iteration: int) -> Intervention | None:
    """Build the event for an operator's stop, or None if the file does not say who asked."""
    asked = read(run)
    if asked is None:
        return None
    return Intervention(
        time=time.time(), iteration=iteration, who=asked.who, reason=asked.reason, changes={"stop": "asked"}
    )


def holds_for_this_start() -> bool:
    """Whether a file STOP that this rank finds at its start is a new request.

    The launcher has removed that of the last start, and it restarts ranks inside the job only without one.
    """
    return STOP_CLEARED in os.environ or is_restart_inside_job()


def is_restart_inside_job() -> bool:
    """Whether the launcher of this rank has started the ranks before, and starts them again after a failure."""
    return int(os.environ.get(RESTART_COUNT, "0")) > 0


def clear_stop_file(run: RunDir) -> None:
    """Remove the file STOP of the last start, in the launcher before it starts ranks; without a launcher, on rank 0."""
    try:
        run.stop.unlink(missing_ok=True)
    except OSError as error:
        raise run_lease.io_error(run.stop, "cannot remove", error) from None
