"""What one node reports about itself, without torch: GPUs, errors of the driver, memory, disk.

Why: most broken nodes are visible before anything is computed.
How: `collect_facts` asks nvidia-smi and the kernel; `check_facts` is a pure function of what they say. A problem of the
node itself blames it. A full disk, a quota or an I/O error may be that of the storage that all nodes share, and blames
none. A node may have more GPUs than the run uses: those may be occupied by others.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from harness.config.parallel import DeviceKind
from harness.config.schema import Config
from harness.core.locking.run_lease import STORAGE_ERRORS
from launch.slurm.node_exclusion import HealthProblem

GIGABYTE = 1e9
MIN_HOST_BYTES = 2 * GIGABYTE
MIN_DISK_BYTES = 2 * GIGABYTE
MIN_FREE_FRACTION = 0.9
"""Of the memory of a GPU; less is free if a leftover process occupies it."""
TOOL_TIMEOUT_S = 60.0
"""For nvidia-smi and dmesg."""
XID_WINDOW_S = 3600.0
BROKEN_XIDS = frozenset({48, 61, 62, 64, 74, 79, 92, 95, 119, 120, 140, 143})
"""Driver errors of broken memory, links or firmware; other Xids are caused by programs."""
QUERY = "index,memory.free,memory.total,ecc.errors.uncorrected.volatile.total"
NOT_REPORTED = re.compile(r"\[?(N/A|Not Supported|Insufficient Permissions|Function Not Found|.*deprecated.*)\]?", re.I)
"""What nvidia-smi prints for a number that a healthy device does not have, or that this user may not read. Other texts,
such as [Unknown Error] and [GPU requires reset], are faults."""
MEBIBYTE = 2**20
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU, as nvidia-smi reports it."""

    index: int
    free_bytes: int | None
    """None if it is not reported, as for memory that GPU and host share."""
    memory_bytes: int | None
    num_ecc_errors: int
    """Uncorrected, since the driver was loaded; 0 if the device does not count."""
    error: str = ""
    """What nvidia-smi prints in place of a number; empty if the device answers."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """State of one node."""

    devices: tuple[GpuFacts, ...]
    """All that nvidia-smi lists."""
    xids: tuple[int, ...]
    """Errors that the driver reported within the last hour."""
    free_host_bytes: float
    free_disk_bytes: float
    write_error: int = 0
    """Error number of a write to the run directory; 0: this node can write there."""
    visible: str | None = None
    """The GPUs that the run uses, as in CUDA_VISIBLE_DEVICES; None: all."""


def find_faults(facts: NodeFacts, num_devices: int | None) -> list[str]:
    """Faults of one node, each in a few words; it needs at least `num_devices` GPUs, None: any number will do."""
    faults: list[str] = []
    if num_devices is not None and len(facts.devices) < num_devices:
        faults.append(f"has {len(facts.devices)} GPUs, expected {num_devices}")
    for device in facts.devices:
        if device.error:
            faults.append(f"GPU {device.index}: nvidia-smi reports {device.error}")
        if device.num_ecc_errors:
            faults.append(f"GPU {device.index} has {device.num_ecc_errors} uncorrected ECC errors")
    for device in list_used_devices(facts):
        free_bytes, memory_bytes = device.free_bytes, device.memory_bytes
        if free_bytes is not None and memory_bytes is not None and free_bytes < MIN_FREE_FRACTION * memory_bytes:
            free, whole = free_bytes / GIGABYTE, memory_bytes / GIGABYTE
            faults.append(f"GPU {device.index} has {free:.0f} of {whole:.0f} GB free: another process is on it")
    if broken := sorted(BROKEN_XIDS.intersection(facts.xids)):
        faults.append(f"the driver reported Xid {', '.join(map(str, broken))} within the last hour")
    faults += check_free_bytes("host memory", facts.free_host_bytes, MIN_HOST_BYTES)
    if facts.write_error and facts.write_error not in STORAGE_ERRORS:
        faults.append(describe_write_error(facts))
    return faults


def list_used_devices(facts: NodeFacts) -> Sequence[GpuFacts]:
    """The GPUs that the run uses; all, if their names are not indices (UUIDs, MIG)."""
    names = [name.strip() for name in facts.visible.split(",")] if facts.visible else []
    if facts.visible is None or any(name.startswith(("GPU-", "MIG-")) for name in names):
        return facts.devices
    by_index = {str(device.index): device for device in facts.devices}
    return [by_index[name] for name in names if name in by_index]


def check_free_bytes(what: str, free_bytes: float, min_bytes: float) -> list[str]:
    if free_bytes >= min_bytes:
        return []
    return [f"{what}: {free_bytes / GIGABYTE:.1f} GB free, at least {min_bytes / GIGABYTE:.0f} needed"]


def check_facts(node: str, facts: NodeFacts, num_devices: int | None) -> list[HealthProblem]:
    """Problems of one node, and of the disk that all nodes share."""
    own = [HealthProblem(node, text) for text in find_faults(facts, num_devices)]
    shared = check_free_bytes("disk in the run directory", facts.free_disk_bytes, MIN_DISK_BYTES)
    if facts.write_error in STORAGE_ERRORS:
        shared.append(describe_write_error(facts))
    return own + [HealthProblem(node, text, blames=False) for text in shared]


def describe_write_error(facts: NodeFacts) -> str:
    return f"the run directory cannot be written: {os.strerror(facts.write_error)}"


def num_required_devices(cfg: Config) -> int | None:
    """How many GPUs a node must have at least; None if any number will do."""
    is_open = cfg.parallel.device is DeviceKind.auto and cfg.launch.slurm.gpus_per_node is None  # then CPUs do as well
    return None if is_open else num_used_devices(cfg) or None


def num_used_devices(cfg: Config) -> int | None:
    """How many GPUs the ranks of a node use; None: all that it has."""
    if cfg.parallel.device is DeviceKind.cpu:
        return 0
    ranks = cfg.launch.nproc
    return cfg.launch.slurm.gpus_per_node or (None if ranks is None else math.ceil(ranks / cfg.launch.ranks_per_gpu))


def used_device_names(cfg: Config) -> str | None:
    """The GPUs that the ranks of this node use, as in CUDA_VISIBLE_DEVICES: the first of those that it names."""
    visible, count = os.environ.get(VISIBLE_DEVICES), num_used_devices(cfg)
    if count is None:
        return visible
    names = map(str, range(count)) if visible is None else visible.split(",")[:count]
    return ",".join(names)


def collect_facts(directory: Path, marker: Path, visible: str | None) -> NodeFacts:
    """Collect the facts of this node, and of the disk of a directory; `marker` is a file to write there.

    `visible` names the GPUs that the run uses, as in CUDA_VISIBLE_DEVICES; None: all.
    """
    smi = run_tool("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    return NodeFacts(
        devices=parse_devices(smi),
        xids=parse_xids(run_tool("dmesg"), read_uptime_s()),
        free_host_bytes=free_host_bytes(Path("/proc/meminfo").read_text(encoding="utf-8")),
        free_disk_bytes=shutil.disk_usage(directory).free,
        write_error=write_marker(marker),
        visible=visible,
    )


def run_tool(*command: str) -> str:
    """Output of a program; empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_devices(table: str) -> tuple[GpuFacts, ...]:
    """Parse the CSV table of nvidia-smi. A device that it cannot ask stays in the table, and is numbered by its row."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    rows = [row for row in rows if len(row) == QUERY.count(",") + 1]
    return tuple(parse_device(row, number) for number, row in enumerate(rows))


def parse_device(row: Sequence[str], number: int) -> GpuFacts:
    """One row of that table; a sick device has texts in place of numbers."""
    index, free_mib, memory_mib, num_ecc_errors = (int(cell) if cell.isdecimal() else None for cell in row)
    texts = [cell for cell in row if not cell.isdecimal() and not NOT_REPORTED.fullmatch(cell)]
    return GpuFacts(
        index=number if index is None else index,
        free_bytes=None if free_mib is None else free_mib * MEBIBYTE,
        memory_bytes=None if memory_mib is None else memory_mib * MEBIBYTE,
        num_ecc_errors=num_ecc_errors or 0,
        error=texts[0] if texts else "",
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


def write_marker(path: Path) -> int:
    """Write a file, which stays until the next check, for the other nodes to find; returns the error number, or 0."""
    try:
        path.write_text(f"{time.time()}\n", encoding="utf-8")
    except OSError as error:
        return error.errno or errno.EIO
    return 0
