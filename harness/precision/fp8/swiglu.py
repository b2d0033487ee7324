"""SwiGLU between fp8 projections, quantized in the kernel that computes it and never written in bf16.

Why: the outputs of gate and up are the widest tensors of a block, and so are their gradients. silu(gate) * up and both
gradients go from registers to fp8, which saves 4 bytes of memory traffic per value in forward and 8 in backward.
Scales that are fitted to the tensor start from the last step's scale (`harness.kernels.fp8_quantize`).
How: one autograd function for the three projections, because fp8 gradients cannot pass through autograd; two operators,
as in `harness.precision.fp8.custom_ops`. Without a GPU plain torch computes the same values and the engine quantizes
them. A probed step computes the sampled rows once more to count underflow. The product is not saved for backward: the
kernel of the gradients, which reads gate and up, quantizes it once more by the same scale, so its bits are the same.
Left out: the recipe `block`, which runs the three projections separately.
"""

# ruff: noqa: ARG001  (fake implementations take all arguments and need few)
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from harness.config.precision import Fp8Recipe
from harness.precision.fp8.custom_ops import define_op, quantize_and_record, split_thirds, used_scale, used_scale_shapes
from harness.precision.fp8.engine import Engine, get_engine
from harness.precision.fp8.formats import (
    FORWARD,
    GRADIENT,
    SCALE_STEPS,
    UNDERFLOW,
    BlockScaling,
    Operand,
    QuantizedMatrix,
)
from harness.precision.fp8.linear import Fp8Linear, project, weight_scale
from harness.precision.fp8.quantize_meters import PROBE, Column, TensorRole, last_scale_slot, sample_rows, sample_stride

if TYPE_CHECKING:
    from harness.kernels.fp8_quantize import QuantizedTiles

NUM_LAYERS = 3


def swiglu(hidden: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """down(silu(gate(hidden)) * up(hidden)); fused if all three layers run in fp8 with one scale per tensor."""
    layers = tuple(layer for layer in (gate, up, down) if isinstance(layer, Fp8Linear) and layer.switch.is_on)
    has_hooks = not torch.compiler.is_compiling() and any(layer._forward_hooks for layer in layers)
    if len(layers) < NUM_LAYERS or layers[0].recipe.kind == Fp8Recipe.block or has_hooks:
        gate_output, up_output = project(hidden, gate, up)
        down_output: Tensor = down(F.silu(gate_output) * up_output)
        return down_output
    flat = hidden.flatten(0, -2)
    tensors = [getattr(layer, name) for name in ("weight", "meter", "delayed_scales") for layer in layers]
    flat_output = _SwiGLU.apply(flat, *layers[0].recipe, torch.is_grad_enabled(), *tensors)  # type: ignore[no-untyped-call]
    output: Tensor = torch.ops.aten._unsafe_view(flat_output, [*hidden.shape[:-1], flat_output.shape[-1]])
    return output


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, kind: str, engine_name: str, record: bool, *tensors: Tensor) -> Tensor:
        weights, meters, delayed_scales = split_thirds(tensors)
        weight_scales = [weight_scale(*pair, kind) for pair in zip(weights, delayed_scales, strict=True)]
        scales = [delayed_scales[0][TensorRole.activations], delayed_scales[2][TensorRole.activations], *weight_scales]
        output, *kept = swiglu_forward(hidden, [*weights, *meters], scales, record, kind, engine_name)
        kept, used_scales = kept[:-NUM_LAYERS], kept[-NUM_LAYERS:]
        ctx.recipe = (kind, engine_name)
        ctx.save_for_backward(*kept, *(used_scales if kind == Fp8Recipe.delayed else weight_scales), *tensors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (kind, engine_name), saved = ctx.recipe, ctx.saved_tensors
        kept, tensors = saved[: -3 * NUM_LAYERS], saved[-3 * NUM_LAYERS :]
        weights, meters, delayed_scales = split_thirds(tensors)
        scales = [scales_by_role[TensorRole.gradients] for scales_by_role in delayed_scales]
        grad_input, *grad_weights = swiglu_backward(
            gradient.contiguous(), list(kept), [*weights, *meters], scales, kind, engine_name
        )
        return grad_input, None, None, None, *grad_weights, *([None] * 2 * NUM_LAYERS)


def forward(
    hidden: Tensor, layers: list[Tensor], scales: list[Tensor], record: bool, recipe: str, engine_name: str
) -> list[Tensor]:
    """The output of the MLP for `hidden` [T, D], then what backward needs: gate and up [T, F]; the quantized input
    [D, T] and 1 / its scale; 1 / the scale of the product silu(gate) * up; and the scales that the weights were
    quantized by (recipe `delayed` only, else empty).

    `layers`: weights, then meters. `scales`: of the input and of the product (recipe `delayed` only), and of each
    weight.
    """
    engine = get_engine(engine_name)
    weights, meters = layers[:NUM_LAYERS], [meter if record else None for meter in layers[NUM_LAYERS:]]
    inputs = quantize_and_record(engine, hidden, scales[0], meters[0], TensorRole.activations, recipe)
    rights = [
        quantize_and_record(engine, weight, scale, meter, TensorRole.weights, recipe, transpose=False)
        for weight, scale, meter in zip(weights, scales[2:], meters, strict=True)
    ]
    gate, up = (_gemm(engine, inputs.as_rows, right.as_rows, split_accumulator=False) for right in rights[:2])
    product = _quantize_product(engine, gate, up, scales[1], meters[2], recipe)
    return [
        _gemm(engine, product.as_rows, rights[2].as_rows, split_accumulator=False),
        *(gate, up),
        *(inputs.columns, inputs.column_scale_inv),
        product.scale_inv,
        *(used_scale(right, recipe) for right in rights),
    ]


def backward(
    gradient: Tensor, kept: list[Tensor], layers: list[Tensor], scales: list[Tensor], recipe: str, engine_name: str
) -> list[Tensor]:
    """The gradient of the input, then of the weights; `scales`: of the output gradient of each layer (recipe `delayed`
    only)."""
    engine = get_engine(engine_name)
    gate, up, columns, scale_inv, product_scale_inv, *weight_scales = kept
    weights, meters = layers[:NUM_LAYERS], layers[NUM_LAYERS:]
    left = quantize_and_record(engine, gradient, scales[2], meters[2], TensorRole.gradients, recipe)
    right = quantize_and_record(engine, weights[2], weight_scales[2], None, TensorRole.weights, recipe)
    grad_product, left_columns = _gemm(engine, left.as_rows, right.as_columns), left.as_columns
    del left, right
    *grads, product_columns = _quantize_grads(engine, grad_product, gate, up, scales, product_scale_inv, meters, recipe)
    del grad_product
    grad_down = _gemm(engine, left_columns, Operand(product_columns, product_scale_inv))
    del left_columns, product_columns
    grad_input: Tensor | None = None
    grad_weights = []
    for grad, weight, scale in zip(grads, weights[:2], weight_scales[:2], strict=True):
        grad_weights.append(_gemm(engine, grad.as_columns, Operand(columns, scale_inv)))
        right = quantize_and_record(engine, weight, scale, None, TensorRole.weights, recipe)
        grad_input = _gemm(engine, grad.as_rows, right.as_columns, out=grad_input)
    assert grad_input is not None
    return [grad_input, *grad_weights, grad_down]


class Product(NamedTuple):
    """silu(gate) * up in fp8, by rows."""

    rows: Tensor
    scale_inv: Tensor
    """A power of two, so that 1 / scale_inv is the scale."""

    @property
    def as_rows(self) -> Operand:
        return Operand(self.rows, self.scale_inv)


class QuantizedGrads(NamedTuple):
    """What the GEMMs of backward read."""

    gate: QuantizedMatrix
    up: QuantizedMatrix
    product_columns: Tensor
    """The transpose of the product, by the scale of forward."""


def _quantize_product(
    engine: Engine, gate: Tensor, up: Tensor, scale: Tensor, meter: Tensor | None, recipe: str
) -> Product:
    if gate.is_cuda:
        return quantize_product_by_kernels(gate, up, scale, meter, recipe)
    quantized = quantize_and_record(engine, compute_product(gate, up), scale, meter, TensorRole.activations, recipe)
    return Product(*quantized.as_rows)


def _quantize_grads(
    engine: Engine,
    grad_product: Tensor,
    gate: Tensor,
    up: Tensor,
    scales: list[Tensor],
    product_scale_inv: Tensor,
    meters: list[Tensor],
    recipe: str,
) -> QuantizedGrads:
    """The quantized gradients of gate and up, from the gradient of silu(gate) * up, and that product once more."""
    if gate.is_cuda:
        return quantize_grads_by_kernels(grad_product, gate, up, scales, product_scale_inv, meters, recipe)
    grad_gate, grad_up = (
        quantize_and_record(engine, values, scale, meter, TensorRole.gradients, recipe)
        for values, scale, meter in zip(compute_grads(grad_product, gate, up), scales, meters, strict=False)
    )
    scale = product_scale_inv.reciprocal().view(())
    product = engine.quantize(compute_product(gate, up), scale, dtype=FORWARD, transpose=True, amax=None)
    return QuantizedGrads(grad_gate, grad_up, product.columns)


def quantize_product_by_kernels(gate: Tensor, up: Tensor, scale: Tensor, meter: Tensor | None, recipe: str) -> Product:
    """silu(gate) * up in fp8, by one Triton kernel."""
    from harness.kernels import swiglu as kernels

    step = _scale_step(FORWARD, recipe)
    scale = scale if step is None else last_scale_slot(meter, TensorRole.activations, gate)
    tiles = kernels.quantize_swiglu(gate, up, scale, dtype=FORWARD, step=step)
    _record_amax(tiles, meter, TensorRole.activations, recipe)
    if meter is not None and PROBE.count_underflow:
        row, every = meter.data[TensorRole.activations], sample_stride(gate)
        sample = sample_rows(gate), sample_rows(up)
        kernels.count_swiglu_underflow(*sample, scale, row, underflow=UNDERFLOW[FORWARD], every=every)
    return Product(tiles.rows, tiles.scale_inv)


def quantize_grads_by_kernels(
    grad_product: Tensor,
    gate: Tensor,
    up: Tensor,
    scales: list[Tensor],
    product_scale_inv: Tensor,
    meters: list[Tensor],
    recipe: str,
) -> QuantizedGrads:
    """The gradients of gate and up, and the transposed product, in fp8, by one Triton kernel."""
    from harness.kernels import swiglu as kernels

    step, meters = _scale_step(GRADIENT, recipe), meters[:2]
    used_scales = (
        scales[:2] if step is None else [last_scale_slot(meter, TensorRole.gradients, gate) for meter in meters]
    )
    *both, product_columns = kernels.quantize_swiglu_grads(
        *(grad_product, gate, up, used_scales, product_scale_inv),
        dtype=GRADIENT,
        product_dtype=FORWARD,
        step=step,
    )
    for tiles, meter in zip(both, meters, strict=True):
        _record_amax(tiles, meter, TensorRole.gradients, recipe)
    grad_gate, grad_up = (
        QuantizedMatrix(tiles.rows, tiles.columns, tiles.scale_inv, tiles.scale_inv) for tiles in both
    )
    if PROBE.count_underflow:
        rows, every = [meter.data[TensorRole.gradients] for meter in meters], sample_stride(gate)
        sample = sample_rows(grad_product), sample_rows(gate), sample_rows(up)
        kernels.count_swiglu_grad_underflow(*sample, used_scales, rows, underflow=UNDERFLOW[GRADIENT], every=every)
    return QuantizedGrads(grad_gate, grad_up, product_columns)


def compute_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in fp32."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def compute_grads(grad_product: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from that of silu(gate) * up, computed in fp32, not quantized."""
    grad_f32, gate_f32, up_f32 = grad_product.float(), gate.float(), up.float()
    sigmoid = torch.sigmoid(gate_f32)
    grad_gate = grad_f32 * up_f32 * sigmoid * (1 + gate_f32 * (1 - sigmoid))
    return grad_gate.to(gate.dtype), (grad_f32 * gate_f32 * sigmoid).to(gate.dtype)


def _scale_step(dtype: torch.dtype, recipe: str) -> int | None:
    """Exponents of fitted scales are multiples of this; None if the scale is given and not fitted."""
    if recipe == Fp8Recipe.current:
        return SCALE_STEPS[dtype]
    return 1 if PROBE.prime_scales else None


def _record_amax(tiles: QuantizedTiles, meter: Tensor | None, role: TensorRole, recipe: str) -> None:
    """In the recipe `delayed` the amax of what a kernel quantized goes into the meter."""
    if meter is not None and recipe == Fp8Recipe.delayed:
        from harness.kernels.fp8_quantize import update_amax

        update_amax(meter.data[role, Column.amax], tiles)


def _gemm(
    engine: Engine, left: Operand, right: Operand, *, out: Tensor | None = None, split_accumulator: bool = True
) -> Tensor:
    return engine.gemm(left, right, out=out, scaling=BlockScaling.none, split_accumulator=split_accumulator)


def _forward_shapes(
    hidden: Tensor, layers: list[Tensor], scales: list[Tensor], record: bool, recipe: str, engine_name: str
) -> list[Tensor]:
    (num_rows, width), (inner, _), (outer, _) = hidden.shape, layers[0].shape, layers[2].shape
    outputs = [hidden.new_empty((num_rows, size), dtype=torch.bfloat16) for size in (outer, inner, inner)]
    scale_invs = [hidden.new_empty((1,), dtype=torch.float32) for _ in range(2)]
    outputs += [hidden.new_empty((width, num_rows), dtype=FORWARD), *scale_invs]
    return [*outputs, *used_scale_shapes(hidden, recipe, NUM_LAYERS)]


def _backward_shapes(
    gradient: Tensor, kept: list[Tensor], layers: list[Tensor], scales: list[Tensor], recipe: str, engine_name: str
) -> list[Tensor]:
    grad_input = gradient.new_empty((len(gradient), layers[0].shape[1]), dtype=torch.bfloat16)
    return [grad_input, *(torch.empty_like(weight, dtype=torch.bfloat16) for weight in layers[:NUM_LAYERS])]


swiglu_forward = define_op(
    "swiglu_forward(Tensor hidden, Tensor[] layers, Tensor[] scales, bool record, str recipe, str engine_name)"
    " -> Tensor[]",
    forward,
    _forward_shapes,
)
swiglu_backward = define_op(
    "swiglu_backward(Tensor gradient, Tensor[] kept, Tensor[] layers, Tensor[] scales, str recipe, str engine_name)"
    " -> Tensor[]",
    backward,
    _backward_shapes,
)
