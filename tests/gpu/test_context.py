"""Context parallelism on a GPU: the kernel on a part of the queries, and 2 and 4 NCCL ranks that share sequences."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.distributed.context import ContextSplit
from harness.model.attention_layer import _compiled_attend_blocks
from harness.model.attention_mask import build_block_mask, causal_block_mask, document_mask
from tests.distributed import cases, context_cases
from tests.distributed.pool import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("context"),
]

LENGTH = 1024
ON_GPU = (
    "parallel.device=cuda",
    "launch.ranks_per_gpu=4",
    "model.dim=64",
    "model.ffn_dim=128",
    f"train.sequence_length={LENGTH}",
    "train.batch_size=4",
)
"""Heads of 16, the smallest that `flex_attention` multiplies; 4 ranks get two blocks of a mask each."""
DOCUMENTS = ("data.document_mask=true",)


def relative_error(own: Tensor, expected: Tensor) -> float:
    return float((own.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("has_documents", [False, True])
def test_attention_of_a_part_of_the_queries_equals_that_of_all(context: int, has_documents: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value, gradient = (
        torch.randn(2, heads, LENGTH, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (4, 2, 2, 4)
    )
    ends = torch.rand(2, LENGTH, device="cuda", generator=generator) < 1 / 150
    documents = ends.cumsum(dim=1).to(torch.int32) if has_documents else None
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril()
    if documents is not None:
        allowed = allowed & document_mask(documents)
    exact = [each.float().requires_grad_() for each in (query, key, value)]
    attended = F.scaled_dot_product_attention(
        exact[0], exact[1], exact[2], attn_mask=allowed, scale=0.125, enable_gqa=True
    )
    attended.backward(gradient.float())  # type: ignore[no-untyped-call]
    keys_and_values = torch.zeros(2, *key.shape, device="cuda")
    for rank in range(context):
        split = ContextSplit(context, rank)
        own_query = split.take(query, 2).requires_grad_()
        own_key, own_value = key.clone().requires_grad_(), value.clone().requires_grad_()
        device = torch.device("cuda", torch.cuda.current_device())
        mask = causal_block_mask(LENGTH, device, split) if documents is None else build_block_mask(documents, split)
        own = _compiled_attend_blocks()(own_query, own_key, own_value, mask, 0.125)
        own.backward(split.take(gradient, 2))
        assert own_query.grad is not None
        assert own_key.grad is not None
        assert own_value.grad is not None
        assert exact[0].grad is not None
        errors = {
            "attended": relative_error(own, split.take(attended, 2)),
            "query": relative_error(own_query.grad, split.take(exact[0].grad, 2)),
        }
        print(f"context {context}, rank {rank}, documents {has_documents}: {errors}", flush=True)
        assert all(error < 1e-2 for error in errors.values()), errors
        keys_and_values += torch.stack([own_key.grad.float(), own_value.grad.float()])
    assert exact[1].grad is not None
    assert exact[2].grad is not None
    errors = {
        "key": relative_error(keys_and_values[0], exact[1].grad),
        "value": relative_error(keys_and_values[1], exact[2].grad),
    }
    print(f"context {context}, documents {has_documents}: {errors}", flush=True)
    assert all(error < 1e-2 for error in errors.values()), errors


@pytest.fixture(scope="module")
def steps_of_one_rank() -> dict[tuple[str, ...], dict[str, Any]]:
    """By the overrides that change the numbers; filled by the tests."""
    return {}


FULL = ("parallel.activation_checkpointing=full",)
COMPILED = ("parallel.compile=true",)
STEPS = [
    pytest.param(2, 2, ("precision=fp32",), (), id="2 ranks, fp32"),
    pytest.param(4, 4, ("precision=fp32", *DOCUMENTS), (), id="4 ranks, fp32, documents"),
    pytest.param(2, 2, ("precision=bf16",), (), id="2 ranks, bf16"),
    pytest.param(2, 2, ("precision=bf16",), (*COMPILED,), id="2 ranks, bf16, compiled"),
    pytest.param(4, 4, ("precision=bf16", *DOCUMENTS), (*COMPILED, *FULL), id="4 ranks, bf16, documents, full"),
    pytest.param(4, 2, ("precision=bf16",), (*COMPILED, "parallel=hsdp"), id="HSDP 2x2, bf16"),
    pytest.param(4, 2, ("precision=bf16",), ("train.micro_batch_size=1",), id="2 groups of 2, bf16, accumulated"),
    pytest.param(2, 2, ("precision=fp8",), (*COMPILED, *FULL), id="2 ranks, fp8"),
]
TOLERANCES = {"precision=fp32": (1e-5, 1e-4), "precision=bf16": (2e-3, 3e-2), "precision=fp8": (5e-3, 1.5e-1)}
"""Relative error of the loss, and of the gradient of a weight."""


@pytest.mark.parametrize(("num_ranks", "context", "common", "others"), STEPS)
def test_a_step_equals_that_of_one_rank(
    nccl_ranks: Pool,
    steps_of_one_rank: dict[tuple[str, ...], dict[str, Any]],
    num_ranks: int,
    context: int,
    common: tuple[str, ...],
    others: tuple[str, ...],
) -> None:
    if "precision=fp8" in common and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    if common not in steps_of_one_rank:
        steps_of_one_rank[common] = nccl_ranks.run(1, context_cases.one_step, *ON_GPU, *common)[0]
    expected = steps_of_one_rank[common]
    overrides = (*ON_GPU, *common, *others, f"parallel.context={context}")
    loss_tolerance, gradient_tolerance = TOLERANCES[common[0]]
    for result in nccl_ranks.run(num_ranks, context_cases.one_step, *overrides):
        errors = {
            name: relative_error(gradient, expected["gradients"][name])
            for name, gradient in result["gradients"].items()
        }
        worst = max(errors, key=lambda name: errors[name])
        print(
            f"loss {result['loss']:.6f} / {expected['loss']:.6f}, norm {result['grad_norm']:.6f} / "
            f"{expected['grad_norm']:.6f}, worst gradient {worst} {errors[worst]:.2e}",
            flush=True,
        )
        assert result["loss"] == pytest.approx(expected["loss"], rel=loss_tolerance)
        assert result["held_out"] == pytest.approx(expected["held_out"], rel=loss_tolerance)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=gradient_tolerance)
        assert errors[worst] < gradient_tolerance, worst


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_deterministic_runs_give_the_same_bits(nccl_ranks: Pool, tmp_path: Path, num_ranks: int) -> None:
    """The start checks it too, and some steps are computed twice."""
    overrides = (*ON_GPU, *DOCUMENTS, "precision=bf16", "run.deterministic=true", "sentinel.sdc.every=2")
    found = []
    for name in ("first", "again"):
        code, records = nccl_ranks.run(
            num_ranks, cases.run, str(tmp_path), f"run.name={name}", *overrides, "parallel.context=2"
        )[0]
        assert code == 0
        assert not any(record.corrupted_ranks or record.other_data for record in records)
        found.append([(record.loss, record.grad_norm, record.weight_digest) for record in records])
    print(found, flush=True)
    assert found[0] == found[1]


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_the_loop_has_no_host_sync(nccl_ranks: Pool, tmp_path: Path, compiled: str) -> None:
    overrides = (*ON_GPU, *DOCUMENTS, "precision=bf16", f"parallel.compile={compiled}", "parallel.context=2")
    loop = ("train.num_steps=10", "sentinel.probe_every=3", "checkpoint.ring.slots=2", "checkpoint.ring.every_steps=2")
    records = nccl_ranks.run(2, cases.run_with_sync_as_error, str(tmp_path), *overrides, *loop)[0]
    assert records[-1].step == 10


def test_chunks_that_are_no_whole_blocks_are_rejected(nccl_ranks: Pool) -> None:
    with pytest.raises(
        AssertionError, match=r"train\.sequence_length: must be a multiple of 2 x parallel\.context x 128"
    ):
        nccl_ranks.run(
            2, context_cases.one_step, *ON_GPU, "precision=bf16", "train.sequence_length=640", "parallel.context=2"
        )
