"""A linear map whose three products (forward, and the two of backward) are taken in fp8.

How: the same parameter as torch's own, so a checkpoint fits either. What the recipe `current` scales weights by is
found in plain torch, once for both passes; the rest are the operators of `harness.precision.fp8.custom_ops`.
A switch takes all of a model's maps to bf16 and back; a compiled block has one graph for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from harness.config.precision import Fp8Recipe
from harness.precision.fp8.custom_ops import fp8_backward, fp8_forward, thirds
from harness.precision.fp8.formats import LIMITS
from harness.precision.fp8.meters import METER, Role, dtype_of, largest_of, scale_of


@dataclass(slots=True)
class Switch:
    """Whether the maps that share it compute in fp8 now."""

    is_on: bool = True


class Recipe(NamedTuple):
    """How a map's numbers are rounded; plain texts, which a graph can hold."""

    kind: str
    engine: str


class Fp8Linear(nn.Linear):
    """`nn.Linear` without bias; see the top of this file."""

    def __init__(self, in_features: int, out_features: int, *, recipe: Recipe, switch: Switch) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.recipe = recipe
        self.switch = switch
        self.register_buffer("meter", torch.zeros(METER), persistent=False)
        self.register_buffer("remembered", torch.ones(len(Role)), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return _in_fp8(hidden, (self,))[0] if self.switch.is_on else F.linear(hidden, self.weight)


def project(hidden: Tensor, *maps: nn.Module) -> tuple[Tensor, ...]:
    """What each map makes of the same input; in fp8 it is rounded once, unless somebody watches the maps."""
    linears = tuple(map_ for map_ in maps if isinstance(map_, Fp8Linear) and map_.switch.is_on)
    is_watched = not torch.compiler.is_compiling() and any(map_._forward_hooks for map_ in maps)
    if len(linears) < len(maps) or is_watched:
        return tuple(map_(hidden) for map_ in maps)
    return _in_fp8(hidden, linears)


def _in_fp8(hidden: Tensor, maps: tuple[Fp8Linear, ...]) -> tuple[Tensor, ...]:
    flat = hidden.flatten(0, -2)
    is_noted = torch.is_grad_enabled()  # an evaluation is no part of what scales and health are made of
    tensors = [getattr(each, name) for name in ("weight", "meter", "remembered") for each in maps]
    products: tuple[Tensor, ...] = _Products.apply(flat, *maps[0].recipe, is_noted, *tensors)  # type: ignore[no-untyped-call]
    # No view, as from torch's own linear map: FSDP would distrust one that a block gives on.
    shape = hidden.shape[:-1]
    return tuple(torch.ops.aten._unsafe_view(product, [*shape, product.shape[-1]]) for product in products)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, kind: str, engine: str, is_noted: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        weights, meters, remembered = thirds(tensors)
        count = len(weights)
        scales = [weight_scale(each, own, kind) for each, own in zip(weights, remembered, strict=True)]
        results = fp8_forward(
            hidden, remembered[0][Role.activations], [*weights, *scales, *meters], is_noted, kind, engine
        )
        products, (columns, inverse), used = results[:count], results[count : count + 2], results[count + 2 :]
        ctx.recipe = (kind, engine, count)
        ctx.save_for_backward(columns, inverse, *(used if kind == Fp8Recipe.delayed else scales), *tensors)
        return tuple(products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kind, engine, count = ctx.recipe
        columns, inverse, *rest = ctx.saved_tensors
        scales, weights, meters, remembered = (rest[first : first + count] for first in range(0, 4 * count, count))
        arrived = [gradient.contiguous() for gradient in gradients]
        gradient_scales = [own[Role.gradients] for own in remembered]
        maps = [*weights, *scales, *meters]
        of_input, *of_weights = fp8_backward(arrived, gradient_scales, columns, inverse, maps, kind, engine)
        return of_input, None, None, None, *of_weights, *([None] * 2 * count)


def weight_scale(weight: Tensor, remembered: Tensor, kind: str) -> Tensor:
    """What the numbers are to be multiplied with, forward and backward; of no meaning in blocks."""
    if kind == Fp8Recipe.current:
        return scale_of(largest_of(weight), LIMITS[dtype_of(Role.weights, kind)])
    return remembered[Role.weights]
