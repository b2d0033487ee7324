"""AdamW on this rank's own parts, which a device bit can refuse: by torch's fused kernel, or by the harness's own.

Why two: torch's kernel is everywhere; the other is faster on CUDA, and needs Triton (`harness.kernels`).
How: what an update needs beside a part's own tensors is one row of numbers on the device, so nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class Part(NamedTuple):
    """What this rank has of a parameter, and what its update reads and writes."""

    parameter: Tensor
    gradient: Tensor
    first: Tensor
    """Moments."""
    second: Tensor
    step: Tensor
    """Updates applied."""


class Rule(NamedTuple):
    lr: Tensor
    weight_decay: float
    beta1: float
    beta2: float
    eps: float


def step_fused(parts: Sequence[Part], rule: Rule, *, refuse: Tensor, divisor: Tensor) -> None:
    """Update each part by its gradient over `divisor`, in place; leave all of it bit for bit where `refuse` is 1."""
    parameters, gradients, firsts, seconds, steps = (list(column) for column in zip(*parts, strict=True))
    adamw(
        parameters,
        gradients,
        firsts,
        seconds,
        [],
        steps,
        fused=True,
        grad_scale=divisor,
        found_inf=refuse,
        amsgrad=False,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=rule.lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=False,
    )


def step_in_one_pass(parts: Sequence[Part], rule: Rule, *, refuse: Tensor, divisor: Tensor) -> None:
    """The same on CUDA, without writing gradients, all parts in one launch; where nothing is refused the last bits may
    differ."""
    from harness.kernels.adamw import step_adamw

    parameters, gradients, firsts, seconds, steps = (list(column) for column in zip(*parts, strict=True))
    foreach_add_(steps, [1 - refuse] * len(steps))  # the same number as a tensor for all would be waited for
    terms = _terms(torch.stack(steps), rule, refuse=refuse, divisor=divisor)
    step_adamw(parameters, gradients, firsts, seconds, terms)


def _terms(steps: Tensor, rule: Rule, *, refuse: Tensor, divisor: Tensor) -> Tensor:
    """A row for each part, as the kernel wants it."""
    first, second = (1 - beta ** steps.double() for beta in (rule.beta1, rule.beta2))
    rows = steps.new_empty(len(steps), 8)
    rows[:, 0] = refuse
    rows[:, 1] = divisor
    rows[:, 2] = 1 - rule.lr * rule.weight_decay
    rows[:, 3] = rule.lr / first
    rows[:, 4] = second.sqrt()
    rows[:, 5] = 1 - rule.beta1
    rows[:, 6] = 1 - rule.beta2
    rows[:, 7] = rule.eps
    return rows
