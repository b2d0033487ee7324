"""Chunked cross-entropy over a large vocabulary, a few thousand tokens at a time.

Why: the fp32 logits of a whole batch would be the largest tensor of a step by far.
How: one autograd function iterates over chunks of tokens. For each chunk it computes the logits, softmax and
log-sum-exp in fp32, and, if needed, the gradients at once, so that backward recomputes nothing.
The seed (loss scale / expected tokens) is multiplied into the gradient of the logits in fp32, before the cast: in fp16
the gradient of one token among many would underflow otherwise. The head's gradient is summed over chunks in fp32.
Left out: sharding over the vocabulary; second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from harness.core.events import TOKEN_LOSS_EDGES

IGNORED = -100
"""The target of a position that is not predicted."""
ENTROPY_TOKENS = 64
"""Positions of a micro-batch whose output distribution a probe measures, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Options of `chunked_cross_entropy`."""

    z_loss: float
    """Coefficient of the squared log-partition."""
    output_multiplier: float
    """Factor on the logits, in fp32."""
    chunk_tokens: int
    own_kernels: bool = False
    """On CUDA, use the harness's Triton kernels."""


class LossSums(NamedTuple):
    """What `chunked_cross_entropy` returns. Only `objective` has a gradient."""

    objective: Tensor
    """seed * (sum of the losses + z_sum); differentiate this one."""
    losses: Tensor
    """Cross-entropy of each token [T] in fp32, zero where the target is ignored."""
    z_sum: Tensor


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, seed: Tensor, *, options: LossOptions
) -> LossSums:
    """Cross-entropy of `hidden` [T, D] @ `weight` [V, D]^T against `targets` [T], summed over the counted tokens."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        sums = _ChunkedCrossEntropy.apply(hidden, weight, targets, seed, options)  # type: ignore[no-untyped-call]
        return LossSums(*cast(tuple[Tensor, Tensor, Tensor], sums))
    z_sum = hidden.new_zeros((), dtype=torch.float32)
    losses = []
    for hidden_chunk, targets_chunk in _chunks(hidden, targets, options):
        chunk_losses, chunk_z, _, _ = _chunk_terms(F.linear(hidden_chunk, weight), targets_chunk, options)
        losses.append(chunk_losses)
        z_sum = z_sum + chunk_z
    joined = torch.cat(losses)
    return LossSums(seed * (joined.sum() + z_sum), joined, z_sum)


def count_losses(losses: Tensor, targets: Tensor) -> Tensor:
    """Histogram of the counted tokens' losses [T] over `TOKEN_LOSS_EDGES`: below the first edge, between each two, and
    not below the last, which includes NaN."""
    is_counted = targets != IGNORED
    below = torch.stack([((losses < edge) & is_counted).sum() for edge in TOKEN_LOSS_EDGES])
    at_most = torch.cat([below.new_zeros(1), below, is_counted.sum().view(1)])
    return at_most.diff().to(torch.float32)


def sample_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, output_multiplier: float) -> Tensor:
    """Summed entropy in nats of the output distribution at sampled positions of `hidden` [B, S, D] that have a target,
    and the number of these positions [2].

    The positions are evenly spread over the sequence, and the rows take turns. A stride over the flat batch could meet
    the same place of each sequence, as the first one, whose token has no context.
    """
    num_rows, length = targets.shape
    numbers = torch.arange(min(ENTROPY_TOKENS, targets.numel()), device=targets.device)
    rows, places = numbers % num_rows, numbers * length // len(numbers)
    logits = F.linear(hidden[rows, places], weight).float() * output_multiplier
    log_shares = torch.log_softmax(logits, dim=-1)
    entropies = -(log_shares.exp() * log_shares).sum(dim=-1)
    is_counted = targets[rows, places] != IGNORED
    return torch.stack([torch.where(is_counted, entropies, 0.0).sum(), is_counted.sum(dtype=torch.float32)])


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, seed: Tensor, options: LossOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        z_sum = hidden.new_zeros((), dtype=torch.float32)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        hidden_gradient = torch.empty_like(hidden)
        losses = []
        differentiate = _chunk_gradient_for(hidden, options)
        for chunk, into in zip(
            _chunks(hidden, targets, options), torch.split(hidden_gradient, options.chunk_tokens), strict=True
        ):
            hidden_chunk, targets_chunk = chunk
            logits = F.linear(hidden_chunk, weight)
            chunk_losses, chunk_z, logits_gradient = differentiate(logits, targets_chunk, seed, options)
            losses.append(chunk_losses)
            z_sum = z_sum + chunk_z
            torch.mm(logits_gradient, weight, out=into)
            _add_matmul(weight_gradient, logits_gradient.T, hidden_chunk)
        ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype))
        ctx.has_kernels = _has_kernels(hidden, options)
        joined = torch.cat(losses)
        ctx.mark_non_differentiable(joined, z_sum)
        return seed * (joined.sum() + z_sum), joined, z_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, objective_gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        times: Callable[[Tensor, Tensor], Tensor] = torch.mul
        if ctx.has_kernels:
            from harness.kernels.cross_entropy import scale_tensor as times
        grad_hidden, grad_weight = (times(gradient, objective_gradient) for gradient in ctx.saved_tensors)
        return grad_hidden, grad_weight, None, None, None


def _has_kernels(hidden: Tensor, options: LossOptions) -> bool:
    return options.own_kernels and hidden.is_cuda


def _chunk_gradient_for(hidden: Tensor, options: LossOptions) -> Differentiate:
    return _chunk_gradient_in_place if _has_kernels(hidden, options) else _chunk_gradient


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a half-precision matmul to an fp32 sum; on CUDA in one GEMM, without rounding in between."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _chunks(hidden: Tensor, targets: Tensor, options: LossOptions) -> zip[tuple[Tensor, Tensor]]:
    size = options.chunk_tokens
    return zip(torch.split(hidden, size), torch.split(targets, size), strict=True)


def _chunk_terms(logits: Tensor, targets: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses [T], sum of the z terms, the fp32 logits after the multiplier, and their log-partition [T, 1]."""
    scaled = logits.float() * options.output_multiplier
    log_partition = torch.logsumexp(scaled, dim=-1, keepdim=True)
    is_counted = (targets != IGNORED)[:, None]
    losses = log_partition - scaled.gather(-1, targets.clamp(min=0)[:, None])
    losses = torch.where(is_counted, losses, 0.0).squeeze(-1)
    z_sum = options.z_loss * torch.where(is_counted, log_partition.square(), 0.0).sum()
    return losses, z_sum, scaled, log_partition


def _chunk_gradient(
    logits: Tensor, targets: Tensor, seed: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, sum of the z terms, and the gradient of seed * (sum of both) with respect to `logits`, in its dtype."""
    losses, z_sum, scaled, log_partition = _chunk_terms(logits, targets, options)
    grad_loss = seed * options.output_multiplier
    grad_partition = torch.where(
        (targets != IGNORED)[:, None], grad_loss * (1 + 2 * options.z_loss * log_partition), 0.0
    )
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    gradient = torch.exp(scaled - log_partition) * grad_partition - torch.where(is_target, grad_loss, 0.0)
    return losses, z_sum, gradient.to(logits.dtype)


def _chunk_gradient_in_place(
    logits: Tensor, targets: Tensor, seed: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """The same on CUDA by one kernel, which overwrites the logits with their gradient."""
    from harness.kernels.cross_entropy import differentiate_loss

    losses, z_terms = differentiate_loss(
        logits, targets, seed, multiplier=options.output_multiplier, z_loss=options.z_loss, ignored=IGNORED
    )
    return losses, z_terms.sum(), logits


Differentiate = Callable[[Tensor, Tensor, Tensor, LossOptions], tuple[Tensor, Tensor, Tensor]]
