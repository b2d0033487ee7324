"""Checks this node alone, without a job: what the driver and kernel report, and GEMMs with a known result.

Why: a spare node joins a run only if it is healthy, and an operator wants to know before a node goes back to work.
How: `check_this_node` runs in this process, and creates a CUDA context on each GPU. A launcher must have none, and a
sick GPU can hang, so a launcher calls `check_in_process`: it runs `harness health --json` with a time limit.
Left out: links to other nodes, which need the other nodes (`launch.health.link_check`).
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, NamedTuple

from harness.config.parallel import DeviceKind
from harness.config.schema import Config
from harness.core import processes
from harness.core.fast_imports import loading
from harness.core.node_name import machine_name
from harness.core.rundir import RunDir
from launch.health.node_facts import (
    VISIBLE_DEVICES,
    NodeFacts,
    check_facts,
    collect_facts,
    num_required_devices,
    used_device_names,
)
from launch.slurm.node_exclusion import HealthProblem

if TYPE_CHECKING:
    from launch.health.gemm_check import GemmReport

CHECK_WITHIN_S = 300.0
"""For one node. Most of it is the import of torch from a slow shared disk."""
KILL_WITHIN_S = 5.0


class NodeReport(NamedTuple):
    """Result of the check of one node."""

    node: str
    problems: tuple[HealthProblem, ...]
    gemms: tuple[GemmReport, ...]
    """Empty if the node failed before anything was computed."""


def check_facts_here(cfg: Config, run: RunDir) -> list[HealthProblem]:
    """Check only what the driver and the kernel report, in this process; takes no time and needs no torch."""
    node = machine_name()
    try:
        return check_facts(node, read_facts(run.path, used_device_names(cfg)), num_required_devices(cfg))
    except OSError as error:
        return [describe_failed_check(node, error)]


def describe_failed_check(node: str, error: OSError) -> HealthProblem:
    """An I/O error of the check: the file system may be at fault."""
    return HealthProblem(node, f"its health check failed: {error}", blames=False)


def read_facts(directory: Path, visible: str | None) -> NodeFacts:
    """The facts of this node, and whether it can write a file in a directory; `visible` names the GPUs to look at."""
    marker = directory / f".health-{machine_name()}-{os.getpid()}"
    try:
        return collect_facts(directory, marker, visible)
    finally:
        with suppress(OSError):
            marker.unlink(missing_ok=True)


def check_this_node(directory: Path, *, device: DeviceKind, num_devices: int | None) -> NodeReport:
    """Check this node in this process; imports torch, and creates a CUDA context on each GPU.

    `directory` is where the run writes. The node needs at least `num_devices` GPUs; None: any number will do. If
    CUDA_VISIBLE_DEVICES is set, only those are checked.
    """
    node = machine_name()
    try:
        facts = read_facts(directory, os.environ.get(VISIBLE_DEVICES))
    except OSError as error:
        return NodeReport(node, (describe_failed_check(node, error),), ())
    if device is DeviceKind.cuda and not facts.devices and num_devices is None:
        num_devices = 1
    if problems := check_facts(node, facts, num_devices):
        return NodeReport(node, tuple(problems), ())
    with loading():
        from launch.health.gemm_check import check_devices, list_devices

    gemms = check_devices(list_devices(device))
    return NodeReport(node, tuple(check_gemms(node, gemms)), tuple(gemms))


def check_gemms(node: str, gemms: list[GemmReport]) -> list[HealthProblem]:
    """Problems of the devices of one node."""
    from launch.health.gemm_check import find_slow_devices

    faults = [fault for gemm in gemms for fault in gemm.list_faults()]
    slow = find_slow_devices({gemm.device: gemm.tflops for gemm in gemms if not gemm.failure})
    return [HealthProblem(node, text) for text in faults + slow]


def check_in_process(cfg: Config, run: RunDir, *, within_s: float = CHECK_WITHIN_S) -> list[HealthProblem]:
    """Check this node for a run, in a process of its own; returns the problems, none if the node is healthy.

    Never raises and never waits longer than `within_s`: a check that hangs or crashes is a problem of this node. The
    caller needs neither torch nor a GPU.
    """
    node = machine_name()
    required, used = num_required_devices(cfg), used_device_names(cfg)
    arguments = ["--json", "--directory", str(run.path), "--device", str(cfg.parallel.device)]
    if required is not None:
        arguments += ["--gpus", str(required)]
    visible = {} if used is None else {VISIBLE_DEVICES: used}
    with TemporaryFile("w+", encoding="utf-8") as output, TemporaryFile("w+", encoding="utf-8") as errors:
        try:
            process = subprocess.Popen(
                processes.command("launch.cli.main", "health", *arguments),
                env=processes.child_environment() | visible,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        except OSError as error:
            return [HealthProblem(node, f"its health check did not start: {error}", blames=False)]
        try:
            exit_code = process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a process that waits for a broken driver cannot be killed
                process.wait(KILL_WITHIN_S)
            return [HealthProblem(node, f"its health check did not end within {within_s:.0f} s")]
        output.seek(0)
        errors.seek(0)
        return parse_problems(node, output.read(), errors.read(), exit_code)


def parse_problems(node: str, output: str, errors: str, exit_code: int) -> list[HealthProblem]:
    """The problems that `harness health --json` printed; a check that crashed is a problem."""
    try:
        return [HealthProblem(**problem) for problem in json.loads(output.splitlines()[-1])["problems"]]
    except (IndexError, KeyError, TypeError, ValueError):
        line = (errors.strip().splitlines() or ["it printed nothing"])[-1]
        return [HealthProblem(node, f"its health check ended with exit code {exit_code}: {line}")]
