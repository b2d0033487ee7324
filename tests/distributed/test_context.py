"""Context parallelism on real ranks: what a group computes together equals what one rank computes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import context_cases
from tests.distributed.pool import Pool


@pytest.mark.parametrize("context", [2, pytest.param(4, marks=pytest.mark.full)])
def test_keys_and_values_are_gathered_in_order_and_their_gradients_summed(ranks: Pool, context: int) -> None:
    results = ranks.run(context, context_cases.gathered_and_differentiated, context)
    places = torch.cat([result.pop("positions") for result in results])
    assert sorted(places.tolist()) == list(range(16)), "every token is computed once"
    for result in results:
        for name, difference in result.items():
            torch.testing.assert_close(difference, torch.zeros_like(difference), atol=1e-6, rtol=0, msg=name)


@pytest.fixture(scope="module")
def steps_of_one_rank() -> dict[tuple[str, ...], dict[str, Any]]:
    """By the overrides that change the numbers; filled by the tests."""
    return {}


DOCUMENTS = ("data.document_mask=true",)


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "context", "common", "others"),
    [
        (2, 2, (), ()),
        (2, 2, DOCUMENTS, ()),
        (4, 2, DOCUMENTS, ("train.micro_batch_size=1",)),
        (4, 4, (), ("train.micro_batch_size=2",)),
        (4, 4, DOCUMENTS, ("parallel.activation_checkpointing=full",)),
        (4, 2, (), ("parallel.activation_checkpointing=selective", "parallel.reshard_after_forward=true")),
        (4, 2, (), ("parallel=hsdp",)),
        (2, 2, ("model.qk_norm=true", "model.tied_head=true", "model.attention=fp32"), ()),
        (2, 2, ("model.norm=layer", "model.norm_placement=post"), ("parallel.activation_checkpointing=full",)),
        (4, 2, ("train.batch_size=3",), ()),
    ],
)
def test_a_step_equals_that_of_one_rank(
    ranks: Pool,
    steps_of_one_rank: dict[tuple[str, ...], dict[str, Any]],
    size: int,
    context: int,
    common: tuple[str, ...],
    others: tuple[str, ...],
) -> None:
    if common not in steps_of_one_rank:
        steps_of_one_rank[common] = ranks.run(1, context_cases.one_step, *common)[0]
    expected = steps_of_one_rank[common]
    results = ranks.run(size, context_cases.one_step, *common, *others, f"parallel.context={context}")
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-6)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)
        assert result["held_out"] == pytest.approx(expected["held_out"], rel=2e-6)
        for name, sums in result["sums"].items():
            if name != "scalars":
                assert sums == pytest.approx(expected["sums"][name], rel=1e-4), name
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, expected["gradients"][name], rtol=2e-5, atol=1e-7, msg=name)
    groups = [result["fingerprint"] for result in results]
    assert groups == [groups[rank // context * context] for rank in range(size)], "a group reads the same rows"
    assert sum(groups[::context]) % 2**64 == expected["fingerprint"]
