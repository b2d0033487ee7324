"""The first module that produces a non-finite value, in a real model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from harness.analysis.replay.module_watch import NonFiniteModules, has_nan, is_finite, watch_modules
from harness.model.attention_mask import document_mask
from harness.model.init import initialize
from harness.model.transformer import Transformer
from harness.precision.fp8.layers import convert_to_fp8
from harness.precision.mixed_precision import linear
from tests.composed import load
from tests.distributed.cases import TINY


def watch_backward(model: Transformer) -> NonFiniteModules:
    tokens = torch.arange(64).view(2, 32)
    with watch_modules(model) as seen:
        model(tokens, tokens).objective.backward()
    return seen


def small_model(*overrides: str) -> Transformer:
    cfg = load([*TINY, *overrides]).model
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


def scale_weights(model: Transformer, factor: float, *names: str) -> None:
    with torch.no_grad():
        for name in names:
            model.get_parameter(f"{name}.weight").mul_(factor)


def test_nan_of_an_attention_softmax_is_traced_to_its_scores() -> None:
    """Finite queries and keys whose products overflow: the softmax of Inf is NaN."""
    model = small_model()
    scale_weights(model, 1e21, "blocks.1.attention.query", "blocks.1.attention.key")
    seen = watch_backward(model)
    assert seen.forward == "blocks.1.attention: scores before the softmax"
    assert seen.path[0] == "blocks.1.attention: scores before the softmax (Inf)"
    assert "blocks.1.attention: softmax (NaN)" in seen.path
    assert not seen.broken_weights


def test_inf_of_the_swiglu_product_is_named() -> None:
    model = small_model()
    scale_weights(model, 1e20, "blocks.0.mlp.gate", "blocks.0.mlp.up")
    seen = watch_backward(model)
    assert seen.forward == "blocks.0.mlp: SwiGLU product"
    assert seen.path[0] == "blocks.0.mlp: SwiGLU product (Inf)"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_head_weight_is_named(value: float) -> None:
    model = small_model("model.tied_head=false")
    with torch.no_grad():
        model.get_parameter("head.weight")[7, 3] = value
    seen = watch_backward(model)
    assert (seen.broken_weights, seen.forward) == ("head", "head logits")


def test_broken_embedding_weight_is_named() -> None:
    model = small_model("model.tied_head=true")
    with torch.no_grad():
        model.get_parameter("embedding.weight")[5, 3] = math.nan
    seen = watch_backward(model)
    assert (seen.broken_weights, seen.forward) == ("embedding", "embedding")


def test_overflowing_logits_are_named() -> None:
    model = small_model("model.tied_head=false")
    scale_weights(model, 1e39, "head")
    with torch.no_grad():
        model.get_parameter("head.weight").nan_to_num_(posinf=3e38, neginf=-3e38)
    seen = watch_backward(model)
    assert (seen.forward, seen.broken_weights) == ("head logits", "")
    assert seen.path[:2] == ["head logits (Inf)", "log-softmax of the loss (Inf)"]


def test_non_finite_loss_from_finite_logits_is_named() -> None:
    model = small_model()
    model.loss_options = replace(model.loss_options, z_loss=1e38)
    seen = watch_backward(model)
    assert seen.forward == "loss reduction"


def test_gradient_that_overflows_inside_attention_is_named() -> None:
    """The forward pass is finite; the gradient overflows in the product that gives it to the queries."""
    model = small_model()
    for name, factor in (("value", 1e20), ("output", 1e-10), ("key", 1e15), ("query", 1e-15)):
        scale_weights(model, factor, f"blocks.1.attention.{name}")
    tokens = torch.arange(64).view(2, 32)
    with watch_modules(model) as seen:
        model(tokens, tokens, seed=1e26).objective.backward()
    assert not seen.forward
    assert seen.backward == "blocks.1.attention: scores or weighted values"
    assert "blocks.1.attention.query.weight" in seen.gradients


def test_masked_documents_are_clean() -> None:
    """A mask holds -Inf on purpose."""
    tokens = torch.arange(64).view(2, 32)
    model = small_model()
    with watch_modules(model) as seen:
        model(tokens, tokens, mask=document_mask((tokens > 16).long())).objective.backward()
    assert seen.is_clean
    assert not seen.path


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_values_are_checked(dtype: torch.dtype) -> None:
    broken = torch.tensor([1.0, math.nan]).to(dtype)
    assert (is_finite(broken[:1]), is_finite(broken)) == (True, False)
    assert (has_nan(broken[:1]), has_nan(broken)) == (False, True)
    overflow = torch.tensor([math.inf]).to(torch.float8_e5m2)
    assert (is_finite(overflow), has_nan(overflow)) == (False, False)


def test_module_that_breaks_an_fp8_model_is_named() -> None:
    cfg = load([*TINY, "precision=fp8_emulated"])
    model = Transformer(cfg.model, sequence_length=32, linear=linear)
    initialize(model, cfg.model, seed=0)
    assert convert_to_fp8(model.blocks, cfg.precision).layers
    assert watch_backward(model).is_clean
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.up.weight")[3, 5] = math.nan
    seen = watch_backward(model)
    assert (seen.broken_weights, seen.forward) == ("blocks.1.mlp.up", "blocks.1.mlp.up")


def test_fused_attention_is_named_as_one() -> None:
    model = small_model()
    scale_weights(model, 1e21, "blocks.1.attention.query", "blocks.1.attention.key")
    tokens = torch.arange(64).view(2, 32)
    with watch_modules(model, on_reference_path=False) as seen:
        model(tokens, tokens).objective.backward()
    assert seen.forward == "blocks.1.attention: attention kernel"


def test_watch_leaves_nothing_behind() -> None:
    """The step after a watched one equals the step before it, bit for bit."""
    model = small_model()
    tokens = torch.arange(64).view(2, 32)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(tokens, tokens).objective.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    before = gradients()
    options = model.loss_options
    watch_backward(model)
    assert model.loss_options is options
    assert all(torch.equal(one, other) for one, other in zip(before, gradients(), strict=True))
