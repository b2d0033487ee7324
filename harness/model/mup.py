"""The parameter table: init std, learning-rate multiplier and weight decay of every parameter, with or without muP.

Why: init and optimizer must agree on the role of each parameter; muP is correct only if both follow it exactly.
How: a parameter's name gives its role, and the config gives each role its treatment. Under muP, with m = dim /
mup_base_width, matrices inside the blocks have 1/sqrt(m) of the base width's init std and 1/m of its learning rate,
attention logits are divided by head_dim instead of its square root, and output logits by m; the embedding is unchanged.
AdamW multiplies weight decay by the learning rate, so where the learning rate is divided by m, the decay is multiplied
by m.
Muon's updates of matrices have one root mean square for all shapes (`optim.muon.update_rms`), and all their singular
values are about equal, so their spectral norm grows with sqrt(m). muP keeps the spectral norm: the learning rate is
divided by sqrt(m), not by m, and the decay is multiplied by sqrt(m).
Left out: transfer over depth, batch size or training length; a ffn_dim that does not grow in proportion to dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from harness.config.model import InitKind, ModelConfig
from harness.config.optim import OptimizerKind


class ParameterRole(StrEnum):
    """What a parameter does in the model."""

    embedding = "embedding"
    norm = "norm"
    hidden = "hidden"
    """Matrices that read the residual stream."""
    residual = "residual"
    """Matrices that write into it."""
    head = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """How init and optimizer treat the parameters of one role."""

    init_std: float | None
    """Standard deviation of the initial values; None: all ones."""
    lr_multiplier: float
    """Times optim.lr."""
    decay: bool
    decay_multiplier: float
    """Times optim.weight_decay."""
    optimizer: OptimizerKind = OptimizerKind.adamw


def role_of(parameter_name: str) -> ParameterRole:
    """The role of a parameter of `Transformer`, by its full name."""
    module = parameter_name.split(".")[-2]
    match module:
        case "embedding":
            return ParameterRole.embedding
        case "query" | "key" | "value" | "gate" | "up":
            return ParameterRole.hidden
        case "output" | "down":
            return ParameterRole.residual
        case "head":
            return ParameterRole.head
        case "norm" | "embedding_norm" | "attention_norm" | "mlp_norm" | "query_norm" | "key_norm":
            return ParameterRole.norm
        case _:
            raise ValueError(f"{parameter_name}: a parameter of module {module!r} has no role")


def parameter_table(
    cfg: ModelConfig, *, decay_embeddings: bool, matrix_optimizer: OptimizerKind = OptimizerKind.adamw
) -> dict[ParameterRole, Treatment]:
    """The treatment of each role. A tied head has the embedding's parameter and treatment.

    `matrix_optimizer`: that of the matrices inside the blocks.
    """
    width = width_multiplier(cfg)
    base_std = _base_std(cfg)
    matrix_std = base_std / math.sqrt(width)
    depth = math.sqrt(2 * cfg.num_layers) if cfg.depth_scaled_init else 1.0

    def inside(init_std: float) -> Treatment:
        divisor = math.sqrt(width) if matrix_optimizer is OptimizerKind.muon else width
        return Treatment(
            init_std=init_std,
            lr_multiplier=1 / divisor,
            decay=True,
            decay_multiplier=divisor,
            optimizer=matrix_optimizer,
        )

    def outside(init_std: float | None, *, decay: bool) -> Treatment:
        return Treatment(init_std=init_std, lr_multiplier=1.0, decay=decay, decay_multiplier=1.0)

    return {
        ParameterRole.embedding: outside(base_std, decay=decay_embeddings),
        ParameterRole.norm: outside(None, decay=False),
        ParameterRole.hidden: inside(matrix_std),
        ParameterRole.residual: inside(matrix_std / depth),
        ParameterRole.head: outside(base_std, decay=decay_embeddings if cfg.tied_head else True),
    }


def width_multiplier(cfg: ModelConfig) -> float:
    """dim / mup_base_width; 1 in standard parametrization."""
    return 1.0 if cfg.mup_base_width is None else cfg.dim / cfg.mup_base_width


def output_multiplier(cfg: ModelConfig) -> float:
    """Factor on the output logits."""
    return 1 / width_multiplier(cfg)


def attention_scale(cfg: ModelConfig) -> float:
    """Factor on the attention logits."""
    return 1 / math.sqrt(cfg.head_dim) if cfg.mup_base_width is None else 1 / cfg.head_dim


def _base_std(cfg: ModelConfig) -> float:
    match cfg.init:
        case InitKind.fixed:
            return cfg.init_std
        case InitKind.hidden:
            return math.sqrt(1 / (3 * (cfg.mup_base_width or cfg.dim)))
