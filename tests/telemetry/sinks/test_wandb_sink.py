"""Tests of the W&B sink in offline mode, with the real package: its file is read back with its own reader."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from harness.config.schema import Config
from harness.core.event_json import to_json
from harness.core.events import Incident, RunEnded, RunRestarted, RunStarted, StepRecord, SystemSampled
from harness.core.rundir import RunDir
from harness.telemetry.event_log import read_chunk
from harness.telemetry.sinks import wandb_sink
from harness.telemetry.sinks.feeder import send_until_end
from harness.telemetry.sinks.sink import SinkKind, progress_file
from harness.telemetry.sinks.trainer_watch import Trainer
from harness.telemetry.sinks.wandb_sink import WandbSink
from harness.telemetry.system_sampler import system_file
from tests.telemetry.sinks.wandb_reader import exit_codes, read_back

pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MakeRun = Callable[..., tuple[RunDir, Config]]
MakeStep = Callable[..., StepRecord]
ON = {"mlflow": "false", "wandb.enabled": "true", "wandb.mode": "offline"}


def append(run: RunDir, *events: Any) -> None:
    with run.events.open("a") as file:
        file.writelines(f"{to_json(event)}\n" for event in events)


def test_a_run_is_in_the_files_of_wandb(
    make_run: MakeRun, make_step: MakeStep, started: RunStarted, ended: RunEnded
) -> None:
    run, _ = make_run("mine", **ON)
    steps = [make_step(iteration) for iteration in range(20)]
    incident: dict[str, Any] = {
        "number": 1,
        "kinds": ["grad_spike"],
        "onset": 7,
        "onset_step": 7,
        "last": 7,
        "last_step": 7,
    }
    append(run, started, *steps, Incident(time=ended.time, iteration=20, verdict="cured", **incident), ended)
    sample: dict[str, Any] = {"iteration": 19, "rank": 0, "host": "h", "every_s": 10.0, "cpu_load": 0.5}
    path = system_file(run, 0)
    path.parent.mkdir()
    path.write_text("".join(to_json(SystemSampled(time=ended.time + index, **sample)) + "\n" for index in range(200)))
    assert send_until_end(run, None) == 0
    rows, ids, summary = read_back(run)
    found = [(row["iteration"], row["loss"], row["_timestamp"]) for row in rows if "loss" in row]
    assert found == [(step.iteration, pytest.approx(step.loss), step.time) for step in steps]
    sampled = [row["_timestamp"] for row in rows if "system/rank-0/cpu_load" in row]
    assert sampled == [ended.time + index for index in range(200)]
    assert set(ids) == {json.loads(progress_file(run, SinkKind.wandb).read_text())["run_id"]}
    assert summary["incident.001"] == "grad_spike from iteration 7: cured"

    append(run, started, make_step(20), ended)
    assert send_until_end(run, None) == 0
    rows, ids, _ = read_back(run)
    assert [row["iteration"] for row in rows if "loss" in row] == list(range(21)), "the next start sends only its own"
    assert len(set(ids)) == 1


def test_steps_increase_after_the_log_has_lost_its_end(make_run: MakeRun, make_step: MakeStep) -> None:
    """W&B ignores a row whose step it has."""
    run, _ = make_run(**ON)
    append(run, make_step(0))
    left_bytes = run.events.stat().st_size
    append(run, *map(make_step, range(1, 10)))
    assert send_until_end(run, None) == 0
    os.truncate(run.events, left_bytes)
    append(run, make_step(1), make_step(2))
    assert send_until_end(run, Trainer(-1, left_bytes)) == 0
    rows = [row for row in read_back(run)[0] if "loss" in row]
    assert [row["iteration"] for row in rows] == [*range(10), 1, 2]
    steps = [row["_step"] for row in rows]
    assert steps == sorted(set(steps))


def test_a_restart_inside_the_job_is_no_failure(make_run: MakeRun, make_step: MakeStep, started: RunStarted) -> None:
    run, _ = make_run(**ON)
    reason = "rank 1 on n1 was killed by SIGKILL"
    append(run, started, make_step(0), RunRestarted(time=started.time, iteration=0, step=1, number=1, reason=reason))
    assert send_until_end(run, Trainer(-1, 0)) == 0
    assert exit_codes(run) == [0]
    append(run, started, make_step(1))
    assert send_until_end(run, Trainer(-1, json.loads(progress_file(run, SinkKind.wandb).read_text())["offset"])) == 0
    assert sorted(exit_codes(run)) == [0, 1], "the second start is gone without an end"


def test_a_batch_sent_twice_is_stored_once(make_run: MakeRun, make_step: MakeStep) -> None:
    run, cfg = make_run(**ON)
    append(run, make_step(0), make_step(1))
    sink = WandbSink(run, cfg.telemetry.wandb)
    sink.connect()
    chunk = read_chunk(run.events, 0)
    assert chunk is not None
    sink.send(chunk)
    sink.send(chunk)  # as after a failure between the two halves of a batch
    sink.state.offset = chunk.end
    sink.send_samples([SystemSampled(time=1.0, iteration=1, rank=0, host="h", every_s=10.0, cpu_load=0.5)])
    append(run, make_step(2))
    further = read_chunk(run.events, chunk.end)
    assert further is not None
    sink.send(further)
    sink.end(has_ended=False)
    rows, _, _ = read_back(run)
    assert [row["iteration"] for row in rows if "loss" in row] == [0, 1, 2]
    assert sum("system/rank-0/cpu_load" in row for row in rows) == 1


def test_a_server_that_does_not_answer_can_be_tried_again(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A failed attempt must leave nothing in W&B's own process that makes the next one fail."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(wandb_sink, "INIT_TIMEOUT_S", 3.0)
    run, cfg = make_run(**(ON | {"wandb.mode": "online"}))
    sink = WandbSink(run, cfg.telemetry.wandb)
    for _ in range(2):
        with pytest.raises(Exception, match=r"(?i)failed to get resume status|timed out|communication"):
            sink.connect()
    assert "a" * 40 not in capfd.readouterr().err
    assert not [path for path in run.path.rglob("*") if path.is_file() and b"a" * 40 in path.read_bytes()]
