"""Which products of a run are taken in fp8, how many numbers are rounded for them, and what that saves of a step.

Why: memory and pace ask the same two things: which maps of which blocks, and how wide they are.
How: maps are chosen as `harness.fp8.products` chooses them, and numbers rounded as `harness.fp8.operators` does it: an
input once for all maps that read it, both ways; a gradient both ways; a weight one way in forward, both ways in
backward, after a look for its largest number in the recipe `current`. Products gain what the fp8 rate is above the bf16
rate. Rounding goes by the rate of memory, but for SwiGLU's product and its gradients: written in fp8 both ways they are
as many bytes as in bf16, unless the recipe is `block`. With full checkpointing the forward pass is done twice, and all
of it: what bf16 need not do again, the product of the last map, comes of the operator that rounds its input.
Left out: the emulated engine, which is a rehearsal and slower than bf16; whether products are slower in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from harness.config import ActivationCheckpointing, Config, Fp8Engine, Fp8Recipe, ModelConfig, PrecisionKind
from harness.model.size import flops_per_token

BLOCK = 128
"""Numbers that share a scale in the recipe `block`."""
SCALE_BYTES = 4
WORKSPACE_BYTES = 32 * 2**20
"""Transformer Engine's own, for cuBLASLt."""
RATE = 1979 / 989
"""A Hopper's fp8 rate over its bf16 rate; datasheet."""
REACHED_BF16, REACHED = 0.69, 0.655
"""Share of the one rate and of the other that products reach; measured on one H200 at 1.26B parameters: 687 and 1,297
TFLOP/s."""
ROUNDING_BYTES_PER_S = 3.3e12
"""What the kernel that rounds and transposes reads and writes; measured on one H200."""
ONE_WAY_BYTES, BOTH_WAYS_BYTES = 3, 4
"""Read and written for one number of bf16."""
LOOK_BYTES, EAGER_LOOK_BYTES = 2, 6
"""To find the largest number of a weight; not compiled, absolute values are written and read besides."""


@final
@dataclass(frozen=True, slots=True)
class Maps:
    """Which linear maps of a block are in fp8."""

    attention: bool
    mlp: bool


@final
@dataclass(frozen=True, slots=True)
class Numbers:
    """What is rounded for the maps of one block."""

    weights: int
    inputs: int
    """Of one token."""
    gradients: int
    """Of one token."""


NO_MAPS = Maps(attention=False, mlp=False)


def blocks_in_fp8(cfg: Config) -> range:
    """Which blocks have maps in fp8."""
    if cfg.precision.kind is not PrecisionKind.fp8:
        return range(0)
    fp8 = cfg.precision.fp8
    return range(fp8.keep_first_blocks, cfg.model.num_layers - fp8.keep_last_blocks)


def maps_of(cfg: Config, block: int) -> Maps:
    """Of one block, counted from the first."""
    fp8 = cfg.precision.fp8
    return Maps(attention=fp8.attention, mlp=fp8.mlp) if block in blocks_in_fp8(cfg) else NO_MAPS


def rounded_bytes(cfg: Config, count: int) -> int:
    """So many numbers in fp8, with their scales."""
    in_blocks = cfg.precision.fp8.recipe is Fp8Recipe.block
    return count + (-(-count * SCALE_BYTES // BLOCK) if in_blocks else 0)


def workspace_bytes(cfg: Config) -> int:
    is_real = cfg.precision.fp8.engine is Fp8Engine.transformer_engine
    return WORKSPACE_BYTES if blocks_in_fp8(cfg) and is_real else 0


def numbers_of(model: ModelConfig, maps: Maps) -> Numbers:
    dim, wide, kv_dim = model.dim, model.ffn_dim, model.num_kv_heads * model.head_dim
    weights = inputs = gradients = 0
    if maps.attention:
        weights, inputs, gradients = 2 * dim * (dim + kv_dim), 2 * dim, 2 * (dim + kv_dim)
    if maps.mlp:
        weights, inputs, gradients = weights + 3 * dim * wide, inputs + dim + wide, gradients + dim + 2 * wide
    return Numbers(weights, inputs, gradients)


def flops_share(cfg: Config) -> float:
    """Of the model's FLOPs, those of products in fp8."""
    blocks = blocks_in_fp8(cfg)
    weights = sum(numbers_of(cfg.model, maps_of(cfg, block)).weights for block in blocks)
    return 6 * weights / flops_per_token(cfg.model, cfg.train.sequence_length)


def saved_s(cfg: Config, *, tokens: int, bf16_flops_per_s: float) -> float:
    """What a micro-batch of so many tokens takes less than in bf16, on a device of that rate with an H200's memory."""
    if cfg.precision.fp8.engine is Fp8Engine.emulated:
        return 0.0
    blocks = blocks_in_fp8(cfg)
    return sum(_saved_s(cfg, maps_of(cfg, block), tokens, bf16_flops_per_s) for block in blocks)


def _saved_s(cfg: Config, maps: Maps, tokens: int, bf16_flops_per_s: float) -> float:
    """Of one block."""
    numbers, num_again = numbers_of(cfg.model, maps), 0
    not_again = 0
    if cfg.parallel.activation_checkpointing is ActivationCheckpointing.full:
        num_again, not_again = 1, cfg.model.dim * cfg.model.ffn_dim if maps.mlp else 0
    num_products = (3 + num_again) * numbers.weights
    plain_s = 2 * tokens * (num_products - not_again) / (REACHED_BF16 * bf16_flops_per_s)
    fp8_s = 2 * tokens * num_products / (REACHED * RATE * bf16_flops_per_s)
    wide = cfg.model.ffn_dim if maps.mlp and cfg.precision.fp8.recipe is not Fp8Recipe.block else 0
    of_tokens = tokens * ((1 + num_again) * (numbers.inputs - wide) + numbers.gradients - 2 * wide)
    of_weights = (1 + num_again) * numbers.weights
    rounding = BOTH_WAYS_BYTES * (of_tokens + numbers.weights) + ONE_WAY_BYTES * of_weights
    look = LOOK_BYTES if cfg.parallel.compile else EAGER_LOOK_BYTES
    looking = look * of_weights if cfg.precision.fp8.recipe is Fp8Recipe.current else 0
    return plain_s - fp8_s - (rounding + looking) / ROUNDING_BYTES_PER_S
