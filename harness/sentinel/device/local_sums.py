"""What is added up of gradients, weights and moments: one number a parameter, over this rank's own part of it.

Why apart: sums over billions of numbers are what the sentinel costs most for, so each has the cheapest way there is. On
CUDA all tensors go through one launch, and all sums over the state are taken in one pass (`harness.kernels`); elsewhere
torch takes one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.distributed.shards import local
from harness.sentinel.device.slots import DIGEST_BITS

DIGEST_MODULUS = 2**DIGEST_BITS - 3
"""A prime: modulo a power of two, a flipped high bit would vanish from a sum."""

PIECE = 2**24
"""Numbers of one tensor that are looked at together, so that no large temporary exists."""


class StateSums(NamedTuple):
    """Sums of each parameter's weights and moments."""

    weight_squares: Tensor
    seconds: Tensor
    """Of second moments, which are never negative."""
    second_squares: Tensor
    directions: Tensor
    """Squares of first / (sqrt(second / correction) + eps): Adam's step at rate 1, but for the first correction."""


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each tensor, as a vector."""
    norms = torch._foreach_norm([local(tensor) for tensor in tensors], 2, dtype=torch.float32)
    return torch.stack(norms).square()


def square_sums_in_one_launch(tensors: Sequence[Tensor]) -> Tensor:
    """The same on CUDA; the last bits may differ."""
    from harness.kernels.grad_norm import sum_squares

    return sum_squares([local(tensor) for tensor in tensors])


def state_sums(
    weights: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor], correction: Tensor, *, eps: float
) -> StateSums:
    """`correction`: of the second moments."""
    pairs = zip(map(local, firsts), map(local, seconds), strict=True)
    return StateSums(
        weight_squares=square_sums(weights),
        seconds=torch.stack(torch._foreach_norm([local(second) for second in seconds], 1, dtype=torch.float32)),
        second_squares=square_sums(seconds),
        directions=torch.stack([_direction_square(*pair, correction, eps=eps) for pair in pairs]),
    )


def state_sums_in_one_pass(
    weights: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor], correction: Tensor, *, eps: float
) -> StateSums:
    """The same on CUDA; the last bits may differ."""
    from harness.kernels.adamw import sum_state

    own_weights, own_firsts, own_seconds = ([local(each) for each in every] for every in (weights, firsts, seconds))
    return StateSums(*sum_state(own_weights, own_firsts, own_seconds, correction, eps=eps).unbind(dim=-1))


def _direction_square(first: Tensor, second: Tensor, correction: Tensor, *, eps: float) -> Tensor:
    pieces = zip(torch.split(first.view(-1), PIECE), torch.split(second.view(-1), PIECE), strict=True)
    return torch.stack([_piece_square(*piece, correction, eps) for piece in pieces]).sum()


def _piece_square(first: Tensor, second: Tensor, correction: Tensor, eps: float) -> Tensor:
    step = (second / correction).sqrt_().add_(eps)
    torch.div(first, step, out=step)
    square: Tensor = torch.linalg.vector_norm(step).square()
    return square


def weight_digest(parameters: Sequence[Tensor]) -> Tensor:
    """A number that equal weights share and that any one flipped bit changes; exact in float32."""
    sums = [local(parameter).detach().view(torch.int32).sum(dtype=torch.int64) for parameter in parameters]
    return torch.stack(sums).sum().remainder(DIGEST_MODULUS)
