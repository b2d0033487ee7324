"""Planned changes on two NCCL ranks that share a GPU: phases of fp8 and bf16, and a batch-size warm-up."""

from __future__ import annotations

import importlib.util
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from harness.core.events import StepRecord
from tests.distributed import cases
from tests.distributed.pool import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("planned-changes"),
]

NUM_STEPS, LENGTH = 12, 256
ON_GPU = (
    *("parallel.device=cuda", "launch.ranks_per_gpu=2", "run.deterministic=true", "run.resume=changed"),
    *("model.dim=256", "model.ffn_dim=512", f"train.sequence_length={LENGTH}"),
    *("model.num_layers=2", "train.batch_size=8", "train.micro_batch_size=2", "optim.schedule=constant"),
)
PHASES = "precision.phases=[{from_batch: 4, kind: bf16}, {from_batch: 8, kind: fp8}]"
STAGES = "train.batch_size_warmup=[{until_batch: 4, batch_size: 4}]"
BOUNDARIES = (3, 4, 9, NUM_STEPS)
"""Lengths of the parts: the run ends before, at, and after a planned change."""


@pytest.mark.parametrize("compiled", ["true", "false"], ids=["compiled", "not compiled"])
@pytest.mark.parametrize("changes", [("precision=fp8", PHASES), ("precision=bf16", STAGES)], ids=["phases", "sizes"])
def test_a_run_in_parts_equals_the_whole_run(
    nccl_ranks: Pool, tmp_path: Path, changes: tuple[str, ...], compiled: str
) -> None:
    if PHASES in changes and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")

    def run(name: str, num_steps: int) -> list[StepRecord]:
        overrides = (*ON_GPU, *changes, f"parallel.compile={compiled}", f"train.num_steps={num_steps}")
        code, records = nccl_ranks.run(2, cases.run, str(tmp_path), f"run.name={name}", *overrides)[0]
        assert code == 0
        return list(records)

    for until in BOUNDARIES:
        in_parts = run("parts", until)
    whole = run("whole", NUM_STEPS)
    results = [[(each.loss, each.grad_norm, each.weight_digest) for each in records] for records in (in_parts, whole)]
    assert results[0] == results[1]
    assert whole[-1].loss < whole[0].loss
    in_fp8 = [not 4 <= batch < 8 and PHASES in changes for batch in range(NUM_STEPS)]
    assert [bool(record.in_fp8) for record in whole] == in_fp8
    sizes = [4 if batch < 4 and STAGES in changes else 8 for batch in range(NUM_STEPS)]
    assert [record.tokens for record in whole] == [LENGTH * total for total in accumulate(sizes)]
