"""Moments in bf16 on real ranks: smaller checkpoints, bit-identical resume, and a change of the dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.checkpoint import store
from harness.core.events import Finding, Intervention, StepRecord
from harness.model.size import num_parameters
from tests.distributed import faulty_runs
from tests.distributed.cases import tiny
from tests.distributed.faulty_runs import RankResult
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

STEPS = (
    "model.num_layers=1",
    "optim.schedule=constant",
    "optim.warmup_steps=0",
    "run.resume=changed",
)


def run(ranks: Pool, directory: Path, name: str, dtype: str, until: int) -> RankResult:
    overrides = (f"run.name={name}", *STEPS, f"optim.moment_dtype={dtype}", f"train.num_steps={until}")
    results = ranks.run(2, faulty_runs.run, str(directory), None, *overrides)
    assert {result.code for result in results} == {0}
    first: RankResult = results[0]
    return first


def saved(directory: Path, name: str, step: int) -> tuple[torch.Tensor, int]:
    """A second moment of a checkpoint, and the bytes of its files."""
    (checkpoint,) = (directory / name / "checkpoints").glob(f"step-*{step}-gen-*")
    key = "optimizer.blocks.0.mlp.up.weight.exp_avg_sq"
    return store.read_tensors(checkpoint, [key])[key], sum(file.stat().st_size for file in checkpoint.iterdir())


def test_a_resume_gives_the_same_bits_and_the_dtype_may_change(ranks: Pool, tmp_path: Path) -> None:
    whole = run(ranks, tmp_path, "whole", "bf16", 4)
    for until in (2, 4):
        resumed = run(ranks, tmp_path, "resumed", "bf16", until)
    assert resumed.weights == whole.weights, "bit for bit"
    exact = run(ranks, tmp_path, "changed", "fp32", 2)
    moment, num_bytes = saved(tmp_path, "changed", 2)
    assert moment.dtype is torch.float32
    rounded = run(ranks, tmp_path, "changed", "bf16", 4)
    smaller, fewer_bytes = saved(tmp_path, "changed", 4)
    assert smaller.dtype is torch.bfloat16
    assert num_bytes - fewer_bytes > 0.9 * 4 * num_parameters(tiny(*STEPS).model)
    back = run(ranks, tmp_path, "changed", "fp32", 6)
    assert saved(tmp_path, "changed", 6)[0].dtype is torch.float32
    assert len({exact.weights, rounded.weights, back.weights}) == 3
    changes = [event.changes for event in back.log if isinstance(event, Intervention)]
    assert [each["optim.moment_dtype"] for each in changes if "optim.moment_dtype" in each] == [
        ["fp32", "bf16"],
        ["bf16", "fp32"],
    ]
    records = [event for event in back.log if isinstance(event, StepRecord)]
    assert [record.step for record in records] == list(range(1, 7))
    assert not [event for event in back.log if isinstance(event, Finding)]
