"""The fused fp8 SwiGLU against its three layers one by one: bit-equal outputs, gradients and meters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.precision.fp8.linear import Fp8Linear, Recipe, Switch, project
from harness.precision.fp8.quantize_meters import METER, Column, probing
from harness.precision.fp8.swiglu import swiglu

WIDTH, INNER = 32, 48
OPERATORS: Any = torch.ops.harness


def make_layers(kind: str = "delayed") -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    switch, layers = Switch(), []
    for width, height in ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)):
        each = Fp8Linear(width, height, recipe=Recipe(kind, "emulated"), switch=switch).to(torch.bfloat16)
        each.weight = nn.Parameter(torch.randn(height, width, generator=generator).mul(0.2).to(torch.bfloat16))
        each.meter, each.delayed_scales = torch.zeros(METER), torch.tensor([16.0, 128.0, 4.0])
        layers.append(each)
    return layers


def unfused(hidden: Tensor, gate: Fp8Linear, up: Fp8Linear, down: Fp8Linear) -> Tensor:
    gate_output, up_output = project(hidden, gate, up)
    output: Tensor = down((F.silu(gate_output.float()) * up_output.float()).to(torch.bfloat16))
    return output


def found(
    way: Any, layers: list[Fp8Linear], *, count_underflow: bool = False, prime_scales: bool = False
) -> list[Tensor]:
    """The output, the gradients and the meters."""
    generator = torch.Generator().manual_seed(1)
    hidden, seed = (torch.randn(2, 16, WIDTH, generator=generator).to(torch.bfloat16) for _ in range(2))
    hidden.requires_grad_()
    with probing(count_underflow=count_underflow, prime_scales=prime_scales):
        output = way(hidden, *layers)
        output.backward(seed)
    gradients = [each.weight.grad for each in layers]
    return [output.detach(), hidden.grad, *gradients, *(each.meter for each in layers)]


@pytest.mark.parametrize("kind", ["current", "delayed"])
@pytest.mark.parametrize("count_underflow", [False, True])
@pytest.mark.parametrize("prime_scales", [False, True])
def test_fused_equals_unfused(kind: str, count_underflow: bool, prime_scales: bool) -> None:
    one = found(swiglu, make_layers(kind), count_underflow=count_underflow, prime_scales=prime_scales)
    for own, parts in zip(
        one, found(unfused, make_layers(kind), count_underflow=count_underflow, prime_scales=prime_scales), strict=True
    ):
        assert torch.equal(own, parts)
    meters = torch.stack(one[-3:])
    assert bool((meters[..., Column.nonzeros] > 0).any()) == count_underflow
    num_recorded = [2, 3, 3] if kind == "delayed" else [0, 0, 0]
    assert meters[..., Column.amax].count_nonzero(dim=0).tolist() == num_recorded, "gate records the input for up"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # from torch's own compiler
@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_compiled_is_one_graph_and_equal(kind: str) -> None:
    layers, plain = make_layers(kind), make_layers(kind)
    for own, other in zip(found(torch.compile(swiglu, fullgraph=True), layers), found(swiglu, plain), strict=True):
        assert torch.equal(own, other)


def test_an_evaluation_records_nothing() -> None:
    layers = make_layers()
    with torch.no_grad():
        swiglu(torch.ones(4, WIDTH, dtype=torch.bfloat16), *layers)
    assert not any(each.meter.any() for each in layers)


def test_block_scales_bf16_and_hooks_are_not_fused() -> None:
    hidden = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    assert torch.isfinite(swiglu(hidden, *make_layers("block"))).all()
    layers = make_layers()
    layers[0].switch.is_on = False
    expected = F.linear(
        F.silu(F.linear(hidden, layers[0].weight)) * F.linear(hidden, layers[1].weight), layers[2].weight
    )
    assert torch.equal(swiglu(hidden, *layers), expected)
    layers, calls = make_layers(), []
    layers[1].register_forward_hook(lambda *_: calls.append(1))
    swiglu(hidden, *layers)
    assert calls == [1]


def test_fake_implementations_are_correct() -> None:
    hidden = torch.ones(16, WIDTH, dtype=torch.bfloat16)
    layers = make_layers()
    tensors = [*(each.weight.detach() for each in layers), *(each.meter for each in layers)]
    arguments = (hidden, tensors, [torch.ones(())] * 5, False, "delayed", "emulated")
    torch.library.opcheck(OPERATORS.swiglu_forward.default, arguments, test_utils=["test_faketensor", "test_schema"])
    _, *kept = OPERATORS.swiglu_forward(*arguments)
    backward = (hidden, kept, tensors, [torch.ones(())] * 3, "delayed", "emulated")
    torch.library.opcheck(OPERATORS.swiglu_backward.default, backward, test_utils=["test_faketensor"])
