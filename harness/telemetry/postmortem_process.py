"""Starts the process that writes the post-mortem of an incident, during the run and without blocking it.

Why: pictures and reports take seconds, no GPU may wait for them, and a failed report must not stop a run. An operator
finds the report without asking for it.
How: `on_event` receives each event after it is in the log. `DRAFT_AFTER` iterations after an action it starts `python
-m harness.analysis.postmortem RUN --incident N` for a first draft, and again when the incident or the run ends. Only
one process runs at a time, with low priority, in its own session. It shares only the run directory with the trainer.
`finish` waits a bounded time and leaves no process behind; `harness postmortem` can write missing reports later. After
that, `replay_incidents` replays the guilty steps on the CPU, also within a bounded time: training is over by then. The
step of a harmless incident is not replayed, because it has no damage to explain.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from typing import final

from harness.core import processes
from harness.core.events import Action, ActionKind, Event, Finding, FindingKind, Incident, StepRecord
from harness.core.processes import last_line
from harness.core.rundir import RunDir
from harness.core.stderr_lines import print_warning

MODULE = "harness.analysis.postmortem"
DRAFT_AFTER = 50
"""Iterations from an action to the first draft: the aftermath that the evidence window shows."""
EXIT_WAIT_S, HURRIED_WAIT_S = 60.0, 5.0
"""Seconds for which the end of a run waits for its reports, normally and after an interruption. The text of a report is
written before its pictures."""
REPORT_S = 10.0
"""Seconds of the time for replays that are left for writing the report."""
POLL_S = 0.05
HARMLESS = "harmless"
"""Verdict of an incident without consequences, as the policy writes it into the log."""
REMARKS = 0
"""Incident number that stands for duplicate batches outside any incident; reported at the end of a run."""


@final
class PostmortemProcess:
    """Writes the post-mortems of one run; owned by rank 0."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._log = run.logs / "evidence.log"
        self._waiting: list[int] = []
        """Queued incidents, the next one first."""
        self._due: dict[int, int] = {}
        """Incident -> the iteration of its first draft."""
        self._process: subprocess.Popen[bytes] | None = None
        self._reported: list[int] = []
        """Incidents of this start, in order."""
        self._harmless: set[int] = set()
        self._failed = False
        self._has_remarks = False

    def on_event(self, event: Event) -> None:
        """Queue the reports that an event makes due. The event must be in the log already."""
        match event:
            case Incident():
                self._due.pop(event.number, None)
                if event.verdict == HARMLESS:
                    self._harmless.add(event.number)
                self._enqueue(event.number)
            case Action() if event.incident and event.kind is not ActionKind.watch:
                self._due.setdefault(event.incident, event.iteration + DRAFT_AFTER)
            case Finding(kind=FindingKind.duplicate_batch):
                self._has_remarks = True
            case StepRecord() if self._due:
                for number in [number for number, due in self._due.items() if event.iteration >= due]:
                    del self._due[number]
                    self._enqueue(number)
            case _:
                pass
        if self._waiting or self._process is not None:
            self._advance()

    def finish(self, wait_s: float, *, is_hurried: Callable[[], bool] = processes.never) -> bool:
        """Wait until all reports are written, at most `wait_s` seconds; False if one was not.

        Once `is_hurried()` holds, the wait is at most `HURRIED_WAIT_S`.
        """
        begun_s = time.monotonic()
        if self._has_remarks:
            self._has_remarks = False
            self._enqueue(REMARKS)
        while self._waiting or self._process is not None:
            self._advance()
            limit_s = min(wait_s, HURRIED_WAIT_S) if is_hurried() else wait_s
            if time.monotonic() - begun_s > limit_s:
                self._give_up(f"still writing after {limit_s:g} s")
            elif self._process is not None:
                time.sleep(POLL_S)
        return not self._failed

    def replay_incidents(
        self, wait_s: float, *, announce: Callable[[str], None], until: Callable[[], bool] = processes.never
    ) -> None:
        """Replay the guilty step of each reported incident that was not harmless and write its report again, while the
        time lasts and `until()` does not hold. `announce` gets a line before each replay.

        The process gets no GPU and none of the variables that would make it a rank of this run. A replay that is not
        done in time is no failure: its report stays as it is.
        """
        deadline_s = time.monotonic() + wait_s
        environment = processes.environment_outside_ranks() | {"CUDA_VISIBLE_DEVICES": ""}
        for number in [number for number in self._reported if number not in self._harmless]:
            left_s = deadline_s - time.monotonic() - REPORT_S
            if left_s <= 0 or until():
                return
            announce(f"replaying incident {number} on the CPU for its post-mortem (at most {left_s:.0f} s)")
            self._start(number, "--replay-within", f"{left_s:.1f}", environment=environment)
            if self._process is not None:
                processes.wait_or_end(self._process, wait_s=deadline_s - time.monotonic(), until=until)
                self._process = None

    def _enqueue(self, number: int) -> None:
        if number not in self._waiting:
            self._waiting.append(number)
        if number != REMARKS and number not in self._reported:
            self._reported.append(number)

    def _advance(self) -> None:
        """Start the next report if the last one is finished."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            if code != 0:
                self._warn(last_line(self._log))
        if self._waiting:
            self._start(self._waiting.pop(0))

    def _start(self, number: int, *options: str, environment: Mapping[str, str] | None = None) -> None:
        args = (str(self._run.path), "--incident", str(number), *options)
        try:
            self._process = processes.start_logged(MODULE, *args, log=self._log, environment=environment)
        except OSError as error:
            self._warn(str(error))

    def _give_up(self, reason: str) -> None:
        self._waiting.clear()
        self._end_process()
        self._warn(reason)

    def _end_process(self) -> None:
        if self._process is not None:
            processes.end_process(self._process)
            self._process = None

    def _warn(self, reason: str) -> None:
        self._failed = True
        print_warning(f"a post-mortem was not written: {reason}")
