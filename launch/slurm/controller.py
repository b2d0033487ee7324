"""Questions to Slurm's controller: one command each, its answer, or its complaint in one line.

Only `sbatch`, `squeue` and `scontrol` are asked: they are on every cluster, the accounting of `sacct` is not.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Sequence

from harness.config.errors import ConfigError, require

WAITING = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "RESIZING",
    "SIGNALING",
    "STOPPED",
)
UNKNOWN_JOB = "Invalid job id"
ASK_AGAIN_S = (1.0, 5.0, 20.0)
"""Pauses between questions to a controller that does not answer."""


def queue_state(job: str) -> str:
    """Slurm's word for a job that still waits or runs; empty for one that ended or was never there.

    A controller that does not answer raises: a job that may be alive must not be taken for one that is gone.
    """
    done = call("squeue", "--noheader", f"--jobs={job}", "--format=%T")
    if done.returncode and done.stderr.strip() and UNKNOWN_JOB not in done.stderr:
        raise ConfigError("launch.slurm", f"cannot tell whether job {job} is alive: {complaint(done)}; try again")
    return next((word.lower() for word in done.stdout.split() if word in WAITING), "")


def show(job: str) -> dict[str, str]:
    """What Slurm says about a job; nothing where it does not answer for a while."""
    command = ["scontrol", "show", "job", "--oneliner", job]
    for pause_s in (0.0, *ASK_AGAIN_S):
        time.sleep(pause_s)
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        if words := dict(re.findall(r"(JobState|Reason|ExcNodeList)=(\S+)", shown)):
            return words
    return {}


def hostnames(expression: str) -> list[str]:
    """The nodes of an expression such as n[1-3,7]; Slurm writes (null) for none."""
    if expression in ("", "(null)"):
        return []
    command = ["scontrol", "show", "hostnames", expression]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


def can_start(sbatch: Sequence[str], without: Sequence[str]) -> bool:
    """Whether Slurm has enough nodes for a job without some of them; nodes that are busy or down now count."""
    command = ["sbatch", "--test-only", f"--exclude={','.join(without)}", *sbatch]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def ask_sbatch(script: str, *options: str) -> str:
    """What sbatch answers to a script; its complaint is the user's, in one line."""
    return ask("sbatch", *options, text=script).partition(";")[0]


def ask(*command: str, text: str = "", complain: bool = True) -> str:
    """The answer of one of Slurm's commands."""
    done = call(*command, text=text)
    if done.returncode and complain:
        raise ConfigError("launch.slurm", complaint(done))
    return done.stdout.strip()


def call(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    message = f"{command[0]} is not on this machine; submit from a login node of the cluster, or launch=local"
    require(shutil.which(command[0]) is not None, "launch", message)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """Why a command failed, in one line."""
    name = str(done.args[0])
    said = " ".join(done.stderr.split()).removeprefix(f"{name}: ").removeprefix("error: ")
    return f"{name}: {said or f'exit code {done.returncode}'}"
