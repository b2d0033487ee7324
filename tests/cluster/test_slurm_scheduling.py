"""Tests of a real Slurm that allocates nodes one by one: waiting array tasks, nodes that fail their health check, and a
spare node that replaces one that died.

Most tasks train nothing: a stand-in for Python records its arguments and runs only the launcher's own commands.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness.config.schema import Config
from harness.core import event_json
from harness.core.events import Event, RunRestarted, RunStarted, StepRecord
from harness.core.rundir import RunDir, locate
from launch.cli import status
from launch.slurm import controller, requeue, submit
from tests import composed
from tests.cluster import local_slurm
from tests.cluster.local_slurm import LocalSlurm, wait_until
from tests.distributed import cases

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(local_slurm.reason_to_skip()), reason=local_slurm.reason_to_skip()),
    pytest.mark.timeout(900),
]

TIMEOUT_S = 300.0
PYTHON = """\
#!/bin/bash
echo "$SLURMD_NODENAME $*" >> {calls}
case "$2" in
    launch.local.node) case "$3" in
        */a) exit 2 ;;
        */b) while [[ ! -e {go} ]]; do sleep 0.1; done ;;
    esac ;;
    *) exec {python} "$@" ;;
esac
"""
NVIDIA_SMI = """\
#!/bin/bash
[[ $SLURMD_NODENAME != n1 ]] || echo "0, 81000, 81559, 2"
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSlurm]:
    slurm = LocalSlurm()
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "HARNESS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(slurm.configuration))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def config(directory: Path, name: str, *overrides: str) -> Config:
    fixed = ["launch=slurm", "launch.nproc=1", "launch.threads=1", f"run.dir={directory}", f"run.name={name}"]
    return composed.load([*cases.TINY, *fixed, *overrides])


def wait(slurm: LocalSlurm, *jobs: str) -> list[submit.FinishedJob]:
    def logs() -> str:
        paths = [*Path.cwd().rglob("slurm-*.log"), *Path.cwd().rglob("rank-*")]
        texts = [f"--- {path}\n{path.read_text()[-3000:]}" for path in paths]
        return "\n".join([slurm.command("squeue"), *texts])

    wait_until(lambda: not any(controller.queue_state(job) for job in jobs), logs, within_s=TIMEOUT_S)
    return [submit.wait_for_job(job, poll_s=0.1) for job in jobs]


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_waiting_task_uses_the_arguments_it_was_submitted_with(
    slurm: LocalSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, go = tmp_path / "calls", tmp_path / "go"
    python = executable(tmp_path / "bin" / "python", PYTHON.format(calls=calls, go=go, python=sys.executable))
    monkeypatch.setattr(sys, "executable", str(python))
    sweep = tmp_path / "sweep"
    overrides = ("launch.at_once=1", "launch.slurm.health=false")
    cfgs = {name: config(sweep, name, *overrides) for name in "abc"}

    first = submit.submit_array(list(cfgs.values()), sweep)
    wait_until(
        lambda: calls.exists() and f"launch.local.node {sweep}/b" in calls.read_text(),
        lambda: slurm.command("squeue"),
        within_s=TIMEOUT_S,
    )
    assert [controller.queue_state(f"{first}_{task}") for task in range(3)] == ["", "running", "pending"]
    second = submit.submit_array([cfgs["a"]], sweep)
    go.touch()
    assert wait(slurm, first, second) == [("FAILED", 2), ("FAILED", 2)]

    started = [line.split()[-2:] for line in calls.read_text().splitlines() if "launch.slurm.requeue begin" in line]
    tasks = {task: Path(run).name for run, task in started}
    assert tasks == {f"{first}_0": "a", f"{first}_1": "b", f"{first}_2": "c", f"{second}_0": "a"}
    ends = {name: [(end.job, end.requeued) for end in requeue.read_ends(RunDir(sweep / name))] for name in "abc"}
    assert ends["a"] == [(f"{first}_0", False), (f"{second}_0", False)], "2 is not requeued"
    assert ends["c"] == [(f"{first}_2", False)]


def test_a_node_that_failed_twice_is_excluded(
    slurm: LocalSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executable(tmp_path / "bin" / "nvidia-smi", NVIDIA_SMI)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    cfg = config(tmp_path, "run", "train.num_steps=2", "checkpoint.every_steps=0", "launch.slurm.max_stalled=1")
    job = submit.submit_run(cfg)
    assert wait(slurm, job) == [("COMPLETED", 0)]
    run = locate(cfg)
    ends = requeue.read_ends(run)
    assert [(end.exit_code, end.requeued) for end in ends] == [(69, True), (69, True), (0, False)]
    fault = {"n1": "GPU 0 has 2 uncorrected ECC errors"}
    assert [dict(end.unhealthy) for end in ends] == [fault, fault, {}]
    assert [[exclusion.node for exclusion in end.excluded] for end in ends] == [[], ["n1"], ["n1"]]
    (start,) = (event for event in event_json.read(run.events) if isinstance(event, RunStarted))
    assert start.world_size == 1
    shown = slurm.command("scontrol", "show", "job", "-o", job).split()
    assert {"ExcNodeList=n1", "Restarts=2"} <= set(shown)
    assert "NodeList=n1" not in shown
    assert status.main([str(run.path)]) == 0
    assert "node n1 is excluded until " in capsys.readouterr().out


def test_a_spare_node_replaces_one_that_died_and_the_job_goes_on(slurm: LocalSlurm, tmp_path: Path) -> None:
    """The launcher and the ranks of the first node are killed: the second coordinates the run, and srun neither ends
    the job nor decides its exit code. The script of the job, which runs on the first node, goes on."""
    overrides = ("launch.nodes=2", "launch.spares=1", "train.num_steps=100000", "optim.schedule=constant")
    cfg = config(tmp_path, "run", *overrides, "launch.slurm.health=false", "checkpoint.every_steps=10")
    run = locate(cfg)
    job = submit.submit_run(cfg)

    def seen(kind: type[Event]) -> list[Event]:
        return (
            [event for event in event_json.read(run.events) if isinstance(event, kind)] if run.events.exists() else []
        )

    def logs() -> str:
        return "\n".join(path.read_text() for path in run.logs.glob("slurm-*.log"))

    wait_until(lambda: len(seen(StepRecord)) > 15, logs, within_s=TIMEOUT_S)
    lost = [pid for pid in slurm.processes() if is_launcher_on_node(pid, "n1")]
    for pid in lost:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(seen(RunStarted)) == 2, logs, within_s=TIMEOUT_S)
    (restarted,) = seen(RunRestarted)
    assert isinstance(restarted, RunRestarted)
    assert (restarted.replaced_by, restarted.num_nodes) == ({"n1": "n3"}, 2), restarted
    run.stop.touch()
    assert wait(slurm, job) == [("FAILED", 75)], "stopped by a person: resumable, not requeued"
    (end,) = requeue.read_ends(run)
    assert (end.exit_code, end.requeued) == (75, False)
    assert [(exclusion.node, exclusion.kind) for exclusion in end.excluded] == [("n1", "lost")]


def is_launcher_on_node(pid: int, node: str) -> bool:
    """Whether a process is the launcher of this node or one of its ranks; srun is not."""
    with suppress(OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        program = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
        is_here = f"SLURMD_NODENAME={node}".encode() in environment and b"HARNESS_EXIT_FILE" in b"".join(environment)
        return is_here and b"python" in program
    return False
