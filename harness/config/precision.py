"""Config section `precision`: the number format of the matmuls, loss scaling, fp8 recipe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from harness.config.errors import require

FP8_SIDE = 16
"""What every side of a product in fp8 is a multiple of."""


class PrecisionKind(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class Fp8Recipe(StrEnum):
    current = "current"
    """A scale for each tensor, from the tensor itself: no state, nothing to roll back."""
    delayed = "delayed"
    """A scale for each tensor, from its largest numbers in the last steps: nothing is rounded twice, and a memory."""
    block = "block"
    """A scale for every 128 numbers of an activation or gradient, and for every 128 x 128 of a weight."""


class Fp8Engine(StrEnum):
    transformer_engine = "transformer_engine"
    emulated = "emulated"
    """The same rounding in plain torch, on any device: for rehearsals, not for speed."""


@dataclass(slots=True, kw_only=True)
class Fp8Config:
    """Which products of a run in fp8 are taken in fp8, and how; all others are bf16."""

    recipe: Fp8Recipe
    """Where the scales come from."""
    engine: Fp8Engine
    attention: bool
    """Whether the projections of attention are among them."""
    mlp: bool
    keep_first_blocks: int
    """So many blocks at the beginning stay bf16."""
    keep_last_blocks: int
    """So many blocks at the end stay bf16."""
    history_steps: int
    """delayed only: steps whose largest numbers make the scale."""

    def __post_init__(self) -> None:
        for name in ("keep_first_blocks", "keep_last_blocks"):
            require(getattr(self, name) >= 0, f"precision.fp8.{name}", f"must be 0 or more, got {getattr(self, name)}")
        require(self.history_steps >= 1, "precision.fp8.history_steps", f"must be at least 1, got {self.history_steps}")
        some = self.attention or self.mlp
        require(some, "precision.fp8.mlp", "must be true where precision.fp8.attention is false: nothing would be fp8")


@dataclass(slots=True, kw_only=True)
class PrecisionConfig:
    kind: PrecisionKind
    """What matrices are multiplied in; master weights, moments and gradient reduction stay fp32."""
    fp8: Fp8Config
    initial_loss_scale: float
    """fp16 only."""
    loss_scale_growth_interval: int
    """fp16 only: clean steps after which the loss scale doubles; an overflow halves it at once."""

    def __post_init__(self) -> None:
        scale, interval = self.initial_loss_scale, self.loss_scale_growth_interval
        require(scale > 0, "precision.initial_loss_scale", f"must be positive, got {scale}")
        require(interval >= 1, "precision.loss_scale_growth_interval", f"must be at least 1, got {interval}")
