"""Tests of TensorBoard's event file, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from harness.config.schema import Config
from harness.core.event_json import to_json
from harness.core.events import Incident, RunEnded, RunStarted, StepRecord, SystemSampled
from harness.core.rundir import RunDir
from harness.telemetry.sinks.feeder import send_until_end
from harness.telemetry.sinks.sink import SinkKind, progress_file
from harness.telemetry.sinks.tensorboard_sink import event_file
from harness.telemetry.system_sampler import system_file

pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")

MakeRun = Callable[..., tuple[RunDir, Config]]
MakeStep = Callable[..., StepRecord]
ON = {"mlflow": "false", "tensorboard.enabled": "true"}


def append(run: RunDir, *events: Any) -> None:
    with run.events.open("a") as file:
        file.writelines(f"{to_json(event)}\n" for event in events)


def read_back(run: RunDir) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(event_file(run).parent), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def scalars(run: RunDir, tag: str) -> list[tuple[int, float, float]]:
    return [(event.step, round(event.value, 6), event.wall_time) for event in read_back(run).Scalars(tag)]


def test_a_run_is_read_back_by_tensorboard(
    make_run: MakeRun, make_step: MakeStep, started: RunStarted, ended: RunEnded
) -> None:
    run, _ = make_run(**ON)
    steps = [make_step(iteration) for iteration in range(30)]
    steps[7] = make_step(7, loss=math.nan, refused=True)
    incident: dict[str, Any] = {
        "number": 1,
        "kinds": ["nonfinite"],
        "onset": 7,
        "onset_step": 7,
        "last": 7,
        "last_step": 7,
    }
    append(run, started, *steps, Incident(time=steps[7].time, iteration=8, verdict="cured", **incident), ended)
    sampled = SystemSampled(
        time=ended.time, iteration=29, rank=0, host="h", every_s=10.0, cpu_load=0.5, gpu_power_w=[700.0, None]
    )
    path = system_file(run, 0)
    path.parent.mkdir()
    path.write_text(to_json(sampled) + "\n")
    assert send_until_end(run, None) == 0
    clean = [(step.iteration, round(step.loss, 6), step.time) for step in steps if not step.refused]
    assert scalars(run, "loss") == clean
    assert scalars(run, "loss_nonfinite") == [(7, 1.0, steps[7].time)]
    assert scalars(run, "system/rank-0/gpu-0/power_w") == [(29, 700.0, ended.time)]
    texts = {tag: read_back(run).Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in ("config", "incidents")}
    assert "    optim:" in texts["config"]
    assert texts["incidents"] == "incident 1: nonfinite from iteration 7: cured"


def test_a_restart_continues_the_file_and_cuts_off_what_a_crash_left(
    make_run: MakeRun, make_step: MakeStep, ended: RunEnded
) -> None:
    run, _ = make_run(**ON)
    append(run, make_step(0), make_step(1))
    assert send_until_end(run, None) == 0
    stored, whole = progress_file(run, SinkKind.tensorboard).read_text(), event_file(run).read_bytes()
    append(run, make_step(2))
    assert send_until_end(run, None) == 0
    assert event_file(run).read_bytes().startswith(whole), "the file is continued, not rewritten"
    progress_file(run, SinkKind.tensorboard).write_text(stored)  # killed after the write, before the progress
    append(run, make_step(3), ended)
    assert send_until_end(run, None) == 0
    assert [step for step, _, _ in scalars(run, "loss")] == [0, 1, 2, 3]


def test_a_lost_file_is_written_again(make_run: MakeRun, make_step: MakeStep, ended: RunEnded) -> None:
    run, _ = make_run(**ON)
    append(run, make_step(0), make_step(1))
    assert send_until_end(run, None) == 0
    event_file(run).unlink()
    append(run, make_step(2), ended)
    assert send_until_end(run, None) == 0
    assert [step for step, _, _ in scalars(run, "loss")] == [0, 1, 2]


@pytest.mark.full
def test_a_dead_server_of_another_sink_delays_nothing(
    make_run: MakeRun, make_step: MakeStep, ended: RunEnded, capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_run(**(ON | {"mlflow": "true", "tracking_uri": "bogus://nowhere"}))
    append(run, make_step(0), ended)
    assert send_until_end(run, None) == 2
    assert "telemetry.tracking_uri" in capfd.readouterr().err
    assert [step for step, _, _ in scalars(run, "loss")] == [0]
