"""A killed or stopped run resumes bit-identically."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import cast

import pytest

from harness.config.compose import read
from harness.config.errors import ConfigError
from harness.control.inbox import interventions
from harness.core import event_json, rundir
from harness.core.events import CheckpointSaved, RunEnded, RunStarted, StepRecord
from harness.core.locking import run_lease
from harness.core.state import RunState
from harness.data.corpus.corpus_record import DataRecord
from harness.resume import explain_lost_end, open_run
from harness.run_corpus import RunData
from harness.telemetry.event_log import prepare_run
from launch.k8s.pod import prepare_node
from launch.local.node_group import SINGLE_NODE
from launch.slurm.job_directory import prepare_job_run
from launch.sweeps.jobs import ComposedJob, name_jobs
from tests.distributed import cases
from tests.distributed.pool import Pool
from tests.forks import Launched
from tests.privileges import obeying_modes

STEPS = ("train.num_steps=22", "model.num_layers=1", "checkpoint.every_steps=3", "optim.warmup_steps=5")
StepResults = dict[int, tuple[float, float, float, int]]


def step_results(records: list[StepRecord]) -> StepResults:
    """The exact results of each step; of repeated steps, the later."""
    return {record.step: (record.loss, record.grad_norm, record.lr, record.cursor) for record in records}


@pytest.fixture(scope="module")
def control(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> StepResults:
    """An undisturbed run."""
    directory = str(tmp_path_factory.mktemp("control"))
    (code, records), *_ = ranks.run(2, cases.run, directory, "run.name=control", *STEPS)
    assert code == 0
    return step_results(records)


def launched(directory: Path) -> Launched:
    """The same run through the launcher, in its own session."""
    overrides = [*cases.TINY, *STEPS, f"run.dir={directory}", "run.name=victim", "launch.nproc=2"]
    return Launched("launch.train", *overrides, output=directory / "output")


def wait_for_step(directory: Path, step: int) -> None:
    """Wait until a step is done and, because saves run in the background, a checkpoint exists."""
    log = directory / "victim" / "events.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        log_so_far = list(event_json.read(log)) if log.exists() else []
        is_done = any(isinstance(event, StepRecord) and event.step >= step for event in log_so_far)
        if is_done and any(isinstance(event, CheckpointSaved) for event in log_so_far):
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached")


def finish(ranks: Pool, directory: Path, size: int) -> tuple[int, list[StepRecord]]:
    code, records = ranks.run(size, cases.run, str(directory), "run.name=victim", *STEPS)[0]
    assert [event for event in event_json.read(directory / "victim" / "events.jsonl") if isinstance(event, RunStarted)][
        -1
    ].resumed_from
    return code, records


def test_a_log_that_cannot_be_written_rejects_a_start_before_its_config_is_accepted(tmp_path: Path) -> None:
    """By the ranks and by a launcher, which writes the config before them."""
    run = prepare_run(cases.tiny("run.name=first", directory=str(tmp_path)))
    event = RunEnded(time=1.0, iteration=2, step=2, exit_code=0, reason="all steps done")
    rundir.append_line(run.events, event_json.to_json(event))
    changed = cases.tiny("run.name=first", "run.resume=changed", "run.seed=7", directory=str(tmp_path))
    before = run.config.read_bytes()
    for log in run.ledger, run.interventions, run.events:
        log.touch()
        log.chmod(0o444)
        problem = f"run.dir: cannot write {log}: Permission denied"
        with obeying_modes():
            with run_lease.holding():
                assert open_run(changed, cast(RunData, None)).problem == problem
            with pytest.raises(ConfigError, match=f"^{re.escape(problem)}$"):
                prepare_run(changed)
        log.chmod(0o644)
    assert run.config.read_bytes() == before
    assert not run.interventions.stat().st_size


@pytest.mark.parametrize(
    ("exit_code", "step", "line"),
    [
        (0, 2, ""),
        (0, 1, "no checkpoint of step 2 can be loaded; the run continues from step 1$"),
        (0, 0, "no checkpoint of step 2 can be loaded; the run starts over$"),
        (75, 1, ""),
    ],
)
def test_a_finished_run_that_trains_again_says_why(exit_code: int, step: int, line: str, tmp_path: Path) -> None:
    cfg = cases.tiny("run.name=first", "train.num_steps=2", directory=str(tmp_path))
    run = prepare_run(cfg)
    ended = RunEnded(time=1.0, iteration=2, step=2, exit_code=exit_code, reason="all steps done")
    rundir.append_line(run.events, event_json.to_json(ended))
    with run_lease.holding():
        opened = open_run(cfg, RunData(DataRecord(sizes=()), {}))
    found = explain_lost_end(opened, RunState(step=step), num_steps=cfg.train.num_steps)
    assert re.search(line, found) if line else not found


@pytest.mark.full
@pytest.mark.parametrize("is_accepted_by_launcher", [False, True])
def test_the_window_after_another_batch_size_survives_a_restart(
    is_accepted_by_launcher: bool, ranks: Pool, tmp_path: Path
) -> None:
    """The launcher of a Slurm job accepts the change before the ranks start."""
    overrides = ("run.name=changed", "run.resume=changed", "model.num_layers=1", "sentinel.planned_batches=5")
    for steps, size in (4, 8), (7, 16), (12, 16):
        start = *overrides, f"train.num_steps={steps}", f"train.batch_size={size}"
        if is_accepted_by_launcher:
            prepare_run(cases.tiny(*start, directory=str(tmp_path)))
        (code, records), *_ = ranks.run(1, cases.run, str(tmp_path), *start)
        assert code == 0
    assert [record.cursor for record in records if record.in_planned_change] == [4, 5, 6, 7, 8]


def test_a_start_that_is_rejected_after_the_run_was_opened_changes_nothing(ranks: Pool, tmp_path: Path) -> None:
    """The checkpoint tells: AdamW cannot continue with the state of Muon. A launcher that writes the config before the
    ranks load the checkpoint says so itself."""
    overrides = ("run.name=job-0", "model.num_layers=1", "train.num_steps=2", "optim.warmup_steps=1")
    run = rundir.RunDir(tmp_path / "job-0")

    def start(*more: str) -> cases.StartResult:
        first, second = ranks.run(2, cases.start_run, str(tmp_path), *overrides, *more)
        assert (first.code, first.problem) == (second.code, second.problem)
        return first  # type: ignore[no-any-return]

    assert start("optim=muon").code == 0
    files = (run.config, run.corpus, run.events)
    before = [path.read_bytes() for path in files]
    rejected = start("optim=adamw", "train.batch_size=16", "run.resume=changed")
    assert rejected.code == 2
    assert "has no state that AdamW could continue with" in rejected.problem
    assert [path.read_bytes() for path in files] == before
    assert not run.interventions.exists()
    unfitting = {
        ("optim=adamw",): r"optim\.kind: .*step-00000002-gen-0 is a checkpoint of Muon",
        ("optim=muon", "run.seed=7"): r"run\.seed: must stay 0 in this run, got 7",
    }
    for other, problem in unfitting.items():
        changed = [*overrides, *other, "run.resume=changed", "launch.nproc=1"]
        for prepare in (prepare_job_run, lambda cfg: prepare_node(cfg, SINGLE_NODE)):
            with pytest.raises(ConfigError, match=f"^{problem}"):
                prepare(cases.tiny(*changed, directory=str(tmp_path)))
        composed = ComposedJob(sweep=tmp_path, overrides={}, cfg=cases.tiny(*changed, directory=str(tmp_path)))
        ((job, _),) = name_jobs(tmp_path, [composed])
        assert re.match(problem, job.problem)
    assert [path.read_bytes() for path in files] == before
    assert not run.interventions.exists()
    assert start("optim=muon").code == 0
    assert start("optim=muon", "train.num_steps=3", "train.batch_size=16", "run.resume=changed").code == 0
    assert read(run.config).train.batch_size == 16
    [change] = interventions(run)
    assert change.changes["train.batch_size"] == [8, 16]


@pytest.mark.full
def test_fp16_begins_with_the_initial_loss_scale_after_another_precision(ranks: Pool, tmp_path: Path) -> None:
    overrides = ("run.name=changed", "run.resume=changed", "model.num_layers=1", "precision.initial_loss_scale=1024")
    interval, scales = "precision.loss_scale_growth_interval=3", []
    for steps, precision in (2, "bf16"), (4, "fp16"), (6, "fp16"), (7, "bf16"), (8, "fp16"):
        start = *overrides, interval, f"precision={precision}", f"train.num_steps={steps}"
        (code, records), *_ = ranks.run(1, cases.run, str(tmp_path), *start)
        assert code == 0
        scales = [record.loss_scale for record in records]
    assert scales == [None, None, 1024, 1024, 1024, 2048, None, 1024]


@pytest.mark.full
def test_killed_run_resumes_bit_identically(ranks: Pool, control: StepResults, tmp_path: Path) -> None:
    with launched(tmp_path) as process:
        wait_for_step(tmp_path, 4)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(timeout=200) == -signal.SIGKILL
    code, records = finish(ranks, tmp_path, 2)
    assert code == 0
    assert step_results(records) == control
    iterations = [record.iteration for record in records]
    assert iterations == sorted(set(iterations)), "iterations never go back"
    assert len(records) > len(control), "lost steps were repeated"


@pytest.mark.full
def test_stopped_run_saves_exits_75_and_resumes_bit_identically(
    ranks: Pool, control: StepResults, tmp_path: Path
) -> None:
    with launched(tmp_path) as process:
        wait_for_step(tmp_path, 4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == 75, process.stderr
    log = list(event_json.read(tmp_path / "victim" / "events.jsonl"))
    ended = log[-1]
    assert isinstance(ended, RunEnded)
    assert ended.exit_code == 75
    assert (tmp_path / "victim" / "checkpoints" / f"step-{ended.step:08d}-gen-0").is_dir()
    code, records = finish(ranks, tmp_path, 2)
    assert code == 0
    assert step_results(records) == control
    assert len(records) == len(control), "no step was repeated"
