"""Computes the kernel time of one device in a step, by part.

Why: one MFU for all shapes is off by a quarter if attention, the optimizer or recomputation takes another share of the
step than in the measured configuration.
How: FLOPs over the rate of the kernel that computes them, bytes over the bandwidth of the device's memory.

    GEMM          6 FLOPs for each weight and token, with recomputation 8. Starting and finishing a tile takes as long
                  as `KernelRates.gemm_overhead` of its inner dimension, so narrow layers and small micro-batches are
                  slower.
    attention     causal FLOPs, as the kernel computes them: 2 matmuls forward, 5 backward, half of the scores. A
                  document mask is planned as a dense one, which computes all scores in a slower kernel. That is an
                  upper bound: a block-sparse mask skips scores, how many depends on the documents.
    elementwise   the tensors that norms, RoPE and SwiGLU read and write (D: residual stream, K: keys or values, F:
                  SwiGLU hidden layer), for one token of a block, compiled:
                  forward 8 D + 2 (D + 2 K) + 3 F, backward 11 D + 2 (D + 2 K) + 6 F,
                  recomputed with selective checkpointing 4 D + 3 F, with full checkpointing all of forward
    head          GEMM of the logits, and the loss: logits are read twice and written once
    weights       fp32 weights cast to the compute type in each micro-batch, twice if will_reshard after forward;
                  gradients cast to fp32, and added to those of earlier micro-batches
    optimizer     gradient norm and AdamW, or the elementwise part of Muon: once a step, however small the batch is
    orthogonalize Muon's Newton-Schulz iterations: bf16 GEMMs of the rank with the most matrices, once a step

Four of the rates are fitted to measured steps (`tests/analysis/plan/measured.py`, `python -m
tests.analysis.plan.calibrate`); the others come from kernels measured in isolation, from publications or from a
datasheet.
Left out: QK norm, embedding lookup, launch latency of the host, clocks that depend on temperature and power.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from math import prod
from typing import final

from harness.analysis.plan.activations import FP32_BYTES, element_bytes, has_dense_mask
from harness.analysis.plan.fp8 import NO_FP8, Fp8Projections, fp8_projections, quantized_bytes
from harness.analysis.plan.orthogonalization import muon_matrices, orthogonalize_flops
from harness.analysis.plan.resharding import BYTES_PER_GB, will_reshard
from harness.config.model import AttentionKind
from harness.config.optim import MomentDtype
from harness.config.parallel import ActivationCheckpointing, ClusterConfig
from harness.config.precision import Fp8Engine, PrecisionKind
from harness.config.schema import Config, sharing
from harness.model.size import num_parameters

H200_TFLOPS, H200_GB_S = 989.0, 4800.0
"""Dense bf16 rate and memory bandwidth; datasheet. `KernelRates` are shares of them."""
FP8_SPEEDUP = 1979 / 989
"""Dense fp8 rate over dense bf16 rate; datasheet of H100 and H200."""
FP32_SPEEDUP = 67 / 989
"""Dense fp32 rate over dense bf16 rate; datasheet of H100 and H200. Not measured."""
NORM_AND_MUON_BYTES = 28
"""For each parameter of a matrix with Muon: the norm reads the gradient; momentum and weight are read and written, the
gradient is read, all fp32; the direction is written and read in bf16."""
NORM_AND_ADAMW_BYTES = 32
"""For each parameter: the norm reads the gradient; AdamW reads gradient, weight and moments, and writes the last three;
all fp32."""
BF16_SAVED_BYTES = 8
"""Of these, if both moments are bf16. Not measured."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """Rates that kernels reach, as shares of the device's peak rates unless a unit is given."""

    gemm: float = 0.704
    """bf16, inner dimension large. Fitted. Includes the gaps between kernels, and clocks under the power limit."""
    gemm_overhead: float = 510.0
    """Inner dimension that takes as long as starting and finishing a tile. Fitted."""
    fp8_gemm: float = 0.608
    """Of the fp8 rate. Fitted."""
    eager_passes: float = 3.94
    """Bytes of elementwise operators that are not compiled, over those that are. Fitted."""
    attention: float = 0.539
    """Causal, heads of 128, long sequences. Measured in isolation on an H200 with cuDNN: 1.08 ms forward and 2.79 ms
    backward for 8 x 4096 tokens and 16 heads."""
    attention_overhead_tokens: float = 300.0
    """Sequence length that takes as long as starting and finishing a row of tiles. cuDNN on an H100 as published with
    FlashAttention-3 (arXiv 2407.08608, figures 5 and 6): 315 TFLOP/s at 512 tokens, 518 at 4k, 539 at 16k."""
    softmax_head_dim: float = 43.0
    """Head dimension whose matmuls take as long as the softmax. Same source: heads of 64 reach 67 % of the forward rate
    of heads of 128, and 85 % of the backward rate."""
    masked_attention: float = 0.306
    """With a dense mask, of FLOPs that count every score. Measured in isolation on an H200: 3.41 ms forward and 9.29 ms
    backward for 8 x 4096 tokens and 16 heads."""
    block_sparse_attention: float = 0.372
    """With documents kept apart, one document in each sequence; shorter documents take less time. Measured in isolation
    on an H200: 1.46 ms forward and 4.15 ms backward for 8 x 4096 tokens and 16 heads."""
    bandwidth: float = 0.867
    """Measured on an H200: AdamW moves 28 bytes for each of 1.26B parameters in 8.5 ms."""
    quantize_bandwidth: float = 0.6875
    """Measured on an H200: the kernel that quantizes and transposes moves 3.3 TB/s."""


RATES = KernelRates()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Kernel time of one device in a step, by part."""

    gemm_s: float
    """GEMMs of the blocks."""
    attention_s: float
    elementwise_s: float
    quantize_s: float
    """fp8 only."""
    head_s: float
    weights_s: float
    optimizer_s: float
    orthogonalize_s: float
    """Muon only."""

    @property
    def total_s(self) -> float:
        return self.blocks_s + self.head_s + self.weights_s + self.optimizer_s + self.orthogonalize_s

    @property
    def blocks_s(self) -> float:
        """Time that FSDP2's collectives of the blocks can overlap with."""
        return self.gemm_s + self.attention_s + self.elementwise_s + self.quantize_s

    def scaled(self, total_s: float) -> Work:
        """The same shares of another total."""
        factor = total_s / self.total_s
        return replace(self, **{field.name: factor * getattr(self, field.name) for field in fields(self)})


def work(cfg: Config, *, world_size: int, rates: KernelRates = RATES) -> Work | None:
    """Kernel time of one rank; None if the rate of the device is not known."""
    if cfg.cluster.peak_tflops is None:
        return None
    shares = sharing(cfg, world_size)
    count = shares.num_micro_batches
    tokens = shares.micro_batch_slots * cfg.train.sequence_length // cfg.parallel.context
    peak, bandwidth = cfg.cluster.peak_tflops * 1e12, rates.bandwidth * memory_bytes_per_s(cfg.cluster)
    slow = FP32_SPEEDUP if cfg.precision.kind is PrecisionKind.fp32 else 1.0
    fp8_rate = rates.fp8_gemm * FP8_SPEEDUP * peak
    quantize_rate = rates.quantize_bandwidth * memory_bytes_per_s(cfg.cluster)
    blocks = Counter(_fp8_gemms(cfg, block) for block in range(cfg.model.num_layers))
    bf16_flops, fp8_flops = (
        sum(
            num * _block_gemm_flops(cfg, projections, tokens, rates, in_fp8=in_fp8)
            for projections, num in blocks.items()
        )
        for in_fp8 in (False, True)
    )
    quantized = sum(num * quantized_bytes(cfg, projections, tokens) for projections, num in blocks.items())
    num_shards = world_size // cfg.parallel.replicate
    matrices = sum(map(prod, muon_matrices(cfg)))
    adamw_bytes = NORM_AND_ADAMW_BYTES - (BF16_SAVED_BYTES if cfg.optim.moment_dtype is MomentDtype.bf16 else 0)
    updated_bytes = adamw_bytes * (num_parameters(cfg.model) - matrices) + NORM_AND_MUON_BYTES * matrices
    head_bytes = 3 * element_bytes(cfg) * cfg.model.vocab_size * tokens
    head_flops = _gemm_flops(cfg.model.dim, cfg.model.vocab_size, tokens, rates)
    return Work(
        gemm_s=count * (bf16_flops / (rates.gemm * slow * peak) + fp8_flops / fp8_rate),
        attention_s=count * cfg.model.num_layers * _attention_s(cfg, tokens, peak, rates),
        elementwise_s=count * cfg.model.num_layers * _elementwise_bytes(cfg, tokens, rates) / bandwidth,
        quantize_s=count * quantized / quantize_rate,
        head_s=count * (head_flops / (rates.gemm * slow * peak) + head_bytes / bandwidth),
        weights_s=_weights_bytes(cfg, count, is_sharded=world_size > 1) / bandwidth,
        optimizer_s=updated_bytes / num_shards / bandwidth,
        orthogonalize_s=orthogonalize_flops(cfg, num_shards, overhead=rates.gemm_overhead) / (rates.gemm * peak),
    )


def memory_bytes_per_s(cluster: ClusterConfig) -> float:
    """Bandwidth of a device's memory; if it is not known, as much for each FLOP/s as an H200 has."""
    if cluster.memory_gb_s is not None:
        return cluster.memory_gb_s * BYTES_PER_GB
    assert cluster.peak_tflops is not None
    return cluster.peak_tflops / H200_TFLOPS * H200_GB_S * BYTES_PER_GB


def _fp8_gemms(cfg: Config, block: int) -> Fp8Projections:
    """Which GEMMs of a block run in fp8. The emulated engine computes in higher precision."""
    is_emulated = cfg.precision.fp8.engine is Fp8Engine.emulated
    return NO_FP8 if is_emulated else fp8_projections(cfg, block)


def _gemm_flops(width_in: int, width_out: int, tokens: int, rates: KernelRates, *, num_forward: int = 1) -> float:
    """Of one projection: forward, gradient of the input, gradient of the weight; each with the tiles' overhead."""
    extra = rates.gemm_overhead
    forward = tokens * width_out * (width_in + extra)
    backward = tokens * width_in * (width_out + extra) + width_in * width_out * (tokens + extra)
    return 2 * (num_forward * forward + backward)


def _block_gemm_flops(
    cfg: Config, projections: Fp8Projections, tokens: int, rates: KernelRates, *, in_fp8: bool
) -> float:
    """Of the GEMMs of one block that run in fp8, or of those that do not.

    Full checkpointing computes forward twice. The output of the last GEMM is not needed for that, but the operator that
    quantizes its input in fp8 also multiplies.
    """
    model = cfg.model
    is_full = cfg.parallel.activation_checkpointing is ActivationCheckpointing.full
    again = 2 if is_full else 1
    flops = 0.0
    if projections.attention == in_fp8:
        qkv = model.dim + 2 * model.num_kv_heads * model.head_dim
        flops += _gemm_flops(model.dim, qkv, tokens, rates, num_forward=again)
        flops += _gemm_flops(model.dim, model.dim, tokens, rates, num_forward=again)
    if projections.mlp == in_fp8:
        flops += 2 * _gemm_flops(model.dim, model.ffn_dim, tokens, rates, num_forward=again)
        flops += _gemm_flops(model.ffn_dim, model.dim, tokens, rates, num_forward=again if in_fp8 else 1)
    return flops


def _attention_s(cfg: Config, tokens: int, peak: float, rates: KernelRates) -> float:
    """Of one block and micro-batch. With context parallelism this assumes Transformer Engine, without which the slower
    `flex_attention` runs."""
    model, length = cfg.model, cfg.train.sequence_length
    in_fp32 = PrecisionKind.fp32 is cfg.precision.kind or model.attention is AttentionKind.fp32
    peak *= FP32_SPEEDUP if in_fp32 else 1.0
    num_matmuls = 9 if cfg.parallel.activation_checkpointing is ActivationCheckpointing.full else 7
    if has_dense_mask(cfg):
        return num_matmuls * 2 * tokens * model.dim * length / (rates.masked_attention * peak)
    rate = rates.block_sparse_attention if cfg.data.document_mask else rates.attention
    flops = num_matmuls * tokens * model.dim * (length + rates.attention_overhead_tokens)
    softmax = (1 + rates.softmax_head_dim / model.head_dim) / (1 + rates.softmax_head_dim / 128)
    return flops * softmax / (rate * peak)


def _elementwise_bytes(cfg: Config, tokens: int, rates: KernelRates) -> float:
    """Of one block and micro-batch."""
    dim, wide, kv_dim = cfg.model.dim, cfg.model.ffn_dim, cfg.model.num_kv_heads * cfg.model.head_dim
    rope = 2 * (dim + 2 * kv_dim)
    forward, backward = 8 * dim + rope + 3 * wide, 11 * dim + rope + 6 * wide
    recomputed = {
        ActivationCheckpointing.none: 0,
        ActivationCheckpointing.selective: 4 * dim + 3 * wide,
        ActivationCheckpointing.full: forward,
    }[cfg.parallel.activation_checkpointing]
    num_bytes = (forward + backward + recomputed) * element_bytes(cfg) * tokens
    return num_bytes * (1.0 if cfg.parallel.compile else rates.eager_passes)


def _weights_bytes(cfg: Config, num_micro_batches: int, *, is_sharded: bool) -> float:
    """Casts and copies of whole weights and gradients. One rank casts its weights in place of gathering them; several
    copy what they gathered."""
    size = element_bytes(cfg)
    gather = 2 * size if is_sharded else FP32_BYTES + size
    gathers, reduce = (2 if will_reshard(cfg) else 1) * gather, size + FP32_BYTES
    added = 3 * FP32_BYTES * (num_micro_batches - 1)
    return num_parameters(cfg.model) * (num_micro_batches * (gathers + reduce) + added)
