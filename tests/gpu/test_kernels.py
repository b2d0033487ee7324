"""The harness's own passes against torch's kernels, over sizes that fill no whole block.

On a GPU; without one by Triton's interpreter, where somebody asks for it (`tests/test_kernels.py` does).
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from harness.fp8 import meters
from harness.fp8.emulated import Emulated
from harness.fp8.engine import FORWARD
from harness.fp8.meters import Column
from harness.optim.adamw import Part, Rule, step_fused, step_in_one_pass
from harness.sentinel.sums import StateSums, state_sums, state_sums_in_one_pass

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs a CUDA device"),
]

SHAPES = (
    [(3,), (1024,), (7, 5), (100, 33), (64, 80)]
    if IS_INTERPRETED
    else [(3,), (2048,), (7, 5), (1000, 333), (4096, 512)]
)
NUM_LARGE = 300_001 if IS_INTERPRETED else 5_000_001
"""More than all programs take at once."""


def parts(num_steps: float = 3.0) -> list[Part]:
    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def numbers(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    return [
        Part(numbers(shape), numbers(shape), numbers(shape), numbers(shape).square(), scalar(num_steps))
        for shape in SHAPES
    ]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def rule() -> Rule:
    return Rule(scalar(0.01), weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)


def test_a_pass_does_what_torchs_kernel_does_and_leaves_the_gradient() -> None:
    ours, theirs = parts(), parts()
    for _ in range(3):
        step_in_one_pass(ours, rule(), refuse=scalar(0.0), divisor=scalar(4.0))
        for part in theirs:
            given = part.gradient.clone()
            step_fused([part], rule(), refuse=scalar(0.0), divisor=scalar(4.0))
            part.gradient.copy_(given)  # it writes the divided one back
    for own, their, begun in zip(ours, theirs, parts(), strict=True):
        torch.testing.assert_close(tuple(own), tuple(their), rtol=1e-5, atol=1e-6)
        assert own.step == 6
        assert torch.equal(own.gradient, begun.gradient)
        assert not torch.equal(own.parameter, begun.parameter)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
def test_a_refused_pass_leaves_every_bit(bad: float) -> None:
    ours, before = parts(0.0), parts(0.0)
    for part in ours:
        part.gradient.fill_(bad)
    step_in_one_pass(ours, rule(), refuse=scalar(1.0), divisor=scalar(bad))
    for own, old in zip(ours, before, strict=True):
        kept = zip(own._replace(gradient=own.step), old._replace(gradient=old.step), strict=True)
        assert all(torch.equal(now, then) for now, then in kept)


def exact_sums(
    weights: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], *, correction: float, eps: float
) -> StateSums:
    rows = []
    for weight, first, second in zip(weights, firsts, seconds, strict=True):
        moment = second.double()
        direction = first.double() / ((moment / scalar(correction).double()).sqrt() + eps)
        rows.append([weight.double().square().sum(), moment.sum(), moment.square().sum(), direction.square().sum()])
    return StateSums(*torch.tensor(rows, dtype=torch.float64, device=DEVICE).unbind(dim=1))


@pytest.mark.parametrize("is_sound", [True, False])
def test_one_pass_sums_the_state_as_torch_does(is_sound: bool) -> None:
    half, none, mean, square = (torch.full((NUM_LARGE,), value, device=DEVICE) for value in (0.5, 0.0, -2e-3, 1e-6))
    large = Part(half, none, mean, square, scalar(1.0))
    every = [*parts(), large]
    if not is_sound:
        every[1].parameter[-1], every[3].first[0, 0], every[4].second[0, 0] = math.nan, math.inf, math.nan
    weights, _, firsts, seconds, _ = (list(column) for column in zip(*every, strict=True))
    one = state_sums_in_one_pass(weights, firsts, seconds, scalar(0.2), eps=1e-8)
    exact = exact_sums(weights, firsts, seconds, correction=0.2, eps=1e-8)
    for name, own, expected in zip(StateSums._fields, one, exact, strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=0.0, equal_nan=True, msg=name)
    if not IS_INTERPRETED:  # torch adds up roughly on a CPU
        for own, theirs in zip(one, state_sums(weights, firsts, seconds, scalar(0.2), eps=1e-8), strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-4, atol=0.0, equal_nan=True)
    assert one.weight_squares[-1].item() == pytest.approx(0.25 * NUM_LARGE)
    spoiled = (one.weight_squares.isnan().sum(), one.seconds.isnan().sum(), one.directions.isinf().sum())
    assert [count.item() for count in spoiled] == ([0, 0, 0] if is_sound else [1, 1, 1])


@pytest.mark.parametrize("sample", [2**20, 20_000])
def test_what_rounding_did_is_noted_as_in_plain_torch(monkeypatch: pytest.MonkeyPatch, sample: int) -> None:
    from harness.kernels import note_rounded

    monkeypatch.setattr(meters, "SAMPLE", sample)
    values = torch.randn(30, 5000, generator=torch.Generator().manual_seed(0)).mul(1e-3).to(torch.bfloat16)
    values[0, :7], values[0, 7] = 0.0, torch.nan
    plain, own = torch.zeros(len(Column)), torch.zeros(len(Column), device=DEVICE)
    for scale in (torch.tensor(2.0), torch.tensor(1.5), torch.tensor(3.0)):
        rounded = Emulated().round(values, scale, dtype=FORWARD, both=False, largest=None)
        meters.note(plain, values, scale, rounded)
        numbers = rounded.rows.view(torch.uint8).to(DEVICE)
        note_rounded(values.to(DEVICE), numbers, scale.to(DEVICE), own, stride=meters.stride_of(values))
    torch.testing.assert_close(own.cpu(), plain, rtol=1e-5, atol=0.0)
    assert plain[Column.zeros] > 0
