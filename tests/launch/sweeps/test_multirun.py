"""Sweeps end to end: concurrent jobs, one that fails, one that is stopped, and a rerun of the same command."""

from __future__ import annotations

import signal
import subprocess
import time
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from harness.analysis.sweeps import sweep_record
from harness.config import compose
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core.event_json import read, to_json
from harness.core.events import RunEnded, RunStarted, StepRecord
from harness.core.locking import directory_lease, lease_holder
from harness.core.rundir import RunDir
from harness.telemetry.event_log import prepare_run
from launch.cli import sweep as sweep_command
from launch.sweeps import jobs, multirun, scheduler
from launch.sweeps.jobs import ComposedJob, JobState
from launch.sweeps.scheduler import ResourceSlot, split_machine
from tests import composed, forked_launchers
from tests.forks import Launched
from tests.full_disk import fill, may_mount, small_disk
from tests.launch.cli.test_main import TINY
from tests.slow_steps import slow_steps

pytestmark = pytest.mark.full

PATIENCE_S = 240.0
GPUS = [str(number) for number in range(8)]


def starts(run: Path) -> int:
    return sum(isinstance(event, RunStarted) for event in read(run / "events.jsonl"))


def test_a_failed_job_does_not_stop_the_sweep_and_a_rerun_completes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        "--multirun",
        *TINY,
        "eval.every_steps=1",
        "launch.at_once=2",
        "run.name=sweep",
        "optim.lr=-1,1e-3,2e-3",
    ]
    sweep = tmp_path / "runs" / "sweep"
    blocker = sweep / "optim.lr=0.002" / "manifest.json"
    blocker.mkdir(parents=True)

    result = forked_launchers.harness("train", *overrides, cwd=tmp_path, within_s=PATIENCE_S)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr == "harness: job 0 (optim.lr=-1): optim.lr: must be positive, got -1.0\n"
    lines = result.stdout.splitlines()
    assert lines[0] == "sweep runs/sweep: 2 of 2 jobs to run, 2 at once"
    assert [line[:12] for line in lines[1:3]] == ["[2/3] start ", "[3/3] start "]
    assert any(line.startswith("[3/3] crashed in ") for line in lines)
    assert lines[-3] in ("1 done, 1 crashed, 1 rejected", "1 crashed, 1 done, 1 rejected")
    assert lines[-2] == "report  harness sweep report runs/sweep"
    assert lines[-1].startswith("resume  harness train --multirun ")
    names = ["optim.lr=0.001", "optim.lr=0.002"]
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == names
    assert "IsADirectoryError" in (sweep / "optim.lr=0.002" / "logs" / "console.txt").read_text()
    for name in names:
        saved = yaml.safe_load((sweep / name / "config.yaml").read_text())
        assert f"optim.lr={saved['optim']['lr']}" == name
        assert saved["telemetry"]["tracking_uri"] == f"sqlite:///{tmp_path}/runs/mlflow.db"

    blocker.rmdir()
    result = forked_launchers.harness("train", *overrides, cwd=tmp_path, within_s=PATIENCE_S)
    assert result.returncode == 2, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "sweep runs/sweep: 1 of 2 jobs to run, 1 finished before, 1 at once"
    assert lines[1] == "[3/3] resume  optim.lr=0.002"
    assert lines[-2] == "1 done, 1 rejected"
    assert [starts(sweep / name) for name in names] == [1, 1]
    for name in names:
        *_, last = read(sweep / name / "events.jsonl")
        assert isinstance(last, RunEnded)
        assert last.exit_code == 0

    assert sweep_command.main(["report", str(sweep)]) == 0
    printed = capsys.readouterr().out
    assert "sweep: 2 jobs by held-out loss\n" in printed
    assert printed.count("done (0)") == 2
    best = f"harness train {' '.join([*TINY, 'eval.every_steps=1'])} optim.lr=0.00"
    assert best in printed
    assert (sweep / "report-optim.lr.png").exists()


def fork_slow_launchers() -> None:
    forked_launchers.fork_launchers()
    slow_steps(0.1)


def test_a_sweep_that_is_stopped(tmp_path: Path) -> None:
    overrides = [*TINY, "telemetry.postmortem=no", "train.num_steps=1000000", "launch.at_once=1", "run.name=long"]
    overrides.append("optim.lr=1e-3,2e-3")
    first = tmp_path / "runs" / "long" / "optim.lr=0.001"
    arguments = ("train", "--multirun", *overrides)
    with Launched(
        "launch.cli.main", *arguments, output=tmp_path / "output", first=fork_slow_launchers, cwd=tmp_path
    ) as process:
        deadline_s = time.monotonic() + PATIENCE_S
        while not (first / "events.jsonl").exists() or not any(
            isinstance(event, StepRecord) for event in read(first / "events.jsonl")
        ):
            assert process.poll() is None, process.stderr
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        refused = forked_launchers.harness(*arguments, cwd=tmp_path, within_s=PATIENCE_S)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert (
            refused.stderr
            == "harness: run.name: runs/long is being swept, or one of its jobs still runs; wait, or stop it\n"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 75, process.stderr
        printed = process.stdout
    assert "\n1 interrupted, 1 not started\n" in printed
    assert printed.splitlines()[-1].startswith("resume  harness train --multirun ")
    *_, last = read(first / "events.jsonl")
    assert isinstance(last, RunEnded)
    assert last.exit_code == 75
    assert list((first / "checkpoints").glob("step-*"))
    assert not (tmp_path / "runs" / "long" / "optim.lr=0.002" / "events.jsonl").exists()


@cache
def load_config(overrides: tuple[str, ...]) -> Config:
    return composed.load([*TINY, *overrides])


def config(*overrides: str) -> Config:
    """A copy that the test may change."""
    return deepcopy(load_config(overrides))


def write_log(run: RunDir, exit_code: int | None, *, step: int = 2) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    events = [RunStarted(time=0.0, iteration=0, world_size=1, num_steps=2, step=0)]
    ended = [] if exit_code is None else [RunEnded(time=0.0, iteration=step, step=step, exit_code=exit_code, reason="")]
    run.events.write_text("".join(f"{to_json(event)}\n" for event in [*events, *ended]))


@pytest.mark.parametrize(
    ("exit_code", "step", "overrides", "state"),
    [
        (0, 2, [], JobState.finished),
        (0, 1, [], JobState.pending),
        (75, 1, [], JobState.pending),
        (1, 1, [], JobState.pending),
        (None, 1, [], JobState.pending),
        (3, 1, [], JobState.halted),
        (3, 1, ["run.resume=changed"], JobState.pending),
    ],
)
def test_state_of_a_job(
    exit_code: int | None, step: int, overrides: list[str], state: JobState, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    assert jobs.find_job_state(run, config(*overrides)) is JobState.pending
    write_log(run, exit_code, step=step)
    assert jobs.find_job_state(run, config(*overrides)) is state


def compose_job(cfg: Config | None, problem: str = "", **overrides: str) -> ComposedJob:
    swept = {key.replace("__", "."): value for key, value in overrides.items()}
    return ComposedJob(sweep=Path("runs/s"), overrides=swept, cfg=cfg, problem=problem)


def test_jobs_get_distinct_names(tmp_path: Path) -> None:
    long = "x" * 200
    composed_jobs = [
        compose_job(config(), data__path="a/b"),
        compose_job(config(), data__path="a b"),
        compose_job(config(), data__path="a/b"),
        compose_job(config(), data__path=long),
        compose_job(None, "no good", data__path="c"),
        compose_job(config("train.batch_size=1", "launch.nproc=2"), data__path="d"),
    ]
    named_jobs = jobs.name_jobs(tmp_path, composed_jobs)
    names = [job.name for job, _ in named_jobs]
    assert names[0] == "data.path=a-b"
    assert names[1].startswith("job-")
    assert names[2].startswith("job-")
    assert names[1] != names[2]
    assert names == [job.name for job, _ in jobs.name_jobs(tmp_path, composed_jobs)]
    assert [job.problem for job, _ in named_jobs[:3]] == ["", "", ""]
    assert [(job.problem, cfg) for job, cfg in named_jobs[3:]] == [
        ("no good", None),
        ("train.batch_size: must be at least the number of ranks (2), one sequence per rank, got 1", None),
    ]
    first = named_jobs[0][1]
    assert first is not None
    assert (first.run.dir, first.run.name) == (str(tmp_path), "data.path=a-b")
    assert [job.name for job, _ in jobs.name_jobs(tmp_path, [compose_job(config())])] == ["job-0"]


def test_another_config_under_the_same_name_is_rejected(tmp_path: Path) -> None:
    ((_, cfg),) = jobs.name_jobs(tmp_path, [compose_job(config("optim.lr=1"), optim__lr="1")])
    assert cfg is not None
    write_log(prepare_run(cfg), 75)
    ((job, _),) = jobs.name_jobs(tmp_path, [compose_job(config("optim.lr=1", "run.seed=7"), optim__lr="1")])
    assert "has another configuration: run.seed was 0, is 7" in job.problem
    ((job, cfg),) = jobs.name_jobs(
        tmp_path, [compose_job(config("optim.lr=1", "run.seed=7", "run.resume=changed"), optim__lr="1")]
    )
    assert (job.problem, cfg is None) == ("", False)
    assert cfg is not None
    run = prepare_run(cfg)
    assert '"run.seed":[0,7]' in run.interventions.read_text()
    assert '"run.seed":[0,7]' in run.events.read_text()
    assert compose.read(run.config).run.seed == 7


def test_a_finished_job_keeps_the_settings_that_it_was_trained_with(tmp_path: Path) -> None:
    for lr in ("1", "2"):
        write_log(RunDir(tmp_path / f"optim.lr={lr}"), 0, step=config().train.num_steps)
    for decay in ("0.1", "0.3"):
        overrides = [f"optim.weight_decay={decay}", "run.resume=changed"]
        swept = [compose_job(config(*overrides, f"optim.lr={lr}"), optim__lr=lr) for lr in ("1", "2")]
        assert multirun.run_sweep(tmp_path, swept, overrides) == 0
    assert [each.fixed[0] for each in sweep_record.read(tmp_path).jobs] == ["optim.weight_decay=0.1"] * 2


@pytest.mark.parametrize(
    ("overrides", "num_cores", "gpus", "expected"),
    [
        ([], 2, [], [ResourceSlot(threads=1)] * 2),
        ([], 16, [], [ResourceSlot(threads=4)] * 4),
        (["launch.threads=8"], 16, [], [ResourceSlot(threads=8)] * 2),
        (["launch.nproc=32"], 16, [], [ResourceSlot(threads=1)]),
        (["launch.at_once=3"], 2, [], [ResourceSlot(threads=1)] * 3),
        (["launch.at_once=9"], 2, [], [ResourceSlot(threads=1)] * 4),
        (["launch.nproc=4"], 32, GPUS, [ResourceSlot(threads=2)] * 4),
    ],
)
def test_cores_are_divided(overrides: list[str], num_cores: int, gpus: list[str], expected: list[ResourceSlot]) -> None:
    cfgs = [config("launch.threads=null", *overrides)] * 4
    assert split_machine(cfgs, num_cores=num_cores, gpus=gpus) == expected


@pytest.mark.parametrize(
    ("overrides", "gpus", "expected"),
    [
        (["launch.nproc=4"], GPUS, ["0,1,2,3", "4,5,6,7"]),
        (["launch.nproc=3"], GPUS, ["0,1,2", "3,4,5"]),
        (["launch.nproc=4", "launch.ranks_per_gpu=2"], GPUS[:4], ["0,1", "2,3"]),
        (["launch.nproc=8", "launch.ranks_per_gpu=8"], GPUS[:2], ["0", "1"]),
        (["launch.nproc=null"], GPUS, ["0,1,2,3,4,5,6,7"]),
        (["launch.nproc=8", "launch.at_once=2"], GPUS, ["0,1,2,3,4,5,6,7"] * 2),
        (["launch.nproc=1"], ["GPU-a", "GPU-b"], ["GPU-a", "GPU-b"]),
    ],
)
def test_gpus_are_divided(
    overrides: list[str], gpus: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shared = split_machine([config("parallel.device=auto", *overrides)] * 9, num_cores=16, gpus=gpus)
    assert [slot.environment()["CUDA_VISIBLE_DEVICES"] for slot in shared] == expected
    assert {slot.environment()["OMP_NUM_THREADS"] for slot in shared} == {str(shared[0].threads)}


def test_exit_codes_of_jobs_and_sweeps() -> None:
    assert [scheduler.job_exit_code(code, is_stopping=False) for code in (0, 3, 75, -9)] == [0, 3, 75, 1]
    assert scheduler.job_exit_code(-15, is_stopping=True) == 75
    assert multirun.worst_exit_code([0, 75, 3]) == 3
    assert multirun.worst_exit_code([0, 75, 1, 139]) == 1
    assert multirun.worst_exit_code([]) == 0


def test_one_launcher_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"^run\.name: .* is being swept")
    with scheduler.lock_sweep(tmp_path), refused, scheduler.lock_sweep(tmp_path):
        pass
    with scheduler.lock_sweep(tmp_path):
        pass


def test_shared_overrides_and_resume_arguments() -> None:
    overrides = [
        "-m",
        "model=tiny",
        "run.name=x",
        "optim.lr=1,2",
        "launch.at_once=2",
        "hydra.job.name=y",
        "+sweep=lr_mup",
    ]
    (job, _), *_ = jobs.name_jobs(Path("runs/s"), [compose_job(config(), optim__lr="1")])
    assert multirun.shared_overrides(overrides, job) == ["model=tiny", "+sweep=lr_mup"]
    assert multirun.resume_arguments(["-m", "a=1,2"], "sweep-1") == ["-m", "a=1,2", "run.name=sweep-1"]
    assert multirun.resume_arguments(overrides, "x") == overrides


def test_an_invalid_sweep_leaves_nothing_on_disk(tmp_path: Path) -> None:
    arguments = ("train", "--multirun", *TINY, "run.name=no", "optim.lr=-1,-2")
    result = forked_launchers.harness(*arguments, cwd=tmp_path, within_s=PATIENCE_S)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 2
    assert not (tmp_path / "runs").exists()
    arguments = ("train", *TINY, "+sweep=beta2_clip_wd", "optim.clip_norm=1")
    preset = forked_launchers.harness(*arguments, cwd=tmp_path, within_s=PATIENCE_S)
    assert preset.returncode == 2
    assert preset.stderr == ("harness: sweep: needs --multirun, or one value for optim.beta2, optim.weight_decay\n")


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["run.name=no", "optim.betta2=0.9,0.95"], "harness: optim.betta2: no such key; optim has "),
        (["run.name=a/b", "optim.lr=1,2"], "harness: job 0 (optim.lr=1): run.name: must be a directory name without /"),
        (["run.name=na,nb"], "harness: run.name: cannot be swept: all jobs of a sweep are in one directory"),
        (["run.dir=da,db"], "harness: run.dir: cannot be swept: all jobs of a sweep are in one directory"),
        (["run.dir=file/below", "optim.lr=1,2"], "harness: run.dir: cannot create file/below"),
    ],
)
def test_a_sweep_that_cannot_be_one_leaves_nothing_on_disk(tmp_path: Path, overrides: list[str], error: str) -> None:
    (tmp_path / "file").write_text("")
    result = forked_launchers.harness("train", "--multirun", *TINY, *overrides, cwd=tmp_path, within_s=PATIENCE_S)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(error), result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_sweep_is_not_mixed_with_a_run(tmp_path: Path) -> None:
    run = prepare_run(composed.load([*TINY, f"run.dir={tmp_path}/runs", "run.name=a"]))
    before = {path: path.is_file() and path.read_bytes() for path in run.path.rglob("*")}
    arguments = ("train", "--multirun", *TINY, "run.name=a", "optim.lr=1e-3,2e-3")
    result = forked_launchers.harness(*arguments, cwd=tmp_path, within_s=PATIENCE_S)
    error = "harness: run.name: runs/a is the directory of a run; choose another name for the sweep\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", error)
    assert {path: path.is_file() and path.read_bytes() for path in run.path.rglob("*")} == before


def test_a_slurm_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The output and the files; tests/cluster runs a real array."""
    monkeypatch.setenv("PATH", "")
    directory = tmp_path / "s"

    def sweep(*overrides: str) -> int:
        directory.mkdir(exist_ok=True)
        (directory / "multirun.yaml").write_text("by Hydra")
        accepted = [compose_job(config(*overrides, f"optim.lr={lr}"), optim__lr=lr) for lr in ("1", "2")]
        return multirun.run_sweep(directory, [*accepted, compose_job(None, "no", optim__lr="-1")], list(overrides))

    assert sweep("launch=slurm", "launch.dry_run=true", "launch.at_once=1") == 2
    printed = capsys.readouterr()
    assert "#SBATCH --array=0-1%1\n" in printed.out
    assert printed.err == "harness: job 2 (optim.lr=-1): no\n"
    assert not directory.exists()
    assert sweep("launch=slurm") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("harness: launch: sbatch is not on this machine; ")
    assert not directory.exists()
    slow = compose_job(config("launch=slurm", "launch.dry_run=true", "launch.slurm.time_minutes=9"), optim__lr="3")
    first = compose_job(config("launch=slurm", "launch.dry_run=true"), optim__lr="4")
    assert multirun.run_sweep(directory, [first, slow], []) == 2
    line = "harness: launch.slurm.time_minutes: is None in job 0 and 9 in job 1, "
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)
    assert multirun.run_sweep(directory, [first, compose_job(config(), optim__lr="5")], []) == 2
    line = "harness: launch: cannot be swept: one launcher starts all jobs of a sweep; give one value"
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert multirun.run_sweep(directory, [compose_job(config(), **{"++run__name": "aa"})], []) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("harness: run.name: cannot be swept: ")
    assert sweep("launch.dry_run=true") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("harness: launch.dry_run: is for launch=slurm; ")
    assert not directory.exists()
    assert multirun.render_submitted(Path("runs/it is"), "7").splitlines() == [
        "job 7: runs/it is",
        "  logs    runs/it is/slurm/slurm-7_*.log",
        "  report  harness sweep report 'runs/it is'",
        "  cancel  scancel 7",
    ]


def test_a_dry_run_with_nothing_left_to_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config("launch=slurm", "launch.dry_run=true", "optim.lr=1")
    write_log(RunDir(tmp_path / "s" / "optim.lr=1"), 0, step=cfg.train.num_steps)
    assert multirun.run_sweep(tmp_path / "s", [compose_job(cfg, optim__lr="1")], []) == 0
    assert capsys.readouterr().out == f"sweep {tmp_path}/s: 0 of 1 jobs to run, 1 finished before\n"
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["optim.lr=1"]


def test_a_job_that_another_process_runs_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "s"
    held = RunDir(sweep / "optim.lr=1")
    held.path.mkdir(parents=True)
    with subprocess.Popen(["sleep", "300"]) as other:
        start = lease_holder.start_of(other.pid)
        assert start is not None
        holder = replace(lease_holder.this_process(), pid=other.pid, started=start)
        lease = directory_lease.acquire(held.lease, holder, on_lost=lambda _: None)
        try:
            cfgs = {lr: config(f"optim.lr={lr}") for lr in ("1", "1e-3")}
            swept = [compose_job(cfg, optim__lr=lr) for lr, cfg in cfgs.items()]
            assert multirun.run_sweep(sweep, swept, []) == 2
            alone = multirun.run_sweep(sweep, swept[:1], [])
        finally:
            other.kill()
        lease.release()
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    refused = f"harness: job 0 (optim.lr=1): run.name: {held.path} is in use by pid {other.pid} on "
    assert (alone, [line.startswith(refused) for line in lines]) == (2, [True, True]), lines
    assert "\n1 done, 1 rejected\n" in printed.out
    assert jobs.find_job_state(RunDir(sweep / "optim.lr=1e-3"), cfgs["1e-3"]) is JobState.finished
    assert not held.config.exists()


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_sweep_on_a_full_disk_is_one_line_and_75(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        assert multirun.run_sweep(disk, [compose_job(config(), optim__lr="1")], []) == 75
    assert capsys.readouterr().err == f"harness: {disk}: cannot write it: No space left on device\n"
