"""The trainer's handle on the process that writes the post-mortem of an incident.

Why: pictures and reports take seconds that no GPU may wait for, and a report that cannot be written must never stop a
run. The person who is woken up should not have to ask for it either.
How: the scribe hears what rank 0 tells. A while after something was done about an incident it starts `python -m
harness.analysis.postmortem RUN --incident N` for a first draft, and again when the incident ends or the run does; one
process at a time, of low priority, in a session of its own. The two share nothing but the run directory. `finish` waits
a bounded time and leaves no process behind; what is missing can be written later by `harness postmortem`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import final

from harness.core import processes
from harness.core.events import Action, ActionKind, Event, Finding, FindingKind, Incident, StepRecord
from harness.core.rundir import RunDir
from harness.telemetry.tracking.sink_process import last_line

MODULE = "harness.analysis.postmortem"
DRAFT_AFTER = 50
"""Iterations from an action to the first draft: what the window of evidence shows of its aftermath."""
EXIT_WAIT_S, HURRIED_WAIT_S = 60.0, 5.0
"""How long the end of a run waits for its reports, of which the words come first."""
LOOK_S = 0.05
REMARKS = 0
"""Stands for duplicate batches that no incident accounts for; they are written about as a run ends."""


@final
class PostmortemProcess:
    """Rank 0 owns one."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._log = run.logs / "evidence.log"
        self._waiting: list[int] = []
        """Incidents to write about, the next first."""
        self._due: dict[int, int] = {}
        """Incident -> the iteration of its first draft."""
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = False
        self._has_remarks = False

    def hear(self, event: Event) -> None:
        """Take note of an event that is in the log by now."""
        match event:
            case Incident():
                self._due.pop(event.number, None)
                self._ask(event.number)
            case Action() if event.incident and event.kind is not ActionKind.watch:
                self._due.setdefault(event.incident, event.iteration + DRAFT_AFTER)
            case Finding(kind=FindingKind.duplicate_batch):
                self._has_remarks = True
            case StepRecord() if self._due:
                for number in [number for number, due in self._due.items() if event.iteration >= due]:
                    del self._due[number]
                    self._ask(number)
            case _:
                pass
        if self._waiting or self._process is not None:
            self._work()

    def finish(self, wait_s: float) -> bool:
        """Wait until everything is written; False where it was not."""
        until = time.monotonic() + wait_s
        if self._has_remarks:
            self._has_remarks = False
            self._ask(REMARKS)
        while self._waiting or self._process is not None:
            self._work()
            if time.monotonic() > until:
                self._give_up(f"still writing after {wait_s:g} s")
            elif self._process is not None:
                time.sleep(LOOK_S)
        return not self._failed

    def _ask(self, number: int) -> None:
        if number not in self._waiting:
            self._waiting.append(number)

    def _work(self) -> None:
        """Begin the next report where the last one is done."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            if code != 0:
                self._warn(last_line(self._log))
        if self._waiting:
            self._start(self._waiting.pop(0))

    def _start(self, number: int) -> None:
        command = processes.command(MODULE, str(self._run.path), "--incident", str(number))
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    env=processes.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            self._warn(str(error))

    def _give_up(self, reason: str) -> None:
        self._waiting.clear()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        self._failed = True
        print(f"warning: a post-mortem was not written: {reason}", file=sys.stderr, flush=True)
