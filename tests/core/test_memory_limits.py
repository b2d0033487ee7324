"""Free memory is the minimum of the machine's and of all cgroup limits (v1 and v2); kills are counted in both."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from harness.core.memory_limits import address_space_left, count_oom_kills, free_bytes, resident_bytes, total_bytes

GB = 10**9
UNLIMITED = str(2**63 - 4096)


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A machine with 64 GB of free memory, whose process is in these cgroups."""
    contents = {"proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 62500000 kB\n", "proc/self/cgroup": cgroup}
    for name, text in (contents | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def version_1(group: str, limit: int | str, used: int, cached: int = 0) -> dict[str, str]:
    return {
        f"memory{group}/memory.limit_in_bytes": str(limit),
        f"memory{group}/memory.usage_in_bytes": str(used),
        f"memory{group}/memory.stat": f"cache 7\ninactive_file 7\ntotal_inactive_file {cached}",
    }


def version_2(group: str, limit: int | str, used: int, cached: int = 0) -> dict[str, str]:
    return {
        f"{group.lstrip('/')}/memory.max": str(limit),
        f"{group.lstrip('/')}/memory.current": str(used),
        f"{group.lstrip('/')}/memory.stat": f"anon 7\ninactive_file {cached}",
    }


V1 = "12:cpu,cpuacct:/slurm/job_7\n9:memory:/slurm/job_7/step_0\n1:name=systemd:/slurm"
V2 = "0::/system.slice/job_7/step_0"


@pytest.mark.parametrize(
    ("cgroup", "files", "free"),
    [
        (V1, {}, 64 * GB),
        (V1, version_1("/slurm/job_7", 32 * GB, 20 * GB, 3 * GB), 15 * GB),
        (V1, version_1("/slurm/job_7", UNLIMITED, 20 * GB), 64 * GB),
        (V1, version_1("/slurm/job_7/step_0", 9 * GB, GB) | version_1("/slurm", 6 * GB, GB), 5 * GB),
        (V1, version_1("", 30 * GB, 10 * GB), 20 * GB),
        (V1 + "\n" + V2, version_1("/slurm/job_7", 32 * GB, 20 * GB), 12 * GB),
        (V2, version_2("/system.slice/job_7", 32 * GB, 20 * GB, 3 * GB), 15 * GB),
        (V2, version_2("/system.slice/job_7", "max", 20 * GB), 64 * GB),
        (V2, version_2("/system.slice/job_7/step_0", 9 * GB, GB) | version_2("/system.slice", 6 * GB, GB), 5 * GB),
        (V2, {"system.slice/job_7/memory.max": "oddity"}, 64 * GB),
        (V2, version_2("/system.slice/job_7", 9 * GB, GB) | {"system.slice/job_7/memory.stat": "anon 7"}, 8 * GB),
        ("0::/slurm/job:7", version_2("/slurm/job:7", 9 * GB, GB), 8 * GB),
        ("", {}, 64 * GB),
    ],
)
def test_smallest_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], free: int) -> None:
    assert free_bytes(machine(tmp_path, cgroup, files)) == free


def test_all_memory_is_that_of_the_machine_or_of_the_smallest_cgroup(tmp_path: Path) -> None:
    assert total_bytes(machine(tmp_path, V1, {})) == 99999999 * 1024
    root = machine(tmp_path, V1, version_1("/slurm/job_7/step_0", 9 * GB, GB) | version_1("/slurm", 6 * GB, GB))
    assert total_bytes(root) == 6 * GB
    assert total_bytes(machine(tmp_path / "2", V2, version_2("/system.slice/job_7", 32 * GB, 20 * GB))) == 32 * GB
    assert total_bytes(machine(tmp_path / "3", V2, version_2("/system.slice", "max", GB))) == 99999999 * 1024
    assert total_bytes() >= free_bytes()


def test_meminfo_without_memavailable_raises(tmp_path: Path) -> None:
    (machine(tmp_path, "", {}) / "proc/meminfo").write_text("MemTotal: 99999999 kB\n")
    with pytest.raises(OSError, match="has no MemAvailable"):
        free_bytes(tmp_path)


def test_this_machine_has_memory() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < free_bytes() <= total


def test_kills_are_counted_for_the_machine_and_for_each_cgroup_above(tmp_path: Path) -> None:
    root = machine(tmp_path, V1 + "\n" + V2, {"memory/slurm/memory.oom_control": "oom_kill_disable 0\noom_kill 2"})
    assert count_oom_kills(root) == 2, "version 1"
    (root / "proc/vmstat").write_text("oom_killer 9\noom_kill 4\n")
    assert count_oom_kills(root) == 6, "and the machine"
    (root / "sys/fs/cgroup/system.slice").mkdir()
    (root / "sys/fs/cgroup/system.slice/memory.events").write_text("oom 5\noom_kill 1\noom_group_kill 7\n")
    assert count_oom_kills(root) == 7, "and version 2"
    (root / "proc/vmstat").write_text("oom_kill many\n")
    assert count_oom_kills(root) == 3, "what cannot be read does not count"


def test_memory_of_a_process(tmp_path: Path) -> None:
    assert resident_bytes(os.getpid()) > 10 * 2**20
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/status").write_text("Name:\tx\nVmSize:\t900 kB\nVmRSS:\t 12 kB\n")
    assert resident_bytes(7, tmp_path) == 12 * 1024
    assert resident_bytes(8, tmp_path) == 0, "it is gone"


def test_a_limit_of_the_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("VmSize:\t900 kB\n")
    limits = {resource.RLIM_INFINITY: None, 1000 * 1024: 100 * 1024, 100: 0}
    for limit, left in limits.items():
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert address_space_left(tmp_path) == left
