"""The script of a job, run by bash with stand-ins for Slurm and Python: what it calls, in which order; its exit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from launch.slurm import code_snapshot

PYTHON = """\
#!/bin/bash
echo "python $*" >> "$CALLS"
case "$2 $3" in
    "launch.slurm.requeue begin") [[ -z ${SLOW:-} ]] || sleep "$SLOW"; exit "${BEGIN:-0}" ;;
    "launch.slurm.requeue end") cp "$7" "$CALLS.complaints" 2> /dev/null; printf %s "${UPDATE:-}"; exit "${END:-1}" ;;
    launch.slurm.node_health*) echo "harness: health: node n1: broken" >&2; exit "${HEALTH:-0}" ;;
    launch.local.node*) exit "${NODE:-0}" ;;
esac
"""
SRUN = """\
#!/bin/bash
echo "srun $*" >> "$CALLS"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """\
#!/bin/bash
[[ $1 == show ]] || echo "scontrol $*" >> "$CALLS"
"""


class Ended(NamedTuple):
    exit_code: int
    calls: list[str]
    stderr: str


class Script:
    def __init__(self, path: Path) -> None:
        self.path, self.calls, self.run = path, path / "calls", path / "run"
        self.run.mkdir()
        for name, text in {"python": PYTHON, "srun": SRUN, "scontrol": SCONTROL}.items():
            (path / name).write_text(text)
            (path / name).chmod(0o755)
        (path / "code" / "slurm").mkdir(parents=True)
        (path / "code" / "slurm" / "environment.sh").write_text("")
        self.environment = {
            "PATH": f"{path}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "HARNESS_PYTHON": "python",
            "HARNESS_CODE": str(path / "code"),
            "HARNESS_RUN": str(self.run),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "n1",
        }

    def start(self, **changed: str) -> subprocess.Popen[str]:
        command = ["bash", str(code_snapshot.slurm_dir() / "train.sbatch")]
        environment = self.environment | changed
        return subprocess.Popen(command, env=environment, cwd=self.path, stderr=subprocess.PIPE, text=True)

    def end(self, process: subprocess.Popen[str]) -> Ended:
        _, stderr = process.communicate(timeout=60)
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        return Ended(process.returncode, calls, stderr)

    def __call__(self, **changed: str) -> Ended:
        return self.end(self.start(**changed))


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_a_start_from_its_beginning_to_its_end(script: Script) -> None:
    ended = script(SLURM_RESTART_COUNT="2")
    assert ended.exit_code == 0
    spelled = [call.replace(str(script.run), "RUN") for call in ended.calls]
    assert spelled[0] == "python -m launch.slurm.requeue begin RUN 7"
    assert spelled[1].startswith("srun --nodes=1 --ntasks=1 ")
    assert spelled[2] == "python -m launch.slurm.node_health RUN 60"
    assert spelled[4] == "python -m launch.local.node RUN"
    assert spelled[5].startswith("python -m launch.slurm.requeue end RUN 7 0 /")
    assert spelled[5].endswith("/train.sbatch"), "by which Slurm is asked whether the job could start"
    assert len(spelled) == 6, "nothing is requeued"
    assert "harness: job 7, start 3, " in ended.stderr


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75])
def test_the_exit_code_is_that_of_the_run(script: Script, code: int) -> None:
    ended = script(NODE=str(code), END="0" if code == 75 else "1")
    assert ended.exit_code == code
    assert [call for call in ended.calls if call.startswith("scontrol")] == ["scontrol requeue 7"] * (code == 75)


def test_a_requeue_comes_before_the_update_that_slurm_takes_only_then(script: Script) -> None:
    ended = script(HEALTH="69", END="0", UPDATE="ExcNodeList=n1")
    assert ended.exit_code == 69
    assert ended.calls[-2:] == ["scontrol requeue 7", "scontrol update JobId=7 ExcNodeList=n1"]
    assert not any("launch.local.node" in call for call in ended.calls)
    assert "harness: health: node n1: broken\n" in ended.stderr
    assert (script.path / "calls.complaints").read_text() == "harness: health: node n1: broken\n"


@pytest.mark.parametrize(
    ("nodes", "per_node", "meet_s", "minutes"),
    [(1, 1, 60, 5), (4, 8, 68, 5), (128, 8, 316, 9), (2048, 8, 900, 19), (20000, 8, 900, 19)],
)
def test_more_processes_have_more_time_to_meet(
    script: Script, nodes: int, per_node: int, meet_s: int, minutes: int
) -> None:
    """1,024 processes that load torch from one disk do not come within the minute that is enough for a few."""
    ended = script(SLURM_JOB_NUM_NODES=str(nodes), HARNESS_CHECKS_PER_NODE=str(per_node), HEALTH="69")
    srun, python = ended.calls[1:3]
    assert python == f"python -m launch.slurm.node_health {script.run} {meet_s}"
    assert f" --time={minutes} " in srun
    assert 60 * minutes > meet_s + 120, "the step outlives the meeting"


def test_every_task_finds_its_own_line(script: Script) -> None:
    listed = script.path / "runs-0.txt"
    listed.write_text(f"{script.run}/a\n{script.run}/b\n")
    array = {"HARNESS_RUN": "", "HARNESS_RUN_LIST": str(listed), "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    ended = script(**array)
    assert ended.calls[0] == f"python -m launch.slurm.requeue begin {script.run}/b 7_1"
    script.calls.unlink()
    ended = script(**array | {"SLURM_ARRAY_TASK_ID": "2"})
    assert (ended.exit_code, ended.calls) == (2, [])
    assert ended.stderr == f"harness: {listed}: has no line for task 2\n"


def test_a_job_that_may_not_have_the_run_leaves_it_alone(script: Script) -> None:
    """Another job has it: nothing is started, written down, requeued or asked to stop, also not by a scancel."""
    process = script.start(BEGIN="2", SLOW="2")
    deadline_s = time.monotonic() + 30
    while not script.calls.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    ended = script.end(process)
    assert ended.exit_code == 2
    assert ended.calls == [f"python -m launch.slurm.requeue begin {script.run} 7"]
    assert list(script.run.iterdir()) == []
