"""Context parallelism on a GPU: the kernel on a part of the queries, and 2 and 4 NCCL ranks that share sequences."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.core import event_json
from harness.core.events import Finding
from harness.distributed.context import ContextSplit
from harness.drills.scenario import load_scenario
from harness.model.attention_layer import _compiled_attend_blocks
from harness.model.attention_mask import build_block_mask, causal_block_mask, document_mask
from harness.precision.te_attention import te_attention, te_attention_obstacle
from tests.distributed import cases, context_cases, test_drills
from tests.distributed.pool import Pool
from tests.gpu import test_nccl_drills

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("context"),
    pytest.mark.filterwarnings("ignore"),  # from torch.compile and NCCL
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


class Whole(NamedTuple):
    """Attention of a whole sequence in fp32, with its gradients; the tensors are [B, S, heads, head_dim]."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor
    allowed: Tensor
    documents: Tensor | None

    def compute(self) -> list[Tensor]:
        """Output, and the gradients of query, key and value."""
        leaves = [each.float().requires_grad_() for each in (self.query, self.key, self.value)]
        query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.allowed, scale=0.125, enable_gqa=True
        ).transpose(1, 2)
        return [attended.detach(), *torch.autograd.grad(attended, leaves, self.gradient.float())]


def make_whole(*, num_rows: int = 2, has_documents: bool = False) -> Whole:
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value, gradient = (
        torch.randn(num_rows, LENGTH, heads, 64, device="cuda", generator=generator).to(torch.bfloat16)
        for heads in (4, 2, 2, 4)
    )
    ends = torch.rand(num_rows, LENGTH, device="cuda", generator=generator) < 1 / 150
    documents = ends.cumsum(dim=1).to(torch.int32) if has_documents else None
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril()
    if documents is not None:
        allowed = allowed & document_mask(documents)
    return Whole(query, key, value, gradient, allowed, documents)


def part_of(whole: Whole, split: ContextSplit, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
    """The output of a rank, and its gradients of query, key and value."""
    leaves = [split.take(whole.query, 1).requires_grad_(), whole.key.clone().requires_grad_()]
    leaves.append(whole.value.clone().requires_grad_())
    attended = attend(*leaves)
    return [attended.detach(), *torch.autograd.grad(attended, leaves, split.take(whole.gradient, 1))]


def by_flex(whole: Whole, split: ContextSplit) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    device = torch.device("cuda", torch.cuda.current_device())
    if whole.documents is None:
        mask = causal_block_mask(LENGTH, device, split)
    else:
        mask = build_block_mask(whole.documents, split)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        attended: Tensor = _compiled_attend_blocks()(query, key, value, mask, 0.125)
        return attended.transpose(1, 2)

    return attend


def check_parts(
    whole: Whole, context: int, make: Callable[[ContextSplit], Callable[[Tensor, Tensor, Tensor], Tensor]]
) -> None:
    expected = whole.compute()
    sums = [torch.zeros_like(each, dtype=torch.float32) for each in (whole.key, whole.value)]
    for rank in range(context):
        split = ContextSplit(context, rank)
        own = part_of(whole, split, make(split))
        errors = [relative_error(each, split.take(exact, 1)) for each, exact in zip(own[:2], expected[:2], strict=True)]
        print(f"context {context}, rank {rank}: output {errors[0]:.2e}, gradient of query {errors[1]:.2e}", flush=True)
        assert max(errors) < 1e-2, errors
        sums = [total + part.float() for total, part in zip(sums, own[2:], strict=True)]
    errors = [relative_error(total, exact) for total, exact in zip(sums, expected[2:], strict=True)]
    print(f"context {context}: gradients of key {errors[0]:.2e}, of value {errors[1]:.2e}", flush=True)
    assert max(errors) < 1e-2, errors


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("has_documents", [False, True])
def test_flex_attention_of_a_part_of_the_queries_equals_that_of_all(context: int, has_documents: bool) -> None:
    whole = make_whole(has_documents=has_documents)
    check_parts(whole, context, lambda split: by_flex(whole, split))


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("deterministic", [False, True])
def test_cudnn_on_the_chunks_of_a_rank_equals_attention_of_all_queries(
    context: int, deterministic: bool, num_rows: int
) -> None:
    """Chunks of two rows are not contiguous."""
    if reason := te_attention_obstacle(64):
        pytest.skip(reason)
    whole = make_whole(num_rows=num_rows)

    def make(split: ContextSplit) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        ends = split.chunk_ends(LENGTH)
        return lambda query, key, value: te_attention(query, key, value, 0.125, deterministic=deterministic, ends=ends)

    check_parts(whole, context, make)
    if deterministic:
        last = ContextSplit(context, context - 1)
        first, again = (part_of(whole, last, make(last)) for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True)), "the same bits"


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
"""Relative error of losses, and of the gradient of a weight. The second is also the share of tokens whose loss may be
counted in another bin of the histogram."""


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
        own, whole = result["sums"], expected["sums"]
        assert own["source_tokens"] == whole["source_tokens"]
        assert own["source_losses"] == pytest.approx(whole["source_losses"], rel=loss_tolerance)
        moved = sum(abs(mine - theirs) for mine, theirs in zip(own["token_losses"], whole["token_losses"], strict=True))
        assert sum(own["token_losses"]) == sum(whole["token_losses"]) > 0
        assert moved / 2 <= gradient_tolerance * sum(whole["token_losses"])
        assert result["held_out"] == pytest.approx(expected["held_out"], rel=loss_tolerance)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=gradient_tolerance)
        assert errors[worst] < gradient_tolerance, worst


@pytest.mark.parametrize(
    ("num_ranks", "documents"),
    [
        pytest.param(2, DOCUMENTS, id="2 ranks, documents"),
        pytest.param(4, DOCUMENTS, id="4 ranks, documents"),
        pytest.param(2, (), id="2 ranks"),
    ],
)
def test_deterministic_runs_give_the_same_bits(
    nccl_ranks: Pool, tmp_path: Path, num_ranks: int, documents: tuple[str, ...]
) -> None:
    """The start checks it too, and some steps are computed twice."""
    overrides = (*ON_GPU, *documents, "precision=bf16", "run.deterministic=true", "sentinel.sdc.every=2")
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


@pytest.mark.parametrize(("compiled", "documents"), [("true", DOCUMENTS), ("false", DOCUMENTS), ("true", ())], ids=str)
def test_the_loop_has_no_host_sync(nccl_ranks: Pool, tmp_path: Path, compiled: str, documents: tuple[str, ...]) -> None:
    overrides = (*ON_GPU, *documents, "precision=bf16", f"parallel.compile={compiled}", "parallel.context=2")
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


@pytest.mark.parametrize("name", ["nan_activation", "nan_loss", "corrupt_activation"])
def test_a_drill_names_the_rank_and_not_its_group(nccl_ranks: Pool, tmp_path: Path, name: str) -> None:
    overrides = (*test_nccl_drills.ON_GPU, "precision=bf16", "parallel.context=2")
    card = test_drills.run_drill(nccl_ranks, tmp_path, name, overrides)
    found = [
        event for event in event_json.read(tmp_path / f"drill-{name}" / "events.jsonl") if isinstance(event, Finding)
    ]
    print(*found, sep="\n", flush=True)
    test_drills.assert_passed(card)
    expected = load_scenario(name).expected.findings
    assert {tuple(finding.ranks) for finding in found if finding.kind in expected} == {(1,)}
