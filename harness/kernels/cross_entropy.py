"""Cross-entropy: the loss and the gradient of the logits, written over the logits in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.multi_tensor import BLOCK

LOGITS_BLOCK, LOGITS_WARPS = 8192, 16
"""The same of one token's logits, and the warps that share it."""


def differentiate_loss(
    logits: Tensor, targets: Tensor, seed: Tensor, *, multiplier: float, z_loss: float, ignored: int
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row of `logits` [T, V], contiguous, and its z term; the logits become their gradient.

    As `harness.model.loss` has it: of seed * (losses + z terms), where logits count times `multiplier`.
    """
    losses, partitions = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    terms = torch.stack([seed, torch.full_like(seed, multiplier), torch.full_like(seed, z_loss)])
    width = logits.shape[1]
    _differentiate_loss[(len(logits),)](
        logits, targets, terms, losses, partitions, width, ignored, LOGITS_BLOCK, num_warps=LOGITS_WARPS
    )
    return losses, partitions


def scaled(values: Tensor, factor: Tensor) -> Tensor:
    """A contiguous tensor times one number of the device; torch does it number by number, at a quarter of the rate."""
    made = torch.empty_like(values)
    count = values.numel()
    _scale[(triton.cdiv(count, BLOCK),)](values, factor, made, count, BLOCK)
    return made


@triton.jit
def _differentiate_loss(logits, targets, terms, losses, squares, width, ignored, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seed, multiplier, z_loss = tl.load(terms), tl.load(terms + 1), tl.load(terms + 2)
    target = tl.load(targets + row)
    counts = target != ignored
    begin = logits + row * width
    aimed = tl.load(begin + tl.where(counts, target, 0)).to(tl.float32) * multiplier
    most, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        value = tl.load(begin + at, mask=at < width, other=float("-inf")).to(tl.float32) * multiplier
        raised = tl.maximum(most, tl.max(value), propagate_nan=tl.PropagateNan.ALL)
        total = total * tl.exp(most - raised) + tl.sum(tl.exp(value - raised))
        most = raised
    partition = most + tl.log(total)
    tl.store(losses + row, tl.where(counts, partition - aimed, 0.0))
    tl.store(squares + row, tl.where(counts, z_loss * partition * partition, 0.0))
    slope = seed * multiplier
    of_partition = tl.where(counts, slope * (1 + 2 * z_loss * partition), 0.0)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        value = tl.load(begin + at, mask=at < width, other=float("-inf")).to(tl.float32) * multiplier
        gradient = tl.exp(value - partition) * of_partition - tl.where(at == target, slope, 0.0)
        tl.store(begin + at, gradient, mask=at < width)


@triton.jit
def _scale(values, factor, made, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(values + at, mask=at < count).to(tl.float32) * tl.load(factor)
    tl.store(made + at, value, mask=at < count)
