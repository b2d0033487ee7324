"""LayerNorm and post-LN against a plain implementation: logits, gradients, probe, names and sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.analysis.replay.activation_probe import measure_activations
from harness.analysis.replay.module_watch import watch_modules
from harness.config.model import ModelConfig, NormKind, NormPlacement
from harness.model.init import initialize
from harness.model.mup import ParameterRole, role_of
from harness.model.size import num_parameters
from harness.model.transformer import Transformer, rotary_tables
from harness.precision.mixed_precision import linear

MakeConfig = Callable[..., ModelConfig]
SEQUENCE_LENGTH = 11
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm": NormKind.layer},
    {"norm_placement": NormPlacement.post},
    {"norm": NormKind.layer, "norm_placement": NormPlacement.post, "qk_norm": True, "embedding_norm": True},
]
BOTH: dict[str, Any] = {"norm": NormKind.layer, "norm_placement": NormPlacement.post}


def build(cfg: ModelConfig) -> Transformer:
    """A model with weights far from initialization, so that no term is small."""
    model = Transformer(cfg, sequence_length=SEQUENCE_LENGTH, linear=linear)
    initialize(model, cfg, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def random_tokens(cfg: ModelConfig) -> Tensor:
    return torch.randint(cfg.vocab_size, (2, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(5))


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return hidden / (hidden.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def layer_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    centered = hidden - hidden.mean(dim=-1, keepdim=True)
    return rms_norm(centered, weight, eps)


def rotate(heads: Tensor, cfg: ModelConfig) -> Tensor:
    cos, sin = (table.float()[:, None] for table in rotary_tables(cfg, SEQUENCE_LENGTH))
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(hidden: Tensor, weights: Mapping[str, Tensor], cfg: ModelConfig) -> Tensor:
    query, key, value = (
        F.linear(hidden, weights[f"attention.{name}"]).view(*hidden.shape[:-1], -1, cfg.head_dim)
        for name in ("query", "key", "value")
    )
    if cfg.qk_norm:
        query = rms_norm(query, weights["attention.query_norm"], cfg.norm_eps)
        key = rms_norm(key, weights["attention.key_norm"], cfg.norm_eps)
    query, key = rotate(query, cfg), rotate(key, cfg)
    group_size = cfg.num_heads // cfg.num_kv_heads
    key, value = (each.repeat_interleave(group_size, dim=2) for each in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(cfg.head_dim)
    future = torch.ones(SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool).triu(1)
    shares = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    return F.linear(torch.einsum("bhqk,bkhd->bqhd", shares, value).flatten(2), weights["attention.output"])


def feed_forward(hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    gate, up = F.linear(hidden, weights["mlp.gate"]), F.linear(hidden, weights["mlp.up"])
    return F.linear(gate * gate.sigmoid() * up, weights["mlp.down"])


def reference_logits(model: Transformer, tokens: Tensor) -> Tensor:
    cfg, every = model.cfg, {name.removesuffix(".weight"): p for name, p in model.named_parameters()}
    normalize = rms_norm if cfg.norm == "rms" else layer_norm
    hidden = every["embedding"][tokens]
    if cfg.embedding_norm:
        hidden = normalize(hidden, every["embedding_norm"], cfg.norm_eps)
    for index in range(cfg.num_layers):
        prefix = f"blocks.{index}."
        weights = {name.removeprefix(prefix): p for name, p in every.items() if name.startswith(prefix)}
        first, second = weights["attention_norm"], weights["mlp_norm"]
        if cfg.norm_placement == "pre":
            hidden = hidden + attend(normalize(hidden, first, cfg.norm_eps), weights, cfg)
            hidden = hidden + feed_forward(normalize(hidden, second, cfg.norm_eps), weights)
        else:
            hidden = normalize(hidden + attend(hidden, weights, cfg), first, cfg.norm_eps)
            hidden = normalize(hidden + feed_forward(hidden, weights), second, cfg.norm_eps)
    return F.linear(normalize(hidden, every["norm"], cfg.norm_eps), every["head"])


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_logits_and_gradients_equal_a_plain_implementation(make_config: MakeConfig, changes: dict[str, Any]) -> None:
    model = build(make_config(**changes))
    tokens = random_tokens(model.cfg)
    logits = reference_logits(model, tokens)
    torch.testing.assert_close(model.logits(tokens), logits, rtol=1e-4, atol=1e-4)

    torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum"))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.autograd.backward(model(tokens, tokens).objective)
    for name, parameter in model.named_parameters():
        gradient, reference = parameter.grad, expected[name]
        assert gradient is not None
        assert reference is not None
        assert float((gradient - reference).norm() / reference.norm()) < 1e-4, name


def test_names_and_number_of_parameters_do_not_depend_on_the_norms(make_config: MakeConfig) -> None:
    plain, other = build(make_config(embedding_norm=True)), build(make_config(embedding_norm=True, **BOTH))
    names = [name for name, _ in other.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    assert sum(parameter.numel() for parameter in other.parameters()) == num_parameters(other.cfg)
    norms = [name for name in names if name.endswith("norm.weight")]
    assert {role_of(name) for name in norms} == {ParameterRole.norm}
    initialize(other, other.cfg, seed=0)
    assert all(torch.equal(other.get_parameter(name), torch.ones(other.cfg.dim)) for name in norms)


def test_probes_measure_the_normalized_stream_of_post_ln(make_config: MakeConfig) -> None:
    model = build(make_config(**BOTH))
    tokens = random_tokens(model.cfg)
    with torch.no_grad():
        for block in model.blocks:
            block.get_parameter("mlp_norm.weight").fill_(2.0)
    with measure_activations(model) as measured:
        sums = model(tokens, tokens, probe=True).activation_square_sums
    expected = 4.0 * tokens.numel() * model.cfg.dim
    assert sums.tolist() == pytest.approx([expected] * 2, rel=1e-2)
    assert [measured.squares[f"blocks.{index}"] for index in range(2)] == pytest.approx(sums.tolist(), rel=1e-5)


def test_a_broken_layer_norm_of_a_post_ln_block_is_named(make_config: MakeConfig) -> None:
    model = build(make_config(**BOTH))
    with torch.no_grad():
        model.get_parameter("blocks.1.attention_norm.weight")[3] = math.nan
    tokens = random_tokens(model.cfg)
    with watch_modules(model) as seen:
        torch.autograd.backward(model(tokens, tokens).objective)
    assert (seen.broken_weights, seen.forward) == ("blocks.1.attention_norm", "blocks.1.attention_norm")
