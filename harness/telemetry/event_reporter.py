"""Rank 0's voice: what happens goes into the event log first, and from there to the console, MLflow and a picture.

Nothing here waits for the file system while the run trains, but for one bounded wait: actions and interventions are in
the log before they are carried out (`harness.telemetry.event_log`). The thread that writes the log also starts the
post-mortems, which read what it wrote.
Leaving is bounded: the picture is drawn from at most `picture.BUDGET_BYTES` of ordinary steps however long the log is,
and not at all when the run was interrupted (exit code 75), because the machine may be taken away. The next end
draws it.
Other ranks have a reporter too and say nothing, so that the loop needs no `if rank == 0`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Self, final

from harness.config.errors import EXIT_INTERRUPTED
from harness.config.schema import Config
from harness.core.events import Action, ActionKind, Event, Intervention, RunEnded, StepRecord
from harness.core.rundir import RunDir
from harness.distributed.world import World
from harness.telemetry.console import Console, closing
from harness.telemetry.event_log import EventLog
from harness.telemetry.meters import Meter
from harness.telemetry.postmortem_process import EXIT_WAIT_S, HURRIED_WAIT_S, PostmortemProcess
from harness.telemetry.run_picture import draw
from harness.telemetry.tracking.sink_process import SinkProcess
from harness.telemetry.tracking.store_uri import tracking_uri


@final
class EventReporter:
    def __init__(self, cfg: Config, run: RunDir, *, world: World, meter: Meter) -> None:
        self._cfg = cfg
        self._run = run
        self._meter = meter
        self._speaks = world.is_first
        self.step_time_s = 0.0
        """Of the last step that was told, by this rank's clock; 0 before the first."""

    def __enter__(self) -> Self:
        if self._speaks:
            self._postmortems = PostmortemProcess(self._run) if self._cfg.telemetry.postmortem else None
            self._log = EventLog(self._run.events, after=None if self._postmortems is None else self._postmortems.hear)
            self._console = Console(self._cfg.train.num_steps)
            self._sink = SinkProcess.start(self._run) if self._cfg.telemetry.mlflow else None
        return self

    def emit(self, event: Event) -> None:
        """Tell an event; the time it took was not training."""
        self._tell(event)
        self._meter.resume(time.perf_counter())

    def note(self, event: Event) -> None:
        """Tell an event that took no time from training."""
        self._tell(event)

    def emit_step(self, record: StepRecord, *, posted_s: float) -> StepRecord:
        """Tell a step, with the pace the host's clock gave it when it was posted; returns it as it was told."""
        rates = self._meter.tick(posted_s)
        self.step_time_s = rates.step_time_s
        told = replace(
            record,
            time=time.time(),
            step_time_s=rates.step_time_s,
            tokens_per_s=rates.tokens_per_s,
            flops_per_s=rates.flops_per_s,
            mfu=rates.mfu,
        )
        self._tell(told)
        return told

    def end(self, event: RunEnded) -> None:
        """The last event of a run; pictures and reports come before it, because MLflow takes its leave with it."""
        if self._speaks:
            is_written = self._log.flush()
            is_hurried = event.exit_code == EXIT_INTERRUPTED  # whoever takes the machine away does not wait
            if is_written and self._cfg.telemetry.picture and not is_hurried:
                self._draw()
            if is_written and self._postmortems is not None:
                self._postmortems.finish(HURRIED_WAIT_S if is_hurried else EXIT_WAIT_S)
        self._tell(event)

    def _draw(self) -> None:
        try:
            draw(self._run.events, self._run.picture)
        except OSError as error:
            print(f"warning: cannot write {self._run.picture}: {error.strerror}", file=sys.stderr, flush=True)

    def _tell(self, event: Event) -> None:
        if self._speaks:
            self._log.write(event)
            self._console.show(event)
            if isinstance(event, Intervention) or (isinstance(event, Action) and event.kind is not ActionKind.watch):
                self._log.flush()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the log, give MLflow its time, and say where everything lies; after a crash, leave at once."""
        if not self._speaks:
            return
        self._log.close()
        self._console.close()
        if kind is not None:
            return
        shipped = self._sink is None or self._sink.finish(self._cfg.telemetry.exit_wait_s)
        uri = None if self._sink is None else tracking_uri(self._cfg)
        self._console.say(closing(self._run, self._console.totals, tracking_uri=uri, shipped=shipped))
