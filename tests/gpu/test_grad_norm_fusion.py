"""Each rank's gradient norm before the reduction, measured by FSDP's copy into the reduce-scatter input.

On NCCL ranks that share a GPU, or on gloo ranks in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases
from tests.distributed.pool import Pool
from tests.gpu.kernel_device import DEVICE, IS_INTERPRETED, MARKS
from tests.gpu.nccl import run_case

pytestmark = MARKS

PADDED = ("model.ffn_dim=51", "train.micro_batch_size=2")
"""Rows that two ranks cannot share evenly, and two or more micro-batches."""
CASES: list[tuple[int, tuple[str, ...]]] = [(2, ("precision=bf16", *PADDED)), (2, ("parallel.replicate=2", *PADDED))]
"""FSDP, and HSDP with a shard axis of size 1, for which FSDP never calls the reduce-scatter."""
if IS_INTERPRETED:  # a program takes milliseconds; one block, the embedding and the head are two FSDP modules
    SMALL = ("model.num_layers=1", "model.dim=16", "model.num_heads=2", "model.num_kv_heads=1", "train.batch_size=4")
    CASES = [(num_ranks, (*overrides, *SMALL)) for num_ranks, overrides in CASES]
else:
    CASES += [
        (2, PADDED),
        (3, ("precision=bf16", "train.micro_batch_size=1")),
        (2, ("precision=bf16", "parallel.replicate=2", "train.micro_batch_size=1")),
        (4, ("precision=bf16", "parallel.replicate=2", *PADDED)),
    ]


@pytest.fixture(scope="module")
def gloo_ranks() -> Iterator[Pool]:
    """Ranks for the interpreter; none is started on a GPU."""
    pool = Pool()
    yield pool
    pool.close()


def measure_on_ranks(directory: Path, gloo_ranks: Pool, num_ranks: int, *overrides: str) -> list[Any]:
    """The results of `square_sums_by_path` in rank order."""
    if IS_INTERPRETED:
        return gloo_ranks.run(num_ranks, cases.square_sums_by_path, *overrides)
    return run_case(directory, "square_sums_by_path", *overrides, num_ranks=num_ranks)


@pytest.mark.parametrize(("num_ranks", "overrides"), CASES)
def test_the_copy_measures_what_a_separate_pass_measures(
    tmp_path: Path, gloo_ranks: Pool, num_ranks: int, overrides: tuple[str, ...]
) -> None:
    fixed = (f"parallel.device={DEVICE}", "parallel.compile=false")
    for rank, found in enumerate(measure_on_ranks(tmp_path / "ranks", gloo_ranks, num_ranks, *fixed, *overrides)):
        print(f"rank {rank}: {found}")
        (copied, in_pass), (separate, all_in_pass), (mixed, some_in_pass) = (
            found[name] for name in ("copied", "separate", "mixed")
        )
        assert in_pass == 0 < copied
        assert copied == pytest.approx(separate, rel=1e-5 if IS_INTERPRETED else 1e-3)
        assert all_in_pass == separate
        assert mixed == pytest.approx(separate, rel=1e-5 if IS_INTERPRETED else 1e-3)
        assert 0 < some_in_pass < mixed
        if IS_INTERPRETED:  # kernels of the model need not be deterministic on a GPU
            assert found["again"] == found["copied"]
        spoiled, in_pass = found["nan"]
        assert in_pass == 0
        assert math.isnan(spoiled) == (rank == num_ranks - 1)
