"""A linear map in fp8: its three products against exact ones, alone and together, watched, switched off, compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.config.compose import load
from harness.config.precision import Fp8Recipe
from harness.model.transformer import Transformer
from harness.precision.fp8.formats import FORWARD, GRADIENT, LIMITS
from harness.precision.fp8.layers import Fp8Layers, convert_to_fp8
from harness.precision.fp8.linear import Fp8Linear, Recipe, Switch, project
from harness.precision.fp8.meters import Column, Role, fp8_dtype, probing
from harness.precision.mixed_precision import linear

RECIPES = pytest.mark.parametrize("kind", list(Fp8Recipe))
BF16_ERROR = 2.0**-8
OPERATORS = torch.ops.harness


@pytest.fixture(autouse=True)
def primed() -> Iterator[None]:
    """Scales that are remembered are not known yet, as in the first step of a run."""
    with probing(count_underflow=False, prime_scales=True):
        yield


def make_maps(kind: str, *widths: int, switch: Switch | None = None) -> list[Fp8Linear]:
    torch.manual_seed(0)
    recipe, switch = Recipe(kind, "emulated"), switch or Switch()
    return [Fp8Linear(144, width, recipe=recipe, switch=switch).to(torch.bfloat16) for width in widths]


def make_hidden() -> Tensor:
    """Activations as those behind a norm, two of them far out."""
    hidden = torch.randn(2, 16, 144, generator=torch.Generator().manual_seed(1))
    hidden.view(-1)[:2] = torch.tensor([30.0, -50.0])
    return hidden.to(torch.bfloat16).requires_grad_()


def make_seeds(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [1e-6 * torch.randn(output.shape, generator=generator).to(torch.bfloat16) for output in outputs]


def gradients(outputs: Sequence[Tensor], hidden: Tensor, maps: Sequence[nn.Linear]) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, [hidden, *(each.weight for each in maps)], make_seeds(outputs)))


def error_of(values: Tensor, role: Role, kind: str) -> Tensor:
    """The most that each number can lose: half of its last digit, and of the smallest number where it is tiny."""
    dtype = fp8_dtype(role, kind)
    info = torch.finfo(dtype)
    scale = LIMITS[dtype] / values.abs().amax() / (2 if kind == Fp8Recipe.block else 1)
    return values.abs() * info.eps / 2 + info.tiny * info.eps / 2 / scale


def bound_of(left: Tensor, right: Tensor, lefts: Tensor, rights: Tensor) -> Tensor:
    """The most that a product of [M, K] and [N, K] can be wrong, where its sides are by so much, in bf16."""
    exact = left.abs() @ right.abs().T
    largest = (left.abs() + lefts) @ (right.abs() + rights).T
    return largest - exact + BF16_ERROR * largest


def test_its_parameter_is_that_of_a_plain_one() -> None:
    twin, plain = Fp8Linear(32, 48, recipe=Recipe("current", "emulated"), switch=Switch()), nn.Linear(32, 48, False)
    assert {name: value.shape for name, value in twin.state_dict().items()} == {"weight": torch.Size([48, 32])}
    plain.load_state_dict(twin.state_dict())
    assert torch.equal(plain.weight, twin.weight)
    assert twin.bias is None


@RECIPES
def test_products_and_gradients_are_wrong_by_no_more_than_the_digits_of_fp8(kind: str) -> None:
    (own,) = make_maps(kind, 48)
    hidden = make_hidden()
    output = own(hidden)
    assert output.shape == (2, 16, 48)
    grad_hidden, grad_weight = gradients([output], hidden, [own])
    inputs, weight = hidden.detach().flatten(0, 1).double(), own.weight.detach().double()
    (seed,) = (each.flatten(0, 1).double() for each in make_seeds([output]))
    errors = [
        error_of(each, role, kind)
        for each, role in ((inputs, Role.activations), (weight, Role.weights), (seed, Role.gradients))
    ]
    cases = (
        (output.flatten(0, 1), inputs, weight, errors[0], errors[1]),
        (grad_hidden.flatten(0, 1), seed, weight.T, errors[2], errors[1].T),
        (grad_weight, seed.T, inputs.T, errors[2].T, errors[0].T),
    )
    for found, left, right, *lost in cases:
        wrong = (found.detach().double() - left @ right.T).abs()
        assert found.dtype is torch.bfloat16
        assert (wrong <= bound_of(left, right, *lost)).all()
        relative = wrong.norm() / (left @ right.T).norm()
        assert 0.005 < relative < 0.08, "it is fp8, and no worse than it must be"


@RECIPES
def test_maps_that_share_an_input_make_what_each_makes_alone(kind: str) -> None:
    maps, hidden = make_maps(kind, 48, 32, 16), make_hidden()
    together = project(hidden, *maps)
    alone = [each(hidden) for each in maps]
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))
    grad_hidden, *of_weights = gradients(together, hidden, maps)
    expected, *expected_weights = gradients(alone, hidden, maps)
    assert all(torch.equal(*pair) for pair in zip(of_weights, expected_weights, strict=True))
    torch.testing.assert_close(grad_hidden, expected, rtol=0.0, atol=4 * BF16_ERROR * float(expected.abs().max()))


@RECIPES
def test_a_map_that_is_watched_is_called_and_makes_the_same(kind: str) -> None:
    maps, hidden = make_maps(kind, 48, 32), make_hidden()
    expected, seen = project(hidden, *maps), []
    handle = maps[1].register_forward_hook(lambda _map, _inputs, output: seen.append(output))
    found = project(hidden, *maps)
    handle.remove()
    assert [each.shape[-1] for each in seen] == [32]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    project(hidden, *maps)
    assert len(seen) == 1


def test_what_is_not_in_fp8_is_computed_beside_it() -> None:
    twin, hidden = make_maps("current", 48)[0], make_hidden()
    plain = nn.Linear(144, 48, bias=False).to(torch.bfloat16)
    plain.load_state_dict(twin.state_dict())
    first, second = project(hidden, twin, plain)
    assert torch.equal(first, twin(hidden))
    assert torch.equal(second, F.linear(hidden, plain.weight))
    assert not torch.equal(first, second)


def test_switched_off_it_is_a_plain_map_to_the_last_bit() -> None:
    maps, hidden = make_maps("delayed", 48, 32, switch=Switch(is_on=False)), make_hidden()
    outputs = project(hidden, *maps)
    expected = [F.linear(hidden, each.weight) for each in maps]
    found = [*outputs, *gradients(outputs, hidden, maps)]
    assert all(map(torch.equal, found, [*expected, *gradients(expected, hidden, maps)]))
    assert not any(each.get_buffer("meter").any() for each in maps)


@RECIPES
def test_what_needs_no_gradient_takes_no_notes(kind: str) -> None:
    own, hidden = make_maps(kind, 48)[0], make_hidden()
    meter = own.get_buffer("meter")
    with probing(count_underflow=True, prime_scales=True):
        with torch.no_grad():
            expected = own(hidden)
        assert not meter.any()
        assert torch.equal(own(hidden), expected)
    assert meter[:, Column.nonzeros].tolist() == [hidden.numel(), own.weight.numel(), 0.0]


@RECIPES
@pytest.mark.parametrize("spoiled", ["hidden", "weight", "gradient"])
def test_what_is_not_finite_comes_out_again(kind: str, spoiled: str) -> None:
    for bad in (torch.nan, torch.inf):
        own, hidden = make_maps(kind, 48)[0], make_hidden()
        with torch.no_grad():
            if spoiled != "gradient":
                (hidden if spoiled == "hidden" else own.weight).view(-1)[7] = bad
        output = own(hidden)
        seed = torch.ones_like(output)
        if spoiled == "gradient":
            seed.view(-1)[7] = bad
        grad_weight = torch.autograd.grad(output, own.weight, seed)[0]
        assert not (output if spoiled == "weight" else grad_weight).isfinite().all()


def make_model(*overrides: str) -> tuple[Transformer, Fp8Layers]:
    cfg = load(
        [
            "precision=fp8_emulated",
            "model.dim=32",
            "model.num_layers=2",
            "model.num_heads=2",
            "model.num_kv_heads=1",
            "model.ffn_dim=48",
            "train.sequence_length=16",
            *overrides,
        ]
    )
    torch.manual_seed(0)
    model = Transformer(cfg.model, sequence_length=16, linear=linear).to(torch.bfloat16)
    products = convert_to_fp8(model.blocks, cfg.precision)
    products.materialize(torch.device("cpu"), [f"blocks.{number}" for number in range(2)])
    return model, products


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own compiler
def test_a_compiled_block_makes_the_same_bits_with_one_graph_for_each_precision() -> None:
    (plain, products), (compiled, others) = (make_model("precision.fp8.recipe=delayed") for _ in range(2))
    stats = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    stats.clear()
    for block in compiled.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    hidden = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()

    def results(model: Transformer) -> list[Tensor]:
        stream, change = hidden, torch.zeros_like(hidden, requires_grad=True)
        for block in model.blocks:
            stream, change = block(stream, change, model.cos, model.sin)
        output = stream + change
        return [output, *torch.autograd.grad(output.float().square().sum(), [hidden, *model.blocks.parameters()])]

    for wanted, graphs in ((True, 1), (False, 2), (True, 2)):
        for each in (products, others):
            each.use_fp8(wanted)
        with probing(count_underflow=True, prime_scales=True):
            pairs = zip(results(plain), results(compiled), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        assert stats["unique_graphs"] == graphs, "whatever the number of blocks"
        assert torch.equal(products.table, others.table)
        assert products.table[:, Role.gradients, Column.nonzeros].bool().all() or not wanted
        for each in (products, others):
            each.update_scale_history(torch.tensor(0.0))
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", list(Fp8Recipe))
def test_what_a_graph_is_told_of_the_operators_is_true(kind: str) -> None:
    """But for the meters, which it is not told of; and torch cannot see whether what is in fp8 changed."""
    nothing_changes = ["test_schema"] if kind == Fp8Recipe.block else []
    scale, (first, second) = torch.tensor(3.0), make_maps(kind, 48, 32)
    hidden, weights = make_hidden().detach().flatten(0, 1), [first.weight.detach(), second.weight.detach()]
    scales, recipe = [scale.clone(), scale.clone()], (kind, "emulated")
    maps = [*weights, *scales, first.meter, second.meter]
    given: tuple[Any, ...] = (hidden, scale, maps, True, *recipe)
    torch.library.opcheck(OPERATORS.fp8_forward.default, given, test_utils=["test_faketensor", *nothing_changes])
    *products, columns, scale_inv, _, _ = OPERATORS.fp8_forward(*given)
    given = (products, scales, columns, scale_inv, maps, *recipe)
    torch.library.opcheck(OPERATORS.fp8_backward.default, given, test_utils="test_faketensor")


def test_gradients_have_range_and_in_blocks_digits() -> None:
    assert fp8_dtype(Role.gradients, "current") is fp8_dtype(Role.gradients, "delayed") is GRADIENT
    assert fp8_dtype(Role.gradients, "block") is fp8_dtype(Role.activations, "current") is FORWARD
