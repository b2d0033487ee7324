"""The update against torch's AdamW, and skipped updates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from harness.config.optim import OptimConfig
from harness.optim.update import Group, Update, build_update
from tests.composed import load

CPU = torch.device("cpu")


def optim(*overrides: str) -> OptimConfig:
    return load(["optim.schedule=constant", "optim.warmup_steps=0", *overrides]).optim


def parameter(seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)))


def build(cfg: OptimConfig, weight: nn.Parameter, *, lr_multiplier: float = 1.0) -> Update:
    group = Group(parameters={"weight": weight}, lr_multiplier=lr_multiplier, weight_decay=cfg.weight_decay)
    return build_update([group], cfg=cfg, num_steps=10, device=CPU)


def apply(
    update: Update, weight: nn.Parameter, gradient: Tensor, *, refuse: float = 0.0, divisor: float = 1.0
) -> float:
    weight.grad = gradient.clone() * divisor
    lr = update.apply(skip_mask=torch.tensor(refuse), grad_norm=gradient.norm(), divisor=torch.tensor(divisor))
    return float(lr)


@pytest.mark.parametrize("clip", [None, 0.5, 100.0])
@pytest.mark.parametrize("divisor", [1.0, 1024.0])
def test_equals_adamw_with_clip_grad_norm(clip: float | None, divisor: float) -> None:
    cfg = optim(f"optim.clip_norm={'null' if clip is None else clip}")
    ours, theirs = parameter(), parameter()
    update = build(cfg, ours, lr_multiplier=0.5)
    reference = torch.optim.AdamW(
        [theirs], lr=cfg.lr * 0.5, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True
    )
    for seed in range(1, 6):
        gradient = parameter(seed).detach()
        apply(update, ours, gradient, divisor=divisor)
        theirs.grad = gradient.clone()
        if clip is not None:
            nn.utils.clip_grad_norm_([theirs], clip)
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert not torch.equal(ours, parameter())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
def test_a_skipped_update_changes_nothing_and_the_next_one_follows(bad: float) -> None:
    cfg = optim("optim.schedule=linear", "optim.min_lr_fraction=0")
    ours, control = parameter(), parameter()
    update, untouched = build(cfg, ours), build(cfg, control)
    gradient = parameter(1).detach()
    first = apply(update, ours, gradient)
    assert apply(untouched, control, gradient) == first
    before = [ours.detach().clone(), *(value.clone() for value in update.state()["weight"].values())]

    refused_lr = apply(update, ours, torch.full_like(gradient, bad), refuse=1.0)

    after = [ours.detach(), *update.state()["weight"].values()]
    assert all(torch.equal(then, now) for then, now in zip(before, after, strict=True))
    assert int(update.step) == 1
    second = parameter(2).detach()
    assert apply(update, ours, second) == apply(untouched, control, second) == refused_lr
    assert torch.equal(ours, control)
    assert int(update.step) == 2


def test_the_lr_follows_the_table_and_stays_at_its_end() -> None:
    cfg = optim("optim.schedule=linear", "optim.min_lr_fraction=0.5", "optim.lr=1.0")
    weight = parameter()
    update = build(cfg, weight)
    rates = [apply(update, weight, parameter(1).detach()) for _ in range(12)]
    assert rates == pytest.approx([1 - 0.05 * min(step, 10) for step in range(12)])


def test_weight_decay_is_per_group() -> None:
    cfg = optim("optim.weight_decay=0.5", "optim.lr=0.1")
    decayed, kept = parameter(), parameter()
    groups = [
        Group(parameters={"decayed": decayed}, lr_multiplier=1.0, weight_decay=cfg.weight_decay),
        Group(parameters={"kept": kept}, lr_multiplier=1.0, weight_decay=0.0),
    ]
    update = build_update(groups, cfg=cfg, num_steps=10, device=CPU)
    decayed.grad, kept.grad = torch.zeros_like(decayed), torch.zeros_like(kept)
    update.apply(skip_mask=torch.tensor(0.0), grad_norm=torch.tensor(0.0), divisor=torch.tensor(1.0))
    torch.testing.assert_close(decayed, parameter() * (1 - 0.1 * 0.5))
    assert torch.equal(kept, parameter())
