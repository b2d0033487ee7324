"""Kernel time of a device, part by part, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from harness.analysis.plan.work import RATES, KernelRates, Work, memory_bytes_per_s, work
from harness.config.schema import Config
from tests.analysis.plan.measured import config

PEAK, BANDWIDTH = 989e12, 4.8e12
TOKENS, LENGTH, DIM, WIDE, KV_DIM, NUM_BLOCKS, VOCABULARY = 8 * 4096, 4096, 2048, 5632, 1024, 24, 32000
"""Of the experiment 1b_bf16."""
BLOCK_WEIGHTS = DIM * (DIM + 2 * KV_DIM) + DIM * DIM + 3 * DIM * WIDE
NUM_PARAMETERS = 1_263_634_432
IDEAL = KernelRates(
    gemm=1.0,
    gemm_overhead=0.0,
    fp8_gemm=1.0,
    attention=1.0,
    attention_overhead_tokens=0.0,
    masked_attention=1.0,
    block_sparse_attention=0.5,
    bandwidth=1.0,
    quantize_bandwidth=1.0,
)
"""Peak rates, so that the time of a part is only its FLOPs or bytes."""


def kernels(*overrides: str, world_size: int = 1, rates: KernelRates = IDEAL) -> Work:
    return of(config(*overrides), world_size=world_size, rates=rates)


def of(cfg: Config, *, world_size: int = 1, rates: KernelRates = IDEAL) -> Work:
    parts = work(cfg, world_size=world_size, rates=rates)
    assert parts is not None
    return parts


def test_each_part_is_its_flops_or_bytes() -> None:
    parts = kernels()
    assert parts.gemm_s == pytest.approx(6 * NUM_BLOCKS * BLOCK_WEIGHTS * TOKENS / PEAK)
    assert parts.attention_s == pytest.approx(7 * NUM_BLOCKS * DIM * LENGTH * TOKENS / PEAK), "causal"
    per_token = 19 * DIM + 4 * (DIM + 2 * KV_DIM) + 9 * WIDE
    assert parts.elementwise_s == pytest.approx(2 * per_token * NUM_BLOCKS * TOKENS / BANDWIDTH)
    head_s = 6 * VOCABULARY * DIM * TOKENS / PEAK + 6 * VOCABULARY * TOKENS / BANDWIDTH
    assert parts.head_s == pytest.approx(head_s)
    assert parts.weights_s == pytest.approx(12 * NUM_PARAMETERS / BANDWIDTH)
    assert parts.optimizer_s == pytest.approx(32 * NUM_PARAMETERS / BANDWIDTH)
    assert parts.quantize_s == 0
    assert parts.total_s == pytest.approx(sum(getattr(parts, field.name) for field in fields(parts)))


def test_weight_time_is_independent_of_the_batch() -> None:
    whole, small = kernels(), kernels("train.batch_size=1")
    assert (small.optimizer_s, small.weights_s) == (whole.optimizer_s, whole.weights_s)
    assert small.gemm_s == pytest.approx(whole.gemm_s / 8)
    assert small.elementwise_s == pytest.approx(whole.elementwise_s / 8)


def test_attention_grows_with_the_sequence_and_gemm_does_not() -> None:
    short, long = kernels(), kernels("train.batch_size=1", "train.sequence_length=32768")
    assert long.attention_s == pytest.approx(8 * short.attention_s)
    assert long.gemm_s == pytest.approx(short.gemm_s)
    measured = [
        kernels(*overrides, rates=RATES) for overrides in ((), ("train.batch_size=1", "train.sequence_length=32768"))
    ]
    assert measured[1].attention_s < 7.6 * measured[0].attention_s, "long rows of tiles run at a higher rate"


def test_full_checkpointing_repeats_forward_except_the_last_gemm() -> None:
    none, full = kernels(), kernels("parallel.activation_checkpointing=full")
    again = 2 * NUM_BLOCKS * (BLOCK_WEIGHTS - DIM * WIDE) * TOKENS / PEAK
    assert full.gemm_s - none.gemm_s == pytest.approx(again)
    assert full.attention_s == pytest.approx(none.attention_s * 9 / 7)
    in_fp8 = [
        kernels("precision=fp8", *overrides).gemm_s for overrides in ((), ("parallel.activation_checkpointing=full",))
    ]
    assert in_fp8[1] == pytest.approx(in_fp8[0] * 8 / 6)


def test_selective_checkpointing_repeats_only_norms_and_swiglu() -> None:
    none, selective = kernels(), kernels("parallel.activation_checkpointing=selective")
    again = 2 * (4 * DIM + 3 * WIDE) * NUM_BLOCKS * TOKENS / BANDWIDTH
    assert selective.total_s - none.total_s == pytest.approx(again)
    assert (selective.gemm_s, selective.attention_s) == (none.gemm_s, none.attention_s)


def test_resharding_and_micro_batches_cast_weights_again() -> None:
    cast_s = 6 * NUM_PARAMETERS / BANDWIDTH
    once = kernels().weights_s
    assert kernels("parallel.reshard_after_forward=true").weights_s == pytest.approx(once + cast_s)
    four = kernels("train.micro_batch_size=2").weights_s
    assert four == pytest.approx(4 * once + 3 * 12 * NUM_PARAMETERS / BANDWIDTH), "gradients are added up"


def test_sharding_divides_only_the_optimizer() -> None:
    one, eight = kernels("train.batch_size=64"), kernels("train.batch_size=64", world_size=8)
    assert eight.optimizer_s == pytest.approx(one.optimizer_s / 8)
    assert eight.weights_s == pytest.approx(one.weights_s * 10 / 12), "copies what was gathered, casts gradients"
    copies = kernels("train.batch_size=64", "parallel.replicate=4", world_size=8)
    assert copies.optimizer_s == pytest.approx(one.optimizer_s / 2)


def test_narrow_gemms_and_few_tokens_are_slower() -> None:
    rates = replace(IDEAL, gemm_overhead=512.0)

    def slowdown(*overrides: str) -> float:
        return kernels(*overrides, rates=rates).gemm_s / kernels(*overrides).gemm_s

    assert slowdown("model=125m") > slowdown() > slowdown("model=7b") > 1
    assert slowdown("train.batch_size=1") > slowdown()


def test_small_heads_and_masks_slow_attention() -> None:
    heads = kernels("model.num_heads=32", "model.num_kv_heads=16", rates=RATES)
    assert heads.attention_s == pytest.approx(kernels(rates=RATES).attention_s * (1 + 43 / 64) / (1 + 43 / 128))
    masked = kernels("data.document_mask=true", "train.sequence_length=4000")
    plain = kernels("train.sequence_length=4000")
    assert masked.attention_s == pytest.approx(2 * plain.attention_s), "every score is computed"
    sparse = kernels("data.document_mask=true")
    assert sparse.attention_s == pytest.approx(2 * kernels().attention_s), "at half the rate, one document a sequence"


def test_eager_operators_move_more_bytes() -> None:
    eager = kernels("parallel.compile=false")
    assert eager.elementwise_s == pytest.approx(RATES.eager_passes * kernels().elementwise_s)
    assert eager.gemm_s == kernels().gemm_s


def test_slower_memory_slows_memory_bound_parts() -> None:
    h200, h100 = kernels(), kernels("cluster=h100")
    assert (h100.gemm_s, h100.attention_s) == (h200.gemm_s, h200.attention_s)
    assert h100.optimizer_s == pytest.approx(h200.optimizer_s * 4800 / 3350)
    unknown = replace(config().cluster, memory_gb_s=None, peak_tflops=2 * 989)
    assert memory_bytes_per_s(unknown) == pytest.approx(2 * BANDWIDTH)


def test_fp32_is_slower() -> None:
    bf16, fp32 = kernels(), kernels("precision=fp32")
    assert fp32.gemm_s == pytest.approx(bf16.gemm_s * 989 / 67)
    assert fp32.attention_s == pytest.approx(bf16.attention_s * 989 / 67)
    assert fp32.elementwise_s == pytest.approx(2 * bf16.elementwise_s)
    assert kernels("model.attention=fp32").attention_s == pytest.approx(fp32.attention_s)


def test_no_time_without_a_device_rate() -> None:
    assert work(config("cluster=auto"), world_size=1) is None


def test_fp8_moves_gemms_and_quantizes() -> None:
    bf16, fp8 = kernels(), kernels("precision=fp8")
    assert fp8.gemm_s == pytest.approx(bf16.gemm_s * 989 / 1979)
    assert (fp8.head_s, fp8.attention_s) == (bf16.head_s, bf16.attention_s)
    inputs, gradients = 3 * DIM, 2 * (DIM + KV_DIM) + DIM
    num_bytes = 4 * TOKENS * (inputs + gradients) + (4 + 3 + 2) * BLOCK_WEIGHTS
    assert fp8.quantize_s == pytest.approx(NUM_BLOCKS * num_bytes / BANDWIDTH)
    mlp_alone = kernels("precision=fp8", "precision.fp8.attention=false")
    assert fp8.gemm_s < mlp_alone.gemm_s < bf16.gemm_s
    assert of(config("precision=fp8_emulated")) == bf16
