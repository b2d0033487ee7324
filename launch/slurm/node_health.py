"""`python -m launch.slurm.node_health RUN SECONDS`: checks every node of a job before each start.

Why: one bad node among a hundred crashes the whole run, or computes wrong numbers. A check before the start takes a
minute.
How: srun starts one process for each future rank. The first on a node collects what is visible without torch (GPUs and
their memory, ECC and driver errors, host memory, disk). Then all processes join in a small all-reduce over the network,
and over NCCL on GPUs, compare clocks, and look for a file that the first one wrote. A problem is one line that names
the node, and the step ends for all. A node is blamed for its own faults only; one that failed twice is excluded
(`launch.slurm.node_exclusion`).
Left out: bandwidth, and errors that the driver does not report. A process that misses the all-reduce is not identified.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from harness.config import compose
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, ConfigError
from harness.config.parallel import DeviceKind, ParallelConfig
from harness.config.schema import Config
from harness.core.fast_imports import loading
from harness.core.rundir import RunDir
from launch.slurm.job_directory import slurm_folder
from launch.slurm.node_exclusion import HealthProblem
from launch.slurm.requeue import EXIT_UNHEALTHY

GIGABYTE = 1e9
MIN_HOST_BYTES = 2 * GIGABYTE
MIN_DISK_BYTES = 2 * GIGABYTE
MIN_FREE_FRACTION = 0.9
"""Of the memory of a GPU; less is free if a leftover process occupies it."""
MAX_SKEW_S = 1.0
TOOL_TIMEOUT_S = 60.0
"""For nvidia-smi and dmesg."""
REDUCED_NUMBERS = 1_000_000
XID_WINDOW_S = 3600.0
BROKEN_XIDS = frozenset({48, 61, 62, 64, 74, 79, 92, 95, 119, 120, 140, 143})
"""Driver errors of broken memory, links or firmware; other Xids are caused by programs."""
QUERY = "index,memory.free,memory.total,ecc.errors.uncorrected.volatile.total"
MEBIBYTE = 2**20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU, as nvidia-smi reports it."""

    index: int
    free_bytes: int
    memory_bytes: int
    num_ecc_errors: int
    """Uncorrected, since the driver was loaded; 0 if the device does not count."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """State of one node."""

    devices: tuple[GpuFacts, ...]
    xids: tuple[int, ...]
    """Errors that the driver reported within the last hour."""
    free_host_bytes: float
    free_disk_bytes: float
    is_writable: bool
    """Whether this node can write to the run directory."""


def find_faults(facts: NodeFacts, num_devices: int | None) -> list[str]:
    """Faults of one node, each in a few words; `num_devices` is None if any number will do."""
    faults: list[str] = []
    if num_devices is not None and len(facts.devices) != num_devices:
        faults.append(f"has {len(facts.devices)} GPUs, expected {num_devices}")
    for device in facts.devices:
        if device.num_ecc_errors:
            faults.append(f"GPU {device.index} has {device.num_ecc_errors} uncorrected ECC errors")
        if device.free_bytes < MIN_FREE_FRACTION * device.memory_bytes:
            free, whole = device.free_bytes / GIGABYTE, device.memory_bytes / GIGABYTE
            faults.append(f"GPU {device.index} has {free:.0f} of {whole:.0f} GB free: another process is on it")
    if broken := sorted(BROKEN_XIDS.intersection(facts.xids)):
        faults.append(f"the driver reported Xid {', '.join(map(str, broken))} within the last hour")
    faults += check_free_bytes("host memory", facts.free_host_bytes, MIN_HOST_BYTES)
    if not facts.is_writable:
        faults.append("the run directory cannot be written")
    return faults


def check_free_bytes(what: str, free_bytes: float, min_bytes: float) -> list[str]:
    if free_bytes >= min_bytes:
        return []
    return [f"{what}: {free_bytes / GIGABYTE:.1f} GB free, at least {min_bytes / GIGABYTE:.0f} needed"]


def check_node(node: str, facts: NodeFacts, num_devices: int | None) -> list[HealthProblem]:
    """Problems of one node, and of the disk that all nodes share."""
    full = check_free_bytes("disk in the run directory", facts.free_disk_bytes, MIN_DISK_BYTES)
    own = [HealthProblem(node, text) for text in find_faults(facts, num_devices)]
    return own + [HealthProblem(node, text, blames=False) for text in full]


def check_clocks(times_s: Mapping[str, float]) -> list[HealthProblem]:
    """Nodes whose clock differs from the median. Of two clocks that differ, neither is blamed."""
    middle_s = statistics.median_low(times_s.values())
    return [
        HealthProblem(
            node, f"its clock differs by {time_s - middle_s:+.1f} s from the other nodes'", blames=len(times_s) > 2
        )
        for node, time_s in times_s.items()
        if abs(time_s - middle_s) > MAX_SKEW_S
    ]


def check_shared_directory(sees_marker: Mapping[str, bool]) -> list[HealthProblem]:
    """Nodes that do not see the first node's run directory; if most do not, the first may be wrong."""
    lost = [node for node, sees_it in sees_marker.items() if not sees_it]
    blames = 2 * len(lost) < len(sees_marker)
    return [HealthProblem(node, "does not see the run directory of the first node", blames=blames) for node in lost]


def expected_num_devices(cfg: Config) -> int | None:
    """None if no number was configured."""
    if cfg.parallel.device is DeviceKind.cpu:
        return None
    return cfg.launch.slurm.gpus_per_node or (cfg.launch.nproc if cfg.parallel.device is DeviceKind.cuda else None)


def collect_facts(run: RunDir, node: str) -> NodeFacts:
    """Collect the facts of this node."""
    smi = run_tool("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    return NodeFacts(
        devices=parse_devices(smi),
        xids=parse_xids(run_tool("dmesg"), read_uptime_s()),
        free_host_bytes=free_host_bytes(Path("/proc/meminfo").read_text(encoding="utf-8")),
        free_disk_bytes=shutil.disk_usage(run.path).free,
        is_writable=write_marker(slurm_folder(run) / f"health-{node}"),
    )


def run_tool(*command: str) -> str:
    """Output of a program; empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_devices(table: str) -> tuple[GpuFacts, ...]:
    """Parse the CSV table of nvidia-smi."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    return tuple(
        GpuFacts(
            index=int(index),
            free_bytes=int(free) * MEBIBYTE,
            memory_bytes=int(whole) * MEBIBYTE,
            num_ecc_errors=int(errors) if errors.isdigit() else 0,
        )
        for index, free, whole, errors in (row for row in rows if len(row) == 4)
    )


def parse_xids(kernel_log: str, up_s: float) -> tuple[int, ...]:
    """Xid numbers of the last hour in a kernel log; `up_s` is the uptime."""
    entries = re.findall(r"^\[\s*([\d.]+)\].*NVRM: Xid \([^)]*\): (\d+)", kernel_log, re.MULTILINE)
    return tuple(int(number) for at_s, number in entries if float(at_s) > up_s - XID_WINDOW_S)


def read_uptime_s() -> float:
    return float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])


def free_host_bytes(meminfo: str) -> float:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return float(match[1]) * 1024 if match else float("inf")


def write_marker(path: Path) -> bool:
    """Whether a file can be written; it stays until the next check, for the other nodes to find."""
    try:
        path.write_text(f"{time.time()}\n", encoding="utf-8")
    except OSError:
        return False
    return True


def check_collectives(cfg: ParallelConfig, run: RunDir, node: str, within_s: float) -> list[HealthProblem]:
    """Join all processes in an all-reduce; returns the problems between nodes, equal on all processes.

    `within_s` bounds the wait for the last process. It grows with their number, because many import torch slowly.
    """
    with loading():
        import torch

        from harness.distributed.collectives import all_reduce_sum, gather_results
        from harness.distributed.world import connect, disconnect

    world = connect(replace(cfg, replicate=1, timeout_s=within_s))
    try:
        duration_s = {}
        for device in dict.fromkeys((torch.device("cpu"), world.device)):
            ones = torch.ones(REDUCED_NUMBERS, device=device)
            began_s = time.perf_counter()
            total = float(all_reduce_sum(ones).sum())
            duration_s[device.type] = time.perf_counter() - began_s
            if total != REDUCED_NUMBERS * world.size:
                text = f"an all-reduce of ones gave {total / REDUCED_NUMBERS}, expected {world.size}"
                return [HealthProblem(node, text, blames=False)]
        nodes = gather_results(lambda: node)
        clock_s = gather_results(time.time)  # all leave the previous exchange at nearly the same moment
        times_s = {name: clock_s[nodes.index(name)] for name in dict.fromkeys(nodes)}
        sees_marker = gather_results(lambda: (slurm_folder(run) / f"health-{nodes[0]}").exists())
        problems = check_clocks(times_s) + check_shared_directory(dict(zip(nodes, sees_marker, strict=True)))
        if world.is_first and not problems:
            reduced = ", ".join(f"{seconds * 1e3:.0f} ms on {device}" for device, seconds in duration_s.items())
            spread_s = max(times_s.values()) - min(times_s.values())
            print(f"health: {len(times_s)} nodes, clocks within {spread_s * 1e3:.0f} ms, all-reduce {reduced}")
        return problems
    finally:
        disconnect()


def main(argv: Sequence[str] | None = None) -> int:
    """RUN and the seconds within which all processes must join; returns the exit code."""
    directory, within_s = sys.argv[1:] if argv is None else argv
    run, slurm = RunDir(Path(directory)), os.environ
    node, is_first_here = slurm["SLURMD_NODENAME"], slurm["SLURM_LOCALID"] == "0"
    slurm["RANK"], slurm["WORLD_SIZE"] = slurm["SLURM_PROCID"], slurm["SLURM_NTASKS"]
    slurm["LOCAL_RANK"] = slurm["SLURM_LOCALID"]
    try:
        cfg = compose.read(run.config)
        faults = check_node(node, collect_facts(run, node), expected_num_devices(cfg)) if is_first_here else []
        problems = faults or check_collectives(cfg.parallel, run, node, float(within_s))
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except Exception as error:
        problems = [HealthProblem(node, f"all-reduce failed: {' '.join(str(error).split())}", blames=False)]
    for problem in problems if is_first_here else ():
        print(problem.render(), file=sys.stderr)
    return EXIT_UNHEALTHY if problems else EXIT_DONE


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # keeps the exit code: threads of torch have aborted the interpreter at exit
