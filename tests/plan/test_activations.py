"""What a block keeps, tensor by tensor: autograd's own list against the formula, where nothing is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.compose import load
from harness.config import PrecisionKind
from harness.model.transformer import Block, document_mask, rotary_tables
from harness.plan.activations import kept_bytes
from harness.precision import DTYPES, linear
from tests.plan.shadow import fused_norms

NUM_ROWS = 2


@pytest.mark.parametrize(
    "words",
    [
        ["model=tiny"],
        ["model=tiny", "precision=bf16"],
        ["model=tiny", "precision=bf16", "model.qk_norm=true"],
        ["model=tiny", "precision=bf16", "model.attention=fp32"],
        ["model=tiny", "model.attention=fp32"],
        ["model=tiny", "precision=bf16", "data.document_mask=true"],
        ["model=125m", "precision=bf16", "train.sequence_length=64"],
    ],
    ids=" ".join,
)
def test_every_byte_that_autograd_keeps(words: list[str]) -> None:
    cfg = load(words)
    length, dtype = cfg.train.sequence_length, DTYPES[PrecisionKind(cfg.precision.kind)]
    block = Block(cfg.model, linear=linear).to(dtype)
    cos, sin = (table.float() for table in rotary_tables(cfg.model, length))
    hidden = torch.randn(NUM_ROWS, length, cfg.model.dim, dtype=dtype, requires_grad=True)
    mask = document_mask(torch.zeros(NUM_ROWS, length, dtype=torch.int64)) if cfg.data.document_mask else None
    not_counted = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), cos, sin)}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with fused_norms(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden, cos, sin, mask)
    sizes = [tensor.untyped_storage().nbytes() for where, tensor in kept.items() if where not in not_counted]
    assert sum(sizes) == kept_bytes(cfg) * NUM_ROWS * length
