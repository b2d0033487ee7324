"""Runs Slurm's command-line tools and returns their output, or their error in one line.

Only `sbatch`, `scancel`, `squeue` and `scontrol` are used: every cluster has them. The accounting of `sacct` is
optional.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

from harness.config.errors import ConfigError, require

ENDED_STATES = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "LAUNCH_FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "RECONFIG_FAIL",
    "REVOKED",
    "TIMEOUT",
)
"""A job in any other state is pending or active; so is one in a state that this list does not know."""
UNKNOWN_JOB = "Invalid job id"
HOLD = re.compile(r"^#SBATCH (--hold|-H)\b", re.MULTILINE)
RETRY_PAUSES_S = (1.0, 5.0, 20.0)
"""Pauses between attempts to reach a controller that does not answer."""


def queue_state(job: str) -> str:
    """State of a job that is pending or active, in lower case; empty for one that ended or never existed.

    Raises if the controller does not answer: a job that may be active must not be taken for ended.
    """
    done = run_command("squeue", "--noheader", f"--jobs={job}", "--format=%T")
    if done.returncode and done.stderr.strip() and UNKNOWN_JOB not in done.stderr:
        raise ConfigError("launch.slurm", f"cannot tell whether job {job} is alive: {error_line(done)}; try again")
    return next((state.lower() for state in done.stdout.split() if state not in ENDED_STATES), "")


def show_job(job: str) -> dict[str, str]:
    """State, reason and excluded nodes of a job; empty if the controller does not answer for a while."""
    command = ["scontrol", "show", "job", "--oneliner", job]
    for pause_s in (0.0, *RETRY_PAUSES_S):
        time.sleep(pause_s)
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        if fields := dict(re.findall(r"(JobState|Reason|ExcNodeList)=(\S+)", shown)):
            return fields
    return {}


def hostnames(expression: str) -> list[str]:
    """The nodes of an expression such as n[1-3,7]; Slurm writes (null) for none."""
    if expression in ("", "(null)"):
        return []
    return run_command("scontrol", "show", "hostnames", expression).stdout.split()


def can_start(sbatch: Sequence[str], without: Sequence[str]) -> bool:
    """Whether Slurm has enough nodes for a job without some of them; busy and down nodes count.

    `without` has to contain the user's own exclusions: sbatch ignores those of the script if it gets an option.
    """
    command = ["sbatch", "--test-only", f"--exclude={','.join(without)}", *sbatch]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def submit_script(script: str, record: Callable[[str], None]) -> str:
    """Submit a script; returns the job id. `record` gets it and writes what the job needs.

    The job is held until then: nothing is written for a job that Slurm rejects, and none starts before it can. The job
    is cancelled if it cannot be recorded. One that its own options hold stays held.
    """
    job = run_sbatch(script, "--parsable", "--hold")
    try:
        record(job)
        if not HOLD.search(script):
            run_slurm("scontrol", "release", job)
    except BaseException:
        run_slurm("scancel", job, check=False)
        raise
    return job


def run_sbatch(script: str, *options: str) -> str:
    """Submit or test a script; returns the job id. Raises ConfigError with the error of sbatch."""
    return run_slurm("sbatch", *options, text=script).partition(";")[0]


def run_slurm(*command: str, text: str = "", check: bool = True) -> str:
    """Run one of Slurm's commands; returns its output."""
    done = run_command(*command, text=text)
    if done.returncode and check:
        raise ConfigError("launch.slurm", error_line(done))
    return done.stdout.strip()


def run_command(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    message = f"{command[0]} is not on this machine; submit from a login node of the cluster, or use launch=local"
    require(shutil.which(command[0]) is not None, "launch", message)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """Why a command failed, in one line."""
    name = str(done.args[0])
    stderr = " ".join(done.stderr.split()).removeprefix(f"{name}: ").removeprefix("error: ")
    return f"{name}: {stderr or f'exit code {done.returncode}'}"
