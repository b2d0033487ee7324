"""The forward and backward GEMMs of fp8 projections as two custom operators.

Why: torch.compile cannot trace into the engines' kernels; to it each is one operator on plain tensors, and a block
compiles as a whole. Projections that read the same input share one operator, which quantizes the input once and saves
host overhead.
How: the forward operator quantizes the input in both layouts and each weight in one, multiplies, and returns the
quantized input for the weight gradient. The backward operator quantizes the gradients in both layouts and the weights
in the other one, so that FSDP can free the weights in between, and accumulates the input gradient in the GEMM.
Both add range statistics to the meters they are given. The schema does not declare that mutation: nothing in the graph
reads a meter, and a backward pass that mutates an input of the forward pass cannot be compiled.
Layers are passed as one list: all weights, then their scales, then their meters.
"""

# ruff: noqa: ARG001  (fake implementations take all arguments and need few)
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.config.precision import Fp8Recipe
from harness.precision.fp8.engine import Engine, get_engine
from harness.precision.fp8.formats import FORWARD, LIMITS, BlockScaling, Operand, QuantizedMatrix
from harness.precision.fp8.quantize_meters import (
    PROBE,
    Column,
    TensorRole,
    compute_amax,
    compute_scale,
    fp8_dtype,
    last_scale_slot,
    record_underflow,
    sample_rows,
    sample_stride,
)


def forward(
    hidden: Tensor, scale: Tensor, layers: list[Tensor], record: bool, recipe: str, engine_name: str
) -> list[Tensor]:
    """`hidden` [T, K] times each weight [N, K].

    Returns the outputs [T, N]; the quantized input [K, T] and 1 / its scales; the scale that each weight was quantized
    by (recipe `delayed` only, else empty).
    """
    engine, (weights, scales, meters) = get_engine(engine_name), split_thirds(layers)
    inputs = quantize_and_record(engine, hidden, scale, meters[0] if record else None, TensorRole.activations, recipe)
    outputs, used_scales = [], []
    for weight, weight_scale, meter in zip(weights, scales, meters, strict=True):
        right = quantize_and_record(
            engine, weight, weight_scale, meter if record else None, TensorRole.weights, recipe, transpose=False
        )
        outputs.append(
            engine.gemm(
                inputs.as_rows, right.as_rows, out=None, scaling=_weight_scaling(recipe), split_accumulator=False
            )
        )
        used_scales.append(used_scale(right, recipe))
    return [*outputs, inputs.columns, inputs.column_scale_inv, *used_scales]


def _forward_shapes(
    hidden: Tensor, scale: Tensor, layers: list[Tensor], record: bool, recipe: str, engine_name: str
) -> list[Tensor]:
    num_rows, width = hidden.shape
    weights, _, _ = split_thirds(layers)
    scale_shape = (
        (1,) if recipe != Fp8Recipe.block else get_engine(engine_name).block_scale_shape(width, num_rows, square=False)
    )
    return [
        *(hidden.new_empty((num_rows, len(weight)), dtype=torch.bfloat16) for weight in weights),
        hidden.new_empty((width, num_rows), dtype=FORWARD),
        hidden.new_empty(scale_shape, dtype=torch.float32),
        *used_scale_shapes(hidden, recipe, len(weights)),
    ]


def backward(
    gradients: list[Tensor],
    gradient_scales: list[Tensor],
    columns: Tensor,
    scale_inv: Tensor,
    layers: list[Tensor],
    recipe: str,
    engine_name: str,
) -> list[Tensor]:
    """The gradient of the input [T, K], then of each weight [N, K]."""
    engine = get_engine(engine_name)
    inputs = Operand(columns, scale_inv)
    scaling = BlockScaling.one_d if recipe == Fp8Recipe.block else BlockScaling.none
    grad_input: Tensor | None = None
    grad_weights = []
    for gradient, scale, weight, weight_scale, meter in zip(
        gradients, gradient_scales, *split_thirds(layers), strict=True
    ):
        left = quantize_and_record(engine, gradient, scale, meter, TensorRole.gradients, recipe)
        grad_weights.append(engine.gemm(left.as_columns, inputs, out=None, scaling=scaling, split_accumulator=True))
        right = quantize_and_record(engine, weight, weight_scale, None, TensorRole.weights, recipe)
        grad_input = engine.gemm(
            left.as_rows, right.as_columns, out=grad_input, scaling=_weight_scaling(recipe), split_accumulator=True
        )
    assert grad_input is not None, "no layers"
    return [grad_input, *grad_weights]


def _backward_shapes(
    gradients: list[Tensor],
    gradient_scales: list[Tensor],
    columns: Tensor,
    scale_inv: Tensor,
    layers: list[Tensor],
    recipe: str,
    engine_name: str,
) -> list[Tensor]:
    grad_input = gradients[0].new_empty((len(gradients[0]), len(columns)), dtype=torch.bfloat16)
    weights, _, _ = split_thirds(layers)
    return [grad_input, *(torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights)]


def used_scale(quantized: QuantizedMatrix, recipe: str) -> Tensor:
    """The scale that a weight was quantized by in the recipe `delayed`, where priming may replace it; else empty."""
    if recipe == Fp8Recipe.delayed:
        return quantized.row_scale_inv.reciprocal().view(())
    return quantized.rows.new_empty(0)


def used_scale_shapes(like: Tensor, recipe: str, count: int) -> list[Tensor]:
    """Fake outputs of `used_scale`."""
    shape, dtype = ((), torch.float32) if recipe == Fp8Recipe.delayed else ((0,), FORWARD)
    return [like.new_empty(shape, dtype=dtype) for _ in range(count)]


def split_thirds(layers: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Split a list into three of equal length."""
    count = len(layers) // 3
    return list(layers[:count]), list(layers[count : 2 * count]), list(layers[2 * count :])


def define_op(schema: str, compute: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """Define an operator through `torch.library.Library`: the wrapper of `torch.library.custom_op` costs the host more
    time than these kernels take."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"harness::{name}", shapes, lib=LIBRARY)
    operator: Callable[..., list[Tensor]] = getattr(torch.ops.harness, name)
    return operator


LIBRARY = torch.library.Library("harness", "DEF")  # type: ignore[no-untyped-call]

fp8_forward = define_op(
    "fp8_forward(Tensor hidden, Tensor scale, Tensor[] layers, bool record, str recipe, str engine_name) -> Tensor[]",
    forward,
    _forward_shapes,
)
fp8_backward = define_op(
    "fp8_backward(Tensor[] gradients, Tensor[] gradient_scales, Tensor columns, Tensor scale_inv, Tensor[] layers,"
    " str recipe, str engine_name) -> Tensor[]",
    backward,
    _backward_shapes,
)


def _weight_scaling(recipe: str) -> BlockScaling:
    return BlockScaling.two_d if recipe == Fp8Recipe.block else BlockScaling.none


def quantize_and_record(
    engine: Engine,
    values: Tensor,
    scale: Tensor,
    meter: Tensor | None,
    role: TensorRole,
    recipe: str,
    *,
    transpose: bool = True,
) -> QuantizedMatrix:
    """Quantize a matrix as the recipe says, and add range statistics to the meter, if there is one."""
    dtype = fp8_dtype(role, recipe)
    row = None if meter is None else meter.data[role]
    if recipe == Fp8Recipe.block:
        quantized = engine.quantize_blocks(values, dtype=dtype, transpose=transpose, square=role is TensorRole.weights)
    elif recipe == Fp8Recipe.current and role is not TensorRole.weights:
        scale = last_scale_slot(meter, role, values)
        quantized = engine.quantize_to_amax(values, scale, dtype=dtype)
    else:
        if recipe == Fp8Recipe.delayed and PROBE.prime_scales:
            scale = compute_scale(compute_amax(values), LIMITS[dtype])
        amax = row[Column.amax] if row is not None and recipe == Fp8Recipe.delayed else None
        quantized = engine.quantize(values, scale, dtype=dtype, transpose=transpose, amax=amax)
    if row is not None and PROBE.count_underflow:
        sample = sample_rows(values)
        if recipe == Fp8Recipe.block:
            scale = compute_scale(compute_amax(sample), LIMITS[dtype])
        record_underflow(row, sample, sample_rows(quantized.rows), scale, every=sample_stride(values))
    return quantized
