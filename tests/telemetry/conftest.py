"""Fixtures: run directories without a trainer, and events as a trainer would write them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import Config
from harness.core import rundir
from harness.core.events import RunEnded, RunStarted, StepRecord
from harness.core.rundir import RunDir
from tests import composed

for name, value in {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}.items():
    os.environ.setdefault(name, value)

MakeRun = Callable[..., tuple[RunDir, Config]]
MakeStep = Callable[..., StepRecord]
EPOCH_S = 1_700_000_000.0


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A prepared run directory under `tmp_path`, as the launcher leaves it."""

    def make(name: str = "run", **telemetry: Any) -> tuple[RunDir, Config]:
        overrides = [f"telemetry.{key}={value}" for key, value in telemetry.items()]
        cfg = composed.load([f"run.dir={tmp_path / 'runs'}", f"run.name={name}", *overrides])
        run = rundir.locate(cfg)
        rundir.prepare_run_dir(cfg, run)
        return run, cfg

    return make


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's empty tables, shared because MLflow takes a second to create them."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").get_experiment_by_name("none")
    return path


@pytest.fixture
def ready_store(tmp_path: Path, empty_store: Path) -> Path:
    """A copy of it at the default location for the runs of this test."""
    (tmp_path / "runs").mkdir()
    return Path(shutil.copy(empty_store, tmp_path / "runs" / "mlflow.db"))


@pytest.fixture
def make_step() -> MakeStep:
    """A factory of step records, with some fields replaced."""

    def make(iteration: int, **changes: Any) -> StepRecord:
        values: dict[str, Any] = {
            "time": EPOCH_S + iteration,
            "iteration": iteration,
            "step": iteration + 1,
            "cursor": iteration,
            "tokens": 2048 * (iteration + 1),
            "loss": 5.5 - iteration / 100,
            "grad_norm": 1.25,
            "lr": 3e-3,
            "tokens_per_s": 20_480.0,
            "refused": False,
            "stop_requested": False,
            "step_time_s": 0.1,
            "flops_per_s": 38.2e9,
        }
        return StepRecord(**(values | changes))

    return make


@pytest.fixture
def started() -> RunStarted:
    return RunStarted(time=EPOCH_S, iteration=0, world_size=2, num_steps=100, step=0)


@pytest.fixture
def ended() -> RunEnded:
    return RunEnded(time=EPOCH_S + 1000, iteration=100, step=100, exit_code=0, reason="all steps done")
