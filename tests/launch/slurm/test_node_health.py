"""The health check of a job: rules about clocks, directories and speeds, and the whole check in real processes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.config import compose
from harness.config.compose import to_yaml
from harness.core.rundir import RunDir, write_atomically
from launch.health import gemm_check
from launch.health.gemm_check import GemmReport
from launch.local.ports import reserved_port
from launch.slurm import job_directory, node_health
from tests import composed
from tests.distributed.cases import TINY
from tests.forks import Launched


def test_clocks_are_compared_with_the_median() -> None:
    def blamed_clocks(*times_s: float) -> list[tuple[str, bool]]:
        times = {f"n{number}": time_s for number, time_s in enumerate(times_s, start=1)}
        return [(problem.node, problem.blames) for problem in node_health.check_clocks(times)]

    assert blamed_clocks(100.0, 100.9, 97.5) == [("n3", True)]
    assert blamed_clocks(90.0, 100.0, 100.0, 100.0) == [("n1", True)], "the first node is not special"
    assert blamed_clocks(100.0, 101.0) == blamed_clocks(100.0, 100.0, 101.0) == []
    assert blamed_clocks(100.0, 110.0) == [("n2", False)], "of two clocks neither is blamed"
    (problem,) = node_health.check_clocks({"n1": 100.0, "n2": 100.0, "n3": 97.5})
    assert problem.text == "its clock differs by -2.5 s from the other nodes'"


def test_a_node_that_sees_another_run_directory() -> None:
    def blamed_nodes(*sees: bool) -> list[tuple[str, bool]]:
        nodes = {f"n{number}": each for number, each in enumerate(sees, start=1)}
        return [(problem.node, problem.blames) for problem in node_health.check_shared_directory(nodes)]

    assert blamed_nodes(True, True, True) == []
    assert blamed_nodes(True, True, False) == [("n3", True)]
    assert blamed_nodes(True, False) == [("n2", False)], "half of them: the first may be wrong"


def test_a_slow_device_is_compared_with_those_of_its_node() -> None:
    nodes, speeds = ["n1", "n1", "n1", "n2", "n2"], [700.0, 690.0, 400.0, 300.0, 310.0]
    gemms = [
        GemmReport(device=f"GPU {rank % 3}", tflops=speed, num_products=1, wrong=())
        for rank, speed in enumerate(speeds)
    ]
    assert [problem.render() for problem in node_health.check_speeds(nodes, gemms)] == [
        "harness: health: node n1: GPU 2: bf16 GEMM at 400 TFLOP/s, 58% of the median of 3 devices"
    ]


def enter_node(number: int, port: int, *, is_sick: bool = False) -> None:
    """The environment that srun gives to the only process of a node."""
    os.environ |= {
        "SLURMD_NODENAME": f"n{number}",
        "SLURM_LOCALID": "0",
        "SLURM_PROCID": str(number),
        "SLURM_NTASKS": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if is_sick:
        gemm_check.multiply_on_device = flip_one_bit


def flip_one_bit(left: Tensor, right: Tensor) -> Tensor:
    product = left @ right
    product.view(torch.int32)[3, 4] ^= 1
    return product


def test_a_sick_gpu_blames_its_node_and_a_lost_directory_blames_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before torch is asked for a device."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '0, [Unknown Error], [Unknown Error], [N/A]'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, value in {
        "SLURMD_NODENAME": "n1",
        "SLURM_LOCALID": "0",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    run = RunDir(tmp_path)
    write_atomically(run.config, to_yaml(composed.load([*TINY, "parallel.device=cuda", "launch.nproc=1"])))
    job_directory.slurm_folder(run).mkdir()
    assert node_health.main([str(run.path), "60"]) == 69
    assert capsys.readouterr().err == "harness: health: node n1: GPU 0: nvidia-smi reports [Unknown Error]\n"

    problems, _ = node_health.check_all(compose.read(run.config), RunDir(tmp_path / "lost"), "n1", 0, 60.0)
    assert [problem.blames for problem in problems] == [False]
    assert problems[0].text.startswith("the health check failed: [Errno 2] No such file or directory: ")


@pytest.mark.full
def test_two_nodes_check_each_other(tmp_path: Path) -> None:
    """In real processes. A process on a sick device reports it and does not join; srun ends the others."""
    run = RunDir(tmp_path)
    write_atomically(run.config, to_yaml(composed.load([*TINY, "launch=slurm", "launch.nodes=2"])))
    job_directory.slurm_folder(run).mkdir()
    arguments = ("launch.slurm.node_health", str(run.path), "60")
    with reserved_port() as port:
        nodes = [
            Launched(*arguments, output=tmp_path / f"n{number}", first=partial(enter_node, number, port))
            for number in range(2)
        ]
        with nodes[0] as first, nodes[1] as second:
            assert (first.wait(120), second.wait(120)) == (0, 0), first.stderr + second.stderr
            assert first.stdout.startswith("health: 2 nodes, clocks within ")
            assert " TFLOP/s on rank 0, 1 links, at least " in first.stdout
            assert first.stderr == second.stderr == second.stdout == ""
        with Launched(*arguments, output=tmp_path / "sick", first=partial(enter_node, 1, port, is_sick=True)) as sick:
            assert sick.wait(120) == 69
            line = "harness: health: node n1: CPU: fp32 GEMM is wrong: 6 of 6 products, 6 elements of 16384 each; "
            assert sick.stderr.startswith(f"{line}the first is product 0, element [3, 4]: ")
