"""Muon's kernels against plain torch, over sizes that do not fill whole pieces."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from harness.config.optim import MuonConfig
from harness.optim.muon import MatrixOptions, Muon
from harness.optim.weight_digest import sum_bits
from tests.gpu.kernel_device import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS

Shapes = list[tuple[int, ...]]

ODD: Shapes = [(3, 1), (7, 5), (0, 4), (37, 133) if IS_INTERPRETED else (130, 133), (64, 80)]
EVEN: Shapes = [(8, 4), (0, 4), (40, 128) if IS_INTERPRETED else (136, 128), (64, 80)]
"""ODD sizes do not allow vectorized loads, EVEN sizes do; both have a matrix of several pieces and an empty one."""
DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.bfloat16]


def random_matrices(shapes: Shapes, seed: int) -> list[Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return [torch.randn(shape, device=DEVICE, generator=generator) for shape in shapes]


def places_of(shapes: Shapes) -> list[int]:
    return list(accumulate((8 + math.prod(shape) // 4 * 4 + 4 for shape in shapes[:-1]), initial=4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("shapes", [ODD, EVEN])
def test_momentum_is_blended(shapes: Shapes, skip: float, dtype: torch.dtype) -> None:
    from harness.kernels.muon import blend_momentum

    gradients, momenta, places = random_matrices(shapes, 0), random_matrices(shapes, 1), places_of(shapes)
    buffer = torch.full((places[-1] + gradients[-1].numel() + 9,), 7.0, dtype=dtype, device=DEVICE)
    blend_momentum(gradients, momenta, buffer, places, torch.tensor([skip, 4.0, 0.05, 0.95], device=DEVICE))
    is_written = torch.zeros_like(buffer, dtype=torch.bool)
    for gradient, momentum, old, place in zip(gradients, momenta, random_matrices(shapes, 1), places, strict=True):
        blended = torch.lerp(old, gradient / 4, 0.05)
        direction = torch.lerp(gradient / 4, blended, 0.95)
        found = buffer[place : place + gradient.numel()].view_as(gradient)
        is_written[place : place + gradient.numel()] = True
        rtol = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(found.float(), direction, rtol=rtol, atol=1e-6)
        if skip:
            assert torch.equal(momentum, old)
        else:
            torch.testing.assert_close(momentum, blended, rtol=1e-5, atol=1e-6)
    assert bool((buffer[~is_written] == 7).all()), "nothing is written beside the directions"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("shapes", [ODD, EVEN])
def test_directions_are_applied(shapes: Shapes, skip: float, dtype: torch.dtype) -> None:
    from harness.kernels.muon import apply_directions

    weights, places = random_matrices(shapes, 0), places_of(shapes)
    directions = random_matrices(shapes, 1)
    buffer = torch.full((places[-1] + weights[-1].numel() + 9,), math.nan, dtype=dtype, device=DEVICE)
    for direction, place in zip(directions, places, strict=True):
        bad = torch.full_like(direction, math.nan) if skip else direction
        buffer[place : place + direction.numel()] = bad.flatten().to(dtype)
    terms = torch.tensor([[skip, 1 - 0.1 * number, 0.5 + number] for number in range(len(shapes))], device=DEVICE)
    before, after, square = apply_directions(weights, buffer, places, terms)
    old = random_matrices(shapes, 0)
    assert int(before) & 0xFFFFFFFF == int(sum_bits(old))
    assert int(after) & 0xFFFFFFFF == int(sum_bits(weights))
    torch.testing.assert_close(
        square.double(), sum(weight.double().square().sum() for weight in weights), rtol=1e-5, atol=0.0
    )
    for number, (weight, was, direction) in enumerate(zip(weights, old, directions, strict=True)):
        expected = was if skip else was * (1 - 0.1 * number) - direction.to(dtype).float() * (0.5 + number)
        torch.testing.assert_close(weight, expected, rtol=0.0 if skip else 1e-5, atol=0.0 if skip else 1e-5)


@pytest.mark.parametrize("nesterov", [True, False])
def test_an_update_with_the_kernels_equals_one_without(nesterov: bool) -> None:
    """Three updates, the second of which is skipped with NaN."""
    shapes: Shapes = [(6, 4), (4, 6), (6, 4), (5, 5)] if IS_INTERPRETED else [(256, 96), (96, 256), (256, 96), (77, 77)]
    built = []
    for own_kernel in (True, False):
        parameters = {str(number): torch.nn.Parameter(each) for number, each in enumerate(random_matrices(shapes, 0))}
        options = [MatrixOptions(0.5, 0.1)] * len(shapes)
        device = torch.device(DEVICE)
        muon = Muon(parameters, options, cfg=MuonConfig(nesterov=nesterov), device=device, own_kernel=own_kernel)
        muon.lr.fill_(0.1)
        sums = []
        for seed, skip in enumerate((0.0, 1.0, 0.0), start=1):
            for parameter, gradient in zip(parameters.values(), random_matrices(shapes, seed), strict=True):
                parameter.grad = gradient * (math.nan if skip else 3.0)
            sums.append(
                muon.step(skip_mask=torch.tensor(skip, device=DEVICE), divisor=torch.tensor(3.0, device=DEVICE))
            )
        masked = [int(each.before) & 0xFFFFFFFF for each in sums], [int(each.after) & 0xFFFFFFFF for each in sums]
        assert masked[1][0] == masked[0][1] == masked[1][1] == masked[0][2], "a skipped update leaves what it read"
        assert masked[1][2] != masked[0][2]
        built.append((muon, parameters))
    (ours, own_weights), (plain, plain_weights) = built
    first = random_matrices(shapes, 0)
    for number, (name, weight) in enumerate(own_weights.items()):
        with torch.no_grad():
            change = torch.linalg.norm(plain_weights[name] - first[number])
            difference = float(torch.linalg.norm(weight - plain_weights[name]) / change)
        assert difference < (1e-5 if IS_INTERPRETED else 2e-2), (
            f"{name}: a GPU orthogonalizes in bf16, {difference:.2g}"
        )
        torch.testing.assert_close(ours.momenta[name], plain.momenta[name], rtol=1e-5, atol=1e-6, msg=name)
