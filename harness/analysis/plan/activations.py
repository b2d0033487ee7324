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

A map in fp8 keeps its input rounded, a byte a number, in place of the input itself: of both norms and of the product.
What was attended to is kept both ways, as attention needs it too. Selective checkpointing keeps rounded inputs besides:
with all maps in fp8 that is as much as without any.

In backward, a block that was checkpointed has its tensors once more, and the gradients of the widest live beside them;
how many at once was read off a GPU (`tests.bench.plan --tensors`):

    none 1 D + 1 F, selective 1 D + 4 F, full 6 D + 2 K + 6 F; not compiled: 1 D + 2 F, 3 D + 4 F, 6 D + 2 K + 6 F

Where the MLP is in fp8 it was read off the operators instead. It is one operator, fullest where the gradients of gate
and up are written, both rounded both ways (4 bytes of F), while that of their product is still there (1 F), beside the
stream's (1 D; selective, not compiled: 3 D). In the recipe `block` it goes by parts. Compiled, those are fullest where
gate and up have become gradients: both of these rounded both ways at once, less the rounded product, which is gone,
and beside the stream's gradient that of the MLP's input. Not compiled, where the gradients of gate and up are made,
with the rounded product gone and nothing rounded yet. Checkpointed in full, a block has besides all that it would have
kept.

What is kept is held against torch by `tests/plan/`, and all of it against a GPU by `tests.bench.plan`.
Left out: what a kernel takes and returns within itself.
"""

from __future__ import annotations

from harness.analysis.plan.fp8 import Maps, numbers_of, rounded_bytes
from harness.config.model import AttentionKind, ModelConfig
from harness.config.parallel import ActivationCheckpointing
from harness.config.precision import Fp8Recipe, PrecisionKind
from harness.config.schema import Config

FP32_BYTES = 4


def element_bytes(cfg: Config) -> int:
    """Of a number in a matrix product, and of a gathered weight."""
    return FP32_BYTES if cfg.precision.kind is PrecisionKind.fp32 else 2


def kept_bytes(cfg: Config, maps: Maps) -> int:
    """What a block with these maps in fp8 keeps of one token until its backward pass."""
    match cfg.parallel.activation_checkpointing:
        case ActivationCheckpointing.full:
            return cfg.model.dim * element_bytes(cfg)
        case ActivationCheckpointing.selective:
            return _selective_bytes(cfg, maps)
        case ActivationCheckpointing.none:
            return _whole_bytes(cfg, maps)


def passing_bytes(cfg: Config, maps: Maps) -> int:
    """What comes and goes for one token at the worst moment of a block's backward pass, besides what was kept."""
    model, compiled, kind = cfg.model, cfg.parallel.compile, cfg.parallel.activation_checkpointing
    if maps.mlp:
        again = _whole_bytes(cfg, maps) - model.dim * element_bytes(cfg)
        return _rounding_bytes(cfg) + (again if kind is ActivationCheckpointing.full else 0)
    match kind:
        case ActivationCheckpointing.none:
            elements = model.dim + (1 if compiled else 2) * model.ffn_dim
        case ActivationCheckpointing.selective:
            elements = (1 if compiled else 3) * model.dim + 4 * model.ffn_dim
        case ActivationCheckpointing.full:
            elements = 6 * model.dim + 2 * _kv_dim(model) + 6 * model.ffn_dim
    return elements * element_bytes(cfg)


def _rounding_bytes(cfg: Config) -> int:
    """The same where the MLP is in fp8; what full checkpointing computes again is not among it."""
    model, size = cfg.model, element_bytes(cfg)
    is_selective = cfg.parallel.activation_checkpointing is ActivationCheckpointing.selective
    if cfg.precision.fp8.recipe is not Fp8Recipe.block:
        num_narrow = 3 if is_selective and not cfg.parallel.compile else 1
        return (num_narrow * model.dim + model.ffn_dim) * size + rounded_bytes(cfg, 4 * model.ffn_dim)
    gone = rounded_bytes(cfg, model.ffn_dim)
    if cfg.parallel.compile:
        return 2 * model.dim * size + rounded_bytes(cfg, 4 * model.ffn_dim) - gone
    if is_selective:
        return (3 * model.dim + 4 * model.ffn_dim) * size - gone
    return (model.dim + 3 * model.ffn_dim) * size - gone


def passing_weight_bytes(cfg: Config, maps: Maps) -> int:
    """Gradients of weights at that moment: of one matrix; in fp8 of two, and a weight rounded both ways."""
    matrix = cfg.model.dim * cfg.model.ffn_dim
    if maps.mlp and cfg.parallel.compile:
        return 2 * matrix * element_bytes(cfg) + rounded_bytes(cfg, 2 * matrix)
    return matrix * element_bytes(cfg)


def _whole_bytes(cfg: Config, maps: Maps) -> int:
    """Every tensor that a block without checkpointing keeps of a token."""
    model, size = cfg.model, element_bytes(cfg)
    is_one = maps.mlp and cfg.precision.fp8.recipe is not Fp8Recipe.block
    num_wide = 2 if cfg.parallel.compile or is_one else 3
    elements = 2 * model.dim + num_wide * model.ffn_dim
    if not maps.attention:
        elements += model.dim
    if not maps.mlp:
        elements += model.dim + model.ffn_dim
    if model.qk_norm:
        elements += model.dim + _kv_dim(model)
    rounded = rounded_bytes(cfg, numbers_of(model, maps).inputs)
    return elements * size + rounded + _attention_bytes(cfg, maps) + _statistics_bytes(model)


def _selective_bytes(cfg: Config, maps: Maps) -> int:
    model, size = cfg.model, element_bytes(cfg)
    num_narrow = 4 if cfg.parallel.compile else 5
    elements = num_narrow * model.dim + 2 * _kv_dim(model) + 2 * model.ffn_dim
    kept = elements * size + _softmax_bytes(model) + rounded_bytes(cfg, numbers_of(model, maps).inputs)
    if model.attention is AttentionKind.fp32:
        return kept + (FP32_BYTES - size) * model.dim
    return kept


def _attention_bytes(cfg: Config, maps: Maps) -> int:
    """Query, key, value and what was attended to; documents kept apart add who may see whom, and who sees nobody."""
    model, size = cfg.model, element_bytes(cfg)
    again = 0 if maps.attention else model.dim * size
    mask = cfg.train.sequence_length * size + again + 1 if cfg.data.document_mask else 0
    if model.attention is AttentionKind.fp32:
        lowered = again if size < FP32_BYTES else 0
        return 4 * model.dim * FP32_BYTES + lowered + mask
    return (2 * model.dim + 2 * _kv_dim(model)) * size + mask


def _statistics_bytes(model: ModelConfig) -> int:
    num_norms = 2 + (model.num_heads + model.num_kv_heads if model.qk_norm else 0)
    return num_norms * FP32_BYTES + _softmax_bytes(model)


def _softmax_bytes(model: ModelConfig) -> int:
    return model.num_heads * FP32_BYTES


def _kv_dim(model: ModelConfig) -> int:
    return model.num_kv_heads * model.head_dim
