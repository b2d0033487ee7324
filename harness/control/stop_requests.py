"""What the outside asks of a run, gathered on one rank until the next all-reduce carries it to the others.

Why: a scheduler sends a signal, an operator writes a file, Ctrl-C is pressed; the loop must hear one word, at a moment
when every rank can save the same step.
How: signal handlers only write a number down. On rank 0 a thread also looks for the file STOP in the run directory
(`harness.control.watcher`); the loop itself never waits for the file system. The loop asks `if stop` in every step and
puts the answer into the step's all-reduce, which every rank reads `sentinel.lag` steps later: after a signal at most
lag + 1 further steps begin, one of them because it came just after the loop had asked. STOP stays as long as the run is
stopped, as a sign that this was wanted; the next start clears it away.
Left out: what is asked of a run that goes on, which is `harness.control.inbox`; and taking a request back. Once seen,
it holds for this start of the run.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import final

from harness.config.errors import ConfigError
from harness.control.commands import one_line
from harness.core.events import Intervention
from harness.core.rundir import RunDir, write_atomically

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is what Slurm is told to send some time before a job's time is up."""
LONGEST_STOP_BYTES = 65536
ELSEWHERE = "a signal to another rank"


@final
@dataclass(slots=True)
class StopRequest:
    """True once this rank was asked to stop; made before the process group, so that no signal is lost."""

    received: list[int] = field(default_factory=list)
    _file_says: str = ""
    """Who asked by the file STOP, once it was seen; empty before."""

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler; who presses Ctrl-C twice will not wait."""
        if number == signal.SIGINT and signal.SIGINT in self.received:
            raise KeyboardInterrupt
        self.received.append(number)

    def look(self, run: RunDir) -> None:
        """See whether the file STOP is there; for rank 0 alone, because a thousand ranks would ask one disk."""
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
        """Who or what asked, in a few words, for a run that is stopping."""
        if self.received:
            return signal.Signals(self.received[0]).name
        return self._file_says or ELSEWHERE


@contextmanager
def signals_to(stop: StopRequest) -> Iterator[None]:
    """Every stop signal is a request; a second SIGINT insists."""
    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What STOP says where `harness ctl` wrote it."""

    who: str
    time: float
    """Seconds since 1970."""
    reason: str

    def in_words(self) -> str:
        return f"asked by {self.who}: {self.reason}" if self.reason else f"asked by {self.who}"


def ask(run: RunDir, *, who: str, reason: str) -> None:
    """Ask a run to save and leave."""
    write_atomically(run.stop, json.dumps(asdict(Asked(who=who, time=time.time(), reason=reason))) + "\n")


def read(run: RunDir) -> Asked | None:
    """Who asked the run to stop, and why; None where nobody did, or by a file that says nothing readable."""
    try:
        with run.stop.open("rb") as file:
            words = json.loads(file.read(LONGEST_STOP_BYTES))
        return Asked(who=one_line(str(words["who"])), time=float(words["time"]), reason=one_line(str(words["reason"])))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def intervention(run: RunDir, iteration: int) -> Intervention | None:
    """The stop that an operator asked for, as an event; None where the file does not say who did."""
    asked = read(run)
    if asked is None:
        return None
    return Intervention(
        time=time.time(), iteration=iteration, who=asked.who, reason=asked.reason, changes={"stop": "asked"}
    )


def clear(run: RunDir) -> None:
    """Remove the STOP that ended the run last time; for rank 0, before the run can be asked anew."""
    try:
        run.stop.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError("", f"{run.stop} cannot be removed: {error.strerror}") from None
