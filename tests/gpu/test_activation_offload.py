"""Activations in host memory on a GPU: the same bits, less device memory, no host sync."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.distributed.world import disconnect
from harness.precision.attention import fast_attention
from tests.gpu.one_rank import start, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # from torch.compile and NCCL
]

ROOT = Path(__file__).parents[2]
LARGER = ("model.num_layers=8", "model.dim=1024", "model.ffn_dim=2816", "train.sequence_length=1024")
ON = "parallel.activation_offload=true"


@pytest.fixture(autouse=True)
def single_rank() -> Iterator[None]:
    with fast_attention():
        yield
    disconnect()


BITS = """
import sys
from pathlib import Path
import torch
from harness.build import build
from harness.config.compose import load
from harness.core.rundir import RunDir
from harness.distributed.determinism import deterministic_algorithms
from harness.distributed.world import connected
from harness.precision.attention import fast_attention
from tests.distributed.cases import digest
from tests.gpu.one_rank import SMALL, step

cfg = load([*SMALL, "run.deterministic=true", "model.num_layers=6", "train.micro_batch_size=4", *sys.argv[1:]])
with deterministic_algorithms(enabled=True), fast_attention(), connected(cfg.parallel) as world:
    parts = build(cfg, world, RunDir(Path("/nonexistent")))
    for index in range(6):
        step(parts, cfg, index, probe=index % 2 == 0)
    print("digest", digest(parts.tensors()))
    print("host bytes", 0 if parts.model.offload is None else parts.model.offload.host_bytes)
    parts.close()
"""


def final_bits(*overrides: str) -> tuple[str, int]:
    """Digest of all tensors after some deterministic steps, and the host memory of the activations."""
    done = subprocess.run(
        [sys.executable, "-c", BITS, *overrides], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0
    lines = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if line.startswith(("digest", "host bytes")))
    return lines["digest"], int(lines["host bytes"])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_deterministic_steps_have_the_same_bits(compiled: bool, checkpointing: str) -> None:
    settings = (f"parallel.compile={compiled}", f"parallel.activation_checkpointing={checkpointing}", "precision=bf16")
    plain, host_bytes = final_bits(*settings)
    assert host_bytes == 0
    offloaded, host_bytes = final_bits(*settings, ON)
    assert host_bytes > 0
    assert offloaded == plain


@pytest.mark.parametrize("compiled", [False, True])
def test_less_device_memory_and_no_host_sync(compiled: bool) -> None:
    peaks = {}
    for is_on in (False, True):
        settings = (*LARGER, "precision=bf16", f"parallel.compile={compiled}", "train.micro_batch_size=8")
        parts, cfg = start(*settings, f"parallel.activation_offload={is_on}")
        for index in range(3):
            step(parts, cfg, index)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for index in range(3, 6):
                step(parts, cfg, index)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        peaks[is_on] = torch.cuda.max_memory_allocated()
        host = 0 if parts.model.offload is None else parts.model.offload.host_bytes
        print(
            f"compiled {compiled}, offload {is_on}: {peaks[is_on] / 1e9:.3f} GB on the device, {host / 1e9:.3f} GB host"
        )
        if is_on:
            assert peaks[False] - peaks[True] > 0.5 * host, "six of eight blocks, beside the peak of other parts"
        disconnect()
        del parts
