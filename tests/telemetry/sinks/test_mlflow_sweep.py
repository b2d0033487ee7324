"""Tests of a sweep in a real sqlite store: one parent run with a child run per job, in any order and after failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.sweeps import sweep_record
from harness.analysis.sweeps.sweep_record import Job, Sweep
from harness.config.errors import EXIT_INTERRUPTED
from harness.config.schema import Config
from harness.core import rundir
from harness.core.events import RunEnded, RunStarted, StepRecord
from harness.core.rundir import RunDir
from harness.telemetry.event_log import EventLog
from harness.telemetry.sinks.__main__ import main
from harness.telemetry.sinks.feeder import send_until_end
from harness.telemetry.sinks.mlflow_run import PARENT_TAG
from harness.telemetry.sinks.trainer_watch import Trainer
from launch.sweeps import multirun
from tests import composed

MakeStep = Callable[..., StepRecord]

# Deprecations inside MLflow are not fixed here.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("ready_store")]


@pytest.fixture
def sweep(tmp_path: Path) -> tuple[Path, dict[str, RunDir]]:
    """A sweep of three jobs, one of them with an invalid config."""
    directory = tmp_path / "runs" / "many"
    jobs = [Job(name=f"optim.lr={lr}", overrides={"optim.lr": lr}) for lr in ("1", "2")]
    jobs.append(Job(name="optim.lr=-1", overrides={"optim.lr": "-1"}, problem="must be positive"))
    runs = {job.name: create_run(directory, job) for job in jobs if not job.problem}
    write(directory, jobs)
    return directory, runs


def create_run(directory: Path, job: Job, **telemetry: str) -> RunDir:
    run = rundir.locate(job_config(directory, job, **telemetry))
    rundir.prepare_run_dir(job_config(directory, job, **telemetry), run)
    return run


def job_config(directory: Path, job: Job, **telemetry: str) -> Config:
    place = {"run.dir": directory, "run.name": f"'{job.name}'", "telemetry.tracking_uri": store(directory)}
    place |= {f"telemetry.{key}": value for key, value in telemetry.items()}
    return composed.load([f"{key}={value}" for key, value in place.items()])


def store(directory: Path) -> str:
    return f"sqlite:///{directory.parent / 'mlflow.db'}"


def write(directory: Path, jobs: list[Job]) -> None:
    sweep_record.write(Sweep(name=directory.name, created=0.0, words=[], fixed=[], jobs=jobs), directory)


def stored_runs(directory: Path) -> dict[str, Any]:
    """All runs of the store by name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=store(directory))
    experiment = client.get_experiment_by_name("pretraining")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert len({run.info.run_name for run in runs}) == len(runs)
    return {run.info.run_name: run for run in runs}


def append_events(run: RunDir, *events: StepRecord | RunStarted | RunEnded) -> None:
    log = EventLog(run.events)
    for event in events:
        log.write(event)
    log.close()


def test_a_finished_job_that_is_sent_again_does_not_set_its_sweep_to_running(
    sweep: tuple[Path, dict[str, RunDir]], make_step: MakeStep, started: RunStarted, ended: RunEnded
) -> None:
    directory, runs = sweep
    name, run = next(iter(runs.items()))
    write(directory, [Job(name=name, overrides={"optim.lr": "1"})])
    append_events(run, started, ended)
    for _ in range(2):
        assert send_until_end(run, None) == 0
        assert stored_runs(directory)["many"].info.status == "FINISHED"
    append_events(run, started, make_step(1))
    assert send_until_end(run, Trainer(-1, run.events.stat().st_size)) == 0
    assert stored_runs(directory)["many"].info.status == "RUNNING"


@pytest.mark.full
def test_jobs_are_nested_under_their_sweep(
    sweep: tuple[Path, dict[str, RunDir]], make_step: MakeStep, started: RunStarted, ended: RunEnded
) -> None:
    directory, runs = sweep
    first, second = runs.values()
    append_events(first, started, make_step(0), ended)
    assert send_until_end(first, None) == 0
    found = stored_runs(directory)
    assert set(found) == {"many", "optim.lr=1"}
    parent = found["many"]
    assert (parent.info.status, parent.data.tags["swept.optim.lr"]) == ("RUNNING", "1, 2, -1")
    assert parent.data.tags["run_dir"] == str(directory)
    assert PARENT_TAG not in parent.data.tags

    write(directory, [Job(name=name, overrides={"optim.lr": name[-1]}) for name in runs])
    append_events(second, started, make_step(0), replace(ended, exit_code=EXIT_INTERRUPTED))
    assert send_until_end(second, None) == 0
    found = stored_runs(directory)
    assert {found[name].data.tags[PARENT_TAG] for name in runs} == {parent.info.run_id}
    assert (found["many"].info.run_id, found["many"].info.status) == (parent.info.run_id, "KILLED")

    append_events(second, started, make_step(1), ended)
    assert send_until_end(second, None) == 0
    assert stored_runs(directory)["many"].info.status == "FINISHED"


def test_the_launcher_sets_the_final_status(sweep: tuple[Path, dict[str, RunDir]], started: RunStarted) -> None:
    directory, runs = sweep
    append_events(next(iter(runs.values())), started)
    assert main([str(directory)]) == 0
    assert {name: run.info.status for name, run in stored_runs(directory).items()} == {"many": "FAILED"}


def test_a_run_beside_a_sweep_is_not_one_of_its_jobs(
    sweep: tuple[Path, dict[str, RunDir]], started: RunStarted, ended: RunEnded
) -> None:
    directory, _ = sweep
    other = create_run(directory, Job(name="other"))
    append_events(other, started, ended)
    assert send_until_end(other, None) == 0
    assert {name: PARENT_TAG in run.data.tags for name, run in stored_runs(directory).items()} == {"other": False}


@pytest.mark.full
def test_a_silent_server_causes_one_warning(
    sweep: tuple[Path, dict[str, RunDir]], capfd: pytest.CaptureFixture[str]
) -> None:
    directory, _ = sweep
    silent = {"tracking_uri": "http://127.0.0.1:9", "exit_wait_s": "60"}
    job = Job(name="optim.lr=1", overrides={"optim.lr": "1"})
    create_run(directory, job, **silent)
    multirun.finish_in_mlflow(directory, [job_config(directory, job, **silent)])
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: the end of the sweep was not recorded in MLflow: ")
    multirun.finish_in_mlflow(directory, [job_config(directory, job, mlflow="false")])
    assert capfd.readouterr().err == ""
