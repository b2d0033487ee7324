"""Rank 0's thread that looks for STOP and for operators' commands, so that the loop only reads memory.

Why: the run directory may lie on a file system that stalls for a minute. A loop that asks it for a file waits as long,
and all other ranks wait for the loop.
How: one thread looks once a second and keeps what it found in memory. The loop carries it through the step's
all-reduce as before, so all ranks hear it at the same iteration. The thread also writes the answers to commands
(`Inbox.done`). The loop waits for an answer to be on disk, for at most `DONE_WAIT_S` a stall; then it goes on with a
warning. A run that is killed before the answer is on disk applies the command again in its next start.
Left out: what checks an order against the run directory when it is applied (`harness.control.inbox.check`), and what
must be on disk before an order takes effect (ledger, marks of checkpoints). Both wait for the file system; both happen
only when an operator asks for something.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Thread
from typing import Self, final

from harness.control.commands import Command
from harness.control.inbox import POLL_S, Inbox
from harness.control.stop_requests import StopRequest
from harness.core.events import Intervention
from harness.core.rundir import RunDir

LOOK_EVERY_S = 1.0
WORD_EVERY_S = 1.0
DONE_WAIT_S = 5.0
CLOSE_WAIT_S = 5.0


@final
class Watcher:
    """STOP goes to `stop`; commands are taken here."""

    def __init__(self, run: RunDir, stop: StopRequest) -> None:
        self._run = run
        self._stop = stop
        self._inbox = Inbox(run)
        self._found: list[Command] = []
        """What waited at the last look."""
        self._applied: set[str] = set()
        """Commands that the loop is done with."""
        self._next_word_s = 0.0
        self._answers: deque[tuple[Command, Intervention]] = deque()
        """To be written; guarded by the condition, as is what follows."""
        self._changed = Condition()
        self._num_answers = self._num_written = 0
        self._gave_up_at = -1
        """How many were written when the loop last stopped waiting for one."""
        self._ended = False
        self._thread = Thread(target=self._look_on, name="watcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(timeout=CLOSE_WAIT_S)
        if self._answers:
            _warn(
                f"{len(self._answers)} answers to commands are not on disk; the next start applies the commands again"
            )

    def waits(self) -> bool:
        """True, at most once a second, as long as a command waits; every time, because a rewind may forget the word."""
        now_s = time.monotonic()
        if now_s < self._next_word_s or not self.take():
            return False
        self._next_word_s = now_s + WORD_EVERY_S
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until a command waits, for a run that is paused; False: nothing came in time."""
        deadline_s = time.monotonic() + timeout_s
        while not self.take():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(POLL_S, left_s))
        return True

    def take(self) -> list[Command]:
        """All commands that waited at the last look, in order, without those that are done."""
        return [command for command in self._found if command.id not in self._applied]

    def done(self, command: Command, event: Intervention) -> None:
        """Have written down what came of a command, then its file removed; waits for it, within limits."""
        self._applied.add(command.id)
        with self._changed:
            self._answers.append((command, event))
            self._num_answers += 1
            self._changed.notify_all()
            until = self._num_answers
            if self._gave_up_at == self._num_written:
                return
            if self._changed.wait_for(lambda: self._num_written >= until, timeout=DONE_WAIT_S):
                return
            self._gave_up_at = self._num_written
        _warn(f"{self._run.interventions} takes no data for {DONE_WAIT_S:g} s; training goes on")

    def look(self) -> None:
        """Ask the file system once, in the caller's thread."""
        self._stop.look(self._run)
        self._found = self._inbox.take()

    def _look_on(self) -> None:
        while True:
            with self._changed:
                is_last = self._ended
            self._write_answers()
            if is_last:
                return
            self.look()
            with self._changed:
                if not self._answers and not self._ended:
                    self._changed.wait(timeout=LOOK_EVERY_S)

    def _write_answers(self) -> None:
        while self._answers:
            self._inbox.done(*self._answers[0])
            with self._changed:
                self._answers.popleft()
                self._num_written += 1
                self._changed.notify_all()


@contextmanager
def watching(run: RunDir, stop: StopRequest, *, is_first: bool) -> Iterator[Watcher | None]:
    """A watcher on rank 0, None on all others."""
    if not is_first:
        yield None
        return
    with Watcher(run, stop) as watcher:
        yield watcher


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
