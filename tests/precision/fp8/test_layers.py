"""Fp8Layers: which projections are converted, range statistics, and delayed scales."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from harness.config.parallel import ActivationCheckpointing
from harness.config.precision import Fp8Recipe
from harness.distributed.fsdp import wrap
from harness.model.transformer import Transformer
from harness.precision.fp8.layers import PRIMED_STEPS, Fp8Layers, convert_to_fp8
from harness.precision.fp8.linear import Fp8Linear, Recipe, Switch
from harness.precision.fp8.quantize_meters import METER, SCALE_EXPONENTS, Column, TensorRole
from harness.precision.mixed_precision import linear
from tests.composed import load

SIDE = 16
E4M3, E5M2 = 448.0, 57344.0
"""The largest finite values of both formats."""
ROLES = [role.name for role in TensorRole]
APPLIED, REFUSED = torch.tensor(0.0), torch.tensor(1.0)


def make(kind: str, num_layers: int = 1, *, history_steps: int = 2) -> Fp8Layers:
    """Layers that double their input, each in its own block, of four blocks."""
    switch, recipe = Switch(), Recipe(kind, "emulated")
    linears = [Fp8Linear(SIDE, SIDE, recipe=recipe, switch=switch).to(torch.bfloat16) for _ in range(num_layers)]
    for each in linears:
        with torch.no_grad():
            each.weight.copy_(2 * torch.eye(SIDE))
    groups = [f"blocks.{number + 1}" for number in range(num_layers)]
    fp8_layers = Fp8Layers(
        layers=linears,
        groups=groups,
        input_owners=list(range(num_layers)),
        switch=switch,
        recipe=Fp8Recipe(kind),
        history_steps=history_steps,
    )
    fp8_layers.materialize(torch.device("cpu"), [f"blocks.{number}" for number in range(4)])
    fp8_layers.primed_steps = min(fp8_layers.primed_steps, 1)
    return fp8_layers


def matrix(*values: float) -> Tensor:
    """These values, then ones."""
    filled = torch.ones(SIDE, SIDE)
    filled.view(-1)[: len(values)] = torch.tensor(values)
    return filled.to(torch.bfloat16)


def forward_backward(
    fp8_layers: Fp8Layers, hidden: Tensor, gradient: Tensor, *, number: int = 0, probe: bool = True
) -> Tensor:
    """Forward and backward through one layer; returns its output."""
    with fp8_layers.probing(probe):
        output: Tensor = fp8_layers.layers[number](hidden.clone().requires_grad_())
        torch.autograd.backward(output, gradient)
    return output.detach()


def sums_of(fp8_layers: Fp8Layers) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in fp8_layers.take_sums().items()}


def in_bins(**exponents: int) -> list[float]:
    """The scale histogram with one scale per role, at this power of two."""
    counts = torch.zeros(len(TensorRole), len(SCALE_EXPONENTS))
    for role, exponent in exponents.items():
        counts[TensorRole[role], (exponent - SCALE_EXPONENTS.start) // SCALE_EXPONENTS.step] = 1.0
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
def test_the_configured_projections_are_replaced(overrides: list[str], blocks: str, parts: str) -> None:
    cfg = load(["precision=fp8_emulated", *(f"precision.fp8.{each}" for each in overrides)])
    with torch.device("meta"):
        model = Transformer(cfg.model, sequence_length=16, linear=linear)
        before = {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()}
        fp8_layers = convert_to_fp8(model.blocks, cfg.precision)
    names = [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    assert names == [f"blocks.{block}.{part}" for block in blocks for part in parts.split()]
    assert fp8_layers.groups == [name[: len("blocks.0")] for name in names]
    assert {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()} == before
    assert {each.recipe for each in fp8_layers.layers} == {("current", "emulated")}
    assert fp8_layers.can_fall_back


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_other_precisions_have_no_fp8_layers(precision: str) -> None:
    cfg = load([f"precision={precision}"])
    with torch.device("meta"):
        model = Transformer(cfg.model, sequence_length=16, linear=linear)
        fp8_layers = convert_to_fp8(model.blocks, cfg.precision)
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())
    assert (fp8_layers.in_fp8, fp8_layers.can_fall_back) == (None, False)
    fp8_layers.use_fp8(False)
    assert fp8_layers.in_fp8 is None


def test_underflows_are_counted_exactly() -> None:
    """With scale 1 the smallest value is 2^-9, for gradients 2^-16; up to half of it underflows."""
    fp8_layers = make("current", 2)
    hidden = matrix(E4M3, -(2.0**-9), 2.0**-10, -(2.0**-11), 1.5 * 2.0**-10, 0.0)
    gradient = matrix(-E5M2, 2.0**-17, 2.0**-16, 1e-30, 0.0, 0.0)
    for _ in range(2):
        forward_backward(fp8_layers, hidden, gradient, number=1)
    sums = sums_of(fp8_layers)
    grid = [dict.fromkeys(ROLES, 0.0) for _ in range(4)]
    zeros, nonzeros = ([row | {} for row in grid] for _ in range(2))
    zeros[2] = {"activations": 4.0, "weights": 0.0, "gradients": 4.0}
    nonzeros[2] = {"activations": 2 * 255.0, "weights": 2 * 16.0, "gradients": 2 * 254.0}
    assert sums["fp8_zeros"] == [share for row in zeros for share in row.values()]
    assert sums["fp8_nonzeros"] == [share for row in nonzeros for share in row.values()]
    assert sums["fp8_tensors"] == [1.0, 1.0, 1.0], "the other layer was not called"
    assert sums["fp8_saturated"] == [0.0, 0.0, 0.0]
    assert sums["fp8_scales"] == in_bins(activations=0, weights=6, gradients=0), "448 / 2 is between 2^6 and 2^8"
    assert not fp8_layers.table[..., : Column.last_scale].any()


@pytest.mark.parametrize(("kind", "lost"), [("current", [2.0, 0.0, 2.0]), ("block", [1.0, 0.0, 1.0])])
def test_with_block_scales_an_outlier_affects_only_its_row(kind: str, lost: list[float]) -> None:
    fp8_layers = make(kind)
    hidden, gradient = matrix(E4M3), matrix(E5M2)
    hidden[:2, 1], gradient[:2, 1] = 2.0**-11, 2.0**-17
    forward_backward(fp8_layers, hidden, gradient)
    sums = sums_of(fp8_layers)
    assert sums["fp8_zeros"] == [*[0.0] * 3, *lost, *[0.0] * 6]
    assert sums["fp8_saturated"] == [0.0, 0.0, 0.0]


def test_a_step_without_probe_is_not_counted() -> None:
    fp8_layers = make("current")
    forward_backward(fp8_layers, matrix(E4M3, 1e-9), matrix(), probe=False)
    assert not fp8_layers.table[..., : Column.last_scale].any()


@pytest.mark.parametrize("kind", list(Fp8Recipe))
def test_micro_batches_of_different_amax_are_not_saturated(kind: str) -> None:
    fp8_layers = make(kind)
    for size in (8.0, 1.0, 2.0):
        forward_backward(fp8_layers, size * matrix(), size * matrix())
    sums = sums_of(fp8_layers)
    assert sums["fp8_saturated"] == [0.0, 0.0, 0.0], "each has its own scale"
    grad_exponent = 4 if kind == "block" else 12  # 448 / 8, or 57344 / 8
    assert sums["fp8_scales"] == in_bins(activations=4, weights=6, gradients=grad_exponent)


def test_a_tensor_beyond_its_delayed_scale_saturates_and_is_counted() -> None:
    fp8_layers = make("delayed")
    forward_backward(fp8_layers, matrix(2.0), matrix(3.0))
    sums = sums_of(fp8_layers)
    assert sums["fp8_saturated"] == [0.0, 0.0, 0.0]
    fp8_layers.update_scale_history(APPLIED)
    assert fp8_layers.delayed_scales[0].tolist() == [128.0, 128.0, 2.0**14]
    output = forward_backward(fp8_layers, matrix(5.0), matrix(3.0))
    assert output[0, :2].tolist() == [7.0, 2.0], "5 saturates to 448 / 128, and is doubled"
    assert sums_of(fp8_layers)["fp8_saturated"] == [0.0, 0.0, 0.0], "but within the margin"
    output = forward_backward(fp8_layers, matrix(10.0), matrix(3.0))
    assert output[0, :2].tolist() == [7.0, 2.0], "10 saturates likewise"
    sums = sums_of(fp8_layers)
    assert sums["fp8_saturated"] == [1.0, 0.0, 0.0]
    assert sums["fp8_tensors"] == [1.0, 1.0, 1.0]
    assert sums["fp8_scales"] == in_bins(activations=6, weights=6, gradients=14)
    fp8_layers.update_scale_history(APPLIED)
    assert forward_backward(fp8_layers, matrix(10.0), matrix(3.0))[0, 0] == 20.0


def test_scales_follow_the_amax_of_the_last_steps() -> None:
    fp8_layers, scales = make("delayed", history_steps=3), []
    for amax in (4.0, 8.0, 1.0, 1.0, 1.0, 2.0):
        forward_backward(fp8_layers, matrix(-amax), matrix(), probe=False)
        fp8_layers.update_scale_history(APPLIED)
        scales.append(fp8_layers.delayed_scales[0, TensorRole.activations].item())
    assert scales == [64.0, 32.0, 32.0, 32.0, 256.0, 128.0], "powers of two, at most 448 / amax"


def test_non_finite_amax_does_not_enter_the_history() -> None:
    fp8_layers = make("delayed", history_steps=2)
    forward_backward(fp8_layers, matrix(4.0), matrix(2.0))
    fp8_layers.update_scale_history(APPLIED)
    for bad in (torch.nan, torch.inf):
        forward_backward(fp8_layers, matrix(bad), matrix(bad))
        fp8_layers.update_scale_history(APPLIED)
        forward_backward(fp8_layers, matrix(4.0), matrix(2.0))
        fp8_layers.update_scale_history(APPLIED)
        assert fp8_layers.delayed_scales[0].tolist() == [64.0, 128.0, 2.0**14]


def test_after_a_reset_scales_come_from_the_tensors_themselves() -> None:
    fp8_layers = make("delayed")
    forward_backward(fp8_layers, matrix(1.0), matrix(1.0))
    fp8_layers.update_scale_history(APPLIED)
    assert forward_backward(fp8_layers, matrix(104.0), matrix(1.0))[0, 0] == 3.5, "delayed scale"
    fp8_layers.reset_scale_history()
    for _ in range(PRIMED_STEPS):
        assert forward_backward(fp8_layers, matrix(104.0), matrix(1.0))[0, 0] == 208.0
        fp8_layers.update_scale_history(APPLIED)
    assert fp8_layers.delayed_scales[0, TensorRole.activations] == 4.0
    fp8_layers.use_fp8(False)
    assert fp8_layers.in_fp8 is False
    assert forward_backward(fp8_layers, matrix(288.0), matrix(1.0))[0, 0] == 576.0
    fp8_layers.update_scale_history(APPLIED)
    fp8_layers.use_fp8(True)
    for _ in range(PRIMED_STEPS):
        assert forward_backward(fp8_layers, matrix(288.0), matrix(1.0))[0, 0] == 576.0
        fp8_layers.use_fp8(True)
        fp8_layers.update_scale_history(APPLIED)
    assert fp8_layers.delayed_scales[0, TensorRole.activations] == 1.0, "the amax of 104 was dropped"
    assert forward_backward(fp8_layers, matrix(3000.0), matrix(1.0))[0, 0] == 2 * E4M3, (
        "delayed scales are in use again"
    )


def test_a_refused_step_does_not_change_the_history() -> None:
    fp8_layers = make("delayed", history_steps=3)
    fp8_layers.reset_scale_history()
    forward_backward(fp8_layers, matrix(torch.nan), matrix(torch.nan))
    fp8_layers.update_scale_history(REFUSED)
    assert not fp8_layers.history.any()
    assert forward_backward(fp8_layers, matrix(4.0), matrix(1e-6))[0, 0] == 8.0
    fp8_layers.update_scale_history(APPLIED)
    before = fp8_layers.history.clone()
    forward_backward(fp8_layers, matrix(1000.0), matrix(2.0))
    fp8_layers.update_scale_history(REFUSED)
    assert torch.equal(fp8_layers.history, before)
    assert fp8_layers.delayed_scales[0, TensorRole.activations] == 64.0
    assert not fp8_layers.table[..., : Column.last_scale].any()


@pytest.mark.parametrize("num_bad", [0, PRIMED_STEPS - 1])
def test_the_first_applied_step_has_gradients_if_all_primed_steps_were_refused(num_bad: int) -> None:
    """They are far below the range of scale 1, and not all refused steps had a finite amax."""
    fp8_layers = make("delayed", history_steps=3)
    fp8_layers.reset_scale_history()
    gradient = matrix() * 2.0**-30
    for number in range(PRIMED_STEPS):
        is_bad = number >= PRIMED_STEPS - num_bad
        forward_backward(fp8_layers, matrix(), gradient * torch.nan if is_bad else gradient, probe=False)
        fp8_layers.update_scale_history(REFUSED)
    assert not fp8_layers.history.any()
    weight = fp8_layers.layers[0].weight
    for _ in range(2):
        fp8_layers.layers[0].zero_grad()
        forward_backward(fp8_layers, matrix(), gradient, probe=False)
        assert weight.grad is not None
        assert set(weight.grad.flatten().tolist()) == {SIDE * 2.0**-30}
        fp8_layers.update_scale_history(APPLIED)
    fp8_layers.reset_scale_history()
    fp8_layers.update_scale_history(REFUSED)
    assert set(fp8_layers.delayed_scales.flatten().tolist()) == {1.0}, "amax of other weights is forgotten"


def test_layers_with_the_same_input_have_the_same_activation_scale() -> None:
    cfg = load(["model=tiny", "precision=fp8_emulated", "precision.fp8.recipe=delayed", "model.num_layers=2"])
    with torch.device("meta"):
        model = Transformer(cfg.model, sequence_length=16, linear=linear)
        fp8_layers = convert_to_fp8(model.blocks, cfg.precision)
    assert fp8_layers.input_owners == [0, 0, 0, 3, 4, 4, 6, 7, 7, 7, 10, 11, 11, 13]
    fp8_layers.materialize(torch.device("cpu"), ["blocks.0", "blocks.1"])
    fp8_layers.table[:, TensorRole.activations, Column.amax] = torch.arange(1.0, 15.0)
    fp8_layers.update_scale_history(APPLIED)
    input_owners = torch.tensor(fp8_layers.input_owners)
    assert torch.equal(
        fp8_layers.delayed_scales[:, TensorRole.activations], torch.exp2((E4M3 / (input_owners + 1)).log2().floor())
    )


@pytest.mark.parametrize("kind", ["current", "block"])
def test_other_recipes_have_no_history(kind: str) -> None:
    fp8_layers = make(kind)
    forward_backward(fp8_layers, matrix(1.0), matrix(1.0))
    fp8_layers.update_scale_history(APPLIED)
    assert forward_backward(fp8_layers, matrix(96.0), matrix(1.0))[0, 0] == 192.0
    assert torch.equal(fp8_layers.delayed_scales, torch.ones(1, len(TensorRole)))
    assert fp8_layers.table.shape == (1, *METER)
    assert not fp8_layers.table[..., Column.amax].any()
    assert fp8_layers.table[0, TensorRole.activations, Column.scale] == 4.0


def test_meters_and_scales_are_16_byte_aligned() -> None:
    """A compiled graph clones unaligned inputs, and statistics that an operator adds to a clone are lost."""
    cfg = load(["model=tiny", "precision=fp8_emulated", "model.num_layers=2"])
    with torch.device("meta"):
        model = Transformer(cfg.model, sequence_length=16, linear=linear)
        fp8_layers = convert_to_fp8(model.blocks, cfg.precision)
    fp8_layers.materialize(torch.device("cpu"), ["blocks.0", "blocks.1"])
    places = [each.get_buffer(name).data_ptr() for each in fp8_layers.layers for name in ("meter", "delayed_scales")]
    assert not any(place % 16 for place in places)
    assert len(Column) <= METER[1]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # from torch's own compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler reads it of any tensor
@pytest.mark.parametrize("kind", ["none", "full"])
def test_a_compiled_block_takes_any_number_of_rows(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A warmup of the batch size changes it. Evaluation and a fallback to bf16 add graphs."""
    overrides = ["model=tiny", "model.num_layers=1", "precision=fp8_emulated"]
    cfg = load([*overrides, "train.sequence_length=16", "parallel.compile=true"])
    model = Transformer(cfg.model, sequence_length=16, linear=linear)
    fp8_layers = convert_to_fp8(model.blocks, cfg.precision)
    model.bfloat16()
    fp8_layers.materialize(torch.device("cpu"), ["blocks.0"])
    model.init_buffers()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for block in model.blocks:
        wrap(block, replace(cfg.parallel, activation_checkpointing=ActivationCheckpointing(kind)))

    torch.compiler.reset()
    for num_rows in range(1, 9):
        tokens = torch.zeros(num_rows, 16, dtype=torch.int64)
        model(tokens, tokens, seed=torch.tensor(1.0)).objective.backward()
    with torch.no_grad():
        model(tokens, tokens)
    fp8_layers.use_fp8(False)
    model(tokens, tokens, seed=torch.tensor(1.0)).objective.backward()
    torch.compiler.reset()
