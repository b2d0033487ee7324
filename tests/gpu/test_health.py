"""Health checks on a GPU: GEMMs with a known result, and links between NCCL ranks that share it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from launch.health.gemm_check import FP8, FP8_CAPABILITY, check_devices, list_cases, list_devices
from tests.gpu.nccl import read_logs, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LINKS = """
import json, os, pathlib, sys
from harness.distributed.collectives import gather_results
from harness.distributed.world import connect, disconnect
from launch.health.link_probe import probe_links
from tests.distributed.cases import tiny
world = connect(tiny("parallel.device=cuda").parallel)
seen = probe_links(world.rank, ["n1", "n2"], world.device, gather=lambda value: gather_results(lambda: value))
links = [[link.fault, link.gb_s, link.latency_us] for link in seen]
pathlib.Path(sys.argv[1], "results", os.environ["RANK"]).write_text(json.dumps(links))
disconnect()
"""


def test_every_gpu_computes_exactly() -> None:
    devices = list_devices("auto")
    reports = check_devices(devices)
    assert [report.list_faults() for report in reports] == [[] for _ in devices]
    assert all(report.tflops > 1.0 for report in reports)
    if torch.cuda.get_device_capability() >= FP8_CAPABILITY:
        assert list_cases(devices[0])[-1] is FP8
        assert reports[0].num_products > 4, "of each dtype at least two"


def test_two_nccl_ranks_test_their_link(tmp_path: Path) -> None:
    for name in ("logs", "results"):
        (tmp_path / name).mkdir()
    assert run_ranks(tmp_path, num_ranks=2, worker=LINKS) == [0, 0], read_logs(tmp_path)
    for rank in range(2):
        ((fault, gb_s, latency_us),) = json.loads((tmp_path / "results" / str(rank)).read_text())
        assert fault == ""
        assert gb_s > 0.0
        assert latency_us > 0.0
