"""Fp8Linear: its three GEMMs against exact ones, single and shared input, with hooks, switched off, compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.config.precision import Fp8Recipe
from harness.model.transformer import Transformer
from harness.precision.fp8.formats import FORWARD, GRADIENT, LIMITS
from harness.precision.fp8.layers import Fp8Layers, convert_to_fp8
from harness.precision.fp8.linear import Fp8Linear, Recipe, Switch, project
from harness.precision.fp8.quantize_meters import Column, TensorRole, fp8_dtype, probing
from harness.precision.mixed_precision import linear
from tests.composed import load

RECIPES = pytest.mark.parametrize("kind", list(Fp8Recipe))
BF16_ERROR = 2.0**-8
OPERATORS = torch.ops.harness


@pytest.fixture(autouse=True)
def primed_scales() -> Iterator[None]:
    """The delayed scales are not known yet, as in the first step of a run."""
    with probing(count_underflow=False, prime_scales=True):
        yield


def make_layers(kind: str, *widths: int, switch: Switch | None = None) -> list[Fp8Linear]:
    torch.manual_seed(0)
    recipe, switch = Recipe(kind, "emulated"), switch or Switch()
    return [Fp8Linear(144, width, recipe=recipe, switch=switch).to(torch.bfloat16) for width in widths]


def make_hidden() -> Tensor:
    """Activations as after a norm, with two outliers."""
    hidden = torch.randn(2, 16, 144, generator=torch.Generator().manual_seed(1))
    hidden.view(-1)[:2] = torch.tensor([30.0, -50.0])
    return hidden.to(torch.bfloat16).requires_grad_()


def make_seeds(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [1e-6 * torch.randn(output.shape, generator=generator).to(torch.bfloat16) for output in outputs]


def gradients(outputs: Sequence[Tensor], hidden: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, [hidden, *(each.weight for each in layers)], make_seeds(outputs)))


def error_of(values: Tensor, role: TensorRole, kind: str) -> Tensor:
    """Bound on the rounding error of each value: half of its last bit, or of the smallest subnormal."""
    dtype = fp8_dtype(role, kind)
    info = torch.finfo(dtype)
    scale = LIMITS[dtype] / values.abs().amax() / (2 if kind == Fp8Recipe.block else 1)
    return values.abs() * info.eps / 2 + info.tiny * info.eps / 2 / scale


def bound_of(left: Tensor, right: Tensor, lefts: Tensor, rights: Tensor) -> Tensor:
    """Bound on the error of a bf16 GEMM of [M, K] and [N, K] whose operands have these errors."""
    exact = left.abs() @ right.abs().T
    bound = (left.abs() + lefts) @ (right.abs() + rights).T
    return bound - exact + BF16_ERROR * bound


def test_its_parameter_is_that_of_nn_linear() -> None:
    fp8, plain = Fp8Linear(32, 48, recipe=Recipe("current", "emulated"), switch=Switch()), nn.Linear(32, 48, False)
    assert {name: value.shape for name, value in fp8.state_dict().items()} == {"weight": torch.Size([48, 32])}
    plain.load_state_dict(fp8.state_dict())
    assert torch.equal(plain.weight, fp8.weight)
    assert fp8.bias is None


@RECIPES
def test_outputs_and_gradients_are_within_fp8_rounding_error(kind: str) -> None:
    (own,) = make_layers(kind, 48)
    hidden = make_hidden()
    output = own(hidden)
    assert output.shape == (2, 16, 48)
    grad_hidden, grad_weight = gradients([output], hidden, [own])
    inputs, weight = hidden.detach().flatten(0, 1).double(), own.weight.detach().double()
    (seed,) = (each.flatten(0, 1).double() for each in make_seeds([output]))
    errors = [
        error_of(each, role, kind)
        for each, role in ((inputs, TensorRole.activations), (weight, TensorRole.weights), (seed, TensorRole.gradients))
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
        assert 0.005 < relative < 0.08, "it is fp8, and not worse than it must be"


@RECIPES
def test_layers_that_share_an_input_equal_single_layers(kind: str) -> None:
    layers, hidden = make_layers(kind, 48, 32, 16), make_hidden()
    joint = project(hidden, *layers)
    single = [each(hidden) for each in layers]
    assert all(torch.equal(*pair) for pair in zip(joint, single, strict=True))
    grad_hidden, *of_weights = gradients(joint, hidden, layers)
    expected, *expected_weights = gradients(single, hidden, layers)
    assert all(torch.equal(*pair) for pair in zip(of_weights, expected_weights, strict=True))
    torch.testing.assert_close(grad_hidden, expected, rtol=0.0, atol=4 * BF16_ERROR * float(expected.abs().max()))


@RECIPES
def test_forward_hooks_are_called_and_change_nothing(kind: str) -> None:
    layers, hidden = make_layers(kind, 48, 32), make_hidden()
    expected, seen = project(hidden, *layers), []
    handle = layers[1].register_forward_hook(lambda _map, _inputs, output: seen.append(output))
    found = project(hidden, *layers)
    handle.remove()
    assert [each.shape[-1] for each in seen] == [32]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    project(hidden, *layers)
    assert len(seen) == 1


def test_fp8_and_plain_layers_can_share_an_input() -> None:
    fp8, hidden = make_layers("current", 48)[0], make_hidden()
    plain = nn.Linear(144, 48, bias=False).to(torch.bfloat16)
    plain.load_state_dict(fp8.state_dict())
    first, second = project(hidden, fp8, plain)
    assert torch.equal(first, fp8(hidden))
    assert torch.equal(second, F.linear(hidden, plain.weight))
    assert not torch.equal(first, second)


def test_switched_off_it_equals_nn_linear_bit_for_bit() -> None:
    layers, hidden = make_layers("delayed", 48, 32, switch=Switch(is_on=False)), make_hidden()
    outputs = project(hidden, *layers)
    expected = [F.linear(hidden, each.weight) for each in layers]
    found = [*outputs, *gradients(outputs, hidden, layers)]
    assert all(map(torch.equal, found, [*expected, *gradients(expected, hidden, layers)]))
    assert not any(each.get_buffer("meter").any() for each in layers)


@RECIPES
def test_without_gradients_nothing_is_recorded(kind: str) -> None:
    own, hidden = make_layers(kind, 48)[0], make_hidden()
    meter = own.get_buffer("meter")
    with probing(count_underflow=True, prime_scales=True):
        with torch.no_grad():
            expected = own(hidden)
        assert not meter.any()
        assert torch.equal(own(hidden), expected)
    assert meter[:, Column.nonzeros].tolist() == [hidden.numel(), own.weight.numel(), 0.0]


@RECIPES
@pytest.mark.parametrize("spoiled", ["hidden", "weight", "gradient"])
def test_non_finite_inputs_propagate(kind: str, spoiled: str) -> None:
    for bad in (torch.nan, torch.inf):
        own, hidden = make_layers(kind, 48)[0], make_hidden()
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
    fp8_layers = convert_to_fp8(model.blocks, cfg.precision)
    fp8_layers.materialize(torch.device("cpu"), [f"blocks.{number}" for number in range(2)])
    return model, fp8_layers


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # from torch's own compiler
def test_a_compiled_block_is_bit_equal_with_one_graph_per_precision() -> None:
    (plain, fp8_layers), (compiled, others) = (make_model("precision.fp8.recipe=delayed") for _ in range(2))
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
        for each in (fp8_layers, others):
            each.use_fp8(wanted)
        with probing(count_underflow=True, prime_scales=True):
            pairs = zip(results(plain), results(compiled), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        assert stats["unique_graphs"] == graphs, "for any number of blocks"
        assert torch.equal(fp8_layers.table, others.table)
        assert fp8_layers.table[:, TensorRole.gradients, Column.nonzeros].bool().all() or not wanted
        for each in (fp8_layers, others):
            each.update_scale_history(torch.tensor(0.0))
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", list(Fp8Recipe))
def test_fake_implementations_are_correct(kind: str) -> None:
    """Except for the mutation of meters, which the schema does not declare; torch cannot compare fp8 tensors."""
    mutation_check = ["test_schema"] if kind == Fp8Recipe.block else []
    scale, (first, second) = torch.tensor(3.0), make_layers(kind, 48, 32)
    hidden, weights = make_hidden().detach().flatten(0, 1), [first.weight.detach(), second.weight.detach()]
    scales, recipe = [scale.clone(), scale.clone()], (kind, "emulated")
    layers = [*weights, *scales, first.meter, second.meter]
    arguments: tuple[Any, ...] = (hidden, scale, layers, True, *recipe)
    torch.library.opcheck(OPERATORS.fp8_forward.default, arguments, test_utils=["test_faketensor", *mutation_check])
    *outputs, columns, scale_inv, _, _ = OPERATORS.fp8_forward(*arguments)
    arguments = (outputs, scales, columns, scale_inv, layers, *recipe)
    torch.library.opcheck(OPERATORS.fp8_backward.default, arguments, test_utils="test_faketensor")


def test_gradients_are_e5m2_except_with_block_scales() -> None:
    assert fp8_dtype(TensorRole.gradients, "current") is fp8_dtype(TensorRole.gradients, "delayed") is GRADIENT
    assert fp8_dtype(TensorRole.gradients, "block") is fp8_dtype(TensorRole.activations, "current") is FORWARD
