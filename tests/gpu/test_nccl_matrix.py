"""Two and four NCCL ranks on one GPU: FSDP and HSDP, bf16 and fp8, accumulation, compiled and not."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from tests.distributed import cases
from tests.distributed.pool import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("nccl-matrix"),
]

ON_GPU = ("parallel.device=cuda", "parallel.compile=false", "launch.ranks_per_gpu=4", "model.num_layers=2")
TWO_MICRO_BATCHES = {2: "train.micro_batch_size=2", 4: "train.micro_batch_size=1"}
COMBINATIONS = [
    pytest.param(2, ("precision=bf16",), id="FSDP 2, bf16"),
    pytest.param(2, ("precision=bf16", "parallel.compile=true"), id="FSDP 2, bf16, compiled"),
    pytest.param(2, ("precision=fp8", "parallel.compile=true"), id="FSDP 2, fp8, compiled"),
    pytest.param(4, ("precision=bf16", "parallel.replicate=2", "parallel.compile=true"), id="HSDP 2x2, bf16, compiled"),
    pytest.param(4, ("precision=fp8", "parallel.replicate=2"), id="HSDP 2x2, fp8"),
]


def on_gpu(num_ranks: int, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """All overrides, with two micro-batches; skips fp8 without Transformer Engine."""
    if "precision=fp8" in overrides and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    return (*ON_GPU, *overrides, TWO_MICRO_BATCHES[num_ranks])


@pytest.mark.parametrize(("num_ranks", "overrides"), COMBINATIONS)
def test_a_refused_update_leaves_no_trace(nccl_ranks: Pool, num_ranks: int, overrides: tuple[str, ...]) -> None:
    """The gradient of one rank has a NaN."""
    outcomes = nccl_ranks.run(num_ranks, cases.run_refused_step, math.nan, 1, *on_gpu(num_ranks, overrides))
    assert [(outcome["unchanged"], outcome["moved"]) for outcome in outcomes] == [(True, True)] * num_ranks


@pytest.mark.parametrize(("num_ranks", "overrides"), COMBINATIONS)
def test_the_loop_has_no_host_sync(
    nccl_ranks: Pool, tmp_path: Path, num_ranks: int, overrides: tuple[str, ...]
) -> None:
    """Gradients before their reduction, probes, snapshots, reports and decisions of several steps in a row."""
    loop = ("train.num_steps=14", "sentinel.probe_every=3", "checkpoint.ring.slots=2", "checkpoint.ring.every_steps=2")
    records = nccl_ranks.run(
        num_ranks, cases.run_with_sync_as_error, str(tmp_path), *on_gpu(num_ranks, overrides), *loop
    )[0]
    assert records[-1].step == 14
    assert records[-1].loss < records[0].loss
    assert all(math.isfinite(value) for _, value in records[-1].ranks["grad_norm"]["worst"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_resumes_on_more_and_on_fewer_ranks(nccl_ranks: Pool, tmp_path: Path, precision: str) -> None:
    shared = (*ON_GPU, f"precision={precision}", "train.batch_size=16", "train.micro_batch_size=4")
    constant = ("optim.schedule=constant", "run.resume=changed", "checkpoint.every_steps=5")
    for num_ranks, until in ((1, 5), (4, 10), (2, 15)):
        code, records = nccl_ranks.run(
            num_ranks, cases.run, str(tmp_path), "run.name=moved", *shared, *constant, f"train.num_steps={until}"
        )[0]
        assert code == 0
    stayed = (*shared, *constant, "train.num_steps=15")
    code, expected = nccl_ranks.run(2, cases.run, str(tmp_path), "run.name=stayed", *stayed)[0]
    assert code == 0
    assert [record.batch["fingerprint"] for record in records] == [each.batch["fingerprint"] for each in expected]
    tolerance = {"fp32": 2e-5, "bf16": 1e-2}[precision]
    assert [record.loss for record in records] == pytest.approx([each.loss for each in expected], rel=tolerance)
