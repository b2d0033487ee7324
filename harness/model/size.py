"""Parameter count and FLOPs per token of a model, from its config alone.

Why: plans, MFU and run names need these numbers without building the model.
How: the shapes of `Transformer` as arithmetic; a test compares them with the real module.
FLOPs follow the usual convention: 6 per matrix weight, and attention as if no position were masked.
Left out: norms, softmax, RoPE and recomputation, which MFU does not count.
"""

from __future__ import annotations

from math import prod

from harness.config.model import ModelConfig

Shape = tuple[int, ...]

GATHERED_SHARE = 0.1
"""Share of a device's memory that gathered weights may take if `parallel.reshard_after_forward` is not set."""


def block_shapes(cfg: ModelConfig) -> list[Shape]:
    """Shapes of the parameters of one block."""
    kv_dim = cfg.num_kv_heads * cfg.head_dim
    attention: list[Shape] = [(cfg.dim, cfg.dim), (kv_dim, cfg.dim), (kv_dim, cfg.dim), (cfg.dim, cfg.dim)]
    mlp: list[Shape] = [(cfg.ffn_dim, cfg.dim), (cfg.ffn_dim, cfg.dim), (cfg.dim, cfg.ffn_dim)]
    norms: list[Shape] = [(cfg.dim,), (cfg.dim,), *([(cfg.head_dim,), (cfg.head_dim,)] if cfg.qk_norm else [])]
    return attention + mlp + norms


def root_shapes(cfg: ModelConfig) -> list[Shape]:
    """Shapes of the parameters outside the blocks: embedding, norms, and the head if it is not tied."""
    num_matrices, num_norms = (1 if cfg.tied_head else 2), (2 if cfg.embedding_norm else 1)
    return [(cfg.vocab_size, cfg.dim)] * num_matrices + [(cfg.dim,)] * num_norms


def num_parameters(cfg: ModelConfig) -> int:
    """Number of trained parameters; a tied head adds none."""
    return cfg.num_layers * sum(map(prod, block_shapes(cfg))) + sum(map(prod, root_shapes(cfg)))


def needs_resharding(cfg: ModelConfig, *, weight_bytes: int, memory_bytes: float | None) -> bool:
    """Whether gathered weights take too much of a device's memory to keep them from forward to backward.

    True if the memory is unknown.
    """
    return memory_bytes is None or num_parameters(cfg) * weight_bytes > GATHERED_SHARE * memory_bytes


def num_matmul_parameters(cfg: ModelConfig) -> int:
    """Weights in matmuls per token: matrices of the blocks and the head, tied or not; no embedding, no norms."""
    return cfg.num_layers * _num_block_matrix_parameters(cfg) + cfg.vocab_size * cfg.dim


def flops_per_token(cfg: ModelConfig, sequence_length: int) -> int:
    """FLOPs of forward and backward per token."""
    attention = 12 * cfg.num_layers * cfg.num_heads * cfg.head_dim * sequence_length
    return 6 * num_matmul_parameters(cfg) + attention


def _num_block_matrix_parameters(cfg: ModelConfig) -> int:
    return sum(prod(shape) for shape in block_shapes(cfg) if len(shape) > 1)
