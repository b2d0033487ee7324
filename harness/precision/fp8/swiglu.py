"""SwiGLU between maps in fp8: rounded where it is computed, and never written in bf16.

Why: what gate and up make of a block's input are its widest tensors, and so are their gradients. The product of the
two, and both gradients, go from registers to fp8: for each number 4 bytes of memory less in forward and 8 in backward.
Scales that come from the tensors themselves are guessed first (`harness.kernels.fp8_quantize`).
How: one function for the three maps, because no gradient in fp8 passes through autograd; two operators, as in
`harness.precision.fp8.custom_ops`. Without a GPU the same numbers are made in plain torch and rounded by the engine. A
probed step computes the rows that are looked at once more.
Left out: the recipe `block`, which goes by parts.
"""

# ruff: noqa: ARG001  (what a graph is told of a result needs few of the arguments)
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from harness.config.precision import Fp8Recipe
from harness.precision.fp8.custom_ops import define, round_noted, scale_used, scales_used, thirds
from harness.precision.fp8.engine import Engine, engine_of
from harness.precision.fp8.formats import FORWARD, GRADIENT, SCALE_STEPS, VANISHING, Blocks, Rounded, Side
from harness.precision.fp8.linear import Fp8Linear, project, weight_scale
from harness.precision.fp8.meters import PROBE, Column, Role, guess_in, sample_of, stride_of

if TYPE_CHECKING:
    from harness.kernels.fp8_quantize import Matrix

NUM_MAPS = 3


def swiglu(hidden: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """down(silu(gate(hidden)) * up(hidden)), in the way that suits the maps."""
    maps = tuple(each for each in (gate, up, down) if isinstance(each, Fp8Linear) and each.switch.is_on)
    is_watched = not torch.compiler.is_compiling() and any(each._forward_hooks for each in maps)
    if len(maps) < NUM_MAPS or maps[0].recipe.kind == Fp8Recipe.block or is_watched:
        turned, passed = project(hidden, gate, up)
        projected: Tensor = down(F.silu(turned) * passed)
        return projected
    flat = hidden.flatten(0, -2)
    tensors = [getattr(each, name) for name in ("weight", "meter", "remembered") for each in maps]
    product = _SwiGLU.apply(flat, *maps[0].recipe, torch.is_grad_enabled(), *tensors)  # type: ignore[no-untyped-call]
    given: Tensor = torch.ops.aten._unsafe_view(product, [*hidden.shape[:-1], product.shape[-1]])
    return given


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, kind: str, engine: str, is_noted: bool, *tensors: Tensor) -> Tensor:
        weights, meters, remembered = thirds(tensors)
        weight_scales = [weight_scale(each, own, kind) for each, own in zip(weights, remembered, strict=True)]
        scales = [remembered[0][Role.activations], remembered[2][Role.activations], *weight_scales]
        product, *kept = swiglu_forward(hidden, [*weights, *meters], scales, is_noted, kind, engine)
        kept, used = kept[:-NUM_MAPS], kept[-NUM_MAPS:]
        ctx.recipe = (kind, engine)
        ctx.save_for_backward(*kept, *(used if kind == Fp8Recipe.delayed else weight_scales), *tensors)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (kind, engine), saved, arrived = ctx.recipe, ctx.saved_tensors, gradient.contiguous()
        kept, tensors = saved[: -3 * NUM_MAPS], saved[-3 * NUM_MAPS :]
        weights, meters, remembered = thirds(tensors)
        scales = [own[Role.gradients] for own in remembered]
        of_input, *of_weights = swiglu_backward(arrived, list(kept), [*weights, *meters], scales, kind, engine)
        return of_input, None, None, None, *of_weights, *([None] * 2 * NUM_MAPS)


def forward(
    hidden: Tensor, maps: list[Tensor], scales: list[Tensor], is_noted: bool, recipe: str, engine: str
) -> list[Tensor]:
    """What the maps (weights, then meters) make of `hidden` [T, D]; then what backward needs: gate and up [T, F], the
    rounded input [D, T] and the rounded product [F, T], each with one over its scale; and the scales that the weights
    were rounded by, which are of meaning where they are remembered.

    `scales`: of the input and of the product, where they are remembered, and of each weight.
    """
    does = engine_of(engine)
    weights, meters = maps[:NUM_MAPS], [meter if is_noted else None for meter in maps[NUM_MAPS:]]
    inputs = round_noted(does, hidden, scales[0], meters[0], Role.activations, recipe)
    rights = [
        round_noted(does, weight, scale, meter, Role.weights, recipe, both=False)
        for weight, scale, meter in zip(weights, scales[2:], meters, strict=True)
    ]
    gate, up = (_multiplied(does, inputs.by_rows, right.by_rows, exact=False) for right in rights[:2])
    product = _rounded_product(does, gate, up, scales[1], meters[2], recipe)
    return [
        _multiplied(does, product.by_rows, rights[2].by_rows, exact=False),
        *(gate, up),
        *(inputs.columns, inputs.column_inverse),
        *(product.columns, product.column_inverse),
        *(scale_used(right, recipe) for right in rights),
    ]


def backward(
    gradient: Tensor, kept: list[Tensor], maps: list[Tensor], scales: list[Tensor], recipe: str, engine: str
) -> list[Tensor]:
    """The gradient of the input, then of the weights; `scales`: of the gradient that each map gets, where they are
    remembered."""
    does = engine_of(engine)
    gate, up, columns, inverse, product_columns, product_inverse, *weight_scales = kept
    weights, meters = maps[:NUM_MAPS], maps[NUM_MAPS:]
    left = round_noted(does, gradient, scales[2], meters[2], Role.gradients, recipe)
    of_down = _multiplied(does, left.by_columns, Side(product_columns, product_inverse))
    right = round_noted(does, weights[2], weight_scales[2], None, Role.weights, recipe)
    slope = _multiplied(does, left.by_rows, right.by_columns)
    del left, right
    of_input: Tensor | None = None
    of_weights = []
    slopes = _rounded_slopes(does, slope, gate, up, scales, meters, recipe)
    del slope
    for each, weight, scale in zip(slopes, weights[:2], weight_scales[:2], strict=True):
        of_weights.append(_multiplied(does, each.by_columns, Side(columns, inverse)))
        right = round_noted(does, weight, scale, None, Role.weights, recipe)
        of_input = _multiplied(does, each.by_rows, right.by_columns, out=of_input)
    assert of_input is not None
    return [of_input, *of_weights, of_down]


def _rounded_product(
    does: Engine, gate: Tensor, up: Tensor, scale: Tensor, meter: Tensor | None, recipe: str
) -> Rounded:
    if gate.is_cuda:
        return product_by_kernels(gate, up, scale, meter, recipe)
    return round_noted(does, product_of(gate, up), scale, meter, Role.activations, recipe)


def _rounded_slopes(
    does: Engine,
    slope: Tensor,
    gate: Tensor,
    up: Tensor,
    scales: list[Tensor],
    meters: list[Tensor],
    recipe: str,
) -> list[Rounded]:
    """The gradients of gate and up from that of their product."""
    if gate.is_cuda:
        return slopes_by_kernels(slope, gate, up, scales, meters, recipe)
    made = zip(slopes_of(slope, gate, up), scales, meters, strict=False)
    return [round_noted(does, values, scale, meter, Role.gradients, recipe) for values, scale, meter in made]


def product_by_kernels(gate: Tensor, up: Tensor, scale: Tensor, meter: Tensor | None, recipe: str) -> Rounded:
    from harness.kernels import swiglu as kernels

    step = _step(FORWARD, recipe)
    used = scale if step is None else guess_in(meter, Role.activations, gate)
    made = kernels.round_product(gate, up, used, dtype=FORWARD, step=step)
    rounded = _finished(made, meter, Role.activations, recipe)
    if meter is not None and PROBE.counts:
        row, every = meter.data[Role.activations], stride_of(gate)
        kernels.count_product(sample_of(gate), sample_of(up), used, row, underflow=VANISHING[FORWARD], every=every)
    return rounded


def slopes_by_kernels(
    slope: Tensor, gate: Tensor, up: Tensor, scales: list[Tensor], meters: list[Tensor], recipe: str
) -> list[Rounded]:
    from harness.kernels import swiglu as kernels

    step, meters = _step(GRADIENT, recipe), meters[:2]
    used = scales[:2] if step is None else [guess_in(meter, Role.gradients, gate) for meter in meters]
    both = kernels.round_slopes(slope, gate, up, used, dtype=GRADIENT, step=step)
    rounded = [_finished(made, meter, Role.gradients, recipe) for made, meter in zip(both, meters, strict=True)]
    if PROBE.counts:
        rows, every = [meter.data[Role.gradients] for meter in meters], stride_of(gate)
        seen = sample_of(slope), sample_of(gate), sample_of(up)
        kernels.count_slopes(*seen, used, rows, underflow=VANISHING[GRADIENT], every=every)
    return rounded


def product_of(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def slopes_of(slope: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from that of their product, unrounded."""
    wide, turned, passed = slope.float(), gate.float(), up.float()
    share = torch.sigmoid(turned)
    of_gate = wide * passed * share * (1 + turned * (1 - share))
    return of_gate.to(gate.dtype), (wide * turned * share).to(gate.dtype)


def _step(dtype: torch.dtype, recipe: str) -> int | None:
    """Of the scale, where it comes from the tensor itself."""
    if recipe == Fp8Recipe.current:
        return SCALE_STEPS[dtype]
    return 1 if PROBE.primes else None


def _finished(made: Matrix, meter: Tensor | None, role: Role, recipe: str) -> Rounded:
    if meter is not None and recipe == Fp8Recipe.delayed:
        from harness.kernels.fp8_quantize import raise_to_largest

        raise_to_largest(meter.data[role, Column.largest], made)
    return Rounded(made.rows, made.columns, made.inverse, made.inverse)


def _multiplied(does: Engine, left: Side, right: Side, *, out: Tensor | None = None, exact: bool = True) -> Tensor:
    return does.multiply(left, right, out=out, blocks=Blocks.none, exact=exact)


def _forward_shapes(
    hidden: Tensor, maps: list[Tensor], scales: list[Tensor], is_noted: bool, recipe: str, engine: str
) -> list[Tensor]:
    (num_rows, width), (inner, _), (outer, _) = hidden.shape, maps[0].shape, maps[2].shape
    made = [hidden.new_empty((num_rows, size), dtype=torch.bfloat16) for size in (outer, inner, inner)]
    for size in (width, inner):
        made += [hidden.new_empty((size, num_rows), dtype=FORWARD), hidden.new_empty((1,), dtype=torch.float32)]
    return [*made, *scales_used(hidden, recipe, NUM_MAPS)]


def _backward_shapes(
    gradient: Tensor, kept: list[Tensor], maps: list[Tensor], scales: list[Tensor], recipe: str, engine: str
) -> list[Tensor]:
    of_input = gradient.new_empty((len(gradient), maps[0].shape[1]), dtype=torch.bfloat16)
    return [of_input, *(torch.empty_like(weight, dtype=torch.bfloat16) for weight in maps[:NUM_MAPS])]


swiglu_forward = define(
    "swiglu_forward(Tensor hidden, Tensor[] maps, Tensor[] scales, bool is_noted, str recipe, str engine) -> Tensor[]",
    forward,
    _forward_shapes,
)
swiglu_backward = define(
    "swiglu_backward(Tensor gradient, Tensor[] kept, Tensor[] maps, Tensor[] scales, str recipe, str engine)"
    " -> Tensor[]",
    backward,
    _backward_shapes,
)
