"""Reports the events of a run on rank 0: event log first, then console, sinks, post-mortems and the picture.

Nothing here waits for the file system during training, with one bounded exception: actions and interventions are in
the log before they are executed (`harness.telemetry.event_log`). The writer thread of the log also starts the
post-mortem processes, which read the log.
The end of a run takes bounded time: the picture is drawn from at most `run_picture.BUDGET_BYTES` of ordinary steps. It
is not drawn after an interruption (exit code 75), because the scheduler may kill the job at any moment; the next end
draws it. A stop request during the end has the same effect: the evaluation and the replays end at once.
`longest_end_s` is the time that the waits may take together. Every rank writes it into its last heartbeat, so that the
launcher does not take ranks that wait, or have ended before rank 0, for hung ones.
Other ranks have a reporter that does nothing, so that the loop needs no `if rank == 0`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self, final

from harness.config.compose import plain
from harness.config.errors import EXIT_INTERRUPTED
from harness.config.schema import Config
from harness.core import processes
from harness.core.batch_sizes import read_token_schedule
from harness.core.events import Action, ActionKind, Event, Intervention, RunEnded, StepRecord
from harness.core.rundir import RunDir
from harness.core.stderr_lines import print_warning
from harness.distributed.world import World
from harness.telemetry.console import Console, closing_lines
from harness.telemetry.evaluation_process import READER_WAIT_S, EvaluationProcess
from harness.telemetry.event_log import CLOSE_WAIT_S, FLUSH_WAIT_S, EventLog
from harness.telemetry.meters import Meter
from harness.telemetry.postmortem_process import EXIT_WAIT_S, PostmortemProcess
from harness.telemetry.run_picture import draw
from harness.telemetry.sinks.sink import enabled_sinks
from harness.telemetry.sinks.sink_process import SinkProcess
from harness.telemetry.sinks.store_uri import tracking_uri


def longest_end_s(cfg: Config) -> float:
    """Seconds for which rank 0 waits at most when the run ends: for log, evaluation, reports, sinks and uploads."""
    telemetry, remote = cfg.telemetry, cfg.checkpoint.remote
    waits = [FLUSH_WAIT_S, CLOSE_WAIT_S]
    if cfg.eval.harness:
        waits += [cfg.eval.harness_exit_wait_s, READER_WAIT_S]
    if telemetry.postmortem:
        waits += [EXIT_WAIT_S, telemetry.replay_s]
    if enabled_sinks(telemetry):
        waits += [telemetry.exit_wait_s, processes.GRACE_S]
    if remote.url is not None:
        waits += [remote.exit_wait_s, processes.GRACE_S]
    return sum(waits)


@final
class EventReporter:
    """Reports events on rank 0 and does nothing on other ranks."""

    def __init__(self, cfg: Config, run: RunDir, *, world: World, meter: Meter) -> None:
        self._cfg = cfg
        self._run = run
        self._meter = meter
        self._is_first = world.is_first
        self.step_time_s = 0.0
        """Duration of the last reported step by this rank's clock, in seconds; 0 before the first."""

    def __enter__(self) -> Self:
        if self._is_first:
            self._postmortems = PostmortemProcess(self._run) if self._cfg.telemetry.postmortem else None
            on_written = None if self._postmortems is None else self._postmortems.on_event
            self._log = EventLog(self._run.events, on_written=on_written)
            self._schedule = read_token_schedule(self._run, plain(self._cfg.train))
            self._console = Console(self._cfg.train.num_steps, schedule=self._schedule)
            self._sink = SinkProcess.start(self._run) if enabled_sinks(self._cfg.telemetry) else None
            self._evaluations = EvaluationProcess.start(self._run, self._cfg.eval)
        return self

    def emit_after_pause(self, event: Event) -> None:
        """Report an event whose work interrupted training; that time does not count in the throughput."""
        self._report(event)
        self._meter.resume(time.perf_counter())

    def resume_clock(self, now_s: float) -> None:
        """Measure the duration of the next step from this time (`time.perf_counter`) on."""
        self._meter.resume(now_s)

    def emit_event(self, event: Event) -> None:
        """Report an event that took no training time."""
        self._report(event)

    def emit_step(self, record: StepRecord, *, posted_s: float, batch_tokens: int | None = None) -> StepRecord:
        """Report a step with its throughput, by the host clock at the time it was posted; returns the full record."""
        rates = self._meter.tick(posted_s, num_tokens=batch_tokens)
        self.step_time_s = rates.step_time_s
        full_record = replace(
            record,
            time=time.time(),
            step_time_s=rates.step_time_s,
            tokens_per_s=rates.tokens_per_s,
            flops_per_s=rates.flops_per_s,
            mfu=rates.mfu,
        )
        self._report(full_record)
        return full_record

    def left_s(self, record: StepRecord) -> float | None:
        """Seconds from this step to the last one, by the batch sizes of the run; None on other ranks than 0."""
        if not self._is_first or self._schedule is None:
            return None
        return self._schedule.left_s(record, num_steps=self._cfg.train.num_steps)

    def end(self, event: RunEnded, *, is_stopping: Callable[[], bool] = processes.never) -> None:
        """Report the last event. Picture and post-mortems come first, because this event ends the sink process.

        `is_stopping()` says whether a stop was requested, also one that arrives during the waits.
        """

        def is_hurried() -> bool:  # the scheduler does not wait
            return event.exit_code == EXIT_INTERRUPTED or is_stopping()

        if self._is_first:
            if self._evaluations is not None:
                begun_s = time.monotonic()
                wait_s = 0.0 if is_hurried() else self._cfg.eval.harness_exit_wait_s
                self._evaluations.finish(wait_s, until=is_hurried)
                self._report_evaluations(blocked_s=time.monotonic() - begun_s)
            is_written = self._log.flush()  # from here on, its thread leaves the post-mortems to this one
            if is_written and self._cfg.telemetry.picture and not is_hurried():
                self._draw()
            if is_written and self._postmortems is not None:
                self._postmortems.finish(EXIT_WAIT_S, is_hurried=is_hurried)
                self._postmortems.replay_incidents(
                    self._cfg.telemetry.replay_s, announce=self._console.print, until=is_hurried
                )
        self._report(event)

    def _report_evaluations(self, *, blocked_s: float = 0.0) -> None:
        """Report the results that the evaluation process has sent; the run has waited `blocked_s` for the first one."""
        for result in () if self._evaluations is None else self._evaluations.drain_events():
            event = replace(result, time=time.time(), blocked_s=blocked_s)
            blocked_s = 0.0
            self._log.write(event)
            self._console.show(event)

    def _draw(self) -> None:
        try:
            draw(self._run.events, self._run.picture)
        except OSError as error:
            print_warning(f"cannot write {self._run.picture}: {error.strerror}")
        except Exception as error:  # a picture must not fail a run
            first_line = next(iter(str(error).splitlines()), "")
            print_warning(f"cannot draw {self._run.picture}: {type(error).__name__}: {first_line}")

    def _report(self, event: Event) -> None:
        if self._is_first:
            self._report_evaluations()
            self._log.write(event)
            self._console.show(event)
            if isinstance(event, Intervention) or (isinstance(event, Action) and event.kind is not ActionKind.watch):
                self._log.flush()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the log, wait for the sink process, and print the closing lines. After a crash, return at once."""
        if not self._is_first:
            return
        self._log.close()
        self._console.close()
        if kind is not None:
            return
        is_sent = self._sink is None or self._sink.finish(self._cfg.telemetry.exit_wait_s)
        uri = tracking_uri(self._cfg) if self._cfg.telemetry.mlflow else None
        self._console.print(closing_lines(self._run, self._console.totals, tracking_uri=uri, is_sent=is_sent))
