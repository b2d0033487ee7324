"""The products of a linear map in fp8, as two operators of torch, so that a compiled block holds them whole.

Why: torch.compile cannot look into the engines' kernels, and must not: to it each is one operator on plain tensors.
Maps that read the same input go through together, which rounds it once, and costs the host one operator.
How: the forward operator rounds the input both ways and each weight one way, multiplies, and gives the rounded input on
for the gradient of the weight. The backward one rounds the gradients both ways and the weights the other way, so that
FSDP can free them in between, and adds up the input's gradient where it is multiplied.
What they learn about range they add to the meters they are given. The graph is not told of that: nothing in it reads a
meter, and a backward pass that changes what the forward pass was given cannot be compiled.
Maps travel as one list: all weights, then their scales, then their meters.
"""

# ruff: noqa: ARG001  (what a graph is told of a result needs few of the arguments)
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.config.precision import Fp8Recipe
from harness.precision.fp8.engine import Engine, engine_of
from harness.precision.fp8.formats import FORWARD, LIMITS, Blocks, Rounded, Side
from harness.precision.fp8.meters import (
    PROBE,
    Column,
    Role,
    dtype_of,
    guess_in,
    largest_of,
    note,
    sample_of,
    scale_of,
    stride_of,
)


def forward(
    hidden: Tensor, scale: Tensor, maps: list[Tensor], is_noted: bool, recipe: str, engine: str
) -> list[Tensor]:
    """`hidden` [T, K] times each weight [N, K]: the products [T, N]; the rounded input [K, T] and one over its scales;
    the scale that each weight was rounded by, which is of meaning where it is remembered."""
    does, (weights, scales, meters) = engine_of(engine), thirds(maps)
    inputs = round_noted(does, hidden, scale, meters[0] if is_noted else None, Role.activations, recipe)
    products, used = [], []
    for weight, weight_scale, meter in zip(weights, scales, meters, strict=True):
        right = round_noted(does, weight, weight_scale, meter if is_noted else None, Role.weights, recipe, both=False)
        products.append(does.multiply(inputs.by_rows, right.by_rows, out=None, blocks=_of_weights(recipe), exact=False))
        used.append(scale_used(right, recipe))
    return [*products, inputs.columns, inputs.column_inverse, *used]


def _forward_shapes(
    hidden: Tensor, scale: Tensor, maps: list[Tensor], is_noted: bool, recipe: str, engine: str
) -> list[Tensor]:
    num_rows, width = hidden.shape
    weights, _, _ = thirds(maps)
    inverse = (1,) if recipe != Fp8Recipe.block else engine_of(engine).block_scales(width, num_rows, square=False)
    return [
        *(hidden.new_empty((num_rows, len(weight)), dtype=torch.bfloat16) for weight in weights),
        hidden.new_empty((width, num_rows), dtype=FORWARD),
        hidden.new_empty(inverse, dtype=torch.float32),
        *scales_used(hidden, recipe, len(weights)),
    ]


def backward(
    gradients: list[Tensor],
    gradient_scales: list[Tensor],
    columns: Tensor,
    inverse: Tensor,
    maps: list[Tensor],
    recipe: str,
    engine: str,
) -> list[Tensor]:
    """The gradient of the input [T, K], then of each weight [N, K]."""
    does = engine_of(engine)
    inputs, lines = Side(columns, inverse), Blocks.lines if recipe == Fp8Recipe.block else Blocks.none
    of_input: Tensor | None = None
    of_weights = []
    for gradient, scale, weight, weight_scale, meter in zip(gradients, gradient_scales, *thirds(maps), strict=True):
        left = round_noted(does, gradient, scale, meter, Role.gradients, recipe)
        of_weights.append(does.multiply(left.by_columns, inputs, out=None, blocks=lines, exact=True))
        right = round_noted(does, weight, weight_scale, None, Role.weights, recipe)
        of_input = does.multiply(left.by_rows, right.by_columns, out=of_input, blocks=_of_weights(recipe), exact=True)
    assert of_input is not None, "a gradient of no products"
    return [of_input, *of_weights]


def _backward_shapes(
    gradients: list[Tensor],
    gradient_scales: list[Tensor],
    columns: Tensor,
    inverse: Tensor,
    maps: list[Tensor],
    recipe: str,
    engine: str,
) -> list[Tensor]:
    of_input = gradients[0].new_empty((len(gradients[0]), len(columns)), dtype=torch.bfloat16)
    weights, _, _ = thirds(maps)
    return [of_input, *(torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights)]


def scale_used(rounded: Rounded, recipe: str) -> Tensor:
    """The scale that a weight was rounded by, where it may not be the one that was brought; empty elsewhere."""
    if recipe == Fp8Recipe.delayed:
        return rounded.row_inverse.reciprocal().view(())
    return rounded.rows.new_empty(0)


def scales_used(like: Tensor, recipe: str, count: int) -> list[Tensor]:
    """What a graph is told of these."""
    shape, dtype = ((), torch.float32) if recipe == Fp8Recipe.delayed else ((0,), FORWARD)
    return [like.new_empty(shape, dtype=dtype) for _ in range(count)]


def thirds(maps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What a list holds one after the other: three things of each map."""
    count = len(maps) // 3
    return list(maps[:count]), list(maps[count : 2 * count]), list(maps[2 * count :])


def define(schema: str, compute: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """Defined by hand: what torch wraps around an operator of Python costs the host more than these kernels take."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"harness::{name}", shapes, lib=LIBRARY)
    operator: Callable[..., list[Tensor]] = getattr(torch.ops.harness, name)
    return operator


LIBRARY = torch.library.Library("harness", "DEF")  # type: ignore[no-untyped-call]

fp8_forward = define(
    "fp8_forward(Tensor hidden, Tensor scale, Tensor[] maps, bool is_noted, str recipe, str engine) -> Tensor[]",
    forward,
    _forward_shapes,
)
fp8_backward = define(
    "fp8_backward(Tensor[] gradients, Tensor[] gradient_scales, Tensor columns, Tensor inverse, Tensor[] maps,"
    " str recipe, str engine) -> Tensor[]",
    backward,
    _backward_shapes,
)


def _of_weights(recipe: str) -> Blocks:
    return Blocks.squares if recipe == Fp8Recipe.block else Blocks.none


def round_noted(
    does: Engine,
    values: Tensor,
    scale: Tensor,
    meter: Tensor | None,
    role: Role,
    recipe: str,
    *,
    both: bool = True,
) -> Rounded:
    """A matrix in fp8 as the recipe has it; what it learns goes into the meter."""
    dtype = dtype_of(role, recipe)
    row = None if meter is None else meter.data[role]
    if recipe == Fp8Recipe.block:
        rounded = does.round_blocks(values, dtype=dtype, both=both, square=role is Role.weights)
    elif recipe == Fp8Recipe.current and role is not Role.weights:
        scale = guess_in(meter, role, values)
        rounded = does.fit(values, scale, dtype=dtype)
    else:
        if recipe == Fp8Recipe.delayed and PROBE.primes:
            scale = scale_of(largest_of(values), LIMITS[dtype])
        largest = row[Column.largest] if row is not None and recipe == Fp8Recipe.delayed else None
        rounded = does.round(values, scale, dtype=dtype, both=both, largest=largest)
    if row is not None and PROBE.counts:
        seen = sample_of(values)
        if recipe == Fp8Recipe.block:
            scale = scale_of(largest_of(seen), LIMITS[dtype])
        note(row, seen, sample_of(rounded.rows), scale, every=stride_of(values))
    return rounded
