"""A compiled run on a GPU that is started a second time compiles no kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.distributed.compile_cache import DIRECTORY, VARIABLES
from tests.gpu.one_rank import SMALL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RUN = (
    "parallel.compile=true",
    "precision=bf16",
    "optim.warmup_steps=1",
    "launch.nproc=1",
    "telemetry=plain",
    "run.name=compiled",
)


def start(runs: Path, num_steps: int) -> list[str]:
    """Train until this step; returns the compiled kernels of Inductor and Triton."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    overrides = (*SMALL, *RUN, f"run.dir={runs}", f"train.num_steps={num_steps}", "run.resume=changed")
    command = [sys.executable, "-m", "harness.train", *overrides]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return sorted(str(file.relative_to(runs)) for file in (runs / DIRECTORY).rglob("*.cubin"))


def test_a_second_start_compiles_no_kernel(tmp_path: Path) -> None:
    compiled = start(tmp_path, 2)
    assert start(tmp_path, 4) == compiled != []
