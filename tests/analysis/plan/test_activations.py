"""Bytes that a block saves for backward: autograd's saved tensors against the formula, also for a compiled block."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.analysis.plan.activations import kept_bytes
from harness.analysis.plan.fp8 import fp8_projections
from harness.config.parallel import ActivationCheckpointing
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.distributed.fsdp import wrap
from harness.model.attention_mask import document_mask
from harness.model.transformer import Block, build_block, rotary_tables
from harness.precision import fused_qkv
from harness.precision.fp8.layers import convert_to_fp8
from harness.precision.mixed_precision import DTYPES, linear
from tests.analysis.plan.shadow import fused_norms
from tests.composed import load
from tests.graph_compiler import without_kernels

NUM_ROWS = 2
IN_FP8 = ["model=tiny", "precision=fp8_emulated", "train.sequence_length=64"]


def kept_by(block: Block, cfg: Config) -> int:
    """Saved bytes without parameters, tables and scalars."""
    length, dtype = cfg.train.sequence_length, DTYPES[PrecisionKind(cfg.precision.kind)]
    cos, sin = (table.float() for table in rotary_tables(cfg.model, length))
    hidden, change = (torch.randn(NUM_ROWS, length, cfg.model.dim, dtype=dtype, requires_grad=True) for _ in range(2))
    mask = document_mask(torch.zeros(NUM_ROWS, length, dtype=torch.int64)) if cfg.data.document_mask else None
    given = (*block.parameters(), *block.buffers(), cos, sin)
    not_counted = {tensor.untyped_storage().data_ptr() for tensor in given}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() > 1:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden, change, cos, sin, mask)
    return sum(tensor.untyped_storage().nbytes() for where, tensor in kept.items() if where not in not_counted)


def block_of(cfg: Config) -> Block:
    block = build_block(cfg.model, linear=linear).to(DTYPES[PrecisionKind(cfg.precision.kind)])
    convert_to_fp8([block], cfg.precision)
    return block


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=tiny"],
        ["model=tiny", "precision=bf16"],
        ["model=tiny", "precision=bf16", "model.qk_norm=true"],
        ["model=tiny", "model.norm=layer"],
        ["model=tiny", "precision=bf16", "model.norm_placement=post"],
        ["model=tiny", "precision=bf16", "model.attention=fp32"],
        ["model=tiny", "model.attention=fp32"],
        ["model=tiny", "precision=bf16", "data.document_mask=true"],
        ["model=125m", "precision=bf16", "train.sequence_length=16"],
        IN_FP8,
        [*IN_FP8, "precision.fp8.recipe=delayed"],
        [*IN_FP8, "precision.fp8.recipe=block"],
        [*IN_FP8, "precision.fp8.attention=false"],
        [*IN_FP8, "precision.fp8.mlp=false"],
        [*IN_FP8, "model.attention=fp32"],
        [*IN_FP8, "data.document_mask=true"],
    ],
    ids=" ".join,
)
def test_saved_bytes_equal_autograd(overrides: list[str]) -> None:
    cfg = load(["train.sequence_length=64", *overrides])
    with fused_norms():
        kept = kept_by(block_of(cfg), cfg)
    assert kept == kept_bytes(cfg, fp8_projections(cfg, 0)) * NUM_ROWS * cfg.train.sequence_length


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler gives two
def test_selective_checkpointing_saves_nothing_in_fp8() -> None:
    cfg = load([*IN_FP8, "parallel.compile=true", "parallel.activation_checkpointing=selective"])
    block = block_of(cfg)
    with without_kernels():
        wrap(block, cfg.parallel)
    num_tokens, projections = NUM_ROWS * cfg.train.sequence_length, fp8_projections(cfg, 0)
    assert kept_by(block, cfg) == num_tokens * kept_bytes(cfg, projections)
    without = replace(cfg, parallel=replace(cfg.parallel, activation_checkpointing=ActivationCheckpointing.none))
    assert kept_bytes(without, projections) - kept_bytes(cfg, projections) == 2 * 4, "but for two statistics of norms"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which the compiler looks at, of any tensor
@pytest.mark.parametrize("precision", ["bf16", "fp8_emulated"])
def test_full_checkpointing_saves_only_the_input(precision: str) -> None:
    overrides = [f"precision={precision}", "parallel.compile=true", "parallel.activation_checkpointing=full"]
    cfg = load(["model=tiny", "train.sequence_length=64", *overrides])
    block = block_of(cfg)
    with without_kernels():
        wrap(block, cfg.parallel)
    kept, wide = kept_by(block, cfg), DTYPES[PrecisionKind(cfg.precision.kind)].itemsize * cfg.model.dim
    assert wide == kept_bytes(cfg, fp8_projections(cfg, 0))
    assert 1 <= kept / (NUM_ROWS * cfg.train.sequence_length * wide) < 1.2, "and a table or two"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("kind", list(ActivationCheckpointing))
def test_fused_qkv_saves_as_much_as_three_projections(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    overrides = ["precision=bf16", "parallel.compile=true", f"parallel.activation_checkpointing={kind}"]
    cfg = load(["model=tiny", "train.sequence_length=64", *overrides])
    kept = []
    for is_joined in (False, True):
        monkeypatch.setattr(fused_qkv, "is_compiled_for_cuda", lambda _hidden, is_joined=is_joined: is_joined)
        block = block_of(cfg)
        with without_kernels():
            wrap(block, cfg.parallel)
        kept.append(kept_by(block, cfg))
        torch._dynamo.reset()
    assert kept[1] <= kept[0]
