"""Tests of jobs on a real Slurm: they run, stop in time, and are requeued when they should be.

Four jobs run at the same time in one cluster and are checked one after the other:
- *preempted*, 2 nodes: gets the signal before its time limit, saves, is requeued and ends bit-identically
- *sweep*, an array: one run is halted by the sentinel; one loses a rank to SIGKILL, which its launcher starts again,
  then the whole task, is requeued and finishes
- *cancelled*: scancel while it trains
- *plain*, 2 nodes with 2 ranks each: `sbatch slurm/train.sbatch` by hand
A run that must not end too early is paused by an operator command that is queued before its start.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.checkpoint import catalog
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.control import inbox
from harness.control.commands import Pause
from harness.core import event_json
from harness.core.events import EndCause, Intervention, RunEnded, RunRestarted, RunStarted, StepRecord
from harness.core.rundir import RunDir, locate
from launch.slurm import controller, job_directory, requeue, submit
from tests import composed
from tests.cluster import local_slurm
from tests.cluster.local_slurm import LocalSlurm, wait_until
from tests.distributed import cases
from tests.distributed.pool import Pool

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(local_slurm.reason_to_skip()), reason=local_slurm.reason_to_skip()),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).parents[2]
NUM_STEPS = 20
OVERRIDES = (
    *cases.TINY,
    "model.num_layers=1",
    f"train.num_steps={NUM_STEPS}",
    "checkpoint.every_steps=10",
    "checkpoint.good_after_steps=3",
    "launch.nproc=1",
    "launch.threads=1",
)
UNCHECKED = "launch.slurm.health=false"
LONG_MINUTES = 30
TIMEOUT_S = 300.0
"""Importing torch takes seconds, and many processes import it at once."""


class Cluster:
    """A Slurm cluster and the directory of its runs."""

    def __init__(self, slurm: LocalSlurm, runs: Path) -> None:
        self.slurm = slurm
        self.start_in(runs)

    def start_in(self, runs: Path) -> None:
        """Use this working directory, with stray modules that must not be imported. Jobs of another are cancelled."""
        self.slurm.command("scancel", "--user=root")
        self.runs = runs
        (runs / "harness").mkdir()
        (runs / "harness" / "__init__.py").write_text("raise SystemExit('this is not the code that was submitted')\n")
        os.chdir(runs)

    def config(self, name: str, *overrides: str) -> Config:
        return composed.load([*OVERRIDES, "launch=slurm", f"run.dir={self.runs}", f"run.name={name}", *overrides])

    def logs(self) -> str:
        """Logs of all jobs, for the message of a failed test."""
        paths = [*self.runs.glob("*/logs/*"), *self.runs.glob("slurm/*.log"), *self.runs.glob("*.log")]
        texts = {path: path.read_text(errors="replace") for path in paths if path.is_file()}
        return "\n".join(f"--- {path}\n{text[-4000:]}" for path, text in texts.items())

    def wait_until(self, ready: object, *, within_s: float = TIMEOUT_S) -> None:
        assert callable(ready)
        wait_until(ready, lambda: f"{self.slurm.command('squeue')}\n{self.logs()}", within_s=within_s)

    def show(self, job: str, name: str) -> str:
        lines = self.slurm.command("scontrol", "show", "job", "-o", job)
        return next(field for field in lines.split() if field.startswith(f"{name}=")).partition("=")[2]

    def wait(self, job: str) -> submit.FinishedJob:
        self.wait_until(lambda: not controller.queue_state(job))
        return submit.wait_for_job(job, poll_s=0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    slurm = LocalSlurm()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "HARNESS_"))]:
                patch.delenv(name)
            patch.setenv("SLURM_CONF", str(slurm.configuration))
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.chdir("/")
            slurm.start()
            yield Cluster(slurm, tmp_path_factory.mktemp("cluster"))
    finally:
        slurm.stop()
        assert not slurm.processes()


def create_paused_run(cfg: Config) -> RunDir:
    """Create a run that pauses at its first step."""
    run = job_directory.prepare_job_run(cfg)
    inbox.send(run, Pause(), who="the test", reason="wait for the test")
    return run


def pauses(run: RunDir) -> list[Intervention]:
    return [event for event in inbox.interventions(run) if "pause" in str(event.changes)]


def is_paused(run: RunDir) -> bool:
    return bool(pauses(run))


def losses(run: RunDir) -> dict[int, float]:
    return {event.step: event.loss for event in event_json.read(run.events) if isinstance(event, StepRecord)}


def run_ended(run: RunDir) -> RunEnded:
    *_, ended = (event for event in event_json.read(run.events) if isinstance(event, RunEnded))
    return ended


def ends(run: RunDir) -> list[tuple[int | None, bool, str]]:
    return [(end.exit_code, end.requeued, end.reason) for end in requeue.read_ends(run)]


@dataclass
class Jobs:
    """Number and run of each job."""

    preempted: tuple[str, RunDir]
    sweep: tuple[str, dict[str, RunDir]]
    cancelled: tuple[str, RunDir]
    plain: tuple[str, RunDir]


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """All jobs, submitted; the first one has just received the signal before its time limit. If that fails, it is done
    once more, with other runs."""
    cluster.start_in(tmp_path_factory.mktemp("jobs"))
    first, array, cancelled = submit_by_command(cluster), submit_array(cluster), submit_one(cluster)
    job, run = first
    cluster.wait_until(lambda: is_paused(run))
    began_s = next(event.time for event in event_json.read(run.events) if isinstance(event, RunStarted))
    minutes = int(time.time() - began_s) // 60 + 2
    cluster.slurm.command("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    plain = submit_plain(cluster)
    cluster.wait_until(lambda: "near its time limit" in (run.logs / f"slurm-{job}.log").read_text())
    cluster.slurm.command("scontrol", "update", f"JobId={job}", f"TimeLimit={LONG_MINUTES}")
    return Jobs(first, array, cancelled, plain)


def submit_by_command(cluster: Cluster) -> tuple[str, RunDir]:
    """Submit on two nodes with the command line, with a run name that needs quoting."""
    name = 'two nodes, "it\'s #1"'
    escaped = name.replace("'", "\\'")
    overrides = [
        "launch.nodes=2",
        "launch.min_nodes=1",
        f"launch.slurm.time_minutes={LONG_MINUTES}",
        "launch.slurm.warn_s=120",
    ]
    run = create_paused_run(cluster.config(f"'{escaped}'", *overrides))
    assert run.path.name == name
    code = "import sys; from launch.cli.main import main; sys.exit(main())"
    chosen = [*OVERRIDES, "launch=slurm", f"run.dir={cluster.runs}", f"run.name='{escaped}'", *overrides]
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", code, "train", *chosen]
    submitted = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert submitted.returncode == 0, submitted.stderr
    job_record = job_directory.read_job(run)
    assert job_record is not None
    assert submitted.stdout.splitlines()[0] == f"job {job_record.job}: {run.path}"
    assert f"tail -F {shlex.quote(str(run.logs / f'slurm-{job_record.job}.log'))}" in submitted.stdout
    return job_record.job, run


def submit_array(cluster: Cluster) -> tuple[str, dict[str, RunDir]]:
    halting = ("optim.lr=1e30", "optim.warmup_steps=0", "sentinel.halt_after_refused=5")
    cfgs = [
        cluster.config("halted", UNCHECKED, *halting, "sentinel.policy.refused_in_row=9"),
        cluster.config("killed", UNCHECKED),
    ]
    create_paused_run(cfgs[-1])
    return submit.submit_array(cfgs, cluster.runs), {str(cfg.run.name): locate(cfg) for cfg in cfgs}


def submit_one(cluster: Cluster) -> tuple[str, RunDir]:
    cfg = cluster.config("cancelled", UNCHECKED)
    run = create_paused_run(cfg)
    job = submit.submit_run(cfg)
    with pytest.raises(ConfigError, match=f"run.name: job {job} of this run is [a-z]+; scancel {job} first"):
        submit.submit_run(cfg)
    return job, run


def submit_plain(cluster: Cluster) -> tuple[str, RunDir]:
    """Submit by hand, from a checkout."""
    script, log = ROOT / "slurm" / "train.sbatch", cluster.runs / "plain.log"
    args = [*OVERRIDES, "launch.nproc=2", "train.num_steps=4", "checkpoint.every_steps=0"]
    args += [f"run.dir={cluster.runs}", "run.name=plain"]
    command = ["sbatch", "--parsable", "--nodes=2", f"--output={log}", str(script), *args]
    environment = cluster.slurm.environment | {"HARNESS_PYTHON": sys.executable, "HARNESS_HEALTH": "false"}
    submitted = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return submitted.stdout.strip(), RunDir(cluster.runs / "plain")


def test_scancel_saves_and_does_not_requeue(jobs: Jobs, cluster: Cluster) -> None:
    job, run = jobs.cancelled
    cluster.wait_until(lambda: is_paused(run))
    cluster.slurm.command("scancel", job)
    assert cluster.wait(job).state == "CANCELLED"
    assert ends(run) == [(75, False, "ended by scancel or by another requeue")]
    assert cluster.show(job, "Restarts") == "0"
    assert run_ended(run).exit_code == 75
    assert [checkpoint.step for checkpoint in catalog.list_checkpoints(run.checkpoints)] == [run_ended(run).step]


def test_a_killed_task_is_requeued_and_a_halted_run_is_not(jobs: Jobs, cluster: Cluster) -> None:
    job, runs = jobs.sweep
    killed = runs["killed"]
    cluster.wait_until(lambda: is_paused(killed))
    (pid_file,) = killed.logs.glob("*/rank-0.pid")
    os.kill(int(pid_file.read_text()), signal.SIGKILL)  # a rank: its launcher starts it again, in the same job
    inbox.send(killed, Pause(), who="the test", reason="wait for the test")
    cluster.wait_until(lambda: len(pauses(killed)) == 2)
    (restarted,) = (event for event in event_json.read(killed.events) if isinstance(event, RunRestarted))
    assert restarted.cause == EndCause.killed_rank
    assert ends(killed) == [], "no requeue"
    os.kill(agent_of(cluster, killed), signal.SIGKILL)
    assert cluster.wait(job) == ("FAILED", 3), "the worst exit code of an array"
    assert ends(runs["halted"]) == [(3, False, "halted by the sentinel")]
    assert ends(killed) == [(137, True, "crashed with exit code 137"), (0, False, "all steps done")]
    assert run_ended(runs["halted"]).exit_code == 3
    assert sorted(losses(killed)) == list(range(1, NUM_STEPS + 1))
    assert [requeue.read_ends(run)[0].job for run in runs.values()] == [f"{job}_{index}" for index in range(2)]


def agent_of(cluster: Cluster, run: RunDir) -> int:
    """Pid of the task that Slurm started for a run; its ranks have the same command line and other names."""
    arguments = f"launch.local.node\0{run.path.resolve()}\0".encode()
    agents = [pid for pid in cluster.slurm.processes() if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(arguments)]
    (pid,) = (pid for pid in agents if not Path(f"/proc/{pid}/comm").read_text().startswith(("srun", "rank-")))
    return pid


def test_a_job_stops_before_its_time_limit_and_continues_bit_identically(
    jobs: Jobs, cluster: Cluster, ranks: Pool, tmp_path: Path
) -> None:
    job, run = jobs.preempted
    assert cluster.wait(job) == ("COMPLETED", 0)
    assert ends(run) == [(75, True, "interrupted, resumable"), (0, False, "all steps done")]
    assert cluster.show(job, "Restarts") == "1", "the same job"
    starts = [event for event in event_json.read(run.events) if isinstance(event, RunStarted)]
    assert [start.world_size for start in starts] == [2, 2]
    assert starts[1].resumed_from is not None
    stops = [event for event in inbox.interventions(run) if "stop" in event.changes]
    assert [(stop.who, stop.reason) for stop in stops] == [("slurm", f"job {job} is near its time limit")]
    text = (run.logs / f"slurm-{job}.log").read_text()
    assert text.count("health: 2 nodes, clocks within") == 2, text
    assert text.count(f"harness: job {job}, start") == 2, "both starts write one log"

    overrides = (*OVERRIDES, "checkpoint.every_steps=0", "run.name=control")
    (control, _) = ranks.run(2, cases.run, str(tmp_path), *overrides)
    assert losses(run) == {record.step: record.loss for record in control[1]}


def test_plain_sbatch_on_two_nodes_with_two_ranks_each(jobs: Jobs, cluster: Cluster) -> None:
    job, run = jobs.plain
    assert cluster.wait(job) == ("COMPLETED", 0), cluster.logs()
    (start,) = (event for event in event_json.read(run.events) if isinstance(event, RunStarted))
    assert start.world_size == 4
    assert sorted(losses(run)) == [1, 2, 3, 4]
    job_record = job_directory.read_job(run)
    assert job_record is not None
    assert (Path(job_record.code) / "harness" / "train.py").read_bytes() == (ROOT / "harness" / "train.py").read_bytes()
    assert Path(job_record.code).is_relative_to(run.path)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_an_unhealthy_node_is_reported_before_the_run_starts(cluster: Cluster) -> None:
    cfg = cluster.config("sick", "parallel.device=cuda", "launch.slurm.max_requeues=0")
    job = submit.submit_run(cfg)
    assert cluster.wait(job) == ("FAILED", 69)
    run = locate(cfg)
    assert ends(run) == [(69, False, "launch.slurm.max_requeues=0 allows no requeue")]
    log = (run.logs / f"slurm-{job}.log").read_text()
    assert re.search(r"^harness: health: node n\d: has 0 GPUs, expected 1$", log, re.MULTILINE), log
    assert not run.events.exists()


def test_a_job_that_slurm_rejects_is_one_line_and_leaves_no_files(cluster: Cluster) -> None:
    cfg = cluster.config("refused", "launch.slurm.partition=nowhere")
    with pytest.raises(ConfigError, match=r"launch\.slurm: sbatch: .*invalid partition") as refused:
        submit.submit_run(cfg)
    assert "\n" not in str(refused.value)
    assert not locate(cfg).path.exists()
