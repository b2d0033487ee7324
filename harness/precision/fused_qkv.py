"""Fused QKV projection with RoPE.

Why: three separate projections read their input three times. In backward they give it three gradients, which the norm
before them must read and add. Compiled RoPE stays below memory bandwidth.
How: one custom operator multiplies by the concatenated weights, then splits the result and applies RoPE in one pass of
`harness.kernels.rope`. The backward operator joins the gradients in the same way and runs both GEMMs. The backward
formula is registered with torch, because torch 2.11 saves every output of an autograd function in a compiled block,
checkpointed or not. Outputs of an operator may not share memory, so the weights' gradient leaves it as one tensor and
is split outside, which the compiler turns into views. Without a GPU both operators compute the same in plain torch.
"""

# ruff: noqa: ARG001  (fake implementations take all arguments and need few)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.precision.fp8.custom_ops import LIBRARY, define_op


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to `heads` [B, S, H, head_dim], in fp32."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def project_qkv_rope(hidden: Tensor, projections: Sequence[nn.Module], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys, with RoPE applied, and values of `hidden` [B, S, D]: each [B, S, width].

    Only for projections that `can_fuse_qkv`; `cos` and `sin` [S, head_dim / 2].
    """
    weights = [projection.weight for projection in projections if isinstance(projection, nn.Linear)]
    outputs = qkv_rope(hidden.flatten(0, -2), weights, cos, sin)
    return tuple(output.view(*hidden.shape[:-1], -1) for output in outputs)


def can_fuse_qkv(hidden: Tensor, projections: Sequence[nn.Module], cos: Tensor) -> bool:
    """Whether one GEMM can replace these projections: plain `nn.Linear` without bias, half a head a power of two."""
    half = cos.shape[-1]
    are_plain = all(type(projection) is nn.Linear and projection.bias is None for projection in projections)
    return are_plain and half & (half - 1) == 0 and is_compiled_for_cuda(hidden)


def is_compiled_for_cuda(hidden: Tensor) -> bool:
    """Elsewhere fusing gains nothing, and forward hooks on single projections must be called."""
    return torch.compiler.is_compiling() and hidden.is_cuda


def forward(hidden: Tensor, weights: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Queries, keys and values [T, width] of `hidden` [T, D]; row t has position t modulo S."""
    fused = hidden @ torch.cat(weights).T
    widths = [weight.shape[0] for weight in weights]
    if fused.is_cuda:
        from harness.kernels.rope import split_and_rotate

        return list(split_and_rotate(fused, cos, sin, widths=widths))
    query, key, value = fused.split_with_sizes(widths, dim=1)
    return [_rotate_flat(query, cos, sin), _rotate_flat(key, cos, sin), value.contiguous()]


def backward(
    gradients: list[Tensor], hidden: Tensor, weights: list[Tensor], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the input [T, D], and that of the concatenated weights."""
    query, key, value = gradients
    if query.is_cuda:
        from harness.kernels.rope import unrotate_and_join

        grad_fused = unrotate_and_join(query, key, value, cos, sin)
    else:
        grad_fused = torch.cat([_rotate_flat(query, cos, -sin), _rotate_flat(key, cos, -sin), value], dim=1)
    return grad_fused @ torch.cat(weights), grad_fused.T @ hidden


def _rotate_flat(flat: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    length, half = cos.shape
    return apply_rope(flat.reshape(-1, length, flat.shape[1] // (2 * half), 2 * half), cos, sin).view(flat.shape)


def _forward_shapes(hidden: Tensor, weights: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    return [hidden.new_empty((hidden.shape[0], weight.shape[0])) for weight in weights]


def _backward_shapes(
    gradients: list[Tensor], hidden: Tensor, weights: list[Tensor], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows = sum(weight.shape[0] for weight in weights)
    return hidden.new_empty(hidden.shape), hidden.new_empty((num_rows, hidden.shape[1]))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    hidden, weights, cos, sin = inputs
    ctx.save_for_backward(hidden, cos, sin, *weights)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    hidden, cos, sin, *weights = ctx.saved_tensors
    contiguous = [gradient.contiguous() for gradient in gradients]
    grad_input, grad_weights = qkv_rope_backward(contiguous, hidden, weights, cos, sin)
    return grad_input, list(grad_weights.split_with_sizes([weight.shape[0] for weight in weights])), None, None


qkv_rope = define_op(
    "qkv_rope(Tensor hidden, Tensor[] weights, Tensor cos, Tensor sin) -> Tensor[]", forward, _forward_shapes
)
qkv_rope_backward = define_op(
    "qkv_rope_backward(Tensor[] gradients, Tensor hidden, Tensor[] weights, Tensor cos, Tensor sin)"
    " -> (Tensor, Tensor)",
    backward,
    _backward_shapes,
)
torch.library.register_autograd("harness::qkv_rope", _differentiate, setup_context=_save_inputs, lib=LIBRARY)
