"""Queries, keys and values of one product, turned by their positions where they are split.

Why: three products read their input three times, and in backward give it three gradients, which the norm before them
must read and add up; and what a compiler turns queries and keys with stays below the rate of memory.
How: one operator of torch multiplies with all weights side by side and splits what comes out, in one pass of
`harness.kernels.rope`; another joins the gradients likewise and takes both products of backward. Its formula is
registered with torch: what an autograd function made, torch 2.11 keeps in a compiled block, checkpointed or not. The
weights' gradient leaves the operator in one piece, since what an operator gives may share no memory, and is cut
outside, where a compiler sees that nothing moves. Without a GPU both do the same in plain torch.
"""

# ruff: noqa: ARG001  (what a graph is told of a result needs few of the arguments)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.precision.fp8.custom_ops import LIBRARY, define


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `heads` [B, S, H, head_dim] by their positions, in fp32."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def rotated_heads(hidden: Tensor, maps: Sequence[nn.Module], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """What the maps to queries, keys and values make of `hidden` [B, S, D], the first two turned: each [B, S, width].

    Of maps that `are_joined`; `cos` and `sin` [S, head_dim / 2].
    """
    weights = [each.weight for each in maps if isinstance(each, nn.Linear)]
    made = project_rotated(hidden.flatten(0, -2), weights, cos, sin)
    return tuple(each.view(*hidden.shape[:-1], -1) for each in made)


def are_joined(hidden: Tensor, maps: Sequence[nn.Module], cos: Tensor) -> bool:
    """Whether one product is to take the place of these maps: of plain ones, and heads that the kernel can split."""
    half = cos.shape[-1]
    is_known = all(type(each) is nn.Linear and each.bias is None for each in maps) and half & (half - 1) == 0
    return is_known and is_compiled_for_cuda(hidden)


def is_compiled_for_cuda(hidden: Tensor) -> bool:
    """Elsewhere nothing is gained, and maps may be watched one by one."""
    return torch.compiler.is_compiling() and hidden.is_cuda


def forward(hidden: Tensor, weights: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Queries, keys and values [T, width] of `hidden` [T, D], where row t has the position t modulo S."""
    joint = hidden @ torch.cat(weights).T
    widths = [weight.shape[0] for weight in weights]
    if joint.is_cuda:
        from harness.kernels.rope import split_rotated

        return list(split_rotated(joint, cos, sin, widths=widths))
    query, key, value = joint.split_with_sizes(widths, dim=1)
    return [_turned(query, cos, sin), _turned(key, cos, sin), value.contiguous()]


def backward(
    gradients: list[Tensor], hidden: Tensor, weights: list[Tensor], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the input [T, D], and those of the weights, one below the other."""
    query, key, value = gradients
    if query.is_cuda:
        from harness.kernels.rope import joined_unrotated

        joint = joined_unrotated(query, key, value, cos, sin)
    else:
        joint = torch.cat([_turned(query, cos, -sin), _turned(key, cos, -sin), value], dim=1)
    return joint @ torch.cat(weights), joint.T @ hidden


def _turned(flat: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    length, half = cos.shape
    return rotate(flat.reshape(-1, length, flat.shape[1] // (2 * half), 2 * half), cos, sin).view(flat.shape)


def _forward_shapes(hidden: Tensor, weights: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    return [hidden.new_empty((hidden.shape[0], weight.shape[0])) for weight in weights]


def _backward_shapes(
    gradients: list[Tensor], hidden: Tensor, weights: list[Tensor], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows = sum(weight.shape[0] for weight in weights)
    return hidden.new_empty(hidden.shape), hidden.new_empty((num_rows, hidden.shape[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    hidden, weights, cos, sin = inputs
    ctx.save_for_backward(hidden, cos, sin, *weights)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    hidden, cos, sin, *weights = ctx.saved_tensors
    arrived = [gradient.contiguous() for gradient in gradients]
    of_input, of_weights = project_rotated_backward(arrived, hidden, weights, cos, sin)
    return of_input, list(of_weights.split_with_sizes([weight.shape[0] for weight in weights])), None, None


project_rotated = define(
    "project_rotated(Tensor hidden, Tensor[] weights, Tensor cos, Tensor sin) -> Tensor[]", forward, _forward_shapes
)
project_rotated_backward = define(
    "project_rotated_backward(Tensor[] gradients, Tensor hidden, Tensor[] weights, Tensor cos, Tensor sin)"
    " -> (Tensor, Tensor)",
    backward,
    _backward_shapes,
)
torch.library.register_autograd("harness::project_rotated", _differentiate, setup_context=_keep, lib=LIBRARY)
