"""A linear layer whose three GEMMs (forward, input gradient, weight gradient) run in fp8.

How: it has the same parameter as `nn.Linear`, so a checkpoint fits either. The recipe `current` computes the weights'
scales in plain torch, once for both passes; the rest are the operators of `harness.precision.fp8.custom_ops`.
A switch turns all fp8 layers of a model to bf16 and back; a compiled block has one graph for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from harness.config.precision import Fp8Recipe
from harness.precision.fp8.custom_ops import fp8_backward, fp8_forward, split_thirds
from harness.precision.fp8.formats import LIMITS
from harness.precision.fp8.quantize_meters import METER, TensorRole, compute_amax, compute_scale, fp8_dtype


@dataclass(slots=True)
class Switch:
    """Whether the layers that share this object compute in fp8 now."""

    is_on: bool = True


class Recipe(NamedTuple):
    """How a layer quantizes; plain strings, which a compiled graph can hold as constants."""

    kind: str
    engine_name: str


class Fp8Linear(nn.Linear):
    """`nn.Linear` without bias, with fp8 GEMMs."""

    def __init__(self, in_features: int, out_features: int, *, recipe: Recipe, switch: Switch) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.recipe = recipe
        self.switch = switch
        self.register_buffer("meter", torch.zeros(METER), persistent=False)
        self.register_buffer("delayed_scales", torch.ones(len(TensorRole)), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return _project_in_fp8(hidden, (self,))[0] if self.switch.is_on else F.linear(hidden, self.weight)


def project(hidden: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of all layers for the same input. fp8 layers quantize it once, unless a layer has a forward hook."""
    linears = tuple(layer for layer in layers if isinstance(layer, Fp8Linear) and layer.switch.is_on)
    has_hooks = not torch.compiler.is_compiling() and any(layer._forward_hooks for layer in layers)
    if len(linears) < len(layers) or has_hooks:
        return tuple(layer(hidden) for layer in layers)
    return _project_in_fp8(hidden, linears)


def _project_in_fp8(hidden: Tensor, layers: tuple[Fp8Linear, ...]) -> tuple[Tensor, ...]:
    flat = hidden.flatten(0, -2)
    record = torch.is_grad_enabled()  # an evaluation must not change scales and range statistics
    tensors = [getattr(layer, name) for name in ("weight", "meter", "delayed_scales") for layer in layers]
    outputs: tuple[Tensor, ...] = _Fp8Gemms.apply(flat, *layers[0].recipe, record, *tensors)  # type: ignore[no-untyped-call]
    # Not a view, like the output of `nn.Linear`: FSDP guards against views among a block's outputs.
    shape = hidden.shape[:-1]
    return tuple(torch.ops.aten._unsafe_view(output, [*shape, output.shape[-1]]) for output in outputs)


class _Fp8Gemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, kind: str, engine_name: str, record: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        weights, meters, delayed_scales = split_thirds(tensors)
        count = len(weights)
        scales = [weight_scale(*pair, kind) for pair in zip(weights, delayed_scales, strict=True)]
        results = fp8_forward(
            hidden, delayed_scales[0][TensorRole.activations], [*weights, *scales, *meters], record, kind, engine_name
        )
        outputs, (columns, scale_inv), used_scales = results[:count], results[count : count + 2], results[count + 2 :]
        ctx.recipe = (kind, engine_name, count)
        ctx.save_for_backward(columns, scale_inv, *(used_scales if kind == Fp8Recipe.delayed else scales), *tensors)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kind, engine_name, count = ctx.recipe
        columns, scale_inv, *rest = ctx.saved_tensors
        scales, weights, meters, delayed_scales = (rest[first : first + count] for first in range(0, 4 * count, count))
        contiguous = [gradient.contiguous() for gradient in gradients]
        gradient_scales = [scales_by_role[TensorRole.gradients] for scales_by_role in delayed_scales]
        layers = [*weights, *scales, *meters]
        grad_input, *grad_weights = fp8_backward(
            contiguous, gradient_scales, columns, scale_inv, layers, kind, engine_name
        )
        return grad_input, None, None, None, *grad_weights, *([None] * 2 * count)


def weight_scale(weight: Tensor, delayed_scales: Tensor, kind: str) -> Tensor:
    """The weight's scale in forward and backward; unused in the recipe `block`."""
    if kind == Fp8Recipe.current:
        return compute_scale(compute_amax(weight), LIMITS[fp8_dtype(TensorRole.weights, kind)])
    return delayed_scales[TensorRole.weights]
