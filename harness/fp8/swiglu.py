"""SwiGLU between maps in fp8 whose scales are remembered: rounded where it is computed, and never written in bf16.

Why: what gate and up make of a block's input are its widest tensors, and so are their gradients. Where scales are known
beforehand, the product of the two, and both gradients, can go from registers to fp8: for each number 4 bytes of memory
less in forward and 8 in backward.
How: one function for the three maps, because no gradient in fp8 passes through autograd; two operators, as in
`harness.fp8.operators`. In a step that is probed, or whose scales are not known yet, and where there is no GPU, the
same numbers are made in plain torch and rounded by the engine.
"""

# ruff: noqa: ARG001  (what a graph is told of a result needs few of the arguments)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from harness.config import Fp8Recipe
from harness.fp8.engine import FORWARD, GRADIENT, Blocks, Engine, Rounded, Side, engine_of
from harness.fp8.linear import Fp8Linear, project
from harness.fp8.meters import PROBE, Column, Role
from harness.fp8.operators import define, round_noted, thirds

DELAYED = str(Fp8Recipe.delayed)
NUM_MAPS = 3


def swiglu(hidden: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """down(silu(gate(hidden)) * up(hidden)), in the way that suits the maps."""
    maps = tuple(each for each in (gate, up, down) if isinstance(each, Fp8Linear) and each.switch.is_on)
    is_watched = not torch.compiler.is_compiling() and any(each._forward_hooks for each in maps)
    if len(maps) < NUM_MAPS or maps[0].recipe.kind != DELAYED or is_watched:
        turned, passed = project(hidden, gate, up)
        projected: Tensor = down(F.silu(turned) * passed)
        return projected
    flat = hidden.flatten(0, -2)
    tensors = [getattr(each, name) for name in ("weight", "meter", "remembered") for each in maps]
    product = _SwiGLU.apply(flat, maps[0].recipe.engine, torch.is_grad_enabled(), *tensors)  # type: ignore[no-untyped-call]
    given: Tensor = torch.ops.aten._unsafe_view(product, [*hidden.shape[:-1], product.shape[-1]])
    return given


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, engine: str, is_noted: bool, *tensors: Tensor) -> Tensor:
        weights, meters, remembered = thirds(tensors)
        scales = [*(own[Role.activations] for own in remembered), *(own[Role.weights] for own in remembered)]
        product, *kept = swiglu_forward(hidden, [*weights, *meters], scales, is_noted, engine)
        ctx.engine = engine
        ctx.save_for_backward(*kept, *tensors)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        kept, tensors = saved[: -3 * NUM_MAPS], saved[-3 * NUM_MAPS :]
        weights, meters, remembered = thirds(tensors)
        scales = [own[Role.gradients] for own in remembered]
        of_input, *of_weights = swiglu_backward(
            gradient.contiguous(), list(kept), [*weights, *meters], scales, ctx.engine
        )
        return of_input, None, None, *of_weights, *([None] * 2 * NUM_MAPS)


def forward(hidden: Tensor, maps: list[Tensor], scales: list[Tensor], is_noted: bool, engine: str) -> list[Tensor]:
    """What the maps (weights, then meters) make of `hidden` [T, D]; then what backward needs: gate and up [T, F], the
    rounded input [D, T] and the rounded product [F, T], each with one over its scale, and the weights' scales.

    `scales`: remembered ones of what each map reads, then of each weight.
    """
    does = engine_of(engine)
    weights, meters = maps[:NUM_MAPS], [meter if is_noted else None for meter in maps[NUM_MAPS:]]
    rights = [
        round_noted(does, weight, scale, meter, Role.weights, DELAYED, both=False)
        for weight, scale, meter in zip(weights, scales[NUM_MAPS:], meters, strict=True)
    ]
    inputs = round_noted(does, hidden, scales[0], meters[0], Role.activations, DELAYED)
    gate, up = (_multiplied(does, inputs.by_rows, right.by_rows, exact=False) for right in rights[:2])
    product = _rounded_product(does, gate, up, scales[2], meters[2])
    return [
        _multiplied(does, product.by_rows, rights[2].by_rows, exact=False),
        *(gate, up),
        *(inputs.columns, inputs.column_inverse),
        *(product.columns, product.column_inverse),
        *(right.row_inverse.reciprocal().view(()) for right in rights),
    ]


def backward(
    gradient: Tensor, kept: list[Tensor], maps: list[Tensor], scales: list[Tensor], engine: str
) -> list[Tensor]:
    """The gradient of the input, then of the weights; `scales`: remembered ones, of the gradient that each map gets."""
    does = engine_of(engine)
    gate, up, columns, inverse, product_columns, product_inverse, *weight_scales = kept
    weights, meters = maps[:NUM_MAPS], maps[NUM_MAPS:]
    rights = [
        round_noted(does, weight, scale, None, Role.weights, DELAYED)
        for weight, scale in zip(weights, weight_scales, strict=True)
    ]
    left = round_noted(does, gradient, scales[2], meters[2], Role.gradients, DELAYED)
    of_down = _multiplied(does, left.by_columns, Side(product_columns, product_inverse))
    slope = _multiplied(does, left.by_rows, rights[2].by_columns)
    of_gate, of_up = _rounded_slopes(does, slope, gate, up, scales, meters)
    inputs = Side(columns, inverse)
    of_input = _multiplied(does, of_gate.by_rows, rights[0].by_columns)
    of_input = _multiplied(does, of_up.by_rows, rights[1].by_columns, out=of_input)
    return [of_input, *(_multiplied(does, each.by_columns, inputs) for each in (of_gate, of_up)), of_down]


def _rounded_product(does: Engine, gate: Tensor, up: Tensor, scale: Tensor, meter: Tensor | None) -> Rounded:
    if gate.is_cuda and not (PROBE.counts or PROBE.primes):
        from harness.kernels import round_product

        rows, columns = round_product(gate, up, scale, _largest(meter, Role.activations, scale), dtype=FORWARD)
        inverse = scale.reciprocal().view(1)
        return Rounded(rows, columns, inverse, inverse)
    product = (F.silu(gate.float()) * up.float()).to(gate.dtype)
    return round_noted(does, product, scale, meter, Role.activations, DELAYED)


def _rounded_slopes(
    does: Engine, slope: Tensor, gate: Tensor, up: Tensor, scales: list[Tensor], meters: list[Tensor]
) -> list[Rounded]:
    """The gradients of gate and up from that of their product."""
    if gate.is_cuda and not (PROBE.counts or PROBE.primes):
        from harness.kernels import round_slopes

        largest = [_largest(meter, Role.gradients, scale) for meter, scale in zip(meters[:2], scales, strict=False)]
        found = round_slopes(slope, gate, up, scales[:2], largest, dtype=GRADIENT)
        inverses = [scale.reciprocal().view(1) for scale in scales[:2]]
        return [Rounded(*both, inverse, inverse) for both, inverse in zip(found, inverses, strict=True)]
    wide, turned, passed = slope.float(), gate.float(), up.float()
    share = torch.sigmoid(turned)
    slopes = (wide * passed * share * (1 + turned * (1 - share)), wide * turned * share)
    return [
        round_noted(does, each.to(gate.dtype), scale, meter, Role.gradients, DELAYED)
        for each, scale, meter in zip(slopes, scales[:2], meters[:2], strict=True)
    ]


def _largest(meter: Tensor | None, role: Role, scale: Tensor) -> Tensor:
    """Where the largest number is noted; somewhere, where nobody takes notes."""
    return torch.zeros_like(scale) if meter is None else meter.data[role, Column.largest]


def _multiplied(does: Engine, left: Side, right: Side, *, out: Tensor | None = None, exact: bool = True) -> Tensor:
    return does.multiply(left, right, out=out, blocks=Blocks.none, exact=exact)


def _forward_shapes(
    hidden: Tensor, maps: list[Tensor], scales: list[Tensor], is_noted: bool, engine: str
) -> list[Tensor]:
    (num_rows, width), (inner, _), (outer, _) = hidden.shape, maps[0].shape, maps[2].shape
    made = [hidden.new_empty((num_rows, size), dtype=torch.bfloat16) for size in (outer, inner, inner)]
    for size in (width, inner):
        made += [hidden.new_empty((size, num_rows), dtype=FORWARD), hidden.new_empty((1,), dtype=torch.float32)]
    return [*made, *(hidden.new_empty((), dtype=torch.float32) for _ in range(NUM_MAPS))]


def _backward_shapes(
    gradient: Tensor, kept: list[Tensor], maps: list[Tensor], scales: list[Tensor], engine: str
) -> list[Tensor]:
    of_input = gradient.new_empty((len(gradient), maps[0].shape[1]), dtype=torch.bfloat16)
    return [of_input, *(torch.empty_like(weight, dtype=torch.bfloat16) for weight in maps[:NUM_MAPS])]


swiglu_forward = define(
    "swiglu_forward(Tensor hidden, Tensor[] maps, Tensor[] scales, bool is_noted, str engine) -> Tensor[]",
    forward,
    _forward_shapes,
)
swiglu_backward = define(
    "swiglu_backward(Tensor gradient, Tensor[] kept, Tensor[] maps, Tensor[] scales, str engine) -> Tensor[]",
    backward,
    _backward_shapes,
)
