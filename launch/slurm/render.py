"""The text of a job: `slurm/train.sbatch` with its holes filled. Pure; needs no Slurm.

Why: what is submitted must be readable before and after, and the same script must work for who submits it by hand.
How: the template is a script that runs as it is. Two kinds of lines are holes: the `#SBATCH` lines, which are replaced
as a block, and settings of the form `name=${HARNESS_NAME:-default}`, which become `name=value`. Values are quoted, each
in its own language: sbatch reads its lines by rules of its own, in which `#` begins a comment anywhere.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.config.errors import require
from harness.config.launch import LaunchConfig, SlurmConfig

DIRECTIVE = "#SBATCH "
SETTING = re.compile(r"(\w+)=\$\{HARNESS_\w+:-.*\}")
PLAIN = re.compile(r"[\w./:=,@%+-]*", re.ASCII)
MEBIBYTE = 2**20
EXCLUDE = "--exclude"


def render(template: str, *, directives: Sequence[str], settings: Mapping[str, str]) -> str:
    """The script of one job; a setting that is not named keeps its default."""
    lines: list[str] = []
    filled: set[str] = set()
    is_headed = False
    for line in template.splitlines():
        hole = SETTING.fullmatch(line)
        if line.startswith(DIRECTIVE):
            if not is_headed:
                lines += [f"{DIRECTIVE}{directive}" for directive in directives]
            is_headed = True
        elif hole and hole[1] in settings:
            filled.add(hole[1])
            lines.append(f"{hole[1]}={shlex.quote(settings[hole[1]])}")
        else:
            lines.append(line)
    assert is_headed, "the template has no #SBATCH line"
    assert filled == settings.keys(), f"no hole for {settings.keys() - filled}"
    return "\n".join(lines) + "\n"


def directives(
    cfg: LaunchConfig, *, name: str, log: Path, working_directory: Path, array: str | None = None
) -> list[str]:
    """What is asked of Slurm, one option a line; `log` may hold Slurm's own %j, %A and %a in its last part alone."""
    slurm = cfg.slurm
    is_fixed = cfg.min_nodes in (None, cfg.nodes)
    asked: dict[str, str | int | None] = {
        "--job-name": name,
        "--nodes": cfg.nodes if is_fixed else f"{cfg.min_nodes}-{cfg.nodes}",
        "--ntasks-per-node": 1 if is_fixed else None,  # beside a range, Slurm would give the least of it
        "--cpus-per-task": slurm.cpus_per_node,
        "--gpus-per-node": slurm.gpus_per_node,
        "--mem": None if slurm.memory_gb is None else f"{math.ceil(slurm.memory_gb * 1e9 / MEBIBYTE)}M",
        "--time": slurm.time_minutes,
        "--partition": slurm.partition,
        "--account": slurm.account,
        "--qos": slurm.qos,
        "--array": array,
        "--signal": f"B:USR1@{slurm.warn_s}",
        "--chdir": str(working_directory),
        "--output": f"{str(log.parent).replace('%', '%%')}/{log.name}",
        "--open-mode": "append",
    }
    lines = [f"{option}={quoted(option, str(value))}" for option, value in asked.items() if value is not None]
    return [*lines, "--requeue" if slurm.max_requeues else "--no-requeue", *slurm.options]


def exclude_option(cfg: SlurmConfig, nodes: Sequence[str]) -> list[str]:
    """Leaves out these nodes and those that the user excludes; of two such options sbatch takes the last."""
    given = [option.partition("=")[2] for option in cfg.options if option.startswith(f"{EXCLUDE}=")]
    return [f"{EXCLUDE}={','.join([*given, *nodes])}"] if nodes else []


def quoted(option: str, value: str) -> str:
    """A value as sbatch reads it on a line of the script: quotes hold spaces, a backslash holds quotes and #."""
    message = f"Slurm cannot be given a line break or a backslash, got {value!r}"
    require("\n" not in value and "\\" not in value, option, message)
    protected = value.replace('"', '\\"').replace("#", "\\#")
    return value if PLAIN.fullmatch(value) else f'"{protected}"'
