"""Which maps compute in fp8, what is counted of them, and the scales that are remembered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.config.compose import load
from harness.config.precision import Fp8Recipe
from harness.model.transformer import Transformer
from harness.precision.fp8.layers import PRIMED_STEPS, Fp8Layers, convert_to_fp8
from harness.precision.fp8.linear import Fp8Linear, Recipe, Switch
from harness.precision.fp8.meters import METER, SCALE_EXPONENTS, Column, Role
from harness.precision.mixed_precision import linear

SIDE = 16
E4M3, E5M2 = 448.0, 57344.0
"""The largest numbers of both formats."""
ROLES = [role.name for role in Role]
APPLIED, REFUSED = torch.tensor(0.0), torch.tensor(1.0)


def make(kind: str, num_maps: int = 1, *, history_steps: int = 2) -> Fp8Layers:
    """Maps that double what they read, each in a block of its own, of four blocks."""
    switch, recipe = Switch(), Recipe(kind, "emulated")
    maps = [Fp8Linear(SIDE, SIDE, recipe=recipe, switch=switch).to(torch.bfloat16) for _ in range(num_maps)]
    for each in maps:
        with torch.no_grad():
            each.weight.copy_(2 * torch.eye(SIDE))
    groups = [f"blocks.{number + 1}" for number in range(num_maps)]
    products = Fp8Layers(
        layers=maps,
        groups=groups,
        input_owners=list(range(num_maps)),
        switch=switch,
        recipe=Fp8Recipe(kind),
        history_steps=history_steps,
    )
    products.materialize(torch.device("cpu"), [f"blocks.{number}" for number in range(4)])
    products.primed_steps = min(products.primed_steps, 1)
    return products


def matrix(*values: float) -> Tensor:
    """These numbers, and ones."""
    filled = torch.ones(SIDE, SIDE)
    filled.view(-1)[: len(values)] = torch.tensor(values)
    return filled.to(torch.bfloat16)


def passes(products: Fp8Layers, hidden: Tensor, gradient: Tensor, *, number: int = 0, probe: bool = True) -> Tensor:
    """Forward and backward through one map; what it made."""
    with products.probing(probe):
        output: Tensor = products.layers[number](hidden.clone().requires_grad_())
        torch.autograd.backward(output, gradient)
    return output.detach()


def taken(products: Fp8Layers) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in products.take_sums().items()}


def in_bins(**exponents: int) -> list[float]:
    """Counts of scales: one for each role, at this power of two."""
    counts = torch.zeros(len(Role), len(SCALE_EXPONENTS))
    for role, exponent in exponents.items():
        counts[Role[role], (exponent - SCALE_EXPONENTS.start) // SCALE_EXPONENTS.step] = 1.0
    found: list[float] = counts.flatten().tolist()
    return found


@pytest.mark.parametrize(
    ("overrides", "blocks", "parts"),
    [
        ([], "0123", "attention.query attention.key attention.value attention.output mlp.gate mlp.up mlp.down"),
        (["attention=false"], "0123", "mlp.gate mlp.up mlp.down"),
        (["mlp=false", "keep_first_blocks=1"], "123", "attention.query attention.key attention.value attention.output"),
        (["attention=false", "keep_first_blocks=1", "keep_last_blocks=2"], "1", "mlp.gate mlp.up mlp.down"),
    ],
)
def test_the_maps_that_were_asked_for_are_replaced(overrides: list[str], blocks: str, parts: str) -> None:
    cfg = load(["precision=fp8_emulated", *(f"precision.fp8.{each}" for each in overrides)])
    with torch.device("meta"):
        model = Transformer(cfg.model, sequence_length=16, linear=linear)
        before = {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()}
        products = convert_to_fp8(model.blocks, cfg.precision)
    names = [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    assert names == [f"blocks.{block}.{part}" for block in blocks for part in parts.split()]
    assert products.groups == [name[: len("blocks.0")] for name in names]
    assert {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()} == before
    assert {each.recipe for each in products.layers} == {("current", "emulated")}
    assert products.can_fall_back


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_another_precision_has_none(precision: str) -> None:
    cfg = load([f"precision={precision}"])
    with torch.device("meta"):
        model = Transformer(cfg.model, sequence_length=16, linear=linear)
        products = convert_to_fp8(model.blocks, cfg.precision)
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())
    assert (products.in_fp8, products.can_fall_back) == (None, False)
    products.use_fp8(False)
    assert products.in_fp8 is None


def test_numbers_that_become_zero_are_counted_one_by_one() -> None:
    """By a scale of 1 the smallest number is 2^-9, of gradients 2^-16; half of it goes to zero, more does not."""
    products = make("current", 2)
    hidden = matrix(E4M3, -(2.0**-9), 2.0**-10, -(2.0**-11), 1.5 * 2.0**-10, 0.0)
    gradient = matrix(-E5M2, 2.0**-17, 2.0**-16, 1e-30, 0.0, 0.0)
    for _ in range(2):
        passes(products, hidden, gradient, number=1)
    sums = taken(products)
    grid = [dict.fromkeys(ROLES, 0.0) for _ in range(4)]
    zeros, nonzeros = ([row | {} for row in grid] for _ in range(2))
    zeros[2] = {"activations": 4.0, "weights": 0.0, "gradients": 4.0}
    nonzeros[2] = {"activations": 2 * 255.0, "weights": 2 * 16.0, "gradients": 2 * 254.0}
    assert sums["fp8_zeros"] == [share for row in zeros for share in row.values()]
    assert sums["fp8_nonzeros"] == [share for row in nonzeros for share in row.values()]
    assert sums["fp8_tensors"] == [1.0, 1.0, 1.0], "of the other map nothing was seen"
    assert sums["fp8_saturated"] == [0.0, 0.0, 0.0]
    assert sums["fp8_scales"] == in_bins(activations=0, weights=6, gradients=0), "448 / 2 is between 2^6 and 2^8"
    assert not products.table[..., : Column.last_scale].any()


@pytest.mark.parametrize(("kind", "lost"), [("current", [2.0, 0.0, 2.0]), ("block", [1.0, 0.0, 1.0])])
def test_in_blocks_an_outlier_costs_its_own_row_alone(kind: str, lost: list[float]) -> None:
    products = make(kind)
    hidden, gradient = matrix(E4M3), matrix(E5M2)
    hidden[:2, 1], gradient[:2, 1] = 2.0**-11, 2.0**-17
    passes(products, hidden, gradient)
    sums = taken(products)
    assert sums["fp8_zeros"] == [*[0.0] * 3, *lost, *[0.0] * 6]
    assert sums["fp8_saturated"] == [0.0, 0.0, 0.0]


def test_a_step_that_is_not_probed_is_not_counted() -> None:
    products = make("current")
    passes(products, matrix(E4M3, 1e-9), matrix(), probe=False)
    assert not products.table[..., : Column.last_scale].any()


@pytest.mark.parametrize("kind", list(Fp8Recipe))
def test_micro_batches_of_other_sizes_are_not_beyond_the_range(kind: str) -> None:
    products = make(kind)
    for size in (8.0, 1.0, 2.0):
        passes(products, size * matrix(), size * matrix())
    sums = taken(products)
    assert sums["fp8_saturated"] == [0.0, 0.0, 0.0], "each was rounded by a scale of its own"
    of_gradients = 4 if kind == "block" else 12  # 448 / 8, or 57344 / 8
    assert sums["fp8_scales"] == in_bins(activations=4, weights=6, gradients=of_gradients)


def test_a_tensor_beyond_the_scale_that_is_remembered_is_cut_and_counted() -> None:
    products = make("delayed")
    passes(products, matrix(2.0), matrix(3.0))
    sums = taken(products)
    assert sums["fp8_saturated"] == [0.0, 0.0, 0.0]
    products.update_scale_history(APPLIED)
    assert products.delayed_scales[0].tolist() == [128.0, 128.0, 2.0**14]
    output = passes(products, matrix(5.0), matrix(3.0))
    assert output[0, :2].tolist() == [7.0, 2.0], "5 became 448 / 128, and was doubled"
    assert taken(products)["fp8_saturated"] == [0.0, 0.0, 0.0], "but not by so much that it would count"
    output = passes(products, matrix(10.0), matrix(3.0))
    assert output[0, :2].tolist() == [7.0, 2.0], "10 likewise"
    sums = taken(products)
    assert sums["fp8_saturated"] == [1.0, 0.0, 0.0]
    assert sums["fp8_tensors"] == [1.0, 1.0, 1.0]
    assert sums["fp8_scales"] == in_bins(activations=6, weights=6, gradients=14)
    products.update_scale_history(APPLIED)
    assert passes(products, matrix(10.0), matrix(3.0))[0, 0] == 20.0


def test_scales_follow_the_largest_number_of_the_last_steps() -> None:
    products, scales = make("delayed", history_steps=3), []
    for largest in (4.0, 8.0, 1.0, 1.0, 1.0, 2.0):
        passes(products, matrix(-largest), matrix(), probe=False)
        products.update_scale_history(APPLIED)
        scales.append(products.delayed_scales[0, Role.activations].item())
    assert scales == [64.0, 32.0, 32.0, 32.0, 256.0, 128.0], "powers of two, and at most 448 by the largest"


def test_what_is_not_finite_does_not_enter_the_memory() -> None:
    products = make("delayed", history_steps=2)
    passes(products, matrix(4.0), matrix(2.0))
    products.update_scale_history(APPLIED)
    for bad in (torch.nan, torch.inf):
        passes(products, matrix(bad), matrix(bad))
        products.update_scale_history(APPLIED)
        passes(products, matrix(4.0), matrix(2.0))
        products.update_scale_history(APPLIED)
        assert products.delayed_scales[0].tolist() == [64.0, 128.0, 2.0**14]


def test_what_is_forgotten_is_taken_from_the_tensors_themselves() -> None:
    products = make("delayed")
    passes(products, matrix(1.0), matrix(1.0))
    products.update_scale_history(APPLIED)
    assert passes(products, matrix(104.0), matrix(1.0))[0, 0] == 3.5, "delayed_scales"
    products.reset_scale_history()
    for _ in range(PRIMED_STEPS):
        assert passes(products, matrix(104.0), matrix(1.0))[0, 0] == 208.0
        products.update_scale_history(APPLIED)
    assert products.delayed_scales[0, Role.activations] == 4.0
    products.use_fp8(False)
    assert products.in_fp8 is False
    assert passes(products, matrix(288.0), matrix(1.0))[0, 0] == 576.0
    products.update_scale_history(APPLIED)
    products.use_fp8(True)
    for _ in range(PRIMED_STEPS):
        assert passes(products, matrix(288.0), matrix(1.0))[0, 0] == 576.0
        products.use_fp8(True)
        products.update_scale_history(APPLIED)
    assert products.delayed_scales[0, Role.activations] == 1.0, "and 104 was forgotten"
    assert passes(products, matrix(3000.0), matrix(1.0))[0, 0] == 2 * E4M3, "from now on it is remembered again"


def test_a_refused_step_leaves_the_memory_as_it_was_and_a_refused_first_one_none() -> None:
    products = make("delayed", history_steps=3)
    products.reset_scale_history()
    passes(products, matrix(torch.nan), matrix(torch.nan))
    products.update_scale_history(REFUSED)
    assert not products.history.any()
    assert passes(products, matrix(4.0), matrix(1e-6))[0, 0] == 8.0
    products.update_scale_history(APPLIED)
    before = products.history.clone()
    passes(products, matrix(1000.0), matrix(2.0))
    products.update_scale_history(REFUSED)
    assert torch.equal(products.history, before)
    assert products.delayed_scales[0, Role.activations] == 64.0
    assert not products.table[..., : Column.last_scale].any()


def test_maps_that_read_the_same_remember_the_same_of_it() -> None:
    cfg = load(["model=tiny", "precision=fp8_emulated", "precision.fp8.recipe=delayed", "model.num_layers=2"])
    with torch.device("meta"):
        model = Transformer(cfg.model, sequence_length=16, linear=linear)
        products = convert_to_fp8(model.blocks, cfg.precision)
    assert products.input_owners == [0, 0, 0, 3, 4, 4, 6, 7, 7, 7, 10, 11, 11, 13]
    products.materialize(torch.device("cpu"), ["blocks.0", "blocks.1"])
    products.table[:, Role.activations, Column.amax] = torch.arange(1.0, 15.0)
    products.update_scale_history(APPLIED)
    input_owners = torch.tensor(products.input_owners)
    assert torch.equal(
        products.delayed_scales[:, Role.activations], torch.exp2((E4M3 / (input_owners + 1)).log2().floor())
    )


@pytest.mark.parametrize("kind", ["current", "block"])
def test_other_recipes_remember_nothing(kind: str) -> None:
    products = make(kind)
    passes(products, matrix(1.0), matrix(1.0))
    products.update_scale_history(APPLIED)
    assert passes(products, matrix(96.0), matrix(1.0))[0, 0] == 192.0
    assert torch.equal(products.delayed_scales, torch.ones(1, len(Role)))
    assert products.table.shape == (1, *METER)
    assert not products.table[..., Column.amax].any()
    assert products.table[0, Role.activations, Column.scale] == 4.0


def test_what_a_compiled_graph_must_not_copy_begins_at_a_multiple_of_16_bytes() -> None:
    """What it is given elsewhere it clones, and what an operator notes in a clone is lost."""
    cfg = load(["model=tiny", "precision=fp8_emulated", "model.num_layers=2"])
    with torch.device("meta"):
        model = Transformer(cfg.model, sequence_length=16, linear=linear)
        products = convert_to_fp8(model.blocks, cfg.precision)
    products.materialize(torch.device("cpu"), ["blocks.0", "blocks.1"])
    places = [each.get_buffer(name).data_ptr() for each in products.layers for name in ("meter", "delayed_scales")]
    assert not any(place % 16 for place in places)
    assert len(Column) <= METER[1]
