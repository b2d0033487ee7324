"""`Transformer` apart from its mathematics: parameter names, sums, probe, buffers, options."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.config.model import ModelConfig
from harness.model.attention_mask import document_mask
from harness.model.init import initialize
from harness.model.loss import IGNORED
from harness.model.transformer import Transformer, sampled_layers
from harness.precision.mixed_precision import linear

MakeConfig = Callable[..., ModelConfig]
SEQUENCE_LENGTH = 8


def build(cfg: ModelConfig) -> Transformer:
    model = Transformer(cfg, sequence_length=SEQUENCE_LENGTH, linear=linear)
    initialize(model, cfg, seed=0)
    return model


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(1, (0,)), (2, (0, 1)), (8, tuple(range(8))), (9, (0, 1, 2, 3, 4, 5, 6, 8)), (24, (0, 3, 6, 9, 13, 16, 19, 23))],
)
def test_sampled_layers(num_layers: int, expected: tuple[int, ...]) -> None:
    assert sampled_layers(num_layers) == expected


def test_parameter_names(make_config: MakeConfig) -> None:
    cfg = make_config(num_layers=1, qk_norm=True, embedding_norm=True)
    in_block = "attention_norm attention.query attention.key attention.value attention.output attention.query_norm"
    in_block += " attention.key_norm mlp_norm mlp.gate mlp.up mlp.down"
    modules = ["embedding", "embedding_norm", *(f"blocks.0.{name}" for name in in_block.split()), "norm", "head"]
    assert [name for name, _ in build(cfg).named_parameters()] == [f"{module}.weight" for module in modules]
    tied = make_config(tied_head=True)
    assert set(build(tied).state_dict()) == set(build(make_config()).state_dict()) - {"head.weight"}


def test_probe_measures_the_residual_stream_and_changes_nothing(make_config: MakeConfig) -> None:
    model = build(make_config(num_layers=3))
    tokens = torch.arange(2 * SEQUENCE_LENGTH).view(2, SEQUENCE_LENGTH)
    seen: list[float] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: seen.append((output[0] + output[1]).norm().item()))
    probed, plain = model(tokens, tokens, probe=True), model(tokens, tokens)
    assert plain.activation_square_sums is None
    assert torch.equal(probed.objective, plain.objective)
    assert probed.activation_square_sums.dtype is torch.float32
    assert probed.activation_square_sums.sqrt().tolist() == pytest.approx(seen[:3], rel=1e-5)


def test_seed_as_tensor_equals_seed_as_number(make_config: MakeConfig) -> None:
    model = build(make_config())
    tokens = torch.arange(SEQUENCE_LENGTH)[None]
    assert torch.equal(
        model(tokens, tokens, seed=0.3).objective, model(tokens, tokens, seed=torch.tensor(0.3)).objective
    )


def test_init_buffers_refills_after_to_empty(make_config: MakeConfig) -> None:
    cfg = make_config()
    expected = build(cfg)
    with torch.device("meta"):
        model = Transformer(cfg, sequence_length=SEQUENCE_LENGTH, linear=linear)
    model.to_empty(device="cpu")
    model.cos.fill_(torch.nan)
    initialize(model, cfg, seed=0)
    assert model.cos.dtype is torch.float32
    assert torch.equal(model.cos, expected.cos)
    assert torch.equal(model.sin, expected.sin)
    assert "cos" not in model.state_dict()


def test_shorter_sequences_have_the_same_positions(make_config: MakeConfig) -> None:
    model = build(make_config())
    tokens = torch.arange(SEQUENCE_LENGTH)[None]
    torch.testing.assert_close(model.logits(tokens[:, :5]), model.logits(tokens)[:, :5])


@pytest.mark.parametrize("option", ["qk_norm", "embedding_norm"])
def test_norm_options_make_the_weight_scale_irrelevant(make_config: MakeConfig, option: str) -> None:
    """Scaling the query weights, or the embedding, by 10 changes the logits unless the norm after it is on."""
    tokens = torch.arange(SEQUENCE_LENGTH)[None]
    name = {"qk_norm": "blocks.1.attention.query.weight", "embedding_norm": "embedding.weight"}[option]
    for enabled in (True, False):
        model = build(make_config(**{option: enabled}, init_std=1.0, norm_eps=1e-12))
        before = model.logits(tokens)
        with torch.no_grad():
            model.get_parameter(name).mul_(10)
        assert torch.allclose(model.logits(tokens), before, rtol=1e-3, atol=1e-3) is enabled


def test_mup_divides_logits_by_the_width(make_config: MakeConfig) -> None:
    model = build(make_config(mup_base_width=8))
    tokens = torch.arange(SEQUENCE_LENGTH)[None]
    hidden: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
    logits = model.logits(tokens)
    assert model.head is not None
    torch.testing.assert_close(logits, hidden[0] @ model.head.weight.T / 4)


def test_mup_scales_attention_by_the_inverse_of_head_dim(make_config: MakeConfig) -> None:
    """At the base width muP equals the standard model with queries scaled by the ratio of both scales."""
    standard = build(make_config(init_std=0.5))
    mup = build(make_config(init_std=0.5, mup_base_width=standard.cfg.dim))
    tokens = torch.arange(SEQUENCE_LENGTH)[None]
    assert not torch.allclose(mup.logits(tokens), standard.logits(tokens), rtol=1e-2)
    with torch.no_grad():
        for name, parameter in mup.named_parameters():
            if "query" in name:
                parameter.mul_(mup.cfg.head_dim**0.5)
    torch.testing.assert_close(mup.logits(tokens), standard.logits(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"norm": "layer", "norm_placement": "post"}, marks=pytest.mark.full)], ids=str
)
def test_each_block_compiles_to_one_graph(make_config: MakeConfig, changes: dict[str, str]) -> None:
    model, compiled = (build(make_config(qk_norm=True, **changes)) for _ in range(2))
    for block in compiled.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    tokens = torch.arange(SEQUENCE_LENGTH)[None]
    for candidate in (model, compiled):
        torch.autograd.backward(candidate(tokens, tokens).objective)
    for expected, parameter in zip(model.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_nan_propagates_without_an_error(make_config: MakeConfig) -> None:
    model = build(make_config())
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    tokens = torch.arange(SEQUENCE_LENGTH)[None]
    output = model(tokens, tokens, probe=True)
    torch.autograd.backward(output.objective)
    assert output.objective.isnan()


def test_documents_in_one_sequence_do_not_attend_to_each_other(make_config: MakeConfig) -> None:
    """The second document's logits equal those without the first document, and its gradient reaches no token of it."""
    cfg = make_config()
    model = build(cfg)
    tokens = torch.randint(cfg.vocab_size, (1, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(3))
    other = tokens.clone()
    other[0, :5] = (other[0, :5] + 1) % cfg.vocab_size
    mask = document_mask(torch.tensor([[0] * 5 + [1] * 3]))
    masked, changed = model.logits(tokens, mask=mask), model.logits(other, mask=mask)
    torch.testing.assert_close(masked[:, 5:], changed[:, 5:], rtol=0, atol=0)
    assert not torch.equal(masked[:, :5], changed[:, :5])
    assert not torch.allclose(model.logits(tokens)[:, 5:], masked[:, 5:])


def test_losses_and_tokens_are_per_row(make_config: MakeConfig) -> None:
    cfg = make_config()
    model = build(cfg)
    tokens = torch.randint(cfg.vocab_size, (3, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(4))
    targets = tokens.roll(-1, dims=1)
    targets[1, 4:] = IGNORED
    output = model(tokens, targets)
    expected = torch.nn.functional.cross_entropy(
        model.logits(tokens).transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    ).sum(dim=1)
    torch.testing.assert_close(output.row_losses, expected.detach())
    assert output.row_tokens.tolist() == [8.0, 4.0, 8.0]
