"""Looks for the failures of one start that no process reports: hung ranks, and reasons for a planned restart.

Why a thread: this reads files of the run. The main thread forwards stop signals and kills ranks, and must do so while
the file system stalls. A failed read says nothing about a rank; the next look repeats it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from threading import Event, Thread
from typing import Self, final

from harness.config.errors import EXIT_CRASHED
from harness.core.events import EndCause
from harness.core.node_name import machine_name
from launch.local.node_group import NodeFailure, NodeGroup
from launch.local.planned_restart import RestartPlanner
from launch.local.ranks import RankLogs
from launch.local.supervisor import Supervisor

LOOK_EVERY_S = 0.1
END_WITHIN_S = 5.0
"""How long the end of a start waits for a look in progress; a file system that stalls may hold it for longer."""


@final
class RankWatch:
    """A thread for the time of one start."""

    def __init__(
        self,
        group: NodeGroup,
        supervisor: Supervisor,
        planner: RestartPlanner,
        logs: RankLogs,
        stop_signals: Sequence[int],
    ) -> None:
        self._group, self._supervisor, self._planner = group, supervisor, planner
        self._logs, self._stop_signals = logs, stop_signals
        self._ended = Event()
        self._warnings: set[str] = set()
        self._thread = Thread(target=self._run, name="rank-watch", daemon=True)
        self.hung: str | None = None
        """One line about a rank that hung here."""
        self.has_answers = False
        """Whether all ranks of this node have written their last collectives after a hang."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._group.changed:
            self._ended.set()
        self._thread.join(END_WITHIN_S)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            try:
                self._look()
            except OSError:
                continue
            except Exception as error:  # a look that fails must not end all later ones
                self._warn_once(f"looking for hung ranks: {type(error).__name__}: {error}")

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warnings:
            self._warnings.add(warning)
            print(f"harness: warning: {warning}", file=sys.stderr, flush=True)

    def _look(self) -> None:
        group = self._group
        if group.failure is not None:
            if group.failure.cause == EndCause.hung_rank:
                self.has_answers = self._logs.have_answered()
        elif (hung := self._supervisor.check(time.monotonic())) is not None:
            self.hung = hung
            self._report(
                NodeFailure(
                    node_rank=group.node_rank,
                    host=machine_name(),
                    exit_code=EXIT_CRASHED,
                    line=hung,
                    cause=EndCause.hung_rank,
                )
            )
        elif not self._stop_signals and (planned := self._planner.check(time.monotonic())) is not None:
            self._report(planned)

    def _report(self, failure: NodeFailure) -> None:
        with self._group.changed:
            if not self._ended.is_set():  # else the next start may have begun
                self._group.report_failure(failure)
