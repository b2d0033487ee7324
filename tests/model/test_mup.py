"""The parameter table, entry by entry."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from harness.config.model import InitKind, ModelConfig
from harness.config.optim import OptimizerKind
from harness.model.mup import ParameterRole, Treatment, attention_scale, output_multiplier, parameter_table, role_of
from harness.model.transformer import Transformer
from harness.precision.mixed_precision import linear

MakeConfig = Callable[..., ModelConfig]


def test_every_parameter_has_a_role(make_config: MakeConfig) -> None:
    cfg = make_config(num_layers=1, qk_norm=True, embedding_norm=True)
    with torch.device("meta"):
        model = Transformer(cfg, sequence_length=4, linear=linear)
    roles: dict[ParameterRole, set[str]] = {role: set() for role in ParameterRole}
    for name, _ in model.named_parameters():
        roles[role_of(name)].add(name.removeprefix("blocks.0.").removesuffix(".weight"))
    assert roles == {
        ParameterRole.embedding: {"embedding"},
        ParameterRole.norm: {
            "embedding_norm",
            "attention_norm",
            "mlp_norm",
            "norm",
            "attention.query_norm",
            "attention.key_norm",
        },
        ParameterRole.hidden: {"attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"},
        ParameterRole.residual: {"attention.output", "mlp.down"},
        ParameterRole.head: {"head"},
    }


def test_an_unknown_parameter_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"blocks\.0\.router\.weight"):
        role_of("blocks.0.router.weight")


def test_standard_parametrization(make_config: MakeConfig) -> None:
    cfg = make_config(init_std=0.02, depth_scaled_init=True, num_layers=8)
    table = parameter_table(cfg, decay_embeddings=False)

    def plain(init_std: float | None, *, decay: bool) -> Treatment:
        return Treatment(init_std=init_std, lr_multiplier=1.0, decay=decay, decay_multiplier=1.0)

    assert table == {
        ParameterRole.embedding: plain(0.02, decay=False),
        ParameterRole.norm: plain(None, decay=False),
        ParameterRole.hidden: plain(0.02, decay=True),
        ParameterRole.residual: plain(0.005, decay=True),
        ParameterRole.head: plain(0.02, decay=True),
    }
    assert output_multiplier(cfg) == 1
    assert attention_scale(cfg) == 1 / math.sqrt(cfg.head_dim)


def test_mup_at_four_times_the_base_width(make_config: MakeConfig) -> None:
    cfg = make_config(dim=256, mup_base_width=64, init_std=0.02, depth_scaled_init=False)
    table = parameter_table(cfg, decay_embeddings=True)
    matrix = Treatment(init_std=0.01, lr_multiplier=0.25, decay=True, decay_multiplier=4.0)
    vector = Treatment(init_std=0.02, lr_multiplier=1.0, decay=True, decay_multiplier=1.0)
    assert table[ParameterRole.hidden] == table[ParameterRole.residual] == matrix
    assert table[ParameterRole.embedding] == table[ParameterRole.head] == vector
    assert table[ParameterRole.norm] == Treatment(init_std=None, lr_multiplier=1.0, decay=False, decay_multiplier=1.0)
    assert output_multiplier(cfg) == 0.25
    assert attention_scale(cfg) == 1 / cfg.head_dim


def test_muon_keeps_the_spectral_norm_of_updates_under_mup(make_config: MakeConfig) -> None:
    """An update at 4 times the width has 2 times the spectral norm at the same learning rate."""
    cfg = make_config(dim=256, mup_base_width=64, init_std=0.02, depth_scaled_init=False)
    muon = parameter_table(cfg, decay_embeddings=True, matrix_optimizer=OptimizerKind.muon)
    adamw = parameter_table(cfg, decay_embeddings=True)
    matrix = muon[ParameterRole.hidden]
    assert matrix == muon[ParameterRole.residual]
    assert (matrix.lr_multiplier, matrix.decay_multiplier, matrix.init_std) == (0.5, 2.0, 0.01)
    assert matrix.optimizer is OptimizerKind.muon
    for role in (ParameterRole.embedding, ParameterRole.head, ParameterRole.norm):
        assert muon[role] == adamw[role]
        assert muon[role].optimizer is OptimizerKind.adamw


def test_hidden_init_depends_on_the_base_width_under_mup(make_config: MakeConfig) -> None:
    changes = {"init": InitKind.hidden, "depth_scaled_init": False, "dim": 256}
    standard = parameter_table(make_config(**changes), decay_embeddings=False)
    assert (
        standard[ParameterRole.embedding].init_std
        == standard[ParameterRole.hidden].init_std
        == math.sqrt(1 / (3 * 256))
    )
    mup = parameter_table(make_config(**changes, mup_base_width=64), decay_embeddings=False)
    assert mup[ParameterRole.hidden].init_std == pytest.approx(math.sqrt(1 / (3 * 256)))
    assert mup[ParameterRole.embedding].init_std == mup[ParameterRole.head].init_std == math.sqrt(1 / (3 * 64))


@pytest.mark.parametrize(
    ("tied", "decay_embeddings", "expected"),
    [(False, False, True), (False, True, True), (True, False, False), (True, True, True)],
)
def test_the_head_is_decayed_unless_it_is_an_undecayed_embedding(
    make_config: MakeConfig, tied: bool, decay_embeddings: bool, expected: bool
) -> None:
    table = parameter_table(make_config(tied_head=tied), decay_embeddings=decay_embeddings)
    assert table[ParameterRole.head].decay is expected
    assert table[ParameterRole.embedding].decay is decay_embeddings
