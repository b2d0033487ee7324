"""The first module that produces a non-finite value, in a real model."""

from __future__ import annotations

import math

import torch

from harness.analysis.replay.module_watch import NonFiniteModules, watch_modules
from harness.config.compose import load
from harness.model.init import initialize
from harness.model.transformer import Transformer
from harness.precision.mixed_precision import linear
from tests.distributed.cases import TINY


def watch_backward(model: Transformer) -> NonFiniteModules:
    tokens = torch.arange(64).view(2, 32)
    with watch_modules(model) as seen:
        model(tokens, tokens).objective.backward()
    return seen


def small_model() -> Transformer:
    cfg = load(TINY).model
    model = Transformer(cfg, sequence_length=32, linear=linear)
    initialize(model, cfg, seed=0)
    return model


def test_clean_step_has_no_findings() -> None:
    assert watch_backward(small_model()).is_clean


def test_non_finite_weights_are_named() -> None:
    model = small_model()
    with torch.no_grad():
        dict(model.named_parameters())["blocks.1.mlp.up.weight"][3, 5] = math.nan
    seen = watch_backward(model)
    assert seen.broken_weights == "blocks.1.mlp.up"
    assert seen.forward == "blocks.1.mlp.up"
    assert "head.weight" in seen.gradients


def test_first_module_to_overflow_is_named() -> None:
    model = small_model()
    module = model.get_submodule("blocks.0.attention.value")
    module.register_forward_hook(lambda _module, _inputs, output: output * math.inf)
    seen = watch_backward(model)
    assert seen.forward == "blocks.0.attention.value"
    assert not seen.broken_weights


def test_module_with_a_non_finite_gradient_is_named() -> None:
    model = small_model()
    module = model.get_submodule("blocks.1.mlp.down")

    def spoil(_module: object, _outgoing: object, _incoming: object) -> tuple[torch.Tensor]:
        return (torch.full((2, 32, 48), math.nan),)

    module.register_full_backward_hook(spoil)
    seen = watch_backward(model)
    assert not seen.forward
    assert seen.backward == "blocks.1.mlp.down"
    assert "blocks.0.mlp.up.weight" in seen.gradients
    assert "blocks.1.mlp.down.weight" not in seen.gradients
