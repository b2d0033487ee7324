"""fp8 emulation: quantization against a table of all fp8 values, GEMMs against the dequantized values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.config.errors import ConfigError
from harness.precision.fp8 import engine as module
from harness.precision.fp8.emulation import EmulatedEngine, block_scale
from harness.precision.fp8.engine import require_engine
from harness.precision.fp8.formats import BLOCK, FORWARD, GRADIENT, LIMITS, BlockScaling, Operand
from harness.precision.fp8.quantize_meters import MAX_SCALE, compute_amax, compute_scale
from tests.composed import load

BOTH = pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
BF16_ERROR = 2.0**-8
EMULATED = EmulatedEngine()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers over twelve powers of ten, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 10.0 ** (12 * torch.rand(*shape, generator=generator) - 6)
    return (torch.randn(*shape, generator=generator) * magnitudes).to(torch.bfloat16)


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest value of the format, ties to even, by exhaustive search."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = every[every.float().isfinite()]
    distances = (values.double().flatten()[:, None] - finite.double()).abs()
    is_odd = (finite.view(torch.uint8) & 1).double()
    is_nearest = distances == distances.amin(dim=1, keepdim=True)
    chosen = torch.where(is_nearest, is_odd, 2.0).argmin(dim=1)
    return finite.float()[chosen].view_as(values)


def dequantize(operand: Operand, *, is_square: bool) -> Tensor:
    """The operand in fp64, one block at a time."""
    wide = operand.data.double()
    height = BLOCK if is_square else 1
    for row in range(operand.scale_inv.shape[0]):
        for column in range(operand.scale_inv.shape[1]):
            block = wide[row * height : (row + 1) * height, column * BLOCK : (column + 1) * BLOCK]
            block.mul_(operand.scale_inv[row, column].double())
    return wide


@BOTH
def test_quantize_rounds_to_nearest_and_saturates(dtype: torch.dtype) -> None:
    values = numbers(24, 40)
    amax = torch.tensor(5.0)
    found = EMULATED.quantize(values, torch.tensor(3.7), dtype=dtype, transpose=True, amax=amax)
    scaled = values.float() * 3.7
    assert (scaled.abs() > LIMITS[dtype]).any(), "some values are beyond the range"
    assert torch.equal(found.rows.float(), nearest(scaled, dtype))
    assert torch.equal(found.columns.float(), found.rows.float().T)
    assert found.row_scale_inv.item() == found.column_scale_inv.item() == pytest.approx(1 / 3.7)
    assert amax == values.abs().max()
    assert not EMULATED.quantize(values, torch.tensor(1.0), dtype=dtype, transpose=False, amax=amax).columns.numel()


@BOTH
def test_ties_round_to_even(dtype: torch.dtype) -> None:
    ones = torch.tensor([[1 + (number + 0.5) * torch.finfo(dtype).eps for number in range(4)]])
    found = EMULATED.quantize(ones, torch.tensor(1.0), dtype=dtype, transpose=False, amax=None)
    assert torch.equal(found.rows.float(), nearest(ones, dtype))
    assert found.rows.view(torch.uint8).bitwise_and(1).sum() == 0


@BOTH
def test_nan_stays_nan_and_an_infinity_turns_the_gemm_into_nan(dtype: torch.dtype) -> None:
    values = torch.ones(4, 16)
    values[1, 2] = torch.nan
    other = Operand(torch.ones(2, 16).to(FORWARD), torch.ones(1))
    scale = compute_scale(compute_amax(values), LIMITS[dtype])
    found = EMULATED.quantize(values, scale, dtype=dtype, transpose=False, amax=None)
    assert torch.equal(found.rows.float().isnan(), values.isnan())
    values[1, 2] = -torch.inf
    scale = compute_scale(compute_amax(values), LIMITS[dtype])
    found = EMULATED.quantize(values, scale, dtype=dtype, transpose=False, amax=None)
    assert (
        EMULATED.gemm(found.as_rows, other, out=None, scaling=BlockScaling.none, split_accumulator=True).isnan().all()
    )


def test_scales_are_powers_of_two_that_put_amax_near_the_limit() -> None:
    amax = torch.tensor([0.0, 2.0, 1.75, 448.0, 449.0, 1e-38])
    assert compute_scale(amax, 448.0).tolist() == [1.0, 128.0, 256.0, 1.0, 0.5, MAX_SCALE]
    assert compute_scale(amax, 448.0, step=4).tolist() == [1.0, 16.0, 256.0, 1.0, 2.0**-4, MAX_SCALE]
    assert compute_scale(amax, 448.0, step=2).tolist() == [1.0, 64.0, 256.0, 1.0, 0.25, MAX_SCALE]
    for step in (1, 2, 4):
        assert compute_scale(torch.tensor(torch.inf), 448.0, step=step) == 0.0, "scale 0 turns it into NaN"
    assert compute_scale(torch.tensor(torch.nan), 448.0) == 1.0, "NaN is visible in the values themselves"
    zeros = EMULATED.quantize(
        torch.zeros(2, 3), compute_scale(torch.zeros(()), 448.0), dtype=FORWARD, transpose=True, amax=None
    )
    assert not zeros.rows.float().any()


@BOTH
def test_block_scales_are_powers_of_two_that_fill_the_range(dtype: torch.dtype) -> None:
    amax = torch.cat([numbers(500).float().abs(), torch.tensor([LIMITS[dtype], LIMITS[dtype] * (1 + 2.0**-20)])])
    scale = block_scale(amax, dtype)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    assert ((amax * scale <= LIMITS[dtype]) & (2 * amax * scale > LIMITS[dtype])).all()
    assert block_scale(torch.zeros(1), dtype) == 1.0
    assert block_scale(torch.tensor(torch.inf), dtype).isnan()


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (130, 300), (7, 5)])
def test_each_block_has_its_own_scale_for_any_shape(shape: tuple[int, int], square: bool) -> None:
    values = numbers(*shape)
    values[0, :] = 0.0
    found = EMULATED.quantize_blocks(values, dtype=FORWARD, transpose=True, square=square)
    for operand, original in ((found.as_rows, values), (found.as_columns, values.T)):
        assert operand.data.shape == original.shape
        assert operand.scale_inv.shape == EMULATED.block_scale_shape(*original.shape, square=square)
        height = BLOCK if square else 1
        for row, column in ((0, 0), (operand.scale_inv.shape[0] - 1, operand.scale_inv.shape[1] - 1)):
            block = original[row * height : (row + 1) * height, column * BLOCK : (column + 1) * BLOCK].float()
            scale = block_scale(block.abs().amax(), FORWARD)
            assert operand.scale_inv[row, column] == 1 / scale
            place = operand.data[row * height : (row + 1) * height, column * BLOCK : (column + 1) * BLOCK]
            assert torch.equal(place.float(), nearest(block * scale, FORWARD))
    rows_only = EMULATED.quantize_blocks(values, dtype=FORWARD, transpose=False, square=square)
    assert torch.equal(rows_only.rows.float(), found.rows.float())
    assert not rows_only.columns.numel()


def test_an_infinity_in_a_block_affects_only_its_row() -> None:
    values = torch.ones(3, 200)
    values[1, 150] = torch.inf
    left = EMULATED.quantize_blocks(values, dtype=FORWARD, transpose=False, square=False)
    right = EMULATED.quantize_blocks(torch.ones(4, 200), dtype=FORWARD, transpose=False, square=True)
    product = EMULATED.gemm(left.as_rows, right.as_rows, out=None, scaling=BlockScaling.two_d, split_accumulator=True)
    assert product.isnan().all(dim=1).tolist() == [False, True, False]
    assert (product[0] == 200.0).all()


@pytest.mark.parametrize("scaling", list(BlockScaling))
def test_gemms_use_the_quantized_values(scaling: BlockScaling) -> None:
    values, others = numbers(20, 300).clamp(-9, 9), numbers(24, 300, seed=1).clamp(-9, 9)
    if scaling is BlockScaling.none:
        left, right = (
            EMULATED.quantize(each, torch.tensor(scale), dtype=FORWARD, transpose=False, amax=None).as_rows
            for each, scale in ((values, 3.0), (others, 0.7))
        )
        exact = (left.data.double() * left.scale_inv) @ (right.data.double() * right.scale_inv).T
    else:
        is_square = scaling is BlockScaling.two_d
        left = EMULATED.quantize_blocks(values, dtype=FORWARD, transpose=False, square=False).as_rows
        right = EMULATED.quantize_blocks(others, dtype=FORWARD, transpose=False, square=is_square).as_rows
        exact = dequantize(left, is_square=False) @ dequantize(right, is_square=is_square).T
    product = EMULATED.gemm(left, right, out=None, scaling=scaling, split_accumulator=False)
    assert product.dtype is torch.bfloat16
    torch.testing.assert_close(product.double(), exact, rtol=BF16_ERROR, atol=1e-4)
    before = numbers(20, 24, seed=2)
    total = before.clone()
    assert EMULATED.gemm(left, right, out=total, scaling=scaling, split_accumulator=True) is total
    torch.testing.assert_close(total.double(), before.double() + exact, rtol=BF16_ERROR, atol=1e-4)


def test_without_a_gpu_transformer_engine_is_rejected_and_emulation_is_not() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"^precision: fp8 needs a GPU .*; use bf16, or .* precision=fp8_emulated$"):
        require_engine(load(["precision=fp8"]).precision, cpu)
    for overrides in (["precision=fp8_emulated", "precision.fp8.recipe=block"], ["precision=bf16"]):
        require_engine(load(overrides).precision, cpu)


def test_the_install_hint_matches_pyproject() -> None:
    project = Path(module.__file__).parents[3] / "pyproject.toml"
    found = re.search(r'^fp8 = \["([^;"]+)', project.read_text(), re.MULTILINE)
    assert found is not None
    assert f"--no-build-isolation '{found[1].strip()}'" in Path(module.__file__).read_text()
