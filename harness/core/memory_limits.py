"""Measures the memory of this machine: what is free, what a process holds, and how often the kernel killed for it.

Why: a run that cannot fit must be rejected before it starts, and a rank that the kernel kills leaves no message of its
own. On a cluster the limit is the job's cgroup, not the machine.
How: free memory is the minimum of the kernel's MemAvailable, the headroom of every cgroup above this process, and the
limit of its address space (`ulimit -v`). The kernel counts its out-of-memory kills in /proc/vmstat for the machine and
in `memory.events` (cgroup v2) or `memory.oom_control` (v1) for a cgroup; a container may show only one of them.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
OOM_KILL = "oom_kill"
"""Name of the counter of out-of-memory kills, in each file that has one."""


def free_bytes(root: Path = ROOT) -> int:
    """Memory still available to this process on this machine; `root` is where /proc and /sys are."""
    return min([_available_bytes(root), *_allowed_bytes(root)])


def _available_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def total_bytes(root: Path = ROOT) -> int:
    """Memory of this machine, or of the smallest cgroup limit above this process."""
    return min([_status_bytes(root / "proc/meminfo", "MemTotal"), *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """The limit of each memory cgroup from this process's up to the root, where there is one."""
    for is_v2, top, group in _memory_cgroups(root):
        for path in _with_parents(top, group):
            with suppress(OSError, ValueError):
                yield int((path / ("memory.max" if is_v2 else "memory.limit_in_bytes")).read_text())


def address_space_left(root: Path = ROOT) -> int | None:
    """Bytes that this process may still map; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - _status_bytes(root / "proc/self/status", "VmSize"))


def resident_bytes(pid: int, root: Path = ROOT) -> int:
    """Memory that a process holds; 0 if it is gone."""
    with suppress(OSError):
        return _status_bytes(root / f"proc/{pid}/status", "VmRSS")
    return 0


def _status_bytes(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def count_oom_kills(root: Path = ROOT) -> int:
    """Out-of-memory kills that the kernel has counted for this machine and for the cgroups of this process.

    Only a difference of two counts has a meaning.
    """
    files = [root / "proc/vmstat", *(path / name for path, name in _oom_counters(root))]
    return sum(_read_counter(path) for path in files)


def _read_counter(path: Path) -> int:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == OOM_KILL:
                return int(value)
    return 0


def _oom_counters(root: Path) -> Iterator[tuple[Path, str]]:
    for is_v2, top, group in _memory_cgroups(root):
        for path in _with_parents(top, group):
            yield path, "memory.events" if is_v2 else "memory.oom_control"


def _allowed_bytes(root: Path) -> Iterator[int]:
    """Headroom of each cgroup from this process's up to the root, for cgroup v2 and v1."""
    for is_v2, top, group in _memory_cgroups(root):
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        yield from _cgroup_headroom(top, group, *names, "inactive_file" if is_v2 else "total_inactive_file")


def _memory_cgroups(root: Path) -> Iterator[tuple[bool, Path, str]]:
    """The memory cgroups of this process: whether of version 2, the root of the hierarchy, and the name."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                yield True, root / "sys/fs/cgroup", group
            elif "memory" in controllers.split(","):
                yield False, root / "sys/fs/cgroup/memory", group


def _with_parents(top: Path, group: str) -> Iterator[Path]:
    """A cgroup and each one above it. In a container the root may be its own group."""
    own = top / group.lstrip("/")
    return (path for path in (own, *own.parents) if path.is_relative_to(top))


def _cgroup_headroom(top: Path, group: str, limit: str, usage: str, cache: str) -> Iterator[int]:
    """Limit minus usage of a cgroup and of each one above it; inactive file cache counts as free. "No limit" is "max"
    in v2, and in v1 a number beyond any machine's memory."""
    for path in _with_parents(top, group):
        with suppress(OSError, ValueError):
            allowed = int((path / limit).read_text())
            stat = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
            yield allowed - int((path / usage).read_text()) + int(stat.get(cache, 0))
