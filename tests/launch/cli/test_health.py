"""`harness health` and the same check in a process of its own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from harness.config.parallel import DeviceKind
from harness.core.node_name import machine_name
from harness.core.rundir import RunDir
from launch.cli.main import main
from launch.health import node_check
from launch.slurm.node_exclusion import HealthProblem
from tests import composed
from tests.distributed.cases import TINY

HAS_GPU = shutil.which("nvidia-smi") is not None


def test_a_healthy_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--directory", str(tmp_path), "--device", "cpu"]) == 0
    device, node = capsys.readouterr().out.splitlines()
    assert device.startswith("CPU: ")
    assert " GEMMs with a known result, bf16 at " in device
    assert node == f"node {machine_name()}: healthy"
    assert main(["health", "--directory", str(tmp_path), "--device", "cpu", "--json"]) == 0
    output = capsys.readouterr().out
    assert node_check.parse_problems("n1", output, "", 0) == []
    (gemm,) = json.loads(output)["gemms"]
    assert (gemm["device"], gemm["wrong"], gemm["failure"]) == ("CPU", [], "")
    assert gemm["tflops"] > 0
    assert not list(tmp_path.iterdir()), "the check leaves no files"


@pytest.mark.skipif(HAS_GPU, reason="this machine may have a GPU")
def test_a_node_without_its_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--directory", str(tmp_path), "--gpus", "8"]) == 69
    printed, name = capsys.readouterr(), machine_name()
    assert printed.err == f"harness: health: node {name}: has 0 GPUs, expected 8\n"
    assert printed.out == f"node {name}: 1 problem\n"


def test_an_io_error_of_the_check_blames_no_node(tmp_path: Path) -> None:
    """A launcher reads these facts itself before it joins a run."""
    lost = tmp_path / "lost"
    problem = HealthProblem(
        machine_name(), f"its health check failed: [Errno 2] No such file or directory: '{lost}'", False
    )
    assert node_check.check_facts_here(composed.load(TINY), RunDir(lost)) == [problem]
    assert node_check.check_this_node(lost, device=DeviceKind.cpu, num_devices=None).problems == (problem,)


def test_a_wrong_option_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert main(["health", "--directory", str(missing)]) == 2
    assert capsys.readouterr().err == f"harness: --directory: {missing} is not a directory\n"
    assert main(["health", "--gpus", "0"]) == 2
    assert capsys.readouterr().err == "harness: --gpus: must be at least 1, got 0\n"


def test_what_the_check_of_another_process_printed() -> None:
    problems = [HealthProblem("n1", "GPU 3: broken"), HealthProblem("n1", "full", blames=False)]
    output = json.dumps({"problems": [problem._asdict() for problem in problems]})
    assert node_check.parse_problems("n1", f"a warning\n{output}\n", "", 69) == problems
    assert node_check.parse_problems("n1", '{"problems": []}\n', "", 0) == []
    assert node_check.parse_problems("n1", "", "Traceback\n  x\nMemoryError\n", 1) == [
        HealthProblem("n1", "its health check ended with exit code 1: MemoryError")
    ]
    assert node_check.parse_problems("n1", "", "", -9)[0].text.endswith("exit code -9: it printed nothing")


@pytest.mark.full
def test_a_launcher_checks_its_node_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As a spare node does before it joins. A check that takes too long is a problem of the node."""
    run, cfg = RunDir(tmp_path), composed.load([*TINY, "parallel.device=cuda", "launch.nproc=99"])
    (problem,) = node_check.check_in_process(cfg, run, within_s=120.0)
    assert problem.node == machine_name()
    assert re.fullmatch(r"has \d+ GPUs, expected 99", problem.text)
    (late,) = node_check.check_in_process(cfg, run, within_s=0.05)
    assert late == HealthProblem(machine_name(), "its health check did not end within 0 s")
