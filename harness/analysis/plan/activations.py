"""Computes the activation memory of a block: bytes saved for backward, and temporary bytes in backward.

Why: activations decide whether a job fits; everything else is arithmetic on the number of parameters.
How: tensors are counted by their width for one token (D: residual stream, K: keys or values, F: SwiGLU hidden layer),
in the order in which autograd saves them:

    not compiled   input, its norm, query, attention output, middle of the block, its norm (6 D), key and value (2 K),
                   gate, silu(gate), up, their product (4 F); statistics of norms and softmax in fp32
    compiled       the same, but silu(gate) is recomputed inside the kernel that needs it (3 F)
    selective      the outputs of matmuls and attention: input, query, attention output, output (4 D; not compiled 5,
                   with the output of the MLP), key and value (2 K), gate and up (2 F)
    full           only the input (1 D)

A projection in fp8 saves its input in fp8, one byte for each value, in place of the input itself: the outputs of both
norms. The attention output is saved in both formats, because attention's backward needs it too. The SwiGLU product is
computed again from gate and up; with the recipe `block` it is saved in fp8.
Selective checkpointing saves fp8 inputs in addition: with all projections in fp8 it saves as much as no checkpointing.

In backward, a checkpointed block holds its recomputed tensors, and the gradients of the widest tensors beside them. How
many are alive at once was measured on a GPU (`tests.bench.plan --tensors`):

    none 1 D + 1 F, selective 1 D + 4 F, full 6 D + 2 K + 6 F; not compiled: 1 D + 2 F, 3 D + 4 F, 6 D + 2 K + 6 F

For an MLP in fp8 the peak was derived from its operators. The MLP is one operator. It peaks where the gradients of gate
and up are written in fp8 in both layouts and the product in one (5 bytes of F) while the gradient of the SwiGLU product
is alive (1 F), beside the gradient of the MLP's output in fp8 (1 byte of D) and that of the residual stream (1 D;
selective, not compiled: 3 D). With the recipe `block` the MLP consists of
several operators. Compiled, they peak when gate and up have become gradients: both in fp8 in both layouts, without the
fp8 SwiGLU product, which is freed, and with the gradient of the MLP's input beside that of the residual stream. Not
compiled, they peak where the gradients of gate and up are computed: the fp8 product is freed, and nothing else is
quantized yet. With full checkpointing, a block additionally holds everything it would have saved.

With context parallelism over N ranks a rank has 1 / N of the tokens, but attention saves the keys and values of the
whole sequence: 2 K x N for each of its tokens. With selective and full checkpointing they are gathered again in
backward. There their gradients and the buffers of both collectives are alive at once (6 K x N). Not measured.

A post-LN block saves as much as a pre-LN block: both norms save their input, and projections save the outputs of norms.

`tests/analysis/plan` compares saved bytes with torch; `tests.bench.plan` compares all numbers with a GPU.
Left out: temporary memory inside a kernel.
"""

from __future__ import annotations

from harness.analysis.plan.fp8 import Fp8Projections, fp8_bytes, saved_inputs
from harness.config.model import AttentionKind, ModelConfig, NormKind
from harness.config.parallel import ActivationCheckpointing, DeviceKind
from harness.config.precision import Fp8Recipe, PrecisionKind
from harness.config.schema import Config
from harness.model.flex_limits import flex_obstacle

FP32_BYTES = 4


def element_bytes(cfg: Config) -> int:
    """Bytes of one element in a matmul, and of a gathered weight."""
    return FP32_BYTES if cfg.precision.kind is PrecisionKind.fp32 else 2


def kept_bytes(cfg: Config, projections: Fp8Projections) -> int:
    """Bytes that a block with these projections in fp8 saves for backward, for one token."""
    match cfg.parallel.activation_checkpointing:
        case ActivationCheckpointing.full:
            return cfg.model.dim * element_bytes(cfg)
        case ActivationCheckpointing.selective:
            return _selective_bytes(cfg, projections)
        case ActivationCheckpointing.none:
            return _whole_bytes(cfg, projections)


def temporary_bytes(cfg: Config, projections: Fp8Projections) -> int:
    """Temporary bytes at the peak of a block's backward pass, for one token, besides the saved bytes."""
    model, compiled, kind = cfg.model, cfg.parallel.compile, cfg.parallel.activation_checkpointing
    if projections.mlp:
        again = _whole_bytes(cfg, projections) - model.dim * element_bytes(cfg)
        in_mlp = _fp8_mlp_bytes(cfg) + (again if kind is ActivationCheckpointing.full else 0)
        return max(in_mlp, _context_bytes(cfg))
    match kind:
        case ActivationCheckpointing.none:
            elements = model.dim + (1 if compiled else 2) * model.ffn_dim
        case ActivationCheckpointing.selective:
            elements = (1 if compiled else 3) * model.dim + 4 * model.ffn_dim
        case ActivationCheckpointing.full:
            elements = 6 * model.dim + 2 * _kv_dim(model) * cfg.parallel.context + 6 * model.ffn_dim
    return max(elements * element_bytes(cfg), _context_bytes(cfg))


def _context_bytes(cfg: Config) -> int:
    """Temporary bytes in the backward pass of attention over several ranks, for one token; 0 on one rank."""
    if cfg.parallel.context == 1:
        return 0
    is_saved = cfg.parallel.activation_checkpointing is ActivationCheckpointing.none
    num_gathered = 4 if is_saved else 6
    recomputed = 6 * cfg.model.dim if cfg.parallel.activation_checkpointing is ActivationCheckpointing.full else 0
    elements = 2 * cfg.model.dim + num_gathered * _kv_dim(cfg.model) * cfg.parallel.context + recomputed
    return elements * element_bytes(cfg)


def _fp8_mlp_bytes(cfg: Config) -> int:
    """Temporary bytes with the MLP in fp8, without the tensors that full checkpointing recomputes."""
    model, size = cfg.model, element_bytes(cfg)
    is_selective = cfg.parallel.activation_checkpointing is ActivationCheckpointing.selective
    if cfg.precision.fp8.recipe is not Fp8Recipe.block:
        num_narrow = 3 if is_selective and not cfg.parallel.compile else 1
        return (num_narrow * model.dim + model.ffn_dim) * size + fp8_bytes(cfg, model.dim + 5 * model.ffn_dim)
    freed = fp8_bytes(cfg, model.ffn_dim)
    if cfg.parallel.compile:
        return 2 * model.dim * size + fp8_bytes(cfg, 4 * model.ffn_dim) - freed
    if is_selective:
        return (3 * model.dim + 4 * model.ffn_dim) * size - freed
    return (model.dim + 3 * model.ffn_dim) * size - freed


def temporary_weight_bytes(cfg: Config, projections: Fp8Projections) -> int:
    """Weight gradients at that peak: of one matrix; in fp8 of two, and one weight in fp8 in both layouts."""
    matrix = cfg.model.dim * cfg.model.ffn_dim
    if projections.mlp and cfg.parallel.compile:
        return 2 * matrix * element_bytes(cfg) + fp8_bytes(cfg, 2 * matrix)
    return matrix * element_bytes(cfg)


def _whole_bytes(cfg: Config, projections: Fp8Projections) -> int:
    """All tensors that a block without checkpointing saves, for one token."""
    model, size = cfg.model, element_bytes(cfg)
    is_one = projections.mlp and cfg.precision.fp8.recipe is not Fp8Recipe.block
    num_wide = 2 if cfg.parallel.compile or is_one else 3
    elements = 2 * model.dim + num_wide * model.ffn_dim
    if not projections.attention:
        elements += model.dim
    if not projections.mlp:
        elements += model.dim + model.ffn_dim
    if model.qk_norm:
        elements += model.dim + _kv_dim(model)
    quantized = fp8_bytes(cfg, saved_inputs(cfg, projections))
    return elements * size + quantized + _attention_bytes(cfg, projections) + _statistics_bytes(model)


def _selective_bytes(cfg: Config, projections: Fp8Projections) -> int:
    model, size = cfg.model, element_bytes(cfg)
    num_narrow = 4 if cfg.parallel.compile else 5
    elements = num_narrow * model.dim + 2 * _kv_dim(model) + 2 * model.ffn_dim
    kept = elements * size + _softmax_bytes(model) + fp8_bytes(cfg, saved_inputs(cfg, projections))
    if model.attention is AttentionKind.fp32:
        return kept + (FP32_BYTES - size) * model.dim
    return kept


def has_dense_mask(cfg: Config) -> bool:
    """Whether attention has a mask with a value for every pair of tokens: of documents, or of a part of the queries."""
    is_half = cfg.precision.kind is not PrecisionKind.fp32 and cfg.parallel.device is not DeviceKind.cpu
    obstacle = flex_obstacle(cfg.model, cfg.train.sequence_length, context=cfg.parallel.context)
    return (cfg.data.document_mask or cfg.parallel.context > 1) and bool(obstacle or not is_half)


def _attention_bytes(cfg: Config, projections: Fp8Projections) -> int:
    """Query, key, value and attention output. A dense document mask adds the mask and the rows without any visible key;
    a block-sparse one saves nothing for each layer."""
    model, size = cfg.model, element_bytes(cfg)
    again = 0 if projections.attention else model.dim * size
    mask = cfg.train.sequence_length * size + again + 1 if has_dense_mask(cfg) else 0
    if model.attention is AttentionKind.fp32:
        lowered = again if size < FP32_BYTES else 0
        return 4 * model.dim * FP32_BYTES + lowered + mask
    return (2 * model.dim + 2 * _kv_dim(model) * cfg.parallel.context) * size + mask


def _statistics_bytes(model: ModelConfig) -> int:
    """RMSNorm saves one number a row; LayerNorm saves two, the mean too."""
    num_saved = 2 if model.norm is NormKind.rms else 4
    num_saved += model.num_heads + model.num_kv_heads if model.qk_norm else 0
    return num_saved * FP32_BYTES + _softmax_bytes(model)


def _softmax_bytes(model: ModelConfig) -> int:
    return model.num_heads * FP32_BYTES


def _kv_dim(model: ModelConfig) -> int:
    return model.num_kv_heads * model.head_dim
