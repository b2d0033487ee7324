"""How large a model is and what a token costs, from its configuration alone.

Why: plans, MFU and run names need these numbers before, or without, building the model.
How: the shapes of `Transformer` as arithmetic; a test holds them against the real module.
FLOPs follow the convention of the field: 6 for each matrix weight, and attention as if no position were masked.
Left out: norms, softmax, rotary embedding and recomputation cost FLOPs that MFU does not count.
"""

from __future__ import annotations

from math import prod

from harness.config.model import ModelConfig

Shape = tuple[int, ...]

GATHERED_SHARE = 0.1
"""Of a device's memory, that gathered weights may take where nothing else was said."""


def block_shapes(cfg: ModelConfig) -> list[Shape]:
    """Shapes of the parameters of one block, which is sharded by itself."""
    kv_dim = cfg.num_kv_heads * cfg.head_dim
    attention: list[Shape] = [(cfg.dim, cfg.dim), (kv_dim, cfg.dim), (kv_dim, cfg.dim), (cfg.dim, cfg.dim)]
    mlp: list[Shape] = [(cfg.ffn_dim, cfg.dim), (cfg.ffn_dim, cfg.dim), (cfg.dim, cfg.ffn_dim)]
    norms: list[Shape] = [(cfg.dim,), (cfg.dim,), *([(cfg.head_dim,), (cfg.head_dim,)] if cfg.qk_norm else [])]
    return attention + mlp + norms


def root_shapes(cfg: ModelConfig) -> list[Shape]:
    """Shapes of what is not in a block: embedding, norms, and the head where it is not the embedding."""
    num_matrices, num_norms = (1 if cfg.tied_head else 2), (2 if cfg.embedding_norm else 1)
    return [(cfg.vocab_size, cfg.dim)] * num_matrices + [(cfg.dim,)] * num_norms


def num_parameters(cfg: ModelConfig) -> int:
    """Every trained number; a tied head adds none."""
    return cfg.num_layers * sum(map(prod, block_shapes(cfg))) + sum(map(prod, root_shapes(cfg)))


def needs_resharding(cfg: ModelConfig, *, weight_bytes: int, memory_bytes: float | None) -> bool:
    """Whether gathered weights are too much of a device's memory to be kept from forward to backward; where it is not
    known how much there is, they are."""
    return memory_bytes is None or num_parameters(cfg) * weight_bytes > GATHERED_SHARE * memory_bytes


def num_matmul_parameters(cfg: ModelConfig) -> int:
    """The weights that every token is multiplied with: matrices and head, tied or not; no embedding, no norms."""
    return cfg.num_layers * _num_block_matrix_parameters(cfg) + cfg.vocab_size * cfg.dim


def flops_per_token(cfg: ModelConfig, sequence_length: int) -> int:
    """Floating-point operations of forward and backward for one token of a sequence."""
    attention = 12 * cfg.num_layers * cfg.num_heads * cfg.head_dim * sequence_length
    return 6 * num_matmul_parameters(cfg) + attention


def _num_block_matrix_parameters(cfg: ModelConfig) -> int:
    return sum(prod(shape) for shape in block_shapes(cfg) if len(shape) > 1)
