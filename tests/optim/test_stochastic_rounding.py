"""Moments in bf16: noise is the same on any number of ranks, rounding is right on average, a skip changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from harness.optim.stochastic_rounding import as_int32, element_noise, make_noise, mix, round_to_bf16
from harness.optim.update import Group, Update, build_update
from tests.composed import load

CPU = torch.device("cpu")


def expected_mix(value: int) -> int:
    """The published 32-bit hash lowbias32, in Python's integers."""
    value ^= value >> 16
    value = value * 0x7FEB352D % 2**32
    value ^= value >> 15
    value = value * 0x846CA68B % 2**32
    return value ^ (value >> 16)


def test_the_hash_is_the_published_one() -> None:
    numbers = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF]
    mixed = mix(torch.tensor([as_int32(number) for number in numbers], dtype=torch.int32))
    assert mixed.tolist() == [as_int32(expected_mix(number)) for number in numbers]


def test_rounding_gives_a_neighbour_and_is_right_on_average() -> None:
    values = torch.tensor([1.0 + 3 / 1024, -1.0 - 1 / 1024, 3.0e-20, 1.0, 0.0])
    noise = make_noise(0, ["a"], [0], CPU)
    count = 4096
    like = values.repeat(count, 1)
    bits, others = element_noise(noise.keys([torch.tensor(5.0)])[0], noise.begins[0], like)
    for each in (bits, others):
        rounded = round_to_bf16(like, each)
        assert rounded.dtype is torch.bfloat16
        low = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
        gap = (low.view(torch.int32) + 0x10000).view(torch.float32) - low
        assert torch.all((rounded.float() == low) | (rounded.float() == low + gap))
        error = (rounded.double().mean(dim=0) - values.double()).abs()
        assert torch.all(error <= 4 * gap.double().abs() / (2 * math.sqrt(count)))
        assert torch.equal(rounded[:, 3:].float(), like[:, 3:]), "what bf16 can hold stays"


def test_nan_and_inf_stay() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf])
    rounded = round_to_bf16(values, torch.full((3,), 0xFFFF, dtype=torch.int32))
    torch.testing.assert_close(rounded.float(), values, equal_nan=True)


def test_noise_depends_on_seed_name_step_and_element_only() -> None:
    whole = torch.zeros(7, 3)

    def bits(seed: int = 0, name: str = "a", step: float = 1.0, first_row: int = 0, like: Tensor = whole) -> Tensor:
        noise = make_noise(seed, ["other", name], [0, 3 * first_row], CPU)
        keys = noise.keys([torch.tensor(9.0), torch.tensor(step)])
        return torch.stack(element_noise(keys[1], noise.begins[1], like))

    every = bits()
    parts = [bits(first_row=begin, like=whole[begin:end]) for begin, end in ((0, 3), (3, 6), (6, 7))]
    assert torch.equal(torch.cat(parts, dim=1), every)
    for other in (bits(seed=1), bits(name="b"), bits(step=2.0)):
        assert (other == every).float().mean() < 0.1
    assert every.float().mean() == pytest.approx(32768, rel=0.25)


def build(*overrides: str, rows: int = 6) -> tuple[Update, nn.Parameter]:
    cfg = load(["optim.schedule=constant", "optim.warmup_steps=0", "optim.moment_dtype=bf16", *overrides]).optim
    weight = nn.Parameter(torch.randn(rows, 4, generator=torch.Generator().manual_seed(0)))
    group = Group(parameters={"weight": weight}, lr_multiplier=1.0, weight_decay=cfg.weight_decay)
    update = build_update([group], cfg=cfg, num_steps=500, device=CPU)
    update.seed_noise(3)
    return update, weight


def apply(update: Update, weight: nn.Parameter, gradient: Tensor, *, refuse: float = 0.0) -> None:
    weight.grad = gradient.clone()
    update.apply(skip_mask=torch.tensor(refuse), grad_norm=gradient.norm(), divisor=torch.tensor(1.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
def test_a_skipped_update_changes_no_bit_and_the_next_one_follows(bad: float) -> None:
    (update, weight), (control, untouched) = build(), build()
    gradients = torch.randn(3, *weight.shape, generator=torch.Generator().manual_seed(1))
    apply(update, weight, gradients[0])
    apply(control, untouched, gradients[0])
    before = [weight.detach().clone(), *(value.clone() for value in update.state()["weight"].values())]
    apply(update, weight, torch.full_like(gradients[0], bad), refuse=1.0)
    after = [weight.detach(), *update.state()["weight"].values()]
    assert all(torch.equal(then, now) for then, now in zip(before, after, strict=True))
    for gradient in gradients[1:]:
        apply(update, weight, gradient)
        apply(control, untouched, gradient)
    assert torch.equal(weight, untouched)
    states = zip(update.state()["weight"].values(), control.state()["weight"].values(), strict=True)
    assert all(torch.equal(own, other) for own, other in states)


def test_a_slow_second_moment_follows_its_average_and_weights_stay_close_to_fp32() -> None:
    """With beta2 = 0.999 a step changes the moment by less than bf16 can show; rounded to nearest it would stop."""
    slow = ("optim.beta2=0.999", "optim.clip_norm=null")
    (update, weight), (exact, other) = build(*slow, rows=200), build(*slow, "optim.moment_dtype=fp32", rows=200)
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        gradient = torch.randn(weight.shape, generator=generator)
        apply(update, weight, gradient)
        apply(exact, other, gradient)
    state, expected = update.state()["weight"], exact.state()["weight"]
    assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.bfloat16
    ratio = state["exp_avg_sq"].float() / expected["exp_avg_sq"]
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.005), "no bias"
    assert ratio.std().item() < 0.05
    moved = (other - build(*slow, rows=200)[1]).norm()
    assert (weight - other).norm() < 0.02 * moved
