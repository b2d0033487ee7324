"""Sums over this rank's shard of gradients, weights and moments: one number per parameter.

Why: these sums over billions of values are the main cost of the sentinel. On CUDA one kernel launch sums all gradients,
and one pass computes all sums over the optimizer state (`harness.kernels`); elsewhere torch runs one kernel per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.distributed.shards import local
from harness.distributed.torch_private.foreach import foreach_norm

PIECE = 2**24
"""Values of one tensor that are processed at a time, to avoid large temporaries."""


class StateSums(NamedTuple):
    """Sums over the weights and moments of each parameter."""

    weight_squares: Tensor
    seconds: Tensor
    """Sums of the second moments, which are never negative."""
    second_squares: Tensor
    directions: Tensor
    """Sums of squares of first / (sqrt(second / correction) + eps): Adam's update at lr 1, without the correction of
    the first moment."""


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each tensor [number of tensors]."""
    norms = foreach_norm([local(tensor) for tensor in tensors], 2, dtype=torch.float32)
    return torch.stack(norms).square()


def square_sums_in_one_launch(tensors: Sequence[Tensor]) -> Tensor:
    """`square_sums` on CUDA; the last bits may differ."""
    from harness.kernels.grad_norm import sum_squares

    return sum_squares([local(tensor) for tensor in tensors])


def state_sums(
    weights: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor], correction: Tensor, *, eps: float
) -> StateSums:
    """Sums over weights and moments; `correction` is the bias correction of the second moments."""
    pairs = zip(map(local, firsts), map(local, seconds), strict=True)
    return StateSums(
        weight_squares=square_sums(weights),
        seconds=torch.stack(foreach_norm([local(second) for second in seconds], 1, dtype=torch.float32)),
        second_squares=square_sums(seconds),
        directions=torch.stack([_direction_square(*pair, correction, eps=eps) for pair in pairs]),
    )


def state_sums_in_one_pass(
    weights: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor], correction: Tensor, *, eps: float
) -> StateSums:
    """`state_sums` on CUDA; the last bits may differ."""
    from harness.kernels.adamw import sum_state

    own_weights, own_firsts, own_seconds = (
        [local(tensor) for tensor in tensors] for tensors in (weights, firsts, seconds)
    )
    return StateSums(*sum_state(own_weights, own_firsts, own_seconds, correction, eps=eps).unbind(dim=-1))


def _direction_square(first: Tensor, second: Tensor, correction: Tensor, *, eps: float) -> Tensor:
    pieces = zip(torch.split(first.view(-1), PIECE), torch.split(second.view(-1), PIECE), strict=True)
    return torch.stack([_piece_square(*piece, correction, eps) for piece in pieces]).sum()


def _piece_square(first: Tensor, second: Tensor, correction: Tensor, eps: float) -> Tensor:
    step = (second.float() / correction).sqrt_().add_(eps)
    torch.div(first, step, out=step)
    square: Tensor = torch.linalg.vector_norm(step).square()
    return square
