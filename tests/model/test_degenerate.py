"""Degenerate inputs that could give NaN: everything stays finite, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.config.model import AttentionKind, ModelConfig
from harness.model.attention_layer import Attention
from harness.model.init import initialize
from harness.model.loss import IGNORED, LossOptions, chunked_cross_entropy
from harness.model.transformer import Output, Transformer
from harness.precision.mixed_precision import linear

MakeConfig = Callable[..., ModelConfig]
SEQUENCE_LENGTH = 12
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [
    {"qk_norm": False, "embedding_norm": False, "z_loss": 0.0},
    {"qk_norm": True, "embedding_norm": False, "z_loss": 1e-4},
    {"qk_norm": True, "embedding_norm": True, "z_loss": 1e-4},
]


def build(cfg: ModelConfig, dtype: torch.dtype) -> Transformer:
    model = Transformer(cfg, sequence_length=SEQUENCE_LENGTH, linear=linear)
    initialize(model, cfg, seed=0)
    return model.to(dtype)


def step(model: Transformer, tokens: Tensor, targets: Tensor, mask: Tensor | None = None) -> Output:
    """Forward and backward; asserts that nothing is NaN or infinite."""
    output: Output = model(tokens, targets, seed=1 / targets.numel(), probe=True, mask=mask, measure_logits=True)
    torch.autograd.backward(output.objective)
    for value in output:
        assert value is not None
        assert value.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    return output


def random_tokens(cfg: ModelConfig) -> Tensor:
    return torch.randint(cfg.vocab_size, (2, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_norm_of_zeros(make_config: MakeConfig, options: dict[str, bool | float], dtype: torch.dtype) -> None:
    cfg = make_config(**options)
    model = build(cfg, dtype)
    torch.nn.init.zeros_(model.embedding.weight)
    tokens = random_tokens(cfg)
    output = step(model, tokens, tokens)
    assert output.activation_square_sums is not None
    assert torch.count_nonzero(output.activation_square_sums) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_one_repeated_token(make_config: MakeConfig, options: dict[str, bool | float], dtype: torch.dtype) -> None:
    model = build(make_config(**options), dtype)
    tokens = torch.full((2, SEQUENCE_LENGTH), 3)
    step(model, tokens, tokens)


@pytest.mark.parametrize("options", OPTIONS)
def test_all_targets_ignored(make_config: MakeConfig, options: dict[str, bool | float]) -> None:
    cfg = make_config(**options)
    model = build(cfg, torch.bfloat16)
    tokens = random_tokens(cfg)
    output = step(model, tokens, torch.full_like(tokens, IGNORED))
    assert output.row_tokens.sum() == 0
    assert output.row_losses.sum() == 0
    assert all(torch.count_nonzero(p.grad) == 0 for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize("target", [0, 1])
def test_huge_logits(z_loss: float, target: int) -> None:
    """Logits of +10,000 and -10,000, with the target on either side."""
    hidden = torch.full((3, 4), 50.0, dtype=torch.bfloat16).requires_grad_()
    weight = torch.tensor([[50.0] * 4, [-50.0] * 4], dtype=torch.bfloat16).requires_grad_()
    assert (hidden @ weight.T).detach()[0].tolist() == [9984.0, -9984.0]  # the bf16 neighbours of 10,000
    options = LossOptions(z_loss=z_loss, output_multiplier=1.0, chunk_tokens=2)
    sums = chunked_cross_entropy(hidden, weight, torch.full((3,), target), torch.tensor(1.0), options=options)
    torch.autograd.backward(sums.objective)
    assert sums.losses.sum() == (0.0 if target == 0 else 3 * 2 * 9984.0)
    for value in (*sums, hidden.grad, weight.grad):
        assert value is not None
        assert value.isfinite().all()


@pytest.mark.parametrize("options", OPTIONS)
def test_huge_logits_of_the_whole_model(make_config: MakeConfig, options: dict[str, bool | float]) -> None:
    cfg = make_config(**options)
    model = build(cfg, torch.bfloat16)
    assert model.head is not None
    with torch.no_grad():
        model.head.weight.mul_(1e5)
        tokens = random_tokens(cfg)
        assert model.logits(tokens).abs().max() > 10_000
    step(model, tokens, tokens)


@pytest.mark.full
@pytest.mark.parametrize("attention", list(AttentionKind))
@pytest.mark.parametrize("dtype", DTYPES)
def test_fully_masked_row(make_config: MakeConfig, attention: AttentionKind, dtype: torch.dtype) -> None:
    """Position 5 is fully masked: its attention output and gradient are zero, and other positions do not change."""
    cfg = make_config(attention=attention)
    model = build(cfg, dtype)
    block = model.blocks[0]
    assert isinstance(block.attention, Attention)
    hidden = torch.randn(2, SEQUENCE_LENGTH, cfg.dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    hidden.requires_grad_()
    mask = torch.ones(SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool)
    mask[5] = False
    masked = block.attention(hidden, model.cos, model.sin, mask)
    free = block.attention(hidden, model.cos, model.sin, None)
    assert torch.count_nonzero(masked[:, 5]) == 0
    others = [position for position in range(SEQUENCE_LENGTH) if position != 5]
    torch.testing.assert_close(masked[:, others], free[:, others], rtol=1e-2, atol=1e-4)
    (gradient,) = torch.autograd.grad(masked[:, 5].sum(), hidden)
    assert torch.count_nonzero(gradient) == 0

    tokens = random_tokens(cfg)
    step(model, tokens, tokens, mask=mask)
    step(model, tokens, tokens, mask=torch.zeros(2, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool))


def test_mask_cannot_open_the_future(make_config: MakeConfig) -> None:
    cfg = make_config()
    model = build(cfg, torch.float32)
    tokens = random_tokens(cfg)
    everything = torch.ones(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool)
    torch.testing.assert_close(model.logits(tokens, everything), model.logits(tokens))
