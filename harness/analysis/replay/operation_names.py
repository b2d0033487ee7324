"""Names the operations inside the model's modules, by the module they run in and by what they compute.

Why: attention, SwiGLU and the loss compute between their layers, so the name of a layer is not enough.
How: on the reference path every operation is one aten operator. Its name, the shape of its output and what ran before
it in the same call of the module tell what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn

from harness.model.attention_layer import Attention
from harness.model.transformer import SwiGLU, Transformer

SOFTMAX = ("_softmax", "_safe_softmax", "_softmax_backward_data")
SWIGLU = {"silu": "silu(gate)", "silu_backward": "silu(gate)", "mul": "SwiGLU product"}
BATCHED_MATMULS = ("bmm", "baddbmm", "matmul")
LOGITS_GRADIENT = "gradient of the logits"
"""The loss computes it in the forward pass, chunk by chunk."""
MATMULS = ("mm", "addmm", "matmul", "linear")


@final
@dataclass(slots=True)
class Scope:
    """A call of a module, or its backward pass, while it runs."""

    name: str
    """Name of the module; empty: the model itself."""
    module: nn.Module
    is_forward: bool
    saw_softmax: bool = False
    """A softmax has run in this call."""
    saw_logits: bool = False


def name_operation(scope: Scope, operator: str, shape: tuple[int, ...]) -> str:
    """Module and operation in words; `operator` is the plain name of an aten operator, `shape` that of its output."""
    match scope.module:
        case Attention():
            label = _in_attention(scope, operator)
        case SwiGLU():
            label = {"silu": "silu(gate)", "silu_backward": "silu(gate)", "mul": "SwiGLU product"}.get(
                operator, operator
            )
        case Transformer():
            label = _in_model(scope, operator, shape)
        case _:
            label = ""
    return ": ".join(filter(None, (scope.name, label)))


def _in_attention(scope: Scope, operator: str) -> str:
    if operator in SOFTMAX:
        scope.saw_softmax = True
        return "softmax"
    if operator in BATCHED_MATMULS:
        if not scope.is_forward:
            return "scores or weighted values"
        return "weighted values after the softmax" if scope.saw_softmax else "scores before the softmax"
    return "attention kernel" if "attention" in operator else "RoPE and scaling"


def _in_model(scope: Scope, operator: str, shape: tuple[int, ...]) -> str:
    """Operations between the modules: the residual stream, the head and the loss."""
    if not scope.is_forward:
        return "loss" if not scope.saw_softmax else "residual stream"
    model = scope.module
    assert isinstance(model, Transformer)
    if operator == "logsumexp":
        scope.saw_softmax = True
        return "log-softmax of the loss"
    is_logits = bool(shape) and shape[-1] == model.cfg.vocab_size
    if operator in MATMULS:
        scope.saw_softmax = scope.saw_softmax and not is_logits  # the next chunk of the loss begins
        scope.saw_logits = True
        return "head logits" if is_logits else LOGITS_GRADIENT
    if not scope.saw_logits:
        return "residual stream"
    if is_logits and not scope.saw_softmax:
        return "head logits"
    if is_logits:
        return "softmax of the loss" if operator in ("exp", "sub") else LOGITS_GRADIENT
    return "loss reduction"
