"""Feeds the sinks of a run: one thread per sink, one tail of the log for all.

Why: a server may be slow, down or gone, and none of that may affect training or another sink.
How: each thread sends what its sink has not accepted yet, stores the progress, and waits a second. While the trainer
lives, every failure is retried with growing pauses. Once the trainer is gone, the rest is sent with one attempt; alerts
are tried for `PATIENCE_S` more, because nobody else tells of the crash, unless the run is started again. A lock per
sink keeps two processes from sending one run to the same target; the thread of a restarted run waits for it, and then
sends the events of its own start.
A power failure may take the end of the log, which is not synced, and leave the progress, which is. A sink that has sent
more than the log holds goes on where the log ended when this start began.
Left out: the sinks share a process, so a crash of the interpreter ends all of them. Their progress is on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event as Flag
from threading import Thread
from typing import final

from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError
from harness.config.telemetry import TelemetryConfig
from harness.core.events import RunEnded
from harness.core.locking import run_lease
from harness.core.locking.file_lock import exclusive
from harness.core.rundir import RunDir
from harness.telemetry.event_log import Chunk, log_size, read_chunk
from harness.telemetry.sinks.log_tail import LogTail
from harness.telemetry.sinks.sink import BadSinkError, Sink, SinkKind, enabled_sinks, read_telemetry, stored_offset
from harness.telemetry.sinks.sink_log import EXIT_NOT_SENT, first_line, log, report
from harness.telemetry.sinks.trainer_watch import Trainer, last_event

POLL_S = 1.0
HEAD_START_S = 10.0
"""How long sinks wait for the first step of a trainer. Their imports take seconds of a core, and would delay that step
on a machine with few cores."""
LONGEST_PAUSE_S = 15.0
STUCK_AFTER_S = 300.0
"""Once the trainer is gone, a sink that accepts nothing for this long is abandoned. Libraries have shorter limits."""
PATIENCE_S = {SinkKind.alerts: 600.0}
"""Seconds for which a sink is still tried after the trainer is gone."""


def send_until_end(
    run: RunDir, trainer: Trainer | None, kinds: Sequence[SinkKind] | None = None, *, wait: bool = False
) -> int:
    """Send until the run has ended and everything is sent; returns the exit code.

    Without a trainer, sends the unsent rest once. `kinds`: these sinks, enabled or not. `wait`: another process that
    sends the run is waited for.
    """
    try:
        cfg = read_telemetry(run)
    except ConfigError as error:
        log(str(error))
        return EXIT_BAD_CONFIG
    tail = LogTail(run)
    chosen = enabled_sinks(cfg) if kinds is None else kinds
    feeders = [SinkFeeder(kind, run, cfg, tail, trainer, wait=wait) for kind in chosen]
    if trainer is not None:
        wait_for_first_step(run, trainer)
    for feeder in feeders:
        feeder.start()
    while busy := [feeder for feeder in feeders if feeder.is_busy]:
        busy[0].wait(POLL_S / 10)
        if trainer is not None and not trainer.is_over(run):
            continue
        for feeder in busy:
            feeder.give_up_if_stuck()
    return max((feeder.exit_code for feeder in feeders), default=EXIT_DONE)


def wait_for_first_step(run: RunDir, trainer: Trainer) -> None:
    """Return when the trainer has logged a step, is over, or has had its head start."""
    until_s = time.monotonic() + HEAD_START_S
    while time.monotonic() < until_s:
        if trainer.has_trained(run) or trainer.has_ended(run) or trainer.is_over(run):
            return
        time.sleep(POLL_S / 10)


def build_sink(kind: SinkKind, run: RunDir, cfg: TelemetryConfig, trainer: Trainer | None) -> Sink:
    """Construct a sink from its stored progress. Does not connect."""
    match kind:
        case SinkKind.mlflow:
            from harness.telemetry.sinks.mlflow_progress import configured_uri, load_progress
            from harness.telemetry.sinks.mlflow_sink import MlflowSink

            return MlflowSink(run, load_progress(run, None if trainer is None else configured_uri(run)))
        case SinkKind.wandb:
            from harness.telemetry.sinks.wandb_sink import WandbSink

            return WandbSink(run, cfg.wandb)
        case SinkKind.tensorboard:
            from harness.telemetry.sinks.tensorboard_sink import TensorboardSink

            return TensorboardSink(run)
        case SinkKind.prometheus:
            from harness.telemetry.sinks.prometheus_sink import PrometheusSink

            return PrometheusSink(run, cfg.prometheus)
        case SinkKind.alerts:
            from harness.telemetry.alerts.alert_sink import AlertSink

            return AlertSink(run, cfg.alerts, trainer)


@final
class SinkFeeder:
    """The thread of one sink."""

    def __init__(
        self,
        kind: SinkKind,
        run: RunDir,
        cfg: TelemetryConfig,
        tail: LogTail,
        trainer: Trainer | None,
        *,
        wait: bool = False,
    ) -> None:
        self._wait = wait
        self._kind, self._run, self._cfg, self._tail, self._trainer = kind, run, cfg, tail, trainer
        self._restart_bytes = find_restart(run, kind, trainer)
        self._has_given_up = False
        self._moved_s = time.monotonic()
        """Start of the current attempt, or when the sink last accepted something."""
        self._done = Flag()
        self.exit_code = EXIT_NOT_SENT
        self._patience_s = 0.0 if trainer is None else PATIENCE_S.get(kind, 0.0)

    @property
    def is_busy(self) -> bool:
        return not (self._done.is_set() or self._has_given_up)

    def start(self) -> None:
        Thread(target=self._send_alone, name=str(self._kind), daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        self._done.wait(timeout_s)

    def give_up_if_stuck(self) -> None:
        """Abandon a sink that does not return from a call."""
        if self.is_busy and time.monotonic() - self._moved_s > STUCK_AFTER_S:
            log(f"{self._kind}: no answer within {STUCK_AFTER_S:g} s; gave up")
            self._has_given_up = True

    def _send_alone(self) -> None:
        try:
            with sole_sender(self._run, self._kind, keep_trying=self._may_wait) as is_sole:
                if is_sole:
                    self.exit_code = self._send_until_end()
                else:
                    log(f"{self._kind}: {self._run.path} is being sent by another process")
        except Exception as error:
            log(f"{self._kind}: {first_line(error)}; gave up")
        finally:
            self._done.set()

    def _may_wait(self) -> bool:
        """Whether to wait for another process that sends the run."""
        return self._wait or (self._trainer is not None and self._trainer.is_alive())

    def _send_until_end(self) -> int:
        sink: Sink | None = None
        num_failures, over_s, log_bytes = 0, 0.0, 0
        while True:
            is_over = self._trainer is None or self._trainer.is_over(self._run)
            if is_over and not over_s:
                over_s, log_bytes = time.monotonic(), log_size(self._run.events)
            self._moved_s = time.monotonic()
            try:
                sink = sink or self._build_sink()
                self._send_rest(sink)
                if is_over or self._has_sent_end(sink):
                    sink.end(has_ended=self._has_ended())
                    return EXIT_DONE
                num_failures = 0
            except (BadSinkError, ConfigError) as error:
                report(f"{self._kind} gets no events: {error}")
                return EXIT_BAD_CONFIG
            except Exception as error:
                num_failures += 1
                is_patient = time.monotonic() - over_s < self._patience_s and log_size(self._run.events) == log_bytes
                is_last = is_over and not is_patient
                after = "gave up" if is_last else f"next try in {pause_s(num_failures):g} s"
                sent = 0 if sink is None else sink.state.offset
                log(f"{self._kind}: {first_line(error)}; {after}; sent {sent} bytes of {self._run.events.name}")
                if is_last:
                    return EXIT_NOT_SENT
            time.sleep(pause_s(num_failures))

    def _build_sink(self) -> Sink:
        sink = build_sink(self._kind, self._run, self._cfg, self._trainer)
        state, restart_bytes = sink.state, self._restart_bytes
        if restart_bytes is not None and state.offset > restart_bytes:
            lost = f"{self._run.events.name} has lost its end: {state.offset} bytes of it were sent"
            log(f"{self._kind}: {lost}; continues at byte {restart_bytes}")
            state.rewind(restart_bytes)
            sink.save()
        return sink

    def _send_rest(self, sink: Sink) -> None:
        """Send what the sink has not accepted yet."""
        sink.connect()
        while chunk := self._read(sink.state.offset):
            sink.send(chunk)
            sink.state.offset = chunk.end
            sink.save()
            self._moved_s = time.monotonic()
        if samples := self._tail.samples_after(sink.state.sampled):
            sink.send_samples(samples)
            for sample in samples:
                sink.state.sampled[str(sample.rank)] = sample.time
            sink.save()
        sink.poll()

    def _read(self, offset: int) -> Chunk | None:
        """The events from byte `offset` on, without those of a later start; None if there are none yet."""
        chunk = self._tail.read(offset)
        end = None if self._trainer is None else self._trainer.end_bytes(self._run)
        if chunk is None or end is None or chunk.end <= end:
            return chunk
        return read_chunk(self._run.events, offset, end) if offset < end else None

    def _has_ended(self) -> bool:
        """Whether the log says how the run, or this start of it, has ended; True also if a process still trains it."""
        if self._trainer is None:
            return isinstance(last_event(self._run), RunEnded) or run_lease.is_in_use(self._run.path)
        return self._trainer.has_ended(self._run)

    def _has_sent_end(self, sink: Sink) -> bool:
        """Whether the `run_ended` event of this start was sent."""
        return sink.state.offset >= log_size(self._run.events) and self._has_ended()


def find_restart(run: RunDir, kind: SinkKind, trainer: Trainer | None) -> int | None:
    """Where a sink continues if the log has lost bytes that it had sent; None: it has lost none.

    Call before anything of this start is sent. The launcher's sinks come after those of its starts, so only the current
    size of the log tells them that it is too short.
    """
    size = log_size(run.events)
    first = size if trainer is None else trainer.log_bytes
    most = size if trainer is None or trainer.with_restarts else first
    return first if stored_offset(run, kind) > most else None


@contextmanager
def sole_sender(run: RunDir, kind: SinkKind, *, keep_trying: Callable[[], bool]) -> Iterator[bool]:
    """Hold the lock of a sink and yield True; False if another process holds it and `keep_trying` returns False."""
    with exclusive(run.path / f".{kind}.lock", keep_trying=keep_trying) as lock:
        yield lock is not None


def pause_s(num_failures: int) -> float:
    """Seconds until the next attempt: doubles with each failure in a row, up to a limit."""
    return min(POLL_S * 2.0 ** min(num_failures, 10), LONGEST_PAUSE_S)
