"""Logits and gradients against an independent implementation: Hugging Face's Llama, with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.config.model import AttentionKind, ModelConfig
from harness.huggingface.names import hf_name
from harness.model.init import initialize
from harness.model.transformer import Transformer
from harness.precision.mixed_precision import linear

SEQUENCE_LENGTH = 19


def llama_options(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.dim,
        "intermediate_size": cfg.ffn_dim,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "max_position_embeddings": SEQUENCE_LENGTH,
        "rms_norm_eps": cfg.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "tie_word_embeddings": cfg.tied_head,
        "attn_implementation": "eager",
    }


def build_pair(cfg: ModelConfig) -> tuple[Transformer, Any]:
    """Our model with weights far from initialization, so that no term is small, and Llama with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = Transformer(cfg, sequence_length=SEQUENCE_LENGTH, linear=linear)
    initialize(model, cfg, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    llama = LlamaForCausalLM(LlamaConfig(**llama_options(cfg)))
    weights = {hf_name(name): parameter.detach().clone() for name, parameter in model.named_parameters()}
    missing = llama.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= ({"lm_head.weight"} if cfg.tied_head else set())
    return model, llama


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


@pytest.mark.parametrize("tied_head", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("attention", list(AttentionKind))
def test_logits_and_gradients_equal_llama(
    make_config: Callable[..., ModelConfig], tied_head: bool, num_kv_heads: int, attention: AttentionKind
) -> None:
    cfg = make_config(tied_head=tied_head, num_kv_heads=num_kv_heads, attention=attention)
    model, llama = build_pair(cfg)
    stream = torch.randint(cfg.vocab_size, (3, SEQUENCE_LENGTH + 1), generator=torch.Generator().manual_seed(5))
    tokens, targets = stream[:, :-1], stream[:, 1:].clone()
    targets[0, :4] = -100

    llama_logits = llama(tokens, use_cache=False).logits
    reference = F.cross_entropy(llama_logits.flatten(0, 1), targets.flatten(), reduction="sum")
    output = model(tokens, targets, seed=0.25)
    assert relative_error(model.logits(tokens), llama_logits) < 2e-6
    assert relative_error(output.row_losses.sum(), reference) < 1e-6
    assert output.row_tokens.sum() == 3 * SEQUENCE_LENGTH - 4

    torch.autograd.backward(reference * 0.25)
    torch.autograd.backward(output.objective)
    expected = dict(llama.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert relative_error(parameter.grad, expected[hf_name(name)].grad) < 5e-6, name
