"""world_size 1: FSDP's extra copies are skipped, with bit-equal results."""

from __future__ import annotations

import pytest

from tests.distributed import cases
from tests.distributed.pool import Pool


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=fp32",),
        ("precision=bf16",),
        ("precision=bf16", "parallel.reshard_after_forward=true", "train.micro_batch_size=2"),
        ("precision=bf16", "parallel.activation_checkpointing=full"),
    ],
)
def test_weights_are_cast_in_the_copy(ranks: Pool, overrides: tuple[str, ...]) -> None:
    (found,) = ranks.run(1, cases.gather_with_world_size_1, *overrides)
    assert found == dict.fromkeys(found, True)


def test_bf16_computes_in_bf16_and_keeps_fp32_masters(ranks: Pool) -> None:
    bf16, fp32 = "torch.bfloat16", "torch.float32"
    (seen,) = ranks.run(1, cases.dtypes, "precision=bf16")
    assert seen == {"activation": bf16, "gathered": bf16, "master": fp32, "gradient": fp32, "moment": fp32}
