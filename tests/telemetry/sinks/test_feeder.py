"""Tests of the threads that feed sinks: a sink that hangs or fails delays no other, and the end of a run is awaited."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Event as Flag
from threading import Thread
from typing import Any, cast

import pytest

from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core.event_json import to_json
from harness.core.events import Event, RunEnded, RunRestarted, RunStarted, StepRecord, SystemSampled
from harness.core.locking.lease_holder import start_of
from harness.core.rundir import RunDir
from harness.telemetry.event_log import Chunk
from harness.telemetry.sinks import feeder, trainer_watch
from harness.telemetry.sinks.feeder import pause_s, send_until_end
from harness.telemetry.sinks.sink import SinkKind, SinkState
from harness.telemetry.sinks.trainer_watch import Trainer

MakeRun = Callable[..., tuple[RunDir, Config]]
MakeStep = Callable[..., StepRecord]


class ListSink:
    """Keeps what it is sent; fails as often as asked, or hangs."""

    def __init__(self, *, num_failures: int = 0, hangs: bool = False) -> None:
        self.state = SinkState()
        self.iterations: list[int] = []
        self.has_ended: bool | None = None
        self.ended_s = 0.0
        self._num_failures, self._hangs = num_failures, hangs

    def connect(self) -> None:
        if self._hangs:
            Flag().wait(60)

    def send(self, chunk: Chunk) -> None:
        if self._num_failures:
            self._num_failures -= 1
            raise ConnectionError("the wire was cut")
        self.iterations += [event.iteration for event in chunk.events]

    def send_samples(self, samples: list[SystemSampled]) -> None: ...

    def poll(self) -> None: ...

    def save(self) -> None: ...

    def end(self, *, has_ended: bool) -> None:
        self.has_ended, self.ended_s = has_ended, time.monotonic()


def append(run: RunDir, *events: Event) -> None:
    with run.events.open("a") as file:
        file.writelines(f"{to_json(event)}\n" for event in events)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the sinks that are built."""

    def use_sinks(**sinks: Any) -> None:
        monkeypatch.setattr(feeder, "build_sink", lambda kind, *_: sinks[str(kind)])
        monkeypatch.setattr(feeder, "POLL_S", 0.02)

    return use_sinks


def test_a_sink_that_hangs_is_abandoned_and_the_others_are_complete(
    make_run: MakeRun,
    make_step: MakeStep,
    ended: RunEnded,
    use: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(feeder, "STUCK_AFTER_S", 6.0)
    run, _ = make_run()
    append(run, make_step(0), make_step(1), ended)
    hanging, healthy = ListSink(hangs=True), ListSink()
    use(mlflow=hanging, wandb=healthy)
    begun_s = time.monotonic()
    assert send_until_end(run, None, [SinkKind.mlflow, SinkKind.wandb]) == 1
    assert healthy.iterations == [0, 1, 100]
    assert healthy.ended_s - begun_s < feeder.STUCK_AFTER_S, "it did not wait for the other"
    assert "mlflow: no answer within 6 s; gave up" in capfd.readouterr().err


def test_failures_are_retried_while_the_trainer_lives_and_once_when_it_is_gone(
    make_run: MakeRun, make_step: MakeStep, ended: RunEnded, use: Callable[..., None]
) -> None:
    run, _ = make_run()
    append(run, make_step(0), ended)
    failing = ListSink(num_failures=3)
    use(mlflow=failing)
    assert send_until_end(run, None, [SinkKind.mlflow]) == 1
    assert not failing.has_ended
    assert send_until_end(run, Trainer(os.getppid(), 0), [SinkKind.mlflow]) == 0
    assert (failing.iterations, failing.has_ended) == ([0, 100], True)


def test_a_bad_config_ends_only_its_own_sink(
    make_run: MakeRun, ended: RunEnded, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run()
    append(run, ended)
    healthy = ListSink()
    use(wandb=healthy)
    build = feeder.build_sink

    def build_or_reject(kind: SinkKind, *others: Any) -> Any:
        if kind is SinkKind.mlflow:
            raise ConfigError("telemetry.tracking_uri", "is wrong")
        return cast(Any, build)(kind, *others)

    monkeypatch.setattr(feeder, "build_sink", build_or_reject)
    assert send_until_end(run, None, [SinkKind.mlflow, SinkKind.wandb]) == 2
    assert healthy.has_ended is True


def test_the_end_that_the_launcher_logs_after_a_crash_is_awaited(
    make_run: MakeRun, make_step: MakeStep, ended: RunEnded, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run()
    append(run, make_step(0))
    launcher: dict[str, Any] = {"launcher_pid": os.getpid(), "launcher_started": start_of(os.getpid())}
    sink = ListSink()
    use(mlflow=sink)
    trainer = Trainer(-1, 0, **launcher)
    sending = Thread(target=send_until_end, args=(run, trainer, [SinkKind.mlflow]))
    sending.start()
    time.sleep(0.3)
    assert sending.is_alive()
    append(run, ended)
    sending.join(timeout=200)
    assert (sink.iterations, sink.has_ended) == ([0, 100], True)

    append(run, make_step(1))
    monkeypatch.setattr(trainer_watch, "LAUNCHER_WITHIN_S", 0.2)
    silent = ListSink()
    use(mlflow=silent)
    assert send_until_end(run, Trainer(-1, run.events.stat().st_size, **launcher), [SinkKind.mlflow]) == 0
    assert silent.has_ended is False, "a launcher that logs nothing is not awaited for ever"


def restart(iteration: int) -> RunRestarted:
    return RunRestarted(time=1.0, iteration=iteration, step=iteration, number=1, reason="rank 1 was killed by SIGKILL")


@pytest.mark.parametrize("is_logged", [True, False], ids=["by the launcher", "by torchrun"])
def test_a_restart_ends_the_sinks_of_the_old_start_before_the_events_of_the_new(
    make_run: MakeRun, make_step: MakeStep, started: RunStarted, use: Callable[..., None], is_logged: bool
) -> None:
    run, _ = make_run()
    append(run, started, make_step(0), restart(0))
    log_bytes = run.events.stat().st_size
    trainer = Trainer(-1, log_bytes, launcher_pid=os.getpid(), launcher_started=start_of(os.getpid()))
    append(run, started, make_step(1))
    assert not trainer.is_over(run), "the restart before this start says nothing about it"
    append(run, *[restart(1)] * is_logged, replace(started, iteration=2), make_step(2))
    old = ListSink()
    use(mlflow=old)
    assert send_until_end(run, trainer, [SinkKind.mlflow]) == 0
    assert old.iterations == [0, 0, 0, 0, 1, *[1] * is_logged]
    assert old.has_ended is True, "the run trains on: it has not failed"
    assert trainer.end_bytes(run) == old.state.offset
    new = ListSink()
    new.state.offset = old.state.offset
    use(mlflow=new)
    assert send_until_end(run, Trainer(-1, old.state.offset), [SinkKind.mlflow]) == 0
    assert (new.iterations, new.has_ended) == ([2, 2], False), "the new start is gone without an end"


def test_the_launcher_sends_all_its_starts(
    make_run: MakeRun, make_step: MakeStep, started: RunStarted, ended: RunEnded, use: Callable[..., None]
) -> None:
    run, _ = make_run()
    append(run, started, make_step(0), restart(0), started, make_step(1), ended)
    sink = ListSink()
    use(mlflow=sink)
    assert send_until_end(run, Trainer(-1, 0, with_restarts=True), [SinkKind.mlflow]) == 0
    assert (sink.iterations, sink.has_ended) == ([0, 0, 0, 0, 1, 100], True)


def test_a_run_ended_event_of_an_earlier_start_is_not_the_end_of_this_one(
    make_run: MakeRun, ended: RunEnded, use: Callable[..., None]
) -> None:
    run, _ = make_run()
    append(run, ended)
    sink = ListSink()
    use(mlflow=sink)
    assert send_until_end(run, Trainer(-1, run.events.stat().st_size), [SinkKind.mlflow]) == 0
    assert sink.has_ended is False


def test_pauses_grow_to_a_limit() -> None:
    assert [pause_s(number) for number in (0, 1, 2, 3, 4, 50)] == [1, 2, 4, 8, 15, 15]


@pytest.mark.parametrize("has_stepped", [True, False], ids=["a step", "the end of a complete run"])
def test_sinks_start_after_the_first_step(
    make_run: MakeRun, make_step: MakeStep, ended: RunEnded, has_stepped: bool
) -> None:
    """Steps of an earlier start do not count."""
    run, _ = make_run()
    append(run, make_step(0))
    trainer = Trainer(os.getppid(), run.events.stat().st_size)
    waiting = Thread(target=feeder.wait_for_first_step, args=(run, trainer))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    append(run, make_step(1) if has_stepped else ended)
    waiting.join(feeder.HEAD_START_S / 2)
    assert not waiting.is_alive()


def test_sinks_do_not_wait_for_a_trainer_that_is_slow_or_gone(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run()
    feeder.wait_for_first_step(run, Trainer(-1, 0))
    monkeypatch.setattr(feeder, "HEAD_START_S", 0.2)
    feeder.wait_for_first_step(run, Trainer(os.getppid(), 0))
