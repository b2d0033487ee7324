"""What a job may still take: the least of what the machine has and what its control groups allow, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.checkpoint.memory import free_bytes

GB = 10**9
UNLIMITED = str(2**63 - 4096)


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A machine with 64 GB of free memory, whose process is in these groups."""
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
        ("", {}, 64 * GB),
    ],
)
def test_the_narrowest_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], free: int) -> None:
    assert free_bytes(machine(tmp_path, cgroup, files)) == free


def test_this_machine_has_memory() -> None:
    assert 0 < free_bytes() < 1 << 50
