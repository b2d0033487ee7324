"""AdamW on this rank's shards that a mask on the device can skip: by torch's fused kernel, or by a Triton kernel.

Why two: torch's kernel runs on every device; the other is faster on CUDA and needs Triton (`harness.kernels`).
How: all inputs besides the shards' own tensors are scalars on the device, so there is no host sync. Both return
sums over the weights before and after (`harness.optim.weight_digest`).
Moments in bf16 are rounded stochastically (`harness.optim.stochastic_rounding`); the update itself uses them before
they are rounded. torch's fused kernel cannot do that, so the first variant is plain torch then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.distributed.torch_private.foreach import foreach_add_
from harness.distributed.torch_private.fused_adamw import fused_adamw_
from harness.optim.stochastic_rounding import RoundingNoise, element_noise, round_to_bf16
from harness.optim.weight_digest import UpdateSums, sum_bits, sum_weights


class ParameterShard(NamedTuple):
    """This rank's shard of a parameter, with the tensors that its update reads and writes."""

    parameter: Tensor
    gradient: Tensor
    first: Tensor
    """First moment (exp_avg)."""
    second: Tensor
    """Second moment (exp_avg_sq)."""
    step: Tensor
    """Number of applied updates."""


class AdamWOptions(NamedTuple):
    """Hyperparameters of a parameter group."""

    lr: Tensor
    weight_decay: float
    beta1: float
    beta2: float
    eps: float


def step_fused(
    shards: Sequence[ParameterShard],
    options: AdamWOptions,
    *,
    skip_mask: Tensor,
    divisor: Tensor,
    noise: RoundingNoise | None = None,
) -> UpdateSums:
    """Update each shard in place by its gradient / `divisor`; if `skip_mask` is 1, nothing changes by a bit.

    `noise`: for moments in bf16; without it they are fp32.
    """
    if noise is not None:
        return _step_rounded(shards, options, noise, skip_mask=skip_mask, divisor=divisor)
    parameters, gradients, firsts, seconds, steps = (list(column) for column in zip(*shards, strict=True))
    before = sum_bits(parameters)
    fused_adamw_(
        parameters,
        gradients,
        firsts,
        seconds,
        steps,
        grad_scale=divisor,
        found_inf=skip_mask,
        **options._asdict(),
    )
    return sum_weights(parameters)._replace(before=before)


def _step_rounded(
    shards: Sequence[ParameterShard],
    options: AdamWOptions,
    noise: RoundingNoise,
    *,
    skip_mask: Tensor,
    divisor: Tensor,
) -> UpdateSums:
    """AdamW with moments in bf16, in plain torch."""
    parameters = [shard.parameter for shard in shards]
    before, is_kept = sum_bits(parameters), skip_mask > 0
    foreach_add_([shard.step for shard in shards], [1 - skip_mask] * len(shards))
    steps = [shard.step for shard in shards]
    terms = _kernel_terms(torch.stack(steps), options, skip_mask=skip_mask, divisor=divisor)
    for shard, key, begin, row in zip(shards, noise.keys(steps), noise.begins, terms, strict=True):
        _, _, decay, step_size, correction2, weight1, weight2, eps = row.unbind()
        gradient = shard.gradient / divisor
        first, second = shard.first.float(), shard.second.float()
        first += (gradient - first) * weight1
        second += (gradient * gradient - second) * weight2
        updated = shard.parameter * decay - step_size * first / (second.sqrt() / correction2 + eps)
        bits1, bits2 = element_noise(key, begin, gradient)
        shard.parameter.copy_(torch.where(is_kept, shard.parameter, updated))
        shard.first.copy_(torch.where(is_kept, shard.first, round_to_bf16(first, bits1)))
        shard.second.copy_(torch.where(is_kept, shard.second, round_to_bf16(second, bits2)))
    return sum_weights(parameters)._replace(before=before)


def step_triton(
    shards: Sequence[ParameterShard],
    options: AdamWOptions,
    *,
    skip_mask: Tensor,
    divisor: Tensor,
    noise: RoundingNoise | None = None,
) -> UpdateSums:
    """The same on CUDA in one launch, without writing gradients; the last bits may differ from `step_fused`."""
    from harness.kernels.adamw import step_adamw

    parameters, gradients, firsts, seconds, steps = (list(column) for column in zip(*shards, strict=True))
    foreach_add_(steps, [1 - skip_mask] * len(steps))  # one tensor for all would need a host sync
    terms = _kernel_terms(torch.stack(steps), options, skip_mask=skip_mask, divisor=divisor)
    keys = None if noise is None else torch.stack([noise.keys(steps), noise.begins], dim=1)
    return UpdateSums(*step_adamw(parameters, gradients, firsts, seconds, terms, keys))


def sum_weights_triton(weights: Sequence[Tensor]) -> UpdateSums:
    """`sum_weights` on CUDA, bit for bit what a skipped update returns."""
    from harness.kernels.adamw import step_adamw

    terms = torch.ones(len(weights), 8, dtype=torch.float32, device=weights[0].device)
    return UpdateSums(*step_adamw(weights, weights, weights, weights, terms))


def _kernel_terms(steps: Tensor, options: AdamWOptions, *, skip_mask: Tensor, divisor: Tensor) -> Tensor:
    """One row of scalars per shard, as the kernel `step_adamw` reads them."""
    correction1, correction2 = (1 - beta ** steps.double() for beta in (options.beta1, options.beta2))
    rows = steps.new_empty(len(steps), 8)
    rows[:, 0] = skip_mask
    rows[:, 1] = divisor
    rows[:, 2] = 1 - options.lr * options.weight_decay
    rows[:, 3] = options.lr / correction1
    rows[:, 4] = correction2.sqrt()
    rows[:, 5] = 1 - options.beta1
    rows[:, 6] = 1 - options.beta2
    rows[:, 7] = options.eps
    return rows
