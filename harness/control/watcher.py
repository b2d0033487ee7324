"""A thread of rank 0 that polls for the file STOP and for operator commands.

The run directory may lie on a file system that stalls for a minute. If the loop touched it, all ranks would wait. The
thread polls once a second and keeps what it found in memory; the loop only reads memory. The thread also writes the
answers to commands (`Inbox.done`). The loop waits until an answer is on disk, for at most `DONE_WAIT_S` per stall; then
it continues with a warning. A run that is killed before the answer is on disk, here or in the event log, applies the
command again later.

Left out: checking an order against the run directory when it is applied (`harness.control.order_checks`), and what
must be on disk before an order takes effect (ledger, tainted checkpoints). Both wait for the file system, and only when
an operator has sent a command.
"""

from __future__ import annotations

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
from harness.core.stderr_lines import print_warning

LOOK_EVERY_S = 1.0
WORD_EVERY_S = 1.0
DONE_WAIT_S = 5.0
CLOSE_WAIT_S = 5.0


@final
class Watcher:
    """Polls for STOP, which goes to `stop`, and for commands, which `take` returns."""

    def __init__(self, run: RunDir, stop: StopRequest) -> None:
        self._run = run
        self._stop = stop
        self._inbox = Inbox(run)
        self._found: list[Command] = []
        """Commands that waited at the last poll."""
        self._applied: set[str] = set()
        """Commands that the loop has applied."""
        self._next_word_s = 0.0
        self._answers: deque[tuple[Command, Intervention]] = deque()
        """Answers to write; the condition guards these and the fields below."""
        self._changed = Condition()
        self._num_answers = self._num_written = 0
        self._gave_up_at = -1
        """Value of `_num_written` when the loop last gave up waiting for an answer."""
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
            print_warning(
                f"{len(self._answers)} answers to commands are not on disk; the next start applies the commands again,"
                " unless the event log has the answers"
            )

    def waits(self) -> bool:
        """Whether a command waits; True at most once a second. It repeats, because a rewind may discard the flag."""
        now_s = time.monotonic()
        if now_s < self._next_word_s or not self.take():
            return False
        self._next_word_s = now_s + WORD_EVERY_S
        return True

    def wait(self, timeout_s: float) -> bool:
        """Block until a command arrives, for a paused run; False after the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while not self.take():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(POLL_S, left_s))
        return True

    def take(self) -> list[Command]:
        """List the commands that waited at the last poll, in order, without those that were applied."""
        return [command for command in self._found if command.id not in self._applied]

    def done(self, command: Command, event: Intervention) -> None:
        """Queue the answer to a command and wait, for a limited time, until it is on disk and the file is removed."""
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
        print_warning(f"{self._run.interventions} has accepted no data for {DONE_WAIT_S:g} s; training continues")

    def look(self) -> None:
        """Poll the file system once, in the caller's thread."""
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
    """Run a watcher on rank 0; yields None on all other ranks."""
    if not is_first:
        yield None
        return
    with Watcher(run, stop) as watcher:
        yield watcher
