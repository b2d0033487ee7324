"""Attention kernels on a GPU against `scaled_dot_product_attention`: values, gradients, the same bits every time.

In single calls, in compiled and checkpointed blocks, and in whole training steps with documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import harness.model.attention_layer
from harness.analysis.replay.module_watch import watch_modules
from harness.build import Parts, build, run_manifest
from harness.config.compose import load
from harness.config.model import ModelConfig
from harness.config.parallel import ActivationCheckpointing
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.determinism import DeterministicSettings
from harness.distributed.fsdp import wrap
from harness.distributed.shards import local
from harness.distributed.world import connect, disconnect
from harness.model.attention_layer import AttentionMask
from harness.model.attention_mask import BlockSparseMask, build_block_mask, causal_block_mask, document_mask
from harness.model.init import initialize
from harness.model.transformer import Transformer, build_block, rotary_tables
from harness.precision.attention import fast_attention
from harness.precision.mixed_precision import linear
from harness.precision.te_attention import te_attention, te_attention_obstacle
from harness.step import evaluate, finish_step, forward_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # from torch.compile and NCCL
]

Kernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(query, key, value [B, S, heads, head_dim], scale) -> attended."""
LENGTH, NUM_ROWS = 512, 3
NUM_REPEATS = 20
KINDS = list(ActivationCheckpointing)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Compiles for this test alone. After models with other head sizes in the same process, of other files too, the
    compiler would take any head size, and torch 2.11 cannot compile `flex_attention` for that."""
    forget_compiled_blocks()
    with fast_attention():
        yield
    forget_compiled_blocks()


def forget_compiled_blocks() -> None:
    torch._dynamo.reset()
    harness.model.attention_layer._compiled_attend_blocks.cache_clear()


def require_te(head_dim: int = 128) -> None:
    if reason := te_attention_obstacle(head_dim):
        pytest.skip(reason)


def random_documents(num_rows: int, length: int, *, mean_length: float) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    starts = torch.rand(num_rows, length, generator=generator) < 1 / mean_length
    return starts.cumsum(dim=1, dtype=torch.int32).cuda()


def inputs_of(
    num_rows: int, length: int, num_heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Query, key and value, and the gradient of the output."""
    generator = torch.Generator(device="cuda").manual_seed(length + head_dim)
    counts = (num_heads[0], num_heads[1], num_heads[1], num_heads[0])
    shapes = [(num_rows, length, count, head_dim) for count in counts]
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]


def results(kernel: Kernel, inputs: list[Tensor], scale: float) -> list[Tensor]:
    """Output and gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    query, key, value = leaves
    attended = kernel(query, key, value, scale)
    return [attended.detach(), *torch.autograd.grad(attended, leaves, inputs[3])]


def by_flex(mask: BlockSparseMask) -> Kernel:
    """As in a block that is not compiled."""
    compiled = harness.model.attention_layer._compiled_attend_blocks()

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        attended: Tensor = compiled(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, scale)
        return attended.transpose(1, 2)

    return attend


def exact(mask: Tensor | None) -> Kernel:
    """Attention in fp32, score by score."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        length = query.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
        allowed = allowed if mask is None else allowed & mask
        query_32, key_32, value_32 = (tensor.float().transpose(1, 2) for tensor in (query, key, value))
        with sdpa_kernel(SDPBackend.MATH):
            attended = F.scaled_dot_product_attention(
                query_32, key_32, value_32, attn_mask=allowed, scale=scale, enable_gqa=True
            )
        return attended.transpose(1, 2).to(query.dtype)

    return attend


def assert_near(own: list[Tensor], expected: list[Tensor], *, tolerance: float = 0.02) -> None:
    """The largest error, as a share of the largest value; values below 0.01 count as that."""
    assert len(own) == len(expected)
    errors = [
        float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=0.01))
        for ours, theirs in zip(own, expected, strict=True)
    ]
    print("largest errors:", " ".join(f"{error:.1e}" for error in errors))
    assert all(tensor.isfinite().all() for tensor in own)
    assert max(errors) < tolerance


def assert_same_bits(compute: Callable[[], list[Tensor]]) -> None:
    first = compute()
    for number in range(NUM_REPEATS):
        again = compute()
        differ = [place for place, pair in enumerate(zip(first, again, strict=True)) if not torch.equal(*pair)]
        assert not differ, f"repeat {number}: results {differ} of {len(first)} differ"


SHAPES = [(512, (4, 2), 64), (384, (16, 8), 128), (200, (6, 2), 128), (256, (4, 4), 32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_te_attention(shape: tuple[int, tuple[int, int], int], dtype: torch.dtype) -> None:
    length, num_heads, head_dim = shape
    require_te(head_dim)
    inputs = inputs_of(NUM_ROWS, length, num_heads, head_dim, dtype)
    state = torch.cuda.get_rng_state()
    own = results(te_attention, inputs, 0.07)
    assert torch.equal(torch.cuda.get_rng_state(), state), "the generator of torch was advanced"
    assert own[0].is_contiguous()
    assert [tensor.shape for tensor in own] == [inputs[index].shape for index in (3, 0, 1, 2)]
    assert_near(own, results(exact(None), inputs, 0.07))


def test_te_operators_are_registered_completely() -> None:
    """Shapes, dtypes and strides of the fake implementations are those of the kernels."""
    require_te()
    query, key, value, _ = inputs_of(2, 128, (4, 2), 64, torch.bfloat16)
    arguments = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), 0.1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.harness.attention_forward.default, arguments, test_utils=checks)
    attended, log_sums, state = torch.ops.harness.attention_forward(*arguments)
    print("log sums", log_sums.shape, log_sums.dtype, log_sums.stride(), "state", state.shape, state.dtype)
    saved = [tensor.detach() for tensor in (query, key, value, attended, log_sums, state)]
    backward = (torch.randn_like(attended), saved, 0.1)
    torch.library.opcheck(
        torch.ops.harness.attention_backward.default, backward, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(("num_heads", "head_dim"), [((4, 2), 64), ((16, 8), 128), ((4, 4), 16)])
def test_flex_attention(num_heads: tuple[int, int], head_dim: int) -> None:
    """Without documents, with documents of one token, and with longer ones."""
    inputs = inputs_of(NUM_ROWS, LENGTH, num_heads, head_dim, torch.bfloat16)
    masks = [causal_block_mask(LENGTH, inputs[0].device)]
    masks += [
        build_block_mask(random_documents(NUM_ROWS, LENGTH, mean_length=mean_length))
        for mean_length in (1.0, 90.0, 400.0)
    ]
    for mask in masks:
        assert_near(results(by_flex(mask), inputs, 0.07), results(exact(mask.dense()), inputs, 0.07))


@pytest.mark.parametrize("kernel", ["te", "causal", "documents"])
def test_kernels_give_the_same_bits_every_time(kernel: str) -> None:
    inputs = inputs_of(8, 2048, (16, 8), 128, torch.bfloat16)
    match kernel:
        case "te":
            require_te()
            attend: Kernel = te_attention
        case "causal":
            attend = by_flex(causal_block_mask(2048, inputs[0].device))
        case _:
            attend = by_flex(build_block_mask(random_documents(8, 2048, mean_length=300.0)))
    assert_same_bits(lambda: results(attend, inputs, 0.09))


def block_results(
    cfg: ModelConfig,
    mask: AttentionMask,
    *,
    kind: ActivationCheckpointing = ActivationCheckpointing.none,
    compiled: bool = False,
    deterministic: bool = False,
) -> Callable[[int], list[Tensor]]:
    """A block as a function of the number of rows: its output, and gradients of its input and weights."""
    torch.manual_seed(0)
    block = build_block(cfg, linear=linear, deterministic=deterministic).cuda().to(torch.bfloat16)
    parallel = replace(load([]).parallel, activation_checkpointing=kind, compile=compiled)
    wrap(block, parallel)
    cos, sin = (table.float().cuda() for table in rotary_tables(cfg, LENGTH))
    generator = torch.Generator(device="cuda").manual_seed(3)
    values = torch.randn(3, NUM_ROWS, LENGTH, cfg.dim, device="cuda", generator=generator).to(torch.bfloat16)

    def run(num_rows: int) -> list[Tensor]:
        block.zero_grad()
        hidden, change, gradient = values[:, :num_rows].unbind()
        hidden, change = (tensor.detach().requires_grad_() for tensor in (hidden, change))
        part = first_rows(mask, num_rows)
        stream, last = block(hidden, change, cos, sin, part)
        output = stream + last
        output.backward(gradient)
        grads = [tensor.grad.clone() for tensor in (hidden, change, *block.parameters()) if tensor.grad is not None]
        return [output.detach(), *grads]

    return run


def first_rows(mask: AttentionMask, num_rows: int) -> AttentionMask:
    if isinstance(mask, Tensor):
        return mask[:num_rows]
    return mask if mask is None or mask.documents is None else build_block_mask(mask.documents[:num_rows])


def block_config(*overrides: str) -> ModelConfig:
    shape = ("model.dim=256", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=512")
    return load([*shape, "model.mup_base_width=128", *overrides]).model


@pytest.mark.parametrize("kind", KINDS)
def test_te_attention_in_a_compiled_block(kind: ActivationCheckpointing) -> None:
    require_te(64)
    cfg = block_config()
    run = block_results(cfg, None, kind=kind, compiled=True, deterministic=True)
    assert_near(run(NUM_ROWS), block_results(cfg, None)(NUM_ROWS), tolerance=0.05)
    assert_same_bits(lambda: run(NUM_ROWS))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_in_a_block(kind: ActivationCheckpointing, compiled: bool) -> None:
    cfg = block_config()
    documents = random_documents(NUM_ROWS, LENGTH, mean_length=100.0)
    run = block_results(cfg, build_block_mask(documents), kind=kind, compiled=compiled)
    expected = block_results(cfg, document_mask(documents))
    is_plain = kind is ActivationCheckpointing.none
    for num_rows in (NUM_ROWS, 2) if is_plain else (NUM_ROWS,):  # the second size is compiled with symbolic shapes
        assert_near(run(num_rows), expected(num_rows), tolerance=0.05)
    assert_same_bits(lambda: run(NUM_ROWS))


def test_selective_checkpointing_saves_flex_attention() -> None:
    """A compiled block runs the forward kernel once. The profiler lists a kernel on the host and on the device."""
    documents = random_documents(NUM_ROWS, LENGTH, mean_length=100.0)
    counts = {}
    for kind in KINDS:
        run = block_results(block_config(), build_block_mask(documents), kind=kind, compiled=True)
        run(NUM_ROWS)
        with torch.profiler.profile(acc_events=True) as profiler:
            run(NUM_ROWS)
        names = [event.name for event in profiler.events() or () if event.name.startswith("triton_tem")]
        counts[str(kind)] = sum("flex_attention" in name and "backward" not in name for name in names)
        print(kind, names)
    assert counts["none"] > 0
    assert counts == {"none": counts["none"], "selective": counts["none"], "full": 2 * counts["none"]}


SMALL = (
    "model.dim=256",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=512",
    "train.batch_size=8",
    "train.micro_batch_size=3",
    "train.sequence_length=256",
    "precision=bf16",
    "optim.warmup_steps=2",
    "parallel.device=cuda",
    "data.document_mask=true",
)


@pytest.fixture
def single_rank() -> Iterator[None]:
    yield
    disconnect()


def start(*overrides: str) -> tuple[Parts, Config]:
    cfg = load([*SMALL, *overrides])
    return build(cfg, connect(cfg.parallel), RunDir(Path("/nonexistent"))), cfg


def train(parts: Parts, cfg: Config, first: int, last: int) -> list[float]:
    layout, reports = parts.signals.layout, []
    for index in range(first, last):
        forward_backward(parts, parts.batches[index], cfg=cfg, probe=False)
        reports.append(finish_step(parts, cfg=cfg, probe=False).clone())
    return [float(layout.scalar(report, "loss") / layout.scalar(report, "tokens")) for report in reports]


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.compile=true"],
        ["parallel.compile=true", "parallel.activation_checkpointing=full"],
        ["parallel.compile=false", "parallel.activation_checkpointing=selective"],
    ],
    ids=" ".join,
)
def test_a_run_with_documents_trains_as_with_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    """Micro-batches of 3, 3 and 2 rows, and an evaluation. No step waits for the device."""
    parts, cfg = start(*overrides)
    losses = train(parts, cfg, 0, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in (2, 3):
            forward_backward(parts, parts.batches[index], cfg=cfg, probe=False)
            finish_step(parts, cfg=cfg, probe=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses += train(parts, cfg, 4, 8)
    held_out = evaluate(parts, RunState(), cfg=cfg).loss
    assert isinstance(parts.model.mask_documents(parts.batches[0].documents), BlockSparseMask)
    assert run_manifest(cfg, parts, DeterministicSettings())["attention"] == "flex_attention, block-sparse"
    disconnect()

    monkeypatch.setattr(harness.model.attention_layer, "flex_obstacle", lambda *_, **__: "for comparison")
    parts, cfg = start("parallel.compile=false")
    dense = train(parts, cfg, 0, 2)
    train(parts, cfg, 2, 4)
    dense += train(parts, cfg, 4, 8)
    assert isinstance(parts.model.mask_documents(parts.batches[0].documents), Tensor)
    print(f"losses {losses} dense {dense}")
    assert losses == pytest.approx(dense, rel=5e-3)
    assert held_out == pytest.approx(evaluate(parts, RunState(), cfg=cfg).loss, rel=5e-3)
    assert math.isfinite(held_out)


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(
    "overrides", [["parallel.compile=true"], ["data.document_mask=false", "parallel.compile=true"]], ids=" ".join
)
@pytest.mark.parametrize("workspace_fits", [True, False])
def test_two_deterministic_runs_have_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], workspace_fits: bool
) -> None:
    """The gradients of attention's weights, at a length where cuDNN's own backward pass differs. Block-sparse attention
    takes over where Transformer Engine's workspace would be too large."""
    if not workspace_fits:
        monkeypatch.setattr(harness.model.attention_layer, "MAX_WORKSPACE_BYTES", 0)
    gradients = []
    for _ in range(2):
        parts, cfg = start("run.deterministic=true", "train.sequence_length=2048", "model.dim=512", *overrides)
        forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
        backend = run_manifest(cfg, parts, DeterministicSettings())["attention"]
        assert workspace_fits or backend.startswith("flex_attention"), backend
        gradients.append(
            {name: local(p.grad).clone() for name, p in parts.update.parameters.items() if p.grad is not None}
        )
        disconnect()
    for name, gradient in gradients[0].items():
        if ".attention." in name:
            assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.parametrize("on_reference_path", [True, False])
def test_a_replay_watches_attention_with_documents(on_reference_path: bool) -> None:
    cfg = load(["model=tiny"]).model
    model = Transformer(cfg, sequence_length=256, linear=linear, deterministic=True)
    initialize(model, cfg, seed=0)
    model.cuda().to(torch.bfloat16)
    tokens = torch.randint(cfg.vocab_size, (2, 256), device="cuda")
    mask = model.mask_documents(random_documents(2, 256, mean_length=60.0))
    assert isinstance(mask, BlockSparseMask)
    with watch_modules(model, on_reference_path=on_reference_path) as seen:
        model(tokens, tokens, mask=mask).objective.backward()
    assert seen.is_clean
    with torch.no_grad():
        model.get_parameter("blocks.1.attention.value.weight").fill_(torch.nan)
    with watch_modules(model, on_reference_path=on_reference_path) as seen:
        model(tokens, tokens, mask=mask).objective.backward()
    assert seen.broken_weights == "blocks.1.attention.value"
