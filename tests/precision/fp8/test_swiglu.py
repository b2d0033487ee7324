"""SwiGLU in one with its maps against the same by parts: bit for bit, and what is noted of it too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.precision.fp8.linear import Fp8Linear, Recipe, Switch, project
from harness.precision.fp8.meters import METER, Column, probing
from harness.precision.fp8.swiglu import swiglu

WIDTH, INNER = 32, 48
OPERATORS: Any = torch.ops.harness


def maps(kind: str = "delayed") -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    switch, made = Switch(), []
    for width, height in ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)):
        each = Fp8Linear(width, height, recipe=Recipe(kind, "emulated"), switch=switch).to(torch.bfloat16)
        each.weight = nn.Parameter(torch.randn(height, width, generator=generator).mul(0.2).to(torch.bfloat16))
        each.meter, each.delayed_scales = torch.zeros(METER), torch.tensor([20.0, 200.0, 5.0])
        made.append(each)
    return made


def by_parts(hidden: Tensor, gate: Fp8Linear, up: Fp8Linear, down: Fp8Linear) -> Tensor:
    turned, passed = project(hidden, gate, up)
    projected: Tensor = down((F.silu(turned.float()) * passed.float()).to(torch.bfloat16))
    return projected


def found(way: Any, made: list[Fp8Linear], *, counts: bool = False, primes: bool = False) -> list[Tensor]:
    """What it makes, its gradients, and what was noted."""
    generator = torch.Generator().manual_seed(1)
    hidden, seed = (torch.randn(2, 16, WIDTH, generator=generator).to(torch.bfloat16) for _ in range(2))
    hidden.requires_grad_()
    with probing(count_underflow=counts, prime_scales=primes):
        output = way(hidden, *made)
        output.backward(seed)
    gradients = [each.weight.grad for each in made]
    return [output.detach(), hidden.grad, *gradients, *(each.meter for each in made)]


@pytest.mark.parametrize("kind", ["current", "delayed"])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("primes", [False, True])
def test_it_is_what_the_parts_make(kind: str, counts: bool, primes: bool) -> None:
    one = found(swiglu, maps(kind), counts=counts, primes=primes)
    for own, parts in zip(one, found(by_parts, maps(kind), counts=counts, primes=primes), strict=True):
        assert torch.equal(own, parts)
    meters = torch.stack(one[-3:])
    assert bool((meters[..., Column.nonzeros] > 0).any()) == counts
    noted = [2, 3, 3] if kind == "delayed" else [0, 0, 0]
    assert meters[..., Column.amax].count_nonzero(dim=0).tolist() == noted, "gate reads for up"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own affairs
@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_compiled_it_is_one_graph_and_the_same(kind: str) -> None:
    made, plain = maps(kind), maps(kind)
    for own, other in zip(found(torch.compile(swiglu, fullgraph=True), made), found(swiglu, plain), strict=True):
        assert torch.equal(own, other)


def test_an_evaluation_takes_no_notes() -> None:
    made = maps()
    with torch.no_grad():
        swiglu(torch.ones(4, WIDTH, dtype=torch.bfloat16), *made)
    assert not any(each.meter.any() for each in made)


def test_other_recipes_bf16_and_watched_maps_go_by_parts() -> None:
    hidden = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    assert torch.isfinite(swiglu(hidden, *maps("block"))).all()
    made = maps()
    made[0].switch.is_on = False
    expected = F.linear(F.silu(F.linear(hidden, made[0].weight)) * F.linear(hidden, made[1].weight), made[2].weight)
    assert torch.equal(swiglu(hidden, *made), expected)
    made, heard = maps(), []
    made[1].register_forward_hook(lambda *_: heard.append(1))
    swiglu(hidden, *made)
    assert heard == [1]


def test_a_graph_is_told_the_truth() -> None:
    hidden = torch.ones(16, WIDTH, dtype=torch.bfloat16)
    made = maps()
    tensors = [*(each.weight.detach() for each in made), *(each.meter for each in made)]
    given = (hidden, tensors, [torch.ones(())] * 5, False, "delayed", "emulated")
    torch.library.opcheck(OPERATORS.swiglu_forward.default, given, test_utils=["test_faketensor", "test_schema"])
    _, *kept = OPERATORS.swiglu_forward(*given)
    backward = (hidden, kept, tensors, [torch.ones(())] * 3, "delayed", "emulated")
    torch.library.opcheck(OPERATORS.swiglu_backward.default, backward, test_utils=["test_faketensor"])
