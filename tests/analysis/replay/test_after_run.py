"""Replays after the end of a run: the guilty step is measured, or the report says why not."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.postmortem import evidence as schema
from harness.analysis.postmortem.write import EVIDENCE, MARKDOWN, write_folder
from harness.analysis.replay.after_run import (
    SKIPPED_FILE,
    ReplayTimeoutError,
    available_bytes,
    check_cost,
    replay_after_run,
    time_limit,
)
from harness.analysis.replay.history import REPLAY_FILE
from harness.analysis.replay.request import ReplayRequest
from harness.config.compose import load
from harness.config.errors import ConfigError
from harness.core.events import Incident
from harness.core.rundir import RunDir
from launch.cli.main import main
from tests.analysis.postmortem import stories
from tests.distributed import faulty_runs
from tests.distributed.cases import TINY
from tests.distributed.pool import Pool
from tests.sentinel.series import record

RUN = (
    "run.name=victim",
    "train.num_steps=60",
    "optim.warmup_steps=5",
    "checkpoint.every_steps=10",
    "checkpoint.keep=9",
)


def request(num_steps: int) -> ReplayRequest:
    steps = [record(at, 3.0) for at in range(num_steps)]
    return ReplayRequest(
        run=Path(), report=Path(), checkpoint=None, steps=steps, older=None, exactly=False, with_samples=False
    )


def test_a_replay_that_takes_too_long_is_not_begun() -> None:
    cfg = load(TINY)
    check_cost(cfg, request(10), within_s=60, memory_bytes=1e9)
    with pytest.raises(ConfigError, match=r"100000 steps would take about [0-9]+ s on the CPU"):
        check_cost(cfg, request(100_000), within_s=60, memory_bytes=1e9)
    with pytest.raises(ConfigError, match=r"of memory, and 0\.0 GB are free"):
        check_cost(cfg, request(10), within_s=60, memory_bytes=1e6)
    large = replace(cfg, model=load(["model=1b"]).model)
    with pytest.raises(ConfigError, match="on the CPU"):
        check_cost(large, request(10), within_s=60, memory_bytes=1e15)
    assert available_bytes() > 0


def test_time_limit() -> None:
    with time_limit(30):
        pass
    with pytest.raises(ReplayTimeoutError, match=r"did not finish within 0\.05 s"), time_limit(0.05):
        time.sleep(5)


def test_report_says_why_the_step_was_not_replayed(tmp_path: Path) -> None:
    log = stories.one_rank()
    run = stories.write(tmp_path / "run", log)
    assert not replay_after_run(run, 1, within_s=1e-3)
    reason = (run.incidents / "001" / SKIPPED_FILE).read_text()
    assert reason.startswith("The step was not replayed after the run: ")
    assert reason.endswith(f"; run `harness replay {run.path} --incident 1`.\n")
    assert len(reason.splitlines()) == 1
    (incident,) = [event for event in log if isinstance(event, Incident)]
    assert reason in (write_folder(run, incident) / MARKDOWN).read_text()


@pytest.mark.full
def test_run_replays_its_incident_and_the_report_has_the_measurements(
    ranks: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank's gradient is NaN at iteration 36, which the run does not probe."""
    fault = faulty_runs.Fault("gradient", 1, factor=math.nan, iteration=36)
    first, _ = ranks.run(2, faulty_runs.run, str(tmp_path), fault, "telemetry.postmortem=true", *RUN)
    assert first.code == 0
    run = RunDir(tmp_path / "victim")
    folder = run.incidents / "001"
    assert not (folder / SKIPPED_FILE).exists()
    replayed = json.loads((folder / REPLAY_FILE).read_text())
    assert (replayed["iteration"], replayed["checkpoint"]) == (36, "step-00000030-gen-0")
    assert replayed["nature"] == "transient"
    evidence = schema.read(folder / EVIDENCE)
    (guilty,) = [row for row in evidence.records if row.iteration == 36]
    assert sum(guilty.token_loss_counts) == 8 * 32
    assert "embedding" in guilty.activation_rms
    assert sum(evidence.batches[0].token_loss_counts) == 8 * 32
    assert "## Replay" in (folder / MARKDOWN).read_text()
    assert main(["diagnose", str(run.path)]) == 10
    assert "the replay is finite, so test the machine of the named ranks" in capsys.readouterr().out
