"""The job script, run by bash with fakes for Slurm and Python: its calls, their order, its exit code."""

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
    launch.slurm.job_directory*)
        [[ -z ${EDITED:-} ]] || exit 2
        [[ -z ${PREPARED:-} ]] || exit "$PREPARED"
        printf '%s\\n%s\\n' "$HARNESS_CODE/../run" "$HARNESS_CODE" ;;
    launch.slurm.node_health*) echo "harness: health: node n1: broken" >&2; exit "${HEALTH:-0}" ;;
    launch.local.node*)
        [[ -n ${HARNESS_STOP_CLEARED:-} ]] || exit 9
        [[ -z ${FIRST:-} ]] || { mkdir -p "$(dirname "$HARNESS_EXIT_FILE")"; echo "$FIRST" > "$HARNESS_EXIT_FILE"; }
        exit "${NODE:-0}" ;;
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


class ScriptResult(NamedTuple):
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

    def end(self, process: subprocess.Popen[str]) -> ScriptResult:
        _, stderr = process.communicate(timeout=200)
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        return ScriptResult(process.returncode, calls, stderr)

    def __call__(self, **changed: str) -> ScriptResult:
        return self.end(self.start(**changed))


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_calls_of_one_start(script: Script) -> None:
    result = script(SLURM_RESTART_COUNT="2")
    assert result.exit_code == 0
    calls = [call.replace(str(script.run), "RUN") for call in result.calls]
    assert calls[0] == "python -m launch.slurm.requeue begin RUN 7"
    assert calls[1].startswith("srun --nodes=1 --ntasks=1 ")
    assert calls[2] == "python -m launch.slurm.node_health RUN 60"
    assert calls[4] == "python -m launch.local.node RUN"
    assert calls[5].startswith("python -m launch.slurm.requeue end RUN 7 0 /")
    assert calls[5].endswith("/train.sbatch"), "the script for sbatch --test-only"
    assert len(calls) == 6, "nothing is requeued"
    assert "harness: job 7, start 3, " in result.stderr


def test_a_start_whose_storage_fails_is_requeued(script: Script) -> None:
    """No node is checked or started, and the end is decided like any other."""
    result = script(BEGIN="75", END="0")
    assert result.exit_code == 75
    begin, end, requeue = result.calls
    assert begin == f"python -m launch.slurm.requeue begin {script.run} 7"
    assert end.startswith(f"python -m launch.slurm.requeue end {script.run} 7 75  ")
    assert requeue == "scontrol requeue 7"


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75])
def test_the_exit_code_is_that_of_the_run(script: Script, code: int) -> None:
    result = script(NODE=str(code), END="0" if code == 75 else "1")
    assert result.exit_code == code
    assert [call for call in result.calls if call.startswith("scontrol")] == ["scontrol requeue 7"] * (code == 75)


def test_a_lost_node_of_an_elastic_run_does_not_decide_the_exit_code(script: Script) -> None:
    """srun returns the exit code of the launcher that was killed; that of the run is in the file."""
    lost = script(NODE="137", FIRST="0", HARNESS_ELASTIC="true")
    assert lost.exit_code == 0
    assert any(" --no-kill --kill-on-bad-exit=0 --wait=0 " in call for call in lost.calls)
    assert any(" end " in call and f"{script.run} 7 0 /" in call for call in lost.calls)
    script.calls.unlink()
    died = script(NODE="137")
    assert died.exit_code == 137, "the file of an earlier start does not count"
    assert not any("--no-kill" in call or "--wait=0" in call for call in died.calls)


def test_the_requeue_comes_before_the_update(script: Script) -> None:
    result = script(HEALTH="69", END="0", UPDATE="ExcNodeList=n1")
    assert result.exit_code == 69
    assert result.calls[-2:] == ["scontrol requeue 7", "scontrol update JobId=7 ExcNodeList=n1"]
    assert not any("launch.local.node" in call for call in result.calls)
    assert "harness: health: node n1: broken\n" in result.stderr
    assert (script.path / "calls.complaints").read_text() == "harness: health: node n1: broken\n"


@pytest.mark.parametrize(
    ("nodes", "per_node", "join_s", "minutes"),
    [(1, 1, 60, 5), (4, 8, 68, 5), (128, 8, 316, 9), (2048, 8, 900, 19), (20000, 8, 900, 19)],
)
def test_more_processes_have_more_time_to_join(
    script: Script, nodes: int, per_node: int, join_s: int, minutes: int
) -> None:
    """1,024 processes that import torch from one disk need longer than the minute that a few need."""
    result = script(SLURM_JOB_NUM_NODES=str(nodes), HARNESS_CHECKS_PER_NODE=str(per_node), HEALTH="69")
    srun, python = result.calls[1:3]
    assert python == f"python -m launch.slurm.node_health {script.run} {join_s}"
    assert f" --time={minutes} " in srun
    assert 60 * minutes > join_s + 120, "the step outlasts the time to join"


def test_every_array_task_reads_its_own_line(script: Script) -> None:
    listed = script.path / "runs-0.txt"
    listed.write_text(f"{script.run}/a\n{script.run}/b\n")
    array = {"HARNESS_RUN": "", "HARNESS_RUN_LIST": str(listed), "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    result = script(**array)
    assert result.calls[0] == f"python -m launch.slurm.requeue begin {script.run}/b 7_1"
    script.calls.unlink()
    result = script(**array | {"SLURM_ARRAY_TASK_ID": "2"})
    assert (result.exit_code, result.calls) == (2, [])
    assert result.stderr == f"harness: {listed}: has no line for task 2\n"


def test_a_plain_job_needs_its_checkout_only_once(script: Script) -> None:
    """The checkout is edited while the job waits to be requeued."""
    plain = {"HARNESS_RUN": "", "EDITED": "1"}
    kept = script.path / "slurm-7.run"
    assert script(**plain | {"EDITED": ""}, NODE="75", END="0").exit_code == 75
    first, script_run = script.calls.read_text().splitlines()[:2], f"{script.path}/code/../run"
    assert first == ["python -m launch.slurm.job_directory", f"python -m launch.slurm.requeue begin {script_run} 7"]
    script.calls.unlink()
    again = script(**plain, SLURM_RESTART_COUNT="1")
    assert (again.exit_code, again.calls[0]) == (0, first[1])
    assert not kept.exists(), "it is removed at the end"
    kept.write_text(f"{script.path}/other\n{script.path}/code\n")
    assert script(**plain).exit_code == 2, "another job had this number"
    assert script(**plain | {"EDITED": ""}, BEGIN="2").exit_code == 2
    assert not kept.exists(), "it is removed if another start is alive, too"


@pytest.mark.parametrize("code", [1, 2, 75])
def test_a_plain_job_without_storage_for_its_run_is_requeued(script: Script, code: int) -> None:
    result = script(HARNESS_RUN="", PREPARED=str(code))
    assert result.exit_code == code
    requeue = ["scontrol requeue 7"] if code == 75 else []
    assert result.calls == ["python -m launch.slurm.job_directory", *requeue]
    assert not (script.path / "slurm-7.run").exists(), "the next start prepares the run"


def test_a_job_that_cannot_claim_the_run_does_not_touch_it(script: Script) -> None:
    """Another job owns it: nothing is started, recorded, requeued or stopped, also not by a scancel."""
    process = script.start(BEGIN="2", SLOW="2")
    deadline_s = time.monotonic() + 30
    while not script.calls.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    result = script.end(process)
    assert result.exit_code == 2
    assert result.calls == [f"python -m launch.slurm.requeue begin {script.run} 7"]
    assert list(script.run.iterdir()) == []
