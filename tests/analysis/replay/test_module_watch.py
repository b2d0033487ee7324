"""Who made something not finite out of what was finite, in a real model."""

from __future__ import annotations

import math

import torch

from harness.analysis.replay.module_watch import Seen, watching
from harness.config.compose import load
from harness.model.init import initialize
from harness.model.transformer import Transformer
from harness.precision.mixed_precision import linear
from tests.distributed.cases import TINY


def watched(model: Transformer) -> Seen:
    tokens = torch.arange(64).view(2, 32)
    with watching(model) as seen:
        model(tokens, tokens).objective.backward()
    return seen


def small_model() -> Transformer:
    cfg = load(TINY).model
    model = Transformer(cfg, sequence_length=32, linear=linear)
    initialize(model, cfg, seed=0)
    return model


def test_a_clean_step_shows_nothing() -> None:
    assert watched(small_model()).is_clean


def test_weights_that_are_not_finite_are_named() -> None:
    model = small_model()
    with torch.no_grad():
        dict(model.named_parameters())["blocks.1.mlp.up.weight"][3, 5] = math.nan
    seen = watched(model)
    assert seen.broken_weights == "blocks.1.mlp.up"
    assert seen.forward == "blocks.1.mlp.up"
    assert "head.weight" in seen.gradients


def test_the_first_module_to_overflow_is_named_and_not_those_after_it() -> None:
    model = small_model()
    module = model.get_submodule("blocks.0.attention.value")
    module.register_forward_hook(lambda _module, _inputs, output: output * math.inf)
    seen = watched(model)
    assert seen.forward == "blocks.0.attention.value"
    assert not seen.broken_weights


def test_a_gradient_that_breaks_on_its_way_down_is_named() -> None:
    model = small_model()
    module = model.get_submodule("blocks.1.mlp.down")

    def spoil(_module: object, _outgoing: object, _incoming: object) -> tuple[torch.Tensor]:
        return (torch.full((2, 32, 48), math.nan),)

    module.register_full_backward_hook(spoil)
    seen = watched(model)
    assert not seen.forward
    assert seen.backward == "blocks.1.mlp.down"
    assert "blocks.0.mlp.up.weight" in seen.gradients
    assert "blocks.1.mlp.down.weight" not in seen.gradients
