"""Attention on a CPU: block-sparse masks against torch's; `flex_attention` and the deterministic operators against
`scaled_dot_product_attention`; the choice of the kernel. `tests/gpu/test_attention.py` runs the kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import harness.model.attention_layer
import harness.precision.te_attention
from harness.config.model import AttentionKind, ModelConfig
from harness.config.parallel import ActivationCheckpointing
from harness.distributed.context import ContextSplit
from harness.distributed.fsdp import wrap
from harness.model.attention_layer import (
    Attention,
    attend_blocks,
    attention_backend,
    mask_documents,
    reference_attention,
    sample_logits,
)
from harness.model.attention_mask import (
    BlockLists,
    BlockSparseMask,
    build_block_mask,
    causal_block_mask,
    context_causal_mask,
    context_document_mask,
    document_mask,
)
from harness.model.flex_limits import MASK_BLOCK
from harness.model.init import initialize
from harness.model.transformer import Transformer, build_block, rotary_tables
from harness.precision.mixed_precision import linear
from harness.precision.te_attention import te_attention, te_attention_obstacle
from tests.composed import load
from tests.graph_compiler import BACKEND, without_kernels
from tests.no_sync import no_sync

MakeConfig = Callable[..., ModelConfig]
CUDA = torch.device("cuda")
SLOW_EAGER = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def random_documents(num_rows: int, length: int, *, mean_length: float) -> Tensor:
    """Documents of random lengths; the first row is one document, the last one ends documents at borders of blocks."""
    generator = torch.Generator().manual_seed(length)
    starts = torch.rand(num_rows, length, generator=generator) < 1 / mean_length
    starts[0] = False
    starts[-1] = torch.arange(length) % (2 * MASK_BLOCK) == 0
    return starts.cumsum(dim=1, dtype=torch.int32)


def lists_of(mask: BlockMask) -> list[BlockLists]:
    """The lists of torch's mask, in the order of `BlockSparseMask`."""
    pairs = [
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
        (mask.q_num_blocks, mask.q_indices),
        (mask.full_q_num_blocks, mask.full_q_indices),
    ]
    return [BlockLists(counts, indices) for counts, indices in pairs if counts is not None and indices is not None]


def assert_same_lists(own: BlockSparseMask, expected: BlockMask) -> None:
    for name, theirs in zip(own._fields[1:5], lists_of(expected), strict=True):
        lists = getattr(own, name)
        for field, tensor in zip(lists._fields, lists, strict=True):
            assert tensor.dtype is torch.int32
            assert tensor.is_contiguous(), "the kernels on a GPU assume it"
            assert torch.equal(tensor, getattr(theirs, field)), (name, field)


@pytest.mark.parametrize("mean_length", [1.0, 40.0, 128.0, 600.0])
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_block_mask_equals_the_one_of_torch(num_blocks: int, mean_length: float) -> None:
    length = num_blocks * MASK_BLOCK
    documents = random_documents(4, length, mean_length=mean_length)

    def is_visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    with no_sync():
        mask = build_block_mask(documents)
    assert_same_lists(mask, create_block_mask(is_visible, 4, None, length, length, device="cpu"))
    dense = mask.dense()
    assert dense is not None
    assert torch.equal(dense, document_mask(documents))


def test_causal_block_mask_equals_the_one_of_torch() -> None:
    mask = causal_block_mask(3 * MASK_BLOCK, torch.device("cpu"))
    expected = create_block_mask(
        lambda _row, _head, query, key: query >= key, None, None, 3 * MASK_BLOCK, 3 * MASK_BLOCK, device="cpu"
    )
    assert_same_lists(mask, expected)
    assert mask.dense() is None


@pytest.mark.parametrize("context", [2, 3])
@pytest.mark.parametrize("mean_length", [40.0, 600.0, None])
def test_block_masks_of_a_context_group_equal_those_of_torch(context: int, mean_length: float | None) -> None:
    length = 4 * context * MASK_BLOCK
    documents = None if mean_length is None else random_documents(2, length, mean_length=mean_length)
    for rank in range(context):
        split = ContextSplit(context, rank)
        positions = split.positions(length, torch.device("cpu"))

        def is_visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor, positions: Tensor = positions) -> Tensor:
            is_earlier = positions[query] >= key
            return (
                is_earlier
                if documents is None
                else is_earlier & (documents[row, positions[query]] == documents[row, key])
            )

        if documents is None:
            mask, dense = (
                causal_block_mask(length, torch.device("cpu"), split),
                context_causal_mask(length, torch.device("cpu"), split),
            )
        else:
            mask, dense = build_block_mask(documents, split), context_document_mask(documents, split)
        num_rows = None if documents is None else 2
        assert_same_lists(mask, create_block_mask(is_visible, num_rows, None, length // context, length, device="cpu"))
        own = mask.dense()
        assert own is not None
        assert torch.equal(own, dense)
        whole = torch.ones(length, length, dtype=torch.bool).tril()
        if documents is not None:
            whole = whole & document_mask(documents)
        assert torch.equal(dense, split.take(whole, whole.dim() - 2)), "the rows of this rank's queries"


@pytest.mark.parametrize("context", [1, 2, 4])
def test_the_ranks_of_a_context_group_compute_equally_many_scores(context: int) -> None:
    length = 8 * context
    counts = {
        int(context_causal_mask(length, torch.device("cpu"), ContextSplit(context, rank)).sum())
        for rank in range(context)
    }
    assert counts == {length * (length + 1) // 2 // context}


def test_numbers_of_documents_may_repeat_in_other_documents() -> None:
    """Only neighbours are compared: any numbering of contiguous documents will do, as long as neighbours differ."""
    rising = random_documents(3, 5 * MASK_BLOCK, mean_length=200.0)
    falling = rising.amax(dim=1, keepdim=True) - rising
    for own, other in zip(build_block_mask(rising)[1:5], build_block_mask(falling)[1:5], strict=True):
        assert all(torch.equal(*pair) for pair in zip(own, other, strict=True))


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    length = query.shape[-2]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    allowed = causal if mask is None else mask & causal
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale, enable_gqa=True)


@SLOW_EAGER
@pytest.mark.parametrize("has_documents", [True, False])
def test_flex_attention_equals_the_dense_mask(has_documents: bool) -> None:
    length = 3 * MASK_BLOCK
    query, key, value = (numbers(2, heads, length, 16, seed=heads) for heads in (4, 2, 2))
    mask = causal_block_mask(length, torch.device("cpu"))
    if has_documents:
        mask = build_block_mask(random_documents(2, length, mean_length=60.0))
    attended = attend_blocks(query, key, value, mask, 0.3)
    torch.testing.assert_close(attended, sdpa(query, key, value, mask.dense(), 0.3))


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets `flex_attention` differentiate on a CPU, by torch's reference of its kernels, in fp32."""
    monkeypatch.setattr(torch_attention.flex_attention, "_validate_device", lambda *_tensors: None)
    monkeypatch.setattr(harness.model.attention_layer, "HALF", (torch.float32,))
    harness.model.attention_layer._compiled_attend_blocks.cache_clear()
    with without_kernels():
        yield
    harness.model.attention_layer._compiled_attend_blocks.cache_clear()
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize("has_documents", [True, False])
@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_attention_of_parts_of_the_queries_equals_the_dense_mask(has_documents: bool) -> None:
    """Gradients of queries are those of the whole sequence, gradients of keys and values add up over the ranks."""
    context, length = 2, 4 * MASK_BLOCK
    query, key, value = (numbers(2, heads, length, 16, seed=heads).requires_grad_() for heads in (4, 2, 2))
    gradient = numbers(2, 4, length, 16)
    documents = random_documents(2, length, mean_length=60.0) if has_documents else None
    dense = None if documents is None else document_mask(documents)
    expected = sdpa(query, key, value, dense, 0.3)
    expected_gradients = torch.autograd.grad(expected, (query, key, value), gradient)
    sums = [torch.zeros_like(key), torch.zeros_like(value)]
    for rank in range(context):
        split = ContextSplit(context, rank)
        mask = causal_block_mask(length, torch.device("cpu"), split)
        if documents is not None:
            mask = build_block_mask(documents, split)
        own_query = split.take(query.detach(), 2).requires_grad_()
        attended = harness.model.attention_layer._compiled_attend_blocks()(own_query, key, value, mask, 0.3)
        torch.testing.assert_close(attended, split.take(expected, 2), rtol=1e-4, atol=1e-5)
        gradients = torch.autograd.grad(attended, (own_query, key, value), split.take(gradient, 2))
        torch.testing.assert_close(gradients[0], split.take(expected_gradients[0], 2), rtol=1e-4, atol=1e-5)
        sums = [total + part for total, part in zip(sums, gradients[1:], strict=True)]
    torch.testing.assert_close(sums, list(expected_gradients[1:]), rtol=1e-4, atol=1e-5)


def block_gradients(
    cfg: ModelConfig, mask: Tensor | BlockSparseMask | None, *, kind: ActivationCheckpointing, compiled: bool
) -> list[Tensor]:
    """Output of a block, and the gradients of its input and weights."""
    length = 2 * MASK_BLOCK
    torch.manual_seed(0)
    block = build_block(cfg, linear=linear)
    wrap(block, replace(load().parallel, activation_checkpointing=kind, compile=compiled))
    cos, sin = (table.float() for table in rotary_tables(cfg, length))
    hidden, change = (numbers(3, length, cfg.dim, seed=seed).requires_grad_() for seed in (1, 2))
    outputs = block(hidden, change, cos, sin, mask)
    torch.autograd.backward([output.square().sum() for output in outputs])
    return [*outputs, *(tensor.grad for tensor in (hidden, change, *block.parameters()) if tensor.grad is not None)]


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", list(ActivationCheckpointing))
@pytest.mark.usefixtures("flex_on_cpu")
def test_documents_in_a_block_equal_the_dense_mask(
    make_config: MakeConfig, kind: ActivationCheckpointing, compiled: bool
) -> None:
    """The whole graph is compiled; the mask passes through checkpoints as an argument of the block."""
    cfg = make_config(dim=64, num_heads=4, num_kv_heads=2)
    documents = random_documents(3, 2 * MASK_BLOCK, mean_length=50.0)
    expected = block_gradients(cfg, document_mask(documents), kind=ActivationCheckpointing.none, compiled=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # from Dynamo
        own = block_gradients(cfg, build_block_mask(documents), kind=kind, compiled=compiled)
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(4, 2), (3, 1), (2, 2)])
def test_deterministic_operators_equal_sdpa(num_queries: int, num_keys: int) -> None:
    """The reference of Transformer Engine's kernels, with a scale of its own (muP)."""
    tensors = [numbers(2, 9, heads, 8, seed=heads).requires_grad_() for heads in (num_queries, num_keys, num_keys)]
    query, key, value = tensors
    gradient = numbers(2, 9, num_queries, 8)
    attended = te_attention(query, key, value, 0.2)
    assert attended.is_contiguous()
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
    expected = sdpa(query, key, value, None, 0.2).transpose(1, 2)
    torch.testing.assert_close(attended, expected)
    own, theirs = (torch.autograd.grad(output, tensors, gradient) for output in (attended, expected))
    torch.testing.assert_close(own, theirs)


@pytest.mark.full
@pytest.mark.parametrize(("ends", "deterministic"), [([], True), ([4, 8], False)])
def test_deterministic_operators_are_registered_completely(ends: list[int], deterministic: bool) -> None:
    tensors = [numbers(2, 8, heads, 8).requires_grad_() for heads in (4, 2, 2)]
    torch.library.opcheck(torch.ops.harness.attention_forward.default, (*tensors, 0.2, deterministic, ends))


@pytest.mark.parametrize("kernel", ["sdpa", "sdpa, fp32", "sdpa, documents", "te"])
@pytest.mark.parametrize("context", [2, 3])
def test_the_chunks_of_a_context_group_attend_like_the_whole(
    make_config: MakeConfig, context: int, kernel: str
) -> None:
    """Gradients of keys and values are summed over the ranks."""
    cfg = make_config(
        dim=64, num_heads=4, num_kv_heads=2, attention=AttentionKind.fp32 if "fp32" in kernel else AttentionKind.fused
    )
    tensors = [numbers(2, 12 * context, heads, 16, seed=heads).requires_grad_() for heads in (4, 2, 2)]
    gradient = numbers(2, 12 * context, 4, 16)
    documents = random_documents(2, 12 * context, mean_length=5.0) if "documents" in kernel else None
    whole = Attention(cfg, linear=linear)
    query, key, value = tensors
    expected = whole._attend(query, key, value, None if documents is None else document_mask(documents))
    expected_gradients = torch.autograd.grad(expected, tensors, gradient)
    sums = [torch.zeros_like(tensor) for tensor in tensors[1:]]
    for rank in range(context):
        split = ContextSplit(context, rank)
        own = Attention(cfg, linear=linear, context=split)
        own_query = split.take(query.detach(), 1).requires_grad_()
        if kernel == "te":
            attended = own._attend_by_te(own_query, key, value)
        else:
            mask = None if documents is None else context_document_mask(documents, split)
            attended = own._attend(own_query, key, value, mask)
        torch.testing.assert_close(attended, split.take(expected, 1), rtol=1e-4, atol=1e-5)
        gradients = torch.autograd.grad(attended, (own_query, key, value), split.take(gradient, 1))
        torch.testing.assert_close(gradients[0], split.take(expected_gradients[0], 1), rtol=1e-4, atol=1e-5)
        sums = [total + part for total, part in zip(sums, gradients[1:], strict=True)]
    torch.testing.assert_close(sums, list(expected_gradients[1:]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [64, 24, 4])
def test_a_context_group_samples_the_logits_that_one_rank_samples(length: int) -> None:
    query, key = numbers(3, length, 4, 8), numbers(3, length, 2, 8)
    ranks = [ContextSplit(2, rank) for rank in range(2)]
    found = [sample_logits(split.take(query, 1), key, 0.3, context=split) for split in ranks]
    torch.testing.assert_close(torch.stack(found).amax(dim=0), sample_logits(query, key, 0.3))


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("kind", "num_forwards"),
    [(ActivationCheckpointing.none, 1), (ActivationCheckpointing.selective, 1), (ActivationCheckpointing.full, 2)],
)
def test_deterministic_attention_in_a_block(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    kind: ActivationCheckpointing,
    num_forwards: int,
    compiled: bool,
) -> None:
    """Selective checkpointing saves the output of the forward operator."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=BACKEND))
    cfg = make_config(dim=64, num_heads=4, num_kv_heads=2)
    expected = block_gradients(cfg, None, kind=ActivationCheckpointing.none, compiled=False)
    monkeypatch.setattr(
        Attention, "_attend", lambda self, query, key, value, _mask: te_attention(query, key, value, self.scale)
    )
    calls = Mock(wraps=harness.precision.te_attention._forward_in_torch)
    monkeypatch.setattr(harness.precision.te_attention, "_forward_in_torch", calls)
    try:
        own = block_gradients(cfg, None, kind=kind, compiled=compiled)
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
    assert calls.call_count == num_forwards


def test_deterministic_model_computes_the_same_on_a_cpu(make_config: MakeConfig) -> None:
    cfg = make_config()
    tokens = torch.arange(24).view(2, 12)
    outputs = []
    for deterministic in (False, True):
        model = Transformer(cfg, sequence_length=12, linear=linear, deterministic=deterministic)
        initialize(model, cfg, seed=0)
        assert model.mask_documents(None) is None
        outputs.append(model.logits(tokens, mask=model.mask_documents(tokens // 5)))
    assert torch.equal(*outputs)


def test_masks_on_a_cpu_are_dense(make_config: MakeConfig) -> None:
    documents = random_documents(2, MASK_BLOCK, mean_length=30.0)
    mask = mask_documents(make_config(dim=64), documents)
    assert isinstance(mask, Tensor)
    assert torch.equal(mask, document_mask(documents))


def test_reference_attention_uses_the_dense_mask(make_config: MakeConfig) -> None:
    """Replays watch attention operator by operator: a block-sparse mask becomes a dense one, bit for bit."""
    cfg = make_config(dim=64)
    model = Transformer(cfg, sequence_length=MASK_BLOCK, linear=linear)
    initialize(model, cfg, seed=0)
    model.to(torch.bfloat16)
    documents = random_documents(2, MASK_BLOCK, mean_length=30.0)
    tokens = documents.long() % cfg.vocab_size
    with reference_attention(model):
        sparse = model.logits(tokens, mask=build_block_mask(documents))
    assert torch.equal(sparse, model.logits(tokens, mask=document_mask(documents)))
    assert not any(module.on_reference_path for module in model.modules() if isinstance(module, Attention))


SDPA, DENSE = "scaled_dot_product_attention", "scaled_dot_product_attention with a dense mask"
HEADS = "model.num_heads=8"
NO_TE, DOCUMENTS, CONTEXT = "Transformer Engine is not installed", "data.document_mask=true", "parallel.context=2"


@pytest.mark.parametrize(
    ("overrides", "deterministic", "obstacle", "expected"),
    [
        ([], False, "", SDPA),
        ([], True, "", "Transformer Engine, cuDNN's deterministic backward pass"),
        ([], True, NO_TE, f"flex_attention, block-sparse: {NO_TE}"),
        (["train.sequence_length=200"], True, NO_TE, f"{SDPA}: {NO_TE}; sequences of 200 are not a multiple of 128"),
        (
            ["train.sequence_length=32768", HEADS],
            True,
            "",
            "flex_attention, block-sparse: Transformer Engine would need 32 GiB for the backward pass of a layer",
        ),
        (["train.sequence_length=32704", HEADS], True, "", "Transformer Engine, cuDNN's deterministic backward pass"),
        (["precision=fp32"], True, "", f"{SDPA}: precision is fp32"),
        (["model.attention=fp32"], True, "", f"{SDPA}: model.attention is fp32"),
        ([DOCUMENTS], False, NO_TE, "flex_attention, block-sparse"),
        ([DOCUMENTS], True, "", "flex_attention, block-sparse"),
        ([DOCUMENTS, "train.sequence_length=200"], True, "", f"{DENSE}: sequences of 200 are not a multiple of 128"),
        ([DOCUMENTS, "model.num_heads=16"], False, "", f"{DENSE}: heads of 8 are smaller than 16"),
        ([DOCUMENTS, "precision=fp32"], False, "", f"{DENSE}: precision is fp32"),
        ([CONTEXT], False, "", "Transformer Engine, cuDNN on each chunk"),
        ([CONTEXT], True, "", "Transformer Engine, cuDNN on each chunk, deterministic"),
        ([CONTEXT], False, NO_TE, f"flex_attention, block-sparse: {NO_TE}"),
        ([CONTEXT, DOCUMENTS], False, "", "flex_attention, block-sparse"),
        ([CONTEXT, "precision=fp32"], False, "", f"{DENSE}: precision is fp32"),
        ([CONTEXT, "train.sequence_length=32768", HEADS], False, "", "Transformer Engine, cuDNN on each chunk"),
        (
            [CONTEXT, "train.sequence_length=65536", HEADS],
            True,
            "",
            "flex_attention, block-sparse: Transformer Engine would need 32 GiB for the backward pass of a layer",
        ),
    ],
)
def test_backend_in_words(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], deterministic: bool, obstacle: str, expected: str
) -> None:
    monkeypatch.setattr(harness.model.attention_layer, "te_attention_obstacle", lambda _head_dim: obstacle)
    cfg = load(["precision=bf16", "train.sequence_length=512", *overrides])
    assert attention_backend(cfg, CUDA, num_rows=2, deterministic=deterministic) == expected
    on_cpu = DENSE if {DOCUMENTS, CONTEXT} & {*overrides} else SDPA
    assert attention_backend(cfg, torch.device("cpu"), num_rows=2, deterministic=deterministic) == on_cpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_transformer_engine_is_not_used_without_a_gpu() -> None:
    assert te_attention_obstacle(128)
