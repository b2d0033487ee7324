"""Real runs with every sink: two ranks train, and each sink has the losses of the log; then a rank hangs."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.core.event_json import read
from harness.core.events import RunEnded, StepRecord
from harness.core.rundir import RunDir
from harness.telemetry import heartbeat
from harness.telemetry.sinks.prometheus_sink import target_file
from harness.telemetry.sinks.sink import SinkKind, progress_file
from harness.telemetry.sinks.sink_process import SINK_MODULE
from tests.distributed import cases
from tests.forks import Launched
from tests.slow_steps import slow_steps
from tests.telemetry.sinks.wandb_reader import read_back

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SLOW = partial(slow_steps, 0.1)
"""While sink processes import their libraries, two ranks would take hundreds of steps."""


def script(path: Path, output: Path) -> Path:
    """A program that appends each alert to a file, as one line."""
    path.write_text(f"#!/bin/sh\ncat >> {output}\n")
    path.chmod(0o755)
    return path


def alerts(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.05)


def overrides(tmp_path: Path, name: str, *more: str) -> tuple[str, ...]:
    pager = script(tmp_path / "pager", tmp_path / "alerts")
    place = (f"run.dir={tmp_path / 'runs'}", f"run.name={name}", "launch.nproc=2")
    return (*cases.TINY, *place, "telemetry.exit_wait_s=120", f"telemetry.alerts.command.run=[{pager}]", *more)


@pytest.mark.usefixtures("ready_store")
def test_every_sink_has_the_losses_of_a_run(tmp_path: Path) -> None:
    for package in ("tensorboard", "wandb"):
        pytest.importorskip(package, reason=f"the extra `{package}` is not installed")
    sinks = [f"telemetry.{name}.enabled=true" for name in ("wandb", "tensorboard", "prometheus")]
    more = ("telemetry.mlflow=true", *sinks, "telemetry.wandb.mode=offline", "telemetry.system_every_s=0.2")
    run = RunDir(tmp_path / "runs" / "all")
    args = overrides(tmp_path, "all", *more, "train.num_steps=2000", "checkpoint.every_steps=1000")
    with Launched("launch.cli.main", "train", *args, output=tmp_path / "output", first=SLOW) as process:
        wait_until(lambda: target_file(run).exists() and read_metrics(run).get("harness_step", 0) > 5, "a live scrape")
        (run.path / "STOP").touch()
        assert process.wait(timeout=120) == 75, process.stderr
    assert "warning: some events" not in process.stderr
    steps = [event for event in read(run.events) if isinstance(event, StepRecord)]
    iterations = [step.iteration for step in steps]

    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow.db")
    run_id = json.loads(run.mlflow.read_text())["run_id"]
    assert [row.step for row in client.get_metric_history(run_id, "loss")] == iterations
    assert client.get_metric_history(run_id, "system/rank-0/cpu_load"), "system samples are metrics too"
    assert client.get_run(run_id).info.status == "KILLED"
    accumulator = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("loss")] == iterations
    assert accumulator.Scalars("system/rank-0/cpu_load")
    size_bytes = run.events.stat().st_size
    for kind in SinkKind:
        assert json.loads(progress_file(run, kind).read_text())["offset"] == size_bytes, kind
    values = json.loads(progress_file(run, SinkKind.prometheus).read_text())["values"]
    assert (values["harness_iteration"], values["harness_exit_code"]) == (iterations[-1], 75)
    assert [alert["kind"] for alert in alerts(tmp_path / "alerts")] == ["stopped"]
    rows, _, _ = read_back(run)
    assert [row["iteration"] for row in rows if "loss" in row] == iterations
    assert not target_file(run).exists()


def read_metrics(run: RunDir) -> dict[str, float]:
    """Name -> value, for series without further labels."""
    try:
        ((target,),) = (entry["targets"] for entry in json.loads(target_file(run).read_text()))
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
    except OSError:
        return {}
    rows = [line.rpartition(" ") for line in lines if line.count('="') == 1]
    return {series.partition("{")[0]: float(value) for series, _, value in rows}


def test_a_hung_rank_and_the_end_of_its_run_are_alerted(tmp_path: Path) -> None:
    """The launcher ends the run; its sink process and the launcher tell of it."""
    run = RunDir(tmp_path / "runs" / "hung")
    limits = ("launch.hang_after_s=4", "launch.hang_steps=1", "launch.max_restarts=0")
    args = overrides(tmp_path, "hung", "train.num_steps=100000", *limits)
    with Launched("launch.cli.main", "train", *args, output=tmp_path / "output", first=SLOW) as process:
        wait_until(lambda: has_moved(run), "two ranks train")
        beat = heartbeat.read(heartbeat.heartbeat_file(run, 1))
        assert beat is not None
        os.kill(beat.pid, signal.SIGSTOP)
        assert process.wait(timeout=120) == 1, process.stderr
    last = [event for event in read(run.events) if isinstance(event, RunEnded)][-1]
    assert last.cause == "hung rank"
    found = alerts(tmp_path / "alerts")
    assert [alert["kind"] for alert in found] == ["hang", "failed"]
    assert "rank 1 on" in found[0]["text"]
    assert found[1]["text"].startswith(f"[hung] failed at step {last.step} with exit code 1: rank 1 on ")
    assert found[1]["run_dir"] == str(run.path)


@pytest.mark.usefixtures("ready_store")
def test_a_restart_inside_the_job_is_no_failure(tmp_path: Path) -> None:
    """The sink process of the old rank 0 says that the ranks start again; that of the new one goes on."""
    run = RunDir(tmp_path / "runs" / "again")
    args = overrides(tmp_path, "again", "telemetry.mlflow=true", "train.num_steps=100000")
    with Launched("launch.cli.main", "train", *args, output=tmp_path / "output", first=SLOW) as process:
        wait_until(lambda: has_moved(run) and bool(status_in_mlflow(run)), "two ranks train, and MLflow has the run")
        old = sink_processes(run)
        assert len(old) == 1
        beat = heartbeat.read(heartbeat.heartbeat_file(run, 1))
        assert beat is not None
        os.kill(beat.pid, signal.SIGKILL)
        wait_until(lambda: not old & sink_processes(run), "the sink process of the old rank 0 has ended")
        assert [alert["kind"] for alert in alerts(tmp_path / "alerts")] == ["restarted"]
        assert status_in_mlflow(run) == "RUNNING"
        (run.path / "STOP").touch()
        assert process.wait(timeout=120) == 75, process.stderr
    assert [alert["kind"] for alert in alerts(tmp_path / "alerts")] == ["restarted", "stopped"]
    assert status_in_mlflow(run) == "KILLED"


def status_in_mlflow(run: RunDir) -> str:
    """Status of the run in the default store; empty while it has none."""
    from mlflow.tracking import MlflowClient

    run_id = json.loads(run.mlflow.read_text())["run_id"] if run.mlflow.exists() else None
    if run_id is None:
        return ""
    client = MlflowClient(tracking_uri=f"sqlite:///{run.path.parent}/mlflow.db")
    return str(client.get_run(run_id).info.status)


def sink_processes(run: RunDir) -> set[str]:
    """Process ids of the sink processes of a run."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes().split(b"\0")
            if SINK_MODULE.encode() in command and str(run.path).encode() in command:
                found.add(path.parent.name)
    return found


def has_moved(run: RunDir) -> bool:
    beats = [heartbeat.read(heartbeat.heartbeat_file(run, rank)) for rank in range(2)]
    return all(beat is not None and beat.iteration > 3 for beat in beats)
