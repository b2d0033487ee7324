"""Renders the sbatch script of a job from `slurm/train.sbatch`. Pure; needs no Slurm.

Why: the submitted script must be readable before and after, and the template must also work with a plain `sbatch`.
How: the template is a working script. Two kinds of lines are replaced: the `#SBATCH` lines as a block, and settings of
the form `name=${HARNESS_NAME:-default}`, which become `name=value`. Settings are quoted for the shell, directives for
sbatch, which has its own rules: `#` starts a comment anywhere.
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
    """The script of one job; a setting that is not given keeps its default."""
    lines: list[str] = []
    replaced: set[str] = set()
    has_directives = False
    for line in template.splitlines():
        placeholder = SETTING.fullmatch(line)
        if line.startswith(DIRECTIVE):
            if not has_directives:
                lines += [f"{DIRECTIVE}{directive}" for directive in directives]
            has_directives = True
        elif placeholder and placeholder[1] in settings:
            replaced.add(placeholder[1])
            lines.append(f"{placeholder[1]}={shlex.quote(settings[placeholder[1]])}")
        else:
            lines.append(line)
    assert has_directives, "the template has no #SBATCH line"
    assert replaced == settings.keys(), f"no placeholder for {settings.keys() - replaced}"
    return "\n".join(lines) + "\n"


def build_directives(
    cfg: LaunchConfig, *, name: str, log: Path, working_directory: Path, array: str | None = None
) -> list[str]:
    """The options for sbatch, one a line; only the last part of `log` may contain Slurm's %j, %A and %a."""
    slurm = cfg.slurm
    is_fixed, most = cfg.min_nodes in (None, cfg.nodes), cfg.nodes + cfg.spares
    asked: dict[str, str | int | None] = {
        "--job-name": name,
        "--nodes": most if is_fixed else f"{cfg.min_nodes}-{most}",
        "--ntasks-per-node": 1 if is_fixed else None,  # with a node range, Slurm would allocate only the minimum
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
    lines = [f"{option}={quote_value(option, str(value))}" for option, value in asked.items() if value is not None]
    lines += ["--no-kill"] if cfg.spares else []  # the launchers replace a lost node; Slurm would end the job
    return [*lines, "--requeue" if slurm.max_requeues else "--no-requeue", *slurm.options]


def exclude_option(cfg: SlurmConfig, nodes: Sequence[str]) -> list[str]:
    """Excludes these nodes and those of the user's own --exclude; of two such options sbatch uses the last."""
    return [f"{EXCLUDE}={','.join([*list_user_excludes(cfg), *nodes])}"] if nodes else []


def list_user_excludes(cfg: SlurmConfig) -> list[str]:
    """What the user's own --exclude names; each may be an expression such as n[1-3]."""
    return [option.partition("=")[2] for option in cfg.options if option.startswith(f"{EXCLUDE}=")]


def quote_value(option: str, value: str) -> str:
    """Quote a value for a #SBATCH line: quotes protect spaces, a backslash protects quotes and #."""
    message = f"must not contain a line break or a backslash, got {value!r}"
    require("\n" not in value and "\\" not in value, option, message)
    escaped = value.replace('"', '\\"').replace("#", "\\#")
    return value if PLAIN.fullmatch(value) else f'"{escaped}"'
