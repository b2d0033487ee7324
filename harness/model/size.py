"""How large a model is and what a token costs, from its configuration alone.

Why: plans, MFU and run names need these numbers before, or without, building the model.
How: the shapes of `Transformer` as arithmetic; a test holds them against the real module.
FLOPs follow the convention of the field: 6 for each matrix weight, and attention as if no position were masked.
Left out: norms, softmax, rotary embedding and recomputation cost FLOPs that MFU does not count.
"""

from __future__ import annotations

from harness.config import ModelConfig


def num_parameters(cfg: ModelConfig) -> int:
    """Every trained number; a tied head adds none."""
    num_embeddings = 1 if cfg.tied_head else 2
    block = _num_block_matrix_parameters(cfg) + 2 * cfg.dim + (2 * cfg.head_dim if cfg.qk_norm else 0)
    norms = cfg.dim + (cfg.dim if cfg.embedding_norm else 0)
    return num_embeddings * cfg.vocab_size * cfg.dim + cfg.num_layers * block + norms


def num_matmul_parameters(cfg: ModelConfig) -> int:
    """The weights that every token is multiplied with: matrices and head, tied or not; no embedding, no norms."""
    return cfg.num_layers * _num_block_matrix_parameters(cfg) + cfg.vocab_size * cfg.dim


def flops_per_token(cfg: ModelConfig, sequence_length: int) -> int:
    """Floating-point operations of forward and backward for one token of a sequence."""
    attention = 12 * cfg.num_layers * cfg.num_heads * cfg.head_dim * sequence_length
    return 6 * num_matmul_parameters(cfg) + attention


def _num_block_matrix_parameters(cfg: ModelConfig) -> int:
    query_and_output = 2 * cfg.dim * cfg.dim
    key_and_value = 2 * cfg.dim * cfg.num_kv_heads * cfg.head_dim
    return query_and_output + key_and_value + 3 * cfg.dim * cfg.ffn_dim
