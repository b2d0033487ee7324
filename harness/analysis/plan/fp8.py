"""Counts the GEMMs that run in fp8, the values quantized for them, and the bytes that quantization moves.

Why: the plans of memory and of step time both need the projections in fp8 and their widths.
How: projections are chosen as in `harness.precision.fp8.layers`, and values are quantized as in
`harness.precision.fp8.custom_ops`: an input once for all projections that read it, in both layouts; a gradient in both
layouts; a weight in one layout in forward and in both in backward, after its amax was found in the recipe `current`.
The SwiGLU product is quantized by rows in forward and transposed in backward, from gate and up, which are saved anyway.
Full checkpointing quantizes inputs and weights twice.
Left out: the emulated engine, which quantizes in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from harness.config.model import ModelConfig
from harness.config.parallel import ActivationCheckpointing
from harness.config.precision import Fp8Engine, Fp8Recipe, PrecisionKind
from harness.config.schema import Config
from harness.model.size import flops_per_token

BLOCK = 128
"""Values that share a scale in the recipe `block`."""
SCALE_BYTES = 4
WORKSPACE_BYTES = 32 * 2**20
"""cuBLASLt workspace of Transformer Engine."""
ONE_WAY_BYTES, BOTH_WAYS_BYTES = 3, 4
"""Bytes read and written to quantize one bf16 value in one layout, or in both."""
AMAX_BYTES, EAGER_AMAX_BYTES = 2, 6
"""Bytes moved for one weight to find the amax; if not compiled, absolute values are also written and read."""


@final
@dataclass(frozen=True, slots=True)
class Fp8Projections:
    """Which projections of a block run in fp8."""

    attention: bool
    mlp: bool


@final
@dataclass(frozen=True, slots=True)
class QuantizedCounts:
    """Values quantized for the projections of one block."""

    weights: int
    inputs: int
    """For one token."""
    gradients: int
    """For one token."""


NO_FP8 = Fp8Projections(attention=False, mlp=False)


def blocks_in_fp8(cfg: Config) -> range:
    """Blocks with projections in fp8."""
    if cfg.precision.kind is not PrecisionKind.fp8:
        return range(0)
    fp8 = cfg.precision.fp8
    return range(fp8.keep_first_blocks, cfg.model.num_layers - fp8.keep_last_blocks)


def fp8_projections(cfg: Config, block: int) -> Fp8Projections:
    """Projections in fp8 of one block, counted from the first."""
    fp8 = cfg.precision.fp8
    return Fp8Projections(attention=fp8.attention, mlp=fp8.mlp) if block in blocks_in_fp8(cfg) else NO_FP8


def fp8_bytes(cfg: Config, count: int) -> int:
    """Bytes of this many values in fp8, with their scales."""
    in_blocks = cfg.precision.fp8.recipe is Fp8Recipe.block
    return count + (-(-count * SCALE_BYTES // BLOCK) if in_blocks else 0)


def workspace_bytes(cfg: Config) -> int:
    is_real = cfg.precision.fp8.engine is Fp8Engine.transformer_engine
    return WORKSPACE_BYTES if blocks_in_fp8(cfg) and is_real else 0


def count_quantized(model: ModelConfig, projections: Fp8Projections) -> QuantizedCounts:
    dim, wide, kv_dim = model.dim, model.ffn_dim, model.num_kv_heads * model.head_dim
    weights = inputs = gradients = 0
    if projections.attention:
        weights, inputs, gradients = 2 * dim * (dim + kv_dim), 2 * dim, 2 * (dim + kv_dim)
    if projections.mlp:
        weights, inputs, gradients = weights + 3 * dim * wide, inputs + dim + wide, gradients + dim + 2 * wide
    return QuantizedCounts(weights, inputs, gradients)


def saved_inputs(cfg: Config, projections: Fp8Projections) -> int:
    """Quantized inputs that one block saves for backward, for one token."""
    is_computed_again = projections.mlp and cfg.precision.fp8.recipe is not Fp8Recipe.block
    return count_quantized(cfg.model, projections).inputs - (cfg.model.ffn_dim if is_computed_again else 0)


def flops_share(cfg: Config) -> float:
    """Share of the model's FLOPs that are GEMMs in fp8."""
    blocks = blocks_in_fp8(cfg)
    weights = sum(count_quantized(cfg.model, fp8_projections(cfg, block)).weights for block in blocks)
    return 6 * weights / flops_per_token(cfg.model, cfg.train.sequence_length)


def quantized_bytes(cfg: Config, projections: Fp8Projections, tokens: int) -> int:
    """Bytes that quantization for one block reads and writes in a micro-batch of this many tokens.

    SwiGLU's product and its gradients are not counted: their kernels write them in fp8, twice, which is as many bytes
    as in bf16. Recipe `block` quantizes them in a pass of its own.
    """
    numbers = count_quantized(cfg.model, projections)
    num_forward = 2 if cfg.parallel.activation_checkpointing is ActivationCheckpointing.full else 1
    wide = cfg.model.ffn_dim if projections.mlp and cfg.precision.fp8.recipe is not Fp8Recipe.block else 0
    of_tokens = tokens * (num_forward * (numbers.inputs - wide) + numbers.gradients - 2 * wide)
    of_weights = num_forward * numbers.weights
    amax = AMAX_BYTES if cfg.parallel.compile else EAGER_AMAX_BYTES
    amax_bytes = amax * of_weights if cfg.precision.fp8.recipe is Fp8Recipe.current else 0
    return BOTH_WAYS_BYTES * (of_tokens + numbers.weights) + ONE_WAY_BYTES * of_weights + amax_bytes
