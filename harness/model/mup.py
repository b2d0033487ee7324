"""One table that says how every parameter is treated: its first values, its learning rate, its decay.

Why: init and optimizer must agree on which parameter is what, and muP is only right when both follow it to the letter.
How: a parameter's name gives its role, the configuration gives each role its treatment. Under muP, with m = dim /
mup_base_width, matrices inside the blocks start at 1/sqrt(m) of the base width's spread and learn at 1/m of its rate,
attention logits are divided by head_dim instead of its root, and output logits by m; what reads tokens stays as it is.
Weight decay is multiplied by the learning rate in AdamW, so where the rate falls by m the decay rises by m.
Left out: transfer over depth, batch size or training length; a ffn_dim that does not grow in proportion to dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from harness.config.model import InitKind, ModelConfig


class Role(StrEnum):
    embedding = "embedding"
    norm = "norm"
    hidden = "hidden"
    """Matrices that read the residual stream."""
    residual = "residual"
    """Matrices that write into it."""
    head = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    init_std: float | None
    """Spread of the normal distribution that first values are drawn from; None: they are all one."""
    lr_multiplier: float
    """Times optim.lr."""
    decay: bool
    decay_multiplier: float
    """Times optim.weight_decay."""


def role_of(parameter_name: str) -> Role:
    """The role of a parameter of `Transformer`, by its full name."""
    module = parameter_name.split(".")[-2]
    match module:
        case "embedding":
            return Role.embedding
        case "query" | "key" | "value" | "gate" | "up":
            return Role.hidden
        case "output" | "down":
            return Role.residual
        case "head":
            return Role.head
        case "norm" | "embedding_norm" | "attention_norm" | "mlp_norm" | "query_norm" | "key_norm":
            return Role.norm
        case _:
            raise ValueError(f"{parameter_name}: no role is known for a parameter of {module!r}")


def parameter_table(cfg: ModelConfig, *, decay_embeddings: bool) -> dict[Role, Treatment]:
    """How the parameters of each role are treated. A tied head has the embedding's parameter and treatment."""
    width = width_multiplier(cfg)
    base_std = _base_std(cfg)
    matrix_std = base_std / math.sqrt(width)
    depth = math.sqrt(2 * cfg.num_layers) if cfg.depth_scaled_init else 1.0

    def inside(init_std: float) -> Treatment:
        return Treatment(init_std=init_std, lr_multiplier=1 / width, decay=True, decay_multiplier=width)

    def outside(init_std: float | None, *, decay: bool) -> Treatment:
        return Treatment(init_std=init_std, lr_multiplier=1.0, decay=decay, decay_multiplier=1.0)

    return {
        Role.embedding: outside(base_std, decay=decay_embeddings),
        Role.norm: outside(None, decay=False),
        Role.hidden: inside(matrix_std),
        Role.residual: inside(matrix_std / depth),
        Role.head: outside(base_std, decay=decay_embeddings if cfg.tied_head else True),
    }


def width_multiplier(cfg: ModelConfig) -> float:
    """How much wider the model is than the one its options were tuned at; 1 in standard parametrization."""
    return 1.0 if cfg.mup_base_width is None else cfg.dim / cfg.mup_base_width


def output_multiplier(cfg: ModelConfig) -> float:
    """What logits are multiplied with."""
    return 1 / width_multiplier(cfg)


def attention_scale(cfg: ModelConfig) -> float:
    """What products of queries and keys are multiplied with."""
    return 1 / math.sqrt(cfg.head_dim) if cfg.mup_base_width is None else 1 / cfg.head_dim


def _base_std(cfg: ModelConfig) -> float:
    match cfg.init:
        case InitKind.fixed:
            return cfg.init_std
        case InitKind.hidden:
            return math.sqrt(1 / (3 * (cfg.mup_base_width or cfg.dim)))
