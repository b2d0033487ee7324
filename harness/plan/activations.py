"""What a block keeps of a micro-batch for the backward pass, and what passes through it, in bytes.

Why: activations decide whether a job fits; everything else is arithmetic on the number of parameters.
How: tensors are counted by their width for one token (D: the residual stream, K: keys or values, F: the SwiGLU hidden
layer), in the order in which autograd keeps them:

    not compiled   input, its norm, query, attended, middle, its norm (6 D), key and value (2 K), gate, silu(gate), up,
                   their product (4 F); statistics of the norms and of the softmax in fp32
    compiled       the same, but silu(gate) is computed again, inside the kernel that needs it (3 F)
    selective      what `parallel` tells to keep, products and attention: input, query, attended, output (4 D; not
                   compiled 5, with what came out of the MLP), key and value (2 K), gate and up (2 F)
    full           the input alone (1 D)

In backward, a block that was checkpointed has its tensors once more, and the gradients of the widest live beside them;
how many at once was read off a GPU (`tests.bench.plan --tensors`):

    none 1 D + 1 F, selective 1 D + 4 F, full 6 D + 2 K + 6 F; not compiled: 1 D + 2 F, 3 D + 4 F, 6 D + 2 K + 6 F

What is kept is held against torch by `tests/plan/`, and all of it against a GPU by `tests.bench.plan`.
Left out: what a kernel takes and returns within itself.
"""

from __future__ import annotations

from harness.config import ActivationCheckpointing, AttentionKind, Config, ModelConfig, PrecisionKind

FP32_BYTES = 4


def element_bytes(cfg: Config) -> int:
    """Of a number in a matrix product, and of a gathered weight."""
    return FP32_BYTES if cfg.precision.kind is PrecisionKind.fp32 else 2


def kept_bytes(cfg: Config) -> int:
    """What one block keeps of one token until its backward pass."""
    match cfg.parallel.activation_checkpointing:
        case ActivationCheckpointing.full:
            return cfg.model.dim * element_bytes(cfg)
        case ActivationCheckpointing.selective:
            return _selective_bytes(cfg)
        case ActivationCheckpointing.none:
            return _whole_bytes(cfg)


def passing_bytes(cfg: Config) -> int:
    """What comes and goes for one token at the worst moment of a block's backward pass, besides what was kept."""
    model, compiled = cfg.model, cfg.parallel.compile
    match cfg.parallel.activation_checkpointing:
        case ActivationCheckpointing.none:
            elements = model.dim + (1 if compiled else 2) * model.ffn_dim
        case ActivationCheckpointing.selective:
            elements = (1 if compiled else 3) * model.dim + 4 * model.ffn_dim
        case ActivationCheckpointing.full:
            elements = 6 * model.dim + 2 * _kv_dim(model) + 6 * model.ffn_dim
    return elements * element_bytes(cfg)


def _whole_bytes(cfg: Config) -> int:
    """Every tensor that a block without checkpointing keeps of a token."""
    model, size = cfg.model, element_bytes(cfg)
    num_wide = 3 if cfg.parallel.compile else 4
    elements = 4 * model.dim + num_wide * model.ffn_dim
    if model.qk_norm:
        elements += model.dim + _kv_dim(model)
    return elements * size + _attention_bytes(cfg) + _statistics_bytes(model)


def _selective_bytes(cfg: Config) -> int:
    model, size = cfg.model, element_bytes(cfg)
    num_narrow = 4 if cfg.parallel.compile else 5
    elements = num_narrow * model.dim + 2 * _kv_dim(model) + 2 * model.ffn_dim
    if model.attention is AttentionKind.fp32:
        return elements * size + (FP32_BYTES - size) * model.dim + _softmax_bytes(model)
    return elements * size + _softmax_bytes(model)


def _attention_bytes(cfg: Config) -> int:
    """Query, key, value and what was attended to; documents kept apart add who may see whom, and who sees nobody."""
    model, size = cfg.model, element_bytes(cfg)
    mask = (cfg.train.sequence_length + model.dim) * size + 1 if cfg.data.document_mask else 0
    if model.attention is AttentionKind.fp32:
        lowered = size * model.dim if size < FP32_BYTES else 0
        return 4 * model.dim * FP32_BYTES + lowered + mask
    return (2 * model.dim + 2 * _kv_dim(model)) * size + mask


def _statistics_bytes(model: ModelConfig) -> int:
    num_norms = 2 + (model.num_heads + model.num_kv_heads if model.qk_norm else 0)
    return num_norms * FP32_BYTES + _softmax_bytes(model)


def _softmax_bytes(model: ModelConfig) -> int:
    return model.num_heads * FP32_BYTES


def _kv_dim(model: ModelConfig) -> int:
    return model.num_kv_heads * model.head_dim
