"""What numbers the matrices are multiplied in: fp32, bf16, fp16 or fp8; master weights, moments, reduction are fp32.

How: FSDP2 casts each block's weights when it gathers them and reduces gradients in fp32; nothing else in the harness
knows the dtype. fp16 adds a loss scale that lives on the device: it doubles after enough clean steps, halves at an
overflow, and the same gate that refuses a NaN refuses the overflowed update. fp8 is bf16 to FSDP: products are rounded
further inside the blocks, by `harness.fp8`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.config import PrecisionConfig, PrecisionKind

DTYPES = {
    PrecisionKind.fp32: torch.float32,
    PrecisionKind.bf16: torch.bfloat16,
    PrecisionKind.fp16: torch.float16,
    PrecisionKind.fp8: torch.bfloat16,
}
"""What weights are gathered in."""

# On a CPU that does not know bf16 torch takes another kernel, and tells so with a stack of thirty frames.
warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS", category=UserWarning)


def linear(in_features: int, out_features: int) -> nn.Module:
    """The matrix of a block: no bias."""
    return nn.Linear(in_features, out_features, bias=False)


def policy(kind: PrecisionKind) -> MixedPrecisionPolicy:
    """How FSDP2 casts. Inputs are left alone: rotary tables and the loss seed must stay fp32."""
    return MixedPrecisionPolicy(param_dtype=DTYPES[kind], reduce_dtype=torch.float32, cast_forward_inputs=False)


@dataclass(slots=True)
class LossScale:
    """Keeps small fp16 gradients above underflow; constant 1 for every other precision."""

    scale: Tensor
    clean_steps: Tensor
    """Steps since the last overflow or doubling."""
    growth_interval: int | None
    """None: the scale never moves."""

    def update(self, *, overflow: Tensor, refused: Tensor) -> None:
        """Halve at an overflow, double after `growth_interval` clean steps, stand still where an update was refused for
        its size; no host sync."""
        if self.growth_interval is None:
            return
        overflowed = overflow > 0
        clean_steps = torch.where(overflowed, 0, self.clean_steps + (refused == 0))
        grown = clean_steps >= self.growth_interval
        factor = torch.where(overflowed, 0.5, torch.where(grown, 2.0, 1.0))
        self.scale.mul_(factor)
        self.clean_steps.copy_(torch.where(grown, 0, clean_steps))


def loss_scale(cfg: PrecisionConfig, device: torch.device) -> LossScale:
    """The scale to start with."""
    dynamic = cfg.kind is PrecisionKind.fp16
    return LossScale(
        scale=torch.tensor(cfg.initial_loss_scale if dynamic else 1.0, dtype=torch.float32, device=device),
        clean_steps=torch.zeros((), dtype=torch.int64, device=device),
        growth_interval=cfg.loss_scale_growth_interval if dynamic else None,
    )


@contextmanager
def fast_attention() -> Iterator[None]:
    """Let attention take the fastest kernel the device has: on Hopper cuDNN's, ahead of FlashAttention."""
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield
