"""Where block-sparse attention (`flex_attention`) runs. The plan reads this without torch."""

from __future__ import annotations

from harness.config.model import AttentionKind, ModelConfig

MASK_BLOCK = 128
"""Queries and keys in a block of a block-sparse mask; divides the sequence length."""
MIN_FLEX_HEAD_DIM = 16
"""The smallest head that `flex_attention` multiplies on a GPU."""


def flex_obstacle(cfg: ModelConfig, sequence_length: int, *, context: int = 1) -> str:
    """Why a model cannot run `flex_attention` on a GPU in bf16 or fp16, in words; empty if it can. `context`: ranks
    that share a sequence, in two chunks each."""
    if cfg.attention is AttentionKind.fp32:
        return "model.attention is fp32"
    if cfg.head_dim < MIN_FLEX_HEAD_DIM:
        return f"heads of {cfg.head_dim} are smaller than {MIN_FLEX_HEAD_DIM}"
    if sequence_length % MASK_BLOCK:
        return f"sequences of {sequence_length} are not a multiple of {MASK_BLOCK}"
    if context > 1 and sequence_length % (2 * context * MASK_BLOCK):
        return f"sequences of {sequence_length} are not a multiple of 2 x {context} x {MASK_BLOCK}"
    return ""
