"""What a node reports about itself: faults, parsers of nvidia-smi and the kernel."""

from __future__ import annotations

import errno
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.parallel import DeviceKind
from harness.core.rundir import RunDir
from launch.health import node_facts
from launch.health.node_check import check_facts_here
from tests import composed
from tests.distributed.cases import TINY
from tests.full_disk import fill, may_mount, small_disk

HEALTHY = node_facts.NodeFacts(
    devices=tuple(
        node_facts.GpuFacts(index=index, free_bytes=80 * 10**9, memory_bytes=85 * 10**9, num_ecc_errors=0)
        for index in range(2)
    ),
    xids=(31,),
    free_host_bytes=1e12,
    free_disk_bytes=1e12,
)


def test_faults_of_a_node() -> None:
    faulty = replace(HEALTHY.devices[1], free_bytes=10**9, num_ecc_errors=2)
    cases: list[tuple[node_facts.NodeFacts, list[str]]] = [
        (HEALTHY, []),
        (replace(HEALTHY, devices=HEALTHY.devices[:1]), ["has 1 GPUs, expected 2"]),
        (
            replace(HEALTHY, devices=(HEALTHY.devices[0], faulty)),
            ["GPU 1 has 2 uncorrected ECC errors", "GPU 1 has 1 of 85 GB free: another process is on it"],
        ),
        (replace(HEALTHY, xids=(31, 79)), ["the driver reported Xid 79 within the last hour"]),
        (replace(HEALTHY, free_host_bytes=1e9), ["host memory: 1.0 GB free, at least 2 needed"]),
        (replace(HEALTHY, write_error=errno.EROFS), ["the run directory cannot be written: Read-only file system"]),
    ]
    for facts, expected in cases:
        assert node_facts.find_faults(facts, 2) == expected
    assert node_facts.find_faults(replace(HEALTHY, devices=()), None) == []


def test_a_full_disk_blames_no_node() -> None:
    """All nodes share the disk of the run directory: excluding the node that reported it would not help."""
    facts = replace(HEALTHY, free_disk_bytes=1e8, devices=HEALTHY.devices[:1])
    assert [problem.render() for problem in node_facts.check_facts("n1", facts, 2)] == [
        "harness: health: node n1: has 1 GPUs, expected 2",
        "harness: health: seen from node n1: disk in the run directory: 0.1 GB free, at least 2 needed",
    ]
    assert node_facts.check_facts("n1", replace(HEALTHY, free_disk_bytes=2e9, free_host_bytes=2e9), 2) == []
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE):
        (problem,) = node_facts.check_facts("n1", replace(HEALTHY, write_error=number), 2)
        assert (problem.blames, problem.text) == (False, f"the run directory cannot be written: {os.strerror(number)}")


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_disk_without_room_for_one_file_blames_no_node(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        full, cannot_write = check_facts_here(composed.load(TINY), RunDir(disk))
    assert not full.blames
    assert full.text.startswith("disk in the run directory: 0.0 GB free")
    assert (cannot_write.blames, cannot_write.text[-24:]) == (False, " No space left on device")


def test_parse_the_output_of_nvidia_smi_dmesg_and_meminfo() -> None:
    table = "0, 81000, 81559, 0\n1, 80000, 81559, [N/A]\nNo devices were found\n"
    first, second = node_facts.parse_devices(table)
    assert (first.free_bytes, first.num_ecc_errors, second.index, second.num_ecc_errors) == (81000 * 2**20, 0, 1, 0)
    log = "[  100.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n[ 9000.0] NVRM: Xid (PCI:0000:3b:00): 48, x\n[9001.0] usb\n"
    assert node_facts.parse_xids(log, 9100.0) == (48,)
    assert node_facts.free_host_bytes("MemTotal: 9 kB\nMemAvailable:     4 kB\n") == 4096


def test_a_sick_gpu_is_a_fault_of_its_node() -> None:
    """nvidia-smi prints texts in place of numbers. Some of them say only that there is no such number."""
    table = "0, 80000, 81559, 0\n1, [Unknown Error], [Unknown Error], [Unknown Error]\n[GPU is lost], 1, 1, [N/A]\n"
    devices = node_facts.parse_devices(table)
    assert [device.index for device in devices] == [0, 1, 2]
    assert node_facts.find_faults(replace(HEALTHY, devices=devices), 3) == [
        "GPU 1: nvidia-smi reports [Unknown Error]",
        "GPU 2: nvidia-smi reports [GPU is lost]",
    ]
    shared = node_facts.parse_devices("0, [N/A], [Not Supported], N/A\n1, [Insufficient Permissions], 1, 0\n")
    assert [device.free_bytes for device in shared] == [None, None]
    assert node_facts.find_faults(replace(HEALTHY, devices=shared), 2) == []


def test_gpus_that_the_run_does_not_use_blame_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job trains on GPUs 0 and 1 of the same node."""
    table = "0, 9, 81559, 0\n1, 9, 81559, 0\n" + "".join(f"{n}, 81000, 81559, 0\n" for n in range(2, 8))
    whole = replace(HEALTHY, devices=node_facts.parse_devices(table))

    cfg = deepcopy(composed.load(TINY))

    def faults(
        visible: str | None, *, nproc: int | None = None, per_gpu: int = 1, given: int | None = None
    ) -> list[str]:
        cfg.launch.nproc, cfg.launch.ranks_per_gpu, cfg.launch.slurm.gpus_per_node = nproc, per_gpu, given
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        facts = replace(whole, visible=node_facts.used_device_names(cfg))
        return [fault[:5] for fault in node_facts.find_faults(facts, node_facts.num_required_devices(cfg))]

    both = ["GPU 0", "GPU 1"]
    for cfg.parallel.device in (DeviceKind.cuda, DeviceKind.auto):
        assert faults(None) == faults(None, nproc=4) == both
        assert faults("2,3,4,5") == faults("2,3,4,5", nproc=4) == []
        assert faults("2,3,0,1", nproc=2) == faults("5,0", given=1) == [], "the first ones are used"
        assert faults("0,2", nproc=2, per_gpu=2) == ["GPU 0"]
        assert faults("9,NoDevFiles") == []
        assert faults("GPU-8932f937,GPU-3a3bfee5", nproc=1) == both, "names that are no indices"
    cfg.parallel.device = DeviceKind.cuda
    assert faults("2,3", nproc=9) == ["has 8"], "all of the node count"
    cfg.parallel.device = DeviceKind.cpu
    assert faults(None) == faults(None, given=8) == []


def test_required_number_of_devices() -> None:
    def required(*overrides: str) -> int | None:
        return node_facts.num_required_devices(composed.load([*TINY, "launch=slurm", *overrides]))

    assert required("launch.slurm.gpus_per_node=8") is None, "on cpu"
    assert required("parallel.device=auto", "launch.slurm.gpus_per_node=8", "launch.nproc=4") == 8
    assert required("parallel.device=auto", "launch.nproc=4") is None
    assert required("parallel.device=cuda", "launch.nproc=4") == 4
    assert required("parallel.device=cuda", "launch.nproc=7", "launch.ranks_per_gpu=2") == 4
    assert required("parallel.device=cuda") is None
