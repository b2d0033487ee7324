"""The Triton kernels against torch, over sizes that do not fill whole blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.distributed.bit_digests import INTEGERS, SHIFT, digest_bits
from harness.model.loss import IGNORED, LossOptions, _chunk_gradient, _chunk_gradient_in_place
from harness.precision.fp8 import quantize_meters
from harness.precision.fp8.custom_ops import quantize_and_record
from harness.precision.fp8.emulation import EmulatedEngine
from harness.precision.fp8.formats import FORWARD, GRADIENT, SCALE_STEPS, UNDERFLOW, QuantizedMatrix
from harness.precision.fp8.quantize_meters import METER, Column, TensorRole, probing
from harness.precision.fp8.swiglu import (
    compute_grads,
    compute_product,
    quantize_grads_by_kernels,
    quantize_product_by_kernels,
)
from tests.gpu.kernel_device import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS

EQUAL_SHARE, MAX_RELATIVE_ERROR = (0.8, 0.51) if IS_INTERPRETED else (0.999, 0.26)
"""Share of fp8 values that must be equal, and relative error of the others. The interpreter truncates instead of
rounding, which may change a value by half."""
MATRICES = [(80, 72)] if IS_INTERPRETED else [(512, 768), (208, 80)]
"""Whole and partial tiles; in the interpreter, one whole and three partial tiles."""
RECIPES = [("current", False), ("delayed", True), *([] if IS_INTERPRETED else [("delayed", False)])]
"""Recipes, each with whether the scales are primed. The interpreter takes seconds for each."""


@pytest.fixture(autouse=True)
def few_requantize_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pass has fewer programs than tiles, so that programs share them."""
    from harness.kernels import fp8_quantize

    monkeypatch.setattr(fp8_quantize, "MAX_REQUANTIZE_PROGRAMS", 3)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


@pytest.mark.parametrize("sample", [2**20, 4_000])
def test_underflow_counts_match_torch(monkeypatch: pytest.MonkeyPatch, sample: int) -> None:
    from harness.kernels.fp8_quantize import count_underflow

    monkeypatch.setattr(quantize_meters, "SAMPLE_SIZE", sample)
    values = torch.randn(10, 1500, generator=torch.Generator().manual_seed(0)).mul(1e-3).to(torch.bfloat16)
    values[1, :7], values[1, 7] = 0.0, torch.nan
    plain, own = torch.zeros(len(Column)), torch.zeros(len(Column), device=DEVICE)
    for scale in (torch.tensor(2.0), torch.tensor(1.5), torch.tensor(3.0)):
        quantized = EmulatedEngine().quantize(values, scale, dtype=FORWARD, transpose=False, amax=None)
        before, after = quantize_meters.sample_rows(values), quantize_meters.sample_rows(quantized.rows)
        every = quantize_meters.sample_stride(values)
        quantize_meters.record_underflow(plain, before, after, scale, every=every)
        values_on_device, bytes_on_device = values.to(DEVICE), quantized.rows.view(torch.uint8).to(DEVICE)
        sampled = quantize_meters.sample_rows(values_on_device), quantize_meters.sample_rows(bytes_on_device)
        count_underflow(*sampled, scale.to(DEVICE), own, every=every)
    torch.testing.assert_close(own.cpu(), plain, rtol=1e-5, atol=0.0)
    assert plain[Column.underflows] > 0


def test_counts_beyond_the_exact_integers_of_fp32_do_not_depend_on_the_order() -> None:
    """A meter that stands at 2**25 cannot count single values; the 8 rows of this matrix are added to it at once."""
    from harness.kernels.fp8_quantize import count_underflow

    values = torch.zeros(8, 16, device=DEVICE, dtype=torch.bfloat16)
    values[:, 3] = 1.0
    row = torch.zeros(len(Column), device=DEVICE)
    row[Column.nonzeros] = 2.0**25
    count_underflow(values, values.to(FORWARD).view(torch.uint8), torch.ones((), device=DEVICE), row, every=1)
    assert row[Column.nonzeros].item() == 2**25 + 8
    assert row[Column.underflows].item() == 0


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy warns in the interpreter
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
@pytest.mark.parametrize("shape", MATRICES)
def test_the_result_does_not_depend_on_the_last_scale(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    from harness.kernels.fp8_quantize import quantize_matrix

    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(1e-3).to(DEVICE, torch.bfloat16)
    fitting = scalar(0.0)
    plain = EmulatedEngine().quantize_to_amax(values, fitting, dtype=dtype)
    for last_scale in (scalar(0.0), fitting.clone(), scalar(1e6), scalar(2.0**-20)):
        tiles = quantize_matrix(values, last_scale, dtype=dtype, step=SCALE_STEPS[dtype])
        assert last_scale == fitting
        assert tiles.scale_inv * last_scale == 1.0
        assert torch.equal(tiles.columns.view(torch.uint8), tiles.rows.view(torch.uint8).T)
        assert (tiles.rows.float() == plain.rows.float()).float().mean() > EQUAL_SHARE
        torch.testing.assert_close(tiles.rows.float(), plain.rows.float(), rtol=MAX_RELATIVE_ERROR, atol=0.02)
    values[5, 7] = torch.inf
    nonfinite = quantize_matrix(values, last_scale, dtype=dtype, step=SCALE_STEPS[dtype])
    assert last_scale == 0.0
    assert IS_INTERPRETED or nonfinite.rows[5, 7].float().isnan()  # the interpreter clamps NaN


@pytest.mark.parametrize(("recipe", "is_primed"), RECIPES)
@pytest.mark.parametrize("shape", MATRICES)
def test_swiglu_is_quantized_as_in_torch(recipe: str, shape: tuple[int, int], is_primed: bool) -> None:
    """Except for values near a rounding boundary, where the last bit of an exponential decides."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    gate, up, grad = (torch.randn(shape, device=DEVICE, generator=generator).to(torch.bfloat16) for _ in range(3))
    gate[3, 5], up[3, 5], grad[7, 7], up[9, :] = 30.0, 50.0, 20.0, 1e-6
    own, plain = ([torch.zeros(METER, device=DEVICE) for _ in range(2)] for _ in range(2))
    scales, engine = [scalar(2.0), scalar(4.0)], EmulatedEngine()
    results = compute_product(gate, up), *compute_grads(grad, gate, up)
    roles = TensorRole.activations, TensorRole.gradients, TensorRole.gradients
    arguments = zip(results, [scales[0], *scales], [plain[0], *plain], roles, strict=True)
    with probing(count_underflow=True, prime_scales=is_primed):
        product = quantize_product_by_kernels(gate, up, scales[0], own[0], recipe)
        *grads, columns = quantize_grads_by_kernels(grad, gate, up, scales, product.scale_inv, own, recipe)
        kernels = [QuantizedMatrix(product.rows, columns, *[product.scale_inv] * 2), *grads]
        others = [
            quantize_and_record(engine, values, scale, meter, role, recipe) for values, scale, meter, role in arguments
        ]
    with probing(count_underflow=False, prime_scales=is_primed):  # the last scale fits now
        product = quantize_product_by_kernels(gate, up, scales[0], own[0], recipe)
        *grads, columns = quantize_grads_by_kernels(grad, gate, up, scales, product.scale_inv, own, recipe)
        second = [QuantizedMatrix(product.rows, columns, *[product.scale_inv] * 2), *grads]
        for one, repeated in zip(kernels, second, strict=True):
            assert all(
                torch.equal(now.view(torch.uint8), then.view(torch.uint8))
                for now, then in zip(one, repeated, strict=True)
            )
    for one, other in zip(kernels, others, strict=True):
        assert torch.equal(one.columns.view(torch.uint8), one.rows.view(torch.uint8).T)
        same = (one.rows.float() == other.rows.float()) | (one.rows.float().isnan() & other.rows.float().isnan())
        assert same.float().mean() > EQUAL_SHARE
        torch.testing.assert_close(
            one.rows.float(), other.rows.float(), rtol=MAX_RELATIVE_ERROR, atol=0.02, equal_nan=True
        )
        torch.testing.assert_close(one.row_scale_inv, other.row_scale_inv, rtol=1e-2, atol=0.0)
    compared = [column for column in Column if column is not Column.last_scale]
    for one_meter, other_meter in zip(own, plain, strict=True):
        torch.testing.assert_close(one_meter[:, compared], other_meter[:, compared], rtol=1e-2, atol=0.0)
    assert own[0][TensorRole.activations, Column.underflows] > 0
    assert (own[1][TensorRole.gradients, Column.amax] > 1) == (recipe == "delayed")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy warns in the interpreter
@pytest.mark.parametrize("nonfinite", [(), (torch.nan, torch.inf)])
def test_swiglu_underflow_counts_match_torch(nonfinite: tuple[float, ...]) -> None:
    """Exactly: with these values all arithmetic is exact."""
    from harness.kernels.swiglu import count_swiglu_grad_underflow, count_swiglu_underflow

    shape, generator = (9, 1500), torch.Generator().manual_seed(0)
    up = torch.randint(-30, 12, shape, generator=generator).float().exp2()
    up[1, 5:20], up[-2:, 4 : 4 + len(nonfinite)] = 0.0, torch.tensor(nonfinite)
    up[5, 9] = UNDERFLOW[FORWARD] * 2.0**8 / 64  # on the threshold
    up = up.to(DEVICE, torch.bfloat16)
    grad = torch.randint(-40, 3, shape, generator=generator).float().exp2().to(DEVICE, torch.bfloat16)
    gate = torch.full_like(up, 64.0)
    gate[3, :9] = 0.0
    rows, scales = torch.zeros(3, len(Column), device=DEVICE), [scalar(2.0**power) for power in (-8, -6, -4)]
    for _ in range(2):
        count_swiglu_underflow(gate[1::2], up[1::2], scales[0], rows[0], underflow=UNDERFLOW[FORWARD], every=2)
        sample = grad[1::2], gate[1::2], up[1::2]
        count_swiglu_grad_underflow(*sample, scales[1:], [*rows[1:]], underflow=UNDERFLOW[GRADIENT], every=2)
    results = zip(
        (compute_product(gate, up), *compute_grads(grad, gate, up)), scales, (FORWARD, GRADIENT, GRADIENT), strict=True
    )
    for row, (values, scale, dtype) in zip(rows, results, strict=True):
        expected, sampled = torch.zeros(len(Column), device=DEVICE), values[1::2]
        quantized = EmulatedEngine().quantize(sampled, scale, dtype=dtype, transpose=False, amax=None).rows
        for _ in range(2):
            quantize_meters.record_underflow(expected, sampled, quantized, scale, every=2)
        assert torch.equal(row, expected)
        assert 0 < row[Column.underflows] < row[Column.nonzeros] < 2 * up.numel()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy warns in the interpreter
@pytest.mark.parametrize("width", [1000, 9000 if IS_INTERPRETED else 32000])
@pytest.mark.parametrize(("multiplier", "z_loss"), [(1.0, 0.0), (0.5, 1e-2)])
def test_logits_are_overwritten_by_their_gradient(width: int, multiplier: float, z_loss: float) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    num_tokens = 12 if IS_INTERPRETED else 300
    logits = torch.randn(num_tokens, width, device=DEVICE, generator=generator).mul(4).to(torch.bfloat16)
    targets = torch.randint(0, width, (num_tokens,), device=DEVICE, generator=generator)
    targets[7] = IGNORED
    options = LossOptions(z_loss=z_loss, output_multiplier=multiplier, chunk_tokens=num_tokens)
    losses, z_sum, gradient = _chunk_gradient(logits, targets, scalar(0.25), options)
    own_losses, own_z, own_gradient = _chunk_gradient_in_place(logits.clone(), targets, scalar(0.25), options)
    torch.testing.assert_close(own_losses, losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own_z, z_sum, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own_gradient, gradient, rtol=1e-2, atol=1e-7)
    nonfinite = logits.clone()
    nonfinite[3, 5], nonfinite[4, 6] = torch.nan, torch.inf
    own_losses, _, own_gradient = _chunk_gradient_in_place(nonfinite, targets, scalar(0.25), options)
    assert (~own_losses.isfinite()).nonzero().flatten().tolist() == [3, 4]
    assert own_gradient[3:5].isnan().all()


def test_scale_tensor() -> None:
    from harness.kernels import cross_entropy as kernels

    for shape in [(3,), (100, 33), (64, 80)]:
        plain = torch.randn(shape, device=DEVICE)
        for values in (plain, plain.to(torch.bfloat16)):
            last_digit = 2**-7 if IS_INTERPRETED else 0.0  # the interpreter truncates bf16
            expected = (values.float() * scalar(0.3)).to(values.dtype)
            torch.testing.assert_close(kernels.scale_tensor(values, scalar(0.3)), expected, rtol=last_digit, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [0, 1, 4095, 3 * 4096 + 5])
def test_bit_digest(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int) -> None:
    """Random bit patterns; the programs process several blocks."""
    from harness.kernels import bit_digest

    monkeypatch.setattr(bit_digest, "MAX_DIGEST_PROGRAMS", 2)
    patterns = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(INTEGERS[dtype.itemsize])
    digest = bit_digest.sum_patterns(patterns.to(DEVICE), SHIFT)
    assert digest.cpu() == digest_bits(patterns.view(dtype))
    if count:
        patterns[-1] ^= 1
        assert digest.cpu() != digest_bits(patterns.view(dtype))
