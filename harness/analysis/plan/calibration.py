"""Decides whether measured step times cover a configuration.

Why: a planned time without measurement must say so.
How: the rates of `harness.analysis.plan.work` were fitted to steps of one H200. A configuration is covered if its
device, precision, checkpointing and compilation were measured, and its sizes lie within those that were.
`tests/analysis/plan/test_measured.py` compares the ranges with the measured rows.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.analysis.plan.activations import has_dense_mask
from harness.analysis.plan.work import H200_GB_S, H200_TFLOPS
from harness.config.model import AttentionKind, NormKind, NormPlacement
from harness.config.optim import MomentDtype, OptimizerKind
from harness.config.parallel import ActivationCheckpointing
from harness.config.precision import Fp8Engine, Fp8Recipe, PrecisionKind
from harness.config.schema import Config, sharing
from harness.model.size import num_parameters

NUM_STEPS = 26
"""Measured step times that the plan was compared with."""
TOLERANCE = 0.1
"""Every one of them is planned with at most this relative error."""


class Range(NamedTuple):
    """Measured range of a size, both ends included."""

    what: str
    least: int
    most: int


PARAMETERS = Range("parameters", 124_668_672, 5_933_109_248)
MICRO_BATCH = Range("tokens per micro-batch", 4096, 131_072)
SEQUENCE = Range("tokens per sequence", 4096, 32_768)
HEAD_DIM = Range("numbers per head", 64, 128)
MUON_PARAMETERS = 1_263_634_432
"""The only size that was measured with Muon, whose time depends on the shapes of the matrices."""
ONLY_1B = "measured with 1b in bf16, compiled, without activation checkpointing"


def sizes(cfg: Config, *, world_size: int) -> dict[Range, int]:
    """The sizes of a configuration that have a measured range."""
    length = cfg.train.sequence_length
    return {
        PARAMETERS: num_parameters(cfg.model),
        MICRO_BATCH: sharing(cfg, world_size).micro_batch_slots * length // cfg.parallel.context,
        SEQUENCE: length,
        HEAD_DIM: cfg.model.head_dim,
    }


def unmeasured(cfg: Config, *, world_size: int, is_mfu_given: bool = False) -> list[str]:
    """Why the planned time of a step is an estimate without measurement; empty if it is not.

    An MFU that was measured elsewhere stands for the kernels of one device, so that only communication is left.
    """
    reasons = ["several ranks"] if world_size > 1 else []
    if cfg.launch.ranks_per_gpu > 1:
        reasons.append("ranks that share a GPU")
    if is_mfu_given:
        return reasons
    cluster = cfg.cluster
    if (cluster.peak_tflops, cluster.memory_gb_s) != (H200_TFLOPS, H200_GB_S):
        reasons.append("not an H200")
    reasons += _settings(cfg)
    for measured, size in sizes(cfg, world_size=world_size).items():
        if size < measured.least:
            reasons.append(f"{size:,} {measured.what} (measured from {measured.least:,})")
        if size > measured.most:
            reasons.append(f"{size:,} {measured.what} (measured up to {measured.most:,})")
    return reasons


def _settings(cfg: Config) -> list[str]:
    """Settings, alone or in combination, that no measured step had."""
    kind, fp8 = cfg.precision.kind, cfg.precision.fp8
    checkpointing = cfg.parallel.activation_checkpointing
    is_plain = cfg.parallel.compile and checkpointing is ActivationCheckpointing.none
    is_plain_bf16 = is_plain and kind is PrecisionKind.bf16
    found = []
    if kind is PrecisionKind.fp8:
        if fp8.engine is Fp8Engine.emulated:
            found.append("precision.fp8.engine=emulated, which is slower than the bf16 step planned here")
        if fp8.recipe is Fp8Recipe.block:
            found.append("precision.fp8.recipe=block")
        if not is_plain:
            found.append("fp8 not compiled or with activation checkpointing")
    elif kind is not PrecisionKind.bf16:
        found.append(f"precision={kind}")
    if cfg.data.document_mask:
        dense = "a dense mask" if has_dense_mask(cfg) else "one document in each sequence, shorter ones are faster"
        found.append(f"data.document_mask, planned for {dense}")
    if cfg.optim.kind is OptimizerKind.muon and not (is_plain_bf16 and num_parameters(cfg.model) == MUON_PARAMETERS):
        found.append(f"optim.kind={cfg.optim.kind} ({ONLY_1B})")
    if cfg.optim.moment_dtype is MomentDtype.bf16 and not is_plain_bf16:
        found.append(f"optim.moment_dtype={cfg.optim.moment_dtype} ({ONLY_1B})")
    if cfg.parallel.activation_offload:
        found.append("parallel.activation_offload")
    if cfg.model.attention is AttentionKind.fp32:
        found.append("model.attention=fp32")
    if cfg.model.qk_norm:
        found.append("model.qk_norm=true")
    if cfg.model.norm is not NormKind.rms:
        found.append(f"model.norm={cfg.model.norm}")
    if cfg.model.norm_placement is not NormPlacement.pre:
        found.append(f"model.norm_placement={cfg.model.norm_placement}")
    return found
