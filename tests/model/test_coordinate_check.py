"""muP coordinate check: how far activations move in a few steps must not depend on the width.

At each width a fresh model takes a few steps on one batch, with learning rates from the parameter table. The size
of the change of an activation (root mean square over its coordinates) is fitted as width ** slope. Under muP every
slope is near zero; under standard parametrization with one learning rate they grow with the width.
Attention's own scale does not show here: queries and keys are not yet aligned after a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness.config.model import ModelConfig
from harness.config.optim import OptimizerKind
from harness.model.init import initialize
from harness.model.mup import parameter_table, role_of
from harness.model.transformer import Transformer
from harness.optim.update import Group, Update, build_update
from harness.precision.mixed_precision import linear
from tests.composed import load

pytestmark = pytest.mark.full

MakeConfig = Callable[..., ModelConfig]
WIDTHS = (64, 128, 256, 512)
SEQUENCE_LENGTH = 16
NUM_STEPS = 4
LR = 0.01


def build(cfg: ModelConfig, kind: OptimizerKind) -> tuple[Transformer, Update]:
    model = Transformer(cfg, sequence_length=SEQUENCE_LENGTH, linear=linear)
    initialize(model, cfg, seed=0)
    table = parameter_table(cfg, decay_embeddings=False, matrix_optimizer=kind)
    groups = [
        Group(
            parameters={name: parameter},
            lr_multiplier=table[role_of(name)].lr_multiplier,
            weight_decay=0.0,
            optimizer=table[role_of(name)].optimizer,
        )
        for name, parameter in model.named_parameters()
    ]
    constant = ["optim.schedule=constant", "optim.warmup_steps=0", f"optim.lr={LR}", "optim.clip_norm=null"]
    optim = load(constant).optim
    return model, build_update(groups, cfg=optim, num_steps=NUM_STEPS, device=torch.device("cpu"))


def observe(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """Activations by name: embedding, outputs of attention and MLP, residual stream after each layer, logits."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[object, object, Tensor | tuple[Tensor, Tensor]], None]:
        return lambda _module, _inputs, output: seen.__setitem__(
            name, output if isinstance(output, Tensor) else output[0] + output[1]
        )

    modules: dict[str, nn.Module] = {"embedding": model.embedding}
    for index, block in enumerate(model.blocks):
        modules |= {f"blocks.{index}": block}
        modules |= {f"blocks.{index}.{name}": block.get_submodule(name) for name in ("attention", "mlp")}
    hooks = [module.register_forward_hook(watch(name)) for name, module in modules.items()]
    with torch.no_grad():
        seen["logits"] = model.logits(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def train(cfg: ModelConfig, kind: OptimizerKind) -> tuple[dict[str, float], dict[str, float]]:
    """Root mean square of each activation after a few steps on one batch, and of its change over them."""
    stream = torch.randint(cfg.vocab_size, (4, SEQUENCE_LENGTH + 1), generator=torch.Generator().manual_seed(1))
    tokens, targets = stream[:, :-1], stream[:, 1:]
    model, update = build(cfg, kind)
    before = observe(model, tokens)
    for _ in range(NUM_STEPS):
        torch.autograd.backward(model(tokens, targets, seed=1 / targets.numel()).objective)
        update.apply(skip_mask=torch.zeros(()), grad_norm=torch.ones(()), divisor=torch.ones(()))
    after = observe(model, tokens)
    scale = {name: root_mean_square(after[name]) for name in after}
    change = {name: root_mean_square(after[name] - before[name]) for name in after}
    return scale, change


def root_mean_square(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def slopes(observations: list[dict[str, float]]) -> dict[str, float]:
    """For each activation the exponent of width in a power law, fitted by least squares."""
    logs = torch.tensor([[math.log(value) for value in observed.values()] for observed in observations])
    widths = torch.tensor([math.log(width) for width in WIDTHS])
    widths = widths - widths.mean()
    fitted = widths @ logs / widths.square().sum()
    return dict(zip(observations[0], fitted.tolist(), strict=True))


def check(
    make_config: MakeConfig,
    *,
    head_dim: int | None,
    mup_base_width: int | None,
    kind: OptimizerKind = OptimizerKind.adamw,
) -> list[dict[str, float]]:
    """Slopes of scale and change over all widths, with heads of `head_dim` or, when None, with 4 heads."""
    observations = []
    for width in WIDTHS:
        num_heads = width // head_dim if head_dim else 4
        cfg = make_config(
            dim=width,
            num_heads=num_heads,
            num_kv_heads=num_heads // 2,
            ffn_dim=2 * width,
            init_std=0.1,
            loss_chunk_tokens=64,
            mup_base_width=mup_base_width,
        )
        observations.append(train(cfg, kind))
    return [slopes(list(series)) for series in zip(*observations, strict=True)]


@pytest.mark.parametrize("kind", OptimizerKind)
@pytest.mark.parametrize("head_dim", [16, None])
def test_mup_is_flat_over_width(make_config: MakeConfig, head_dim: int | None, kind: OptimizerKind) -> None:
    scale, change = check(make_config, head_dim=head_dim, mup_base_width=WIDTHS[0], kind=kind)
    assert all(abs(slope) < 0.2 for slope in scale.values()), scale
    assert all(abs(slope) < 0.2 for slope in change.values()), change


@pytest.mark.parametrize("head_dim", [16, None])
def test_standard_parametrization_is_not_flat(make_config: MakeConfig, head_dim: int | None) -> None:
    """Only the embedding moves equally at every width: its updates do not pass through a matrix."""
    scale, change = check(make_config, head_dim=head_dim, mup_base_width=None)
    del scale["embedding"], change["embedding"]
    assert all(slope > 0.5 for slope in scale.values()), scale
    assert all(slope > 0.5 for slope in change.values()), change
