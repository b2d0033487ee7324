"""Cross-entropy: the loss, and the gradient of the logits written over the logits.

Why: compiled, the loss reads a row of logits three times before it writes the gradient. torch's kernel that multiplies
by a scalar on the device reaches a quarter of memory bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.multi_tensor import BLOCK

LOGITS_BLOCK, LOGITS_WARPS = 8192, 16
"""Logits of one token that a program processes at once, and its warps."""


def differentiate_loss(
    logits: Tensor, targets: Tensor, seed: Tensor, *, multiplier: float, z_loss: float, ignored: int
) -> tuple[Tensor, Tensor]:
    """Losses and z-loss terms of each row of contiguous `logits` [T, V]; the logits are overwritten by their gradient.

    The gradient is that of seed * (losses + z terms), where the logits are multiplied by `multiplier` first, as in
    `harness.model.loss`.
    """
    losses, z_terms = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    terms = torch.stack([seed, torch.full_like(seed, multiplier), torch.full_like(seed, z_loss)])
    width = logits.shape[1]
    _differentiate_loss[(len(logits),)](
        logits, targets, terms, losses, z_terms, width, ignored, LOGITS_BLOCK, num_warps=LOGITS_WARPS
    )
    return losses, z_terms


def scale_tensor(values: Tensor, factor: Tensor) -> Tensor:
    """A contiguous tensor times a scalar on the device."""
    out = torch.empty_like(values)
    count = values.numel()
    _scale[(triton.cdiv(count, BLOCK),)](values, factor, out, count, BLOCK)
    return out


@triton.jit
def _differentiate_loss(logits, targets, terms, losses, z_terms, width, ignored, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seed, multiplier, z_loss = tl.load(terms), tl.load(terms + 1), tl.load(terms + 2)
    target = tl.load(targets + row)
    is_counted = target != ignored
    begin = logits + row * width
    target_logit = tl.load(begin + tl.where(is_counted, target, 0)).to(tl.float32) * multiplier
    running_max, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        value = tl.load(begin + at, mask=at < width, other=float("-inf")).to(tl.float32) * multiplier
        new_max = tl.maximum(running_max, tl.max(value), propagate_nan=tl.PropagateNan.ALL)
        total = total * tl.exp(running_max - new_max) + tl.sum(tl.exp(value - new_max))
        running_max = new_max
    partition = running_max + tl.log(total)
    tl.store(losses + row, tl.where(is_counted, partition - target_logit, 0.0))
    tl.store(z_terms + row, tl.where(is_counted, z_loss * partition * partition, 0.0))
    grad_loss = seed * multiplier
    grad_partition = tl.where(is_counted, grad_loss * (1 + 2 * z_loss * partition), 0.0)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        value = tl.load(begin + at, mask=at < width, other=float("-inf")).to(tl.float32) * multiplier
        gradient = tl.exp(value - partition) * grad_partition - tl.where(at == target, grad_loss, 0.0)
        tl.store(begin + at, gradient, mask=at < width)


@triton.jit
def _scale(values, factor, out, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(values + at, mask=at < count).to(tl.float32) * tl.load(factor)
    tl.store(out + at, value, mask=at < count)
