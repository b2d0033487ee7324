"""Free memory is the minimum of the machine's and of all cgroup limits (v1 and v2); pinned blocks are aligned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.checkpoint import host_memory
from harness.checkpoint.host_memory import PinnedBlock, align_up, free_bytes

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


def test_meminfo_without_memavailable_raises(tmp_path: Path) -> None:
    (machine(tmp_path, "", {}) / "proc/meminfo").write_text("MemTotal: 99999999 kB\n")
    with pytest.raises(OSError, match="has no MemAvailable"):
        free_bytes(tmp_path)


def test_this_machine_has_memory() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < free_bytes() <= total


def test_pieces_begin_at_multiples_of_64_bytes() -> None:
    assert [align_up(num_bytes) for num_bytes in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


@pytest.mark.parametrize("num_bytes", [0, 192])
def test_a_pinned_block_is_registered_once_and_released_once(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake driver that records its calls; needs no GPU."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(host_memory, "_call_cudart", lambda *arguments: calls.append(arguments))
    block = PinnedBlock(num_bytes, pinned=True)
    address = block._bytes.data_ptr()
    assert calls == [("cudaHostRegister", address, max(num_bytes, 1), 0)]
    assert block._unlock is not None
    assert not block._unlock.atexit, "the driver may be gone by then"
    block.release()
    block.release()
    assert calls[1:] == [("cudaHostUnregister", address)]
    PinnedBlock(num_bytes, pinned=False).release()
    assert len(calls) == 2


def test_a_block_hands_out_separate_aligned_pieces() -> None:
    block = PinnedBlock(64 * 3, pinned=False)
    pieces = [
        block.like(torch.empty(2, 3)),
        block.like(torch.empty(0)),
        block.like(torch.tensor(5)),
        block.like(torch.empty(4)),
    ]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [piece.flatten().tolist() for piece in pieces] == [[0.0] * 6, [], [2], [3.0] * 4]
    assert [piece.untyped_storage().nbytes() for piece in pieces] == [24, 0, 8, 16], (
        "saved without the rest of the block"
    )
    assert all(piece.data_ptr() % 8 == 0 for piece in pieces)
