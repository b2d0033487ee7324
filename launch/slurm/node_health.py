"""`python -m launch.slurm.node_health RUN`, on every node of a job before each start: may this machine train?

Why: one sick node among a hundred costs all of them a crash, or worse, numbers that are wrong. A minute before the
start is cheap.
How: srun starts one process for each rank to come. The first on a node collects what can be seen without torch, and
`complaints` judges it: devices and their memory, errors of ECC and driver, host memory, disk. Then all of them join in
a small all-reduce over the network, and over NCCL where there are devices, tell each other the time, and look for a
file that the first one wrote. A complaint is one line that names the node, and the step ends for all. A node with a
fault of its own is blamed; one that failed twice is excluded (`launch.slurm.node_exclusion`).
Left out: bandwidth, and what a driver does not tell. Who it was that did not come to the all-reduce is not known.
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
from launch.slurm.job_directory import folder
from launch.slurm.node_exclusion import Complaint
from launch.slurm.requeue import EXIT_UNHEALTHY

GIGABYTE = 1e9
LEAST_HOST_BYTES = 2 * GIGABYTE
LEAST_DISK_BYTES = 2 * GIGABYTE
LEAST_DEVICE_SHARE = 0.9
"""Of a device's memory: less is free where somebody else's process is left on it."""
MOST_SKEW_S = 1.0
ANSWER_WITHIN_S = 60.0
"""For a program of the machine."""
REDUCED_NUMBERS = 1_000_000
XID_WINDOW_S = 3600.0
BROKEN_XIDS = frozenset({48, 61, 62, 64, 74, 79, 92, 95, 119, 120, 140, 143})
"""What the driver reports of broken memory, links or firmware; others are a program's own fault."""
QUERY = "index,memory.free,memory.total,ecc.errors.uncorrected.volatile.total"
MEBIBYTE = 2**20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    index: int
    free_bytes: int
    memory_bytes: int
    num_ecc_errors: int
    """Uncorrected, since the driver was loaded; 0 where the device does not count."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one node looks like."""

    devices: tuple[Device, ...]
    xids: tuple[int, ...]
    """Errors that the driver reported within the last hour."""
    free_host_bytes: float
    free_disk_bytes: float
    is_writable: bool
    """Whether the run directory takes a file from here."""


def complaints(facts: Facts, num_devices: int | None) -> list[str]:
    """What is wrong with a node alone, each in a few words; `num_devices` is None where any number will do."""
    found: list[str] = []
    if num_devices is not None and len(facts.devices) != num_devices:
        found.append(f"has {len(facts.devices)} GPUs, {num_devices} are wanted")
    for device in facts.devices:
        if device.num_ecc_errors:
            found.append(f"GPU {device.index} has {device.num_ecc_errors} uncorrected ECC errors")
        if device.free_bytes < LEAST_DEVICE_SHARE * device.memory_bytes:
            free, whole = device.free_bytes / GIGABYTE, device.memory_bytes / GIGABYTE
            found.append(f"GPU {device.index} has {free:.0f} of {whole:.0f} GB free: another process is on it")
    if broken := sorted(BROKEN_XIDS.intersection(facts.xids)):
        found.append(f"the driver reported Xid {', '.join(map(str, broken))} within the last hour")
    found += scarce("host memory", facts.free_host_bytes, LEAST_HOST_BYTES)
    if not facts.is_writable:
        found.append("the run directory cannot be written")
    return found


def scarce(what: str, free_bytes: float, least_bytes: float) -> list[str]:
    if free_bytes >= least_bytes:
        return []
    return [f"{what}: {free_bytes / GIGABYTE:.1f} GB free, at least {least_bytes / GIGABYTE:.0f} are wanted"]


def judged(node: str, facts: Facts, num_devices: int | None) -> list[Complaint]:
    """What is wrong with a node, and what it sees of the disk that all nodes share."""
    full = scarce("disk in the run directory", facts.free_disk_bytes, LEAST_DISK_BYTES)
    own = [Complaint(node, text) for text in complaints(facts, num_devices)]
    return own + [Complaint(node, text, blames=False) for text in full]


def skewed(times_s: Mapping[str, float]) -> list[Complaint]:
    """Nodes whose clock is far from the others'. Of two clocks that disagree nobody knows which one is wrong."""
    middle_s = statistics.median_low(times_s.values())
    return [
        Complaint(node, f"its clock is {time_s - middle_s:+.1f} s off the other nodes'", blames=len(times_s) > 2)
        for node, time_s in times_s.items()
        if abs(time_s - middle_s) > MOST_SKEW_S
    ]


def elsewhere(sees_first: Mapping[str, bool]) -> list[Complaint]:
    """Nodes that do not see the first one's run directory; where most do not, the first one may be the odd one."""
    lost = [node for node, sees in sees_first.items() if not sees]
    blames = 2 * len(lost) < len(sees_first)
    return [Complaint(node, "the run directory is not the first node's", blames=blames) for node in lost]


def num_devices_wanted(cfg: Config) -> int | None:
    """None where none, or any number, was asked for."""
    if cfg.parallel.device is DeviceKind.cpu:
        return None
    return cfg.launch.slurm.gpus_per_node or (cfg.launch.nproc if cfg.parallel.device is DeviceKind.cuda else None)


def collect(run: RunDir, node: str) -> Facts:
    """The facts of this machine."""
    smi = ask("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    return Facts(
        devices=devices_in(smi),
        xids=xids_in(ask("dmesg"), up_for_s()),
        free_host_bytes=free_host_bytes(Path("/proc/meminfo").read_text(encoding="utf-8")),
        free_disk_bytes=shutil.disk_usage(run.path).free,
        is_writable=leaves_a_mark(folder(run) / f"health-{node}"),
    )


def ask(*command: str) -> str:
    """What a program of the machine says; nothing where it is not there or may not."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_WITHIN_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def devices_in(table: str) -> tuple[Device, ...]:
    """The devices of a table of nvidia-smi."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    return tuple(
        Device(
            index=int(index),
            free_bytes=int(free) * MEBIBYTE,
            memory_bytes=int(whole) * MEBIBYTE,
            num_ecc_errors=int(errors) if errors.isdigit() else 0,
        )
        for index, free, whole, errors in (row for row in rows if len(row) == 4)
    )


def xids_in(kernel_log: str, up_s: float) -> tuple[int, ...]:
    """Numbers of the driver's errors within the last hour of a machine that is up for `up_s`."""
    found = re.findall(r"^\[\s*([\d.]+)\].*NVRM: Xid \([^)]*\): (\d+)", kernel_log, re.MULTILINE)
    return tuple(int(number) for at_s, number in found if float(at_s) > up_s - XID_WINDOW_S)


def up_for_s() -> float:
    return float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])


def free_host_bytes(meminfo: str) -> float:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return float(match[1]) * 1024 if match else float("inf")


def leaves_a_mark(path: Path) -> bool:
    """Whether a file can be made here; it stays until the next look, for the others to find."""
    try:
        path.write_text(f"{time.time()}\n", encoding="utf-8")
    except OSError:
        return False
    return True


def meet(cfg: ParallelConfig, run: RunDir, node: str, within_s: float) -> list[Complaint]:
    """Join all processes of the step in an all-reduce; returns what is wrong between the nodes, alike on all.

    `within_s` bounds the wait for the last process; it grows with their number, because many at once load torch slowly.
    """
    with loading():
        import torch

        from harness.distributed.collectives import all_reduce_sum, gather_results
        from harness.distributed.world import connect, disconnect

    world = connect(replace(cfg, replicate=1, timeout_s=within_s))
    try:
        took_s = {}
        for device in dict.fromkeys((torch.device("cpu"), world.device)):
            ones = torch.ones(REDUCED_NUMBERS, device=device)
            began_s = time.perf_counter()
            total = float(all_reduce_sum(ones).sum())
            took_s[device.type] = time.perf_counter() - began_s
            if total != REDUCED_NUMBERS * world.size:
                text = f"an all-reduce of ones gave {total / REDUCED_NUMBERS}, {world.size} is right"
                return [Complaint(node, text, blames=False)]
        nodes = gather_results(lambda: node)
        told_s = gather_results(time.time)  # all come out of the exchange before at nearly the same moment
        times_s = {each: told_s[nodes.index(each)] for each in dict.fromkeys(nodes)}
        sees_first = gather_results(lambda: (folder(run) / f"health-{nodes[0]}").exists())
        wrong = skewed(times_s) + elsewhere(dict(zip(nodes, sees_first, strict=True)))
        if world.is_first and not wrong:
            reduced = ", ".join(f"{seconds * 1e3:.0f} ms on {device}" for device, seconds in took_s.items())
            spread_s = max(times_s.values()) - min(times_s.values())
            print(f"health: {len(times_s)} nodes, clocks within {spread_s * 1e3:.0f} ms, all-reduce {reduced}")
        return wrong
    finally:
        disconnect()


def main(argv: Sequence[str] | None = None) -> int:
    """RUN and the seconds within which all processes must meet; returns the exit code."""
    directory, within_s = sys.argv[1:] if argv is None else argv
    run, slurm = RunDir(Path(directory)), os.environ
    node, is_first_here = slurm["SLURMD_NODENAME"], slurm["SLURM_LOCALID"] == "0"
    slurm["RANK"], slurm["WORLD_SIZE"] = slurm["SLURM_PROCID"], slurm["SLURM_NTASKS"]
    slurm["LOCAL_RANK"] = slurm["SLURM_LOCALID"]
    try:
        cfg = compose.read(run.config)
        found = judged(node, collect(run, node), num_devices_wanted(cfg)) if is_first_here else []
        wrong = found or meet(cfg.parallel, run, node, float(within_s))
    except ConfigError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except Exception as error:
        wrong = [Complaint(node, f"no all-reduce with the others: {' '.join(str(error).split())}", blames=False)]
    for complaint in wrong if is_first_here else ():
        print(complaint.render(), file=sys.stderr)
    return EXIT_UNHEALTHY if wrong else EXIT_DONE


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what was found counts: threads of torch have been seen to abort the interpreter's own end
