"""Config section `optim`: AdamW or Muon, gradient clipping and the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from harness.config.errors import require, require_positive_fp32

MAX_ITERATIONS = 20
"""More Newton-Schulz iterations change nothing."""
SCHEDULE_KEYS = ("optim.lr", "train.num_steps", "optim.schedule", "optim.warmup_steps", "optim.decay_steps",
                 "optim.min_lr_fraction")  # fmt: skip
"""Config keys that the learning rate of a step depends on, those first that a person means by it."""


class OptimizerKind(StrEnum):
    """The optimizer of the matrices in the blocks."""

    adamw = "adamw"
    muon = "muon"


class MomentDtype(StrEnum):
    """Number format of AdamW's moments."""

    fp32 = "fp32"
    bf16 = "bf16"
    """Half the memory and half the traffic; rounded stochastically, so that small changes are not lost."""


class ScheduleKind(StrEnum):
    """Shape of the learning-rate schedule after the warm-up."""

    cosine = "cosine"
    wsd = "wsd"
    linear = "linear"
    constant = "constant"
    inverse_sqrt = "inverse_sqrt"


@dataclass(slots=True, kw_only=True)
class MuonConfig:
    """Muon; without effect if optim.kind is adamw."""

    momentum: float = 0.95
    """Decay of the momentum per step, 0 to 1."""
    nesterov: bool = True
    """Orthogonalize the momentum after one more step in the direction of the gradient (Nesterov)."""
    iterations: int = 5
    """Newton-Schulz iterations of an update; with 5, singular values end between about 0.7 and 1.2."""
    update_rms: float = 0.2
    """Root mean square of an update at learning rate 1, for every shape: an orthogonal m x n matrix is multiplied by
    update_rms * sqrt(max(m, n)). 0.2 is what AdamW's updates have, so that its lr and weight decay can be kept."""

    def __post_init__(self) -> None:
        valid = 0 <= self.momentum < 1
        require(valid, "optim.muon.momentum", f"must be at least 0 and below 1, got {self.momentum}")
        valid = 1 <= self.iterations <= MAX_ITERATIONS
        require(valid, "optim.muon.iterations", f"must be from 1 to {MAX_ITERATIONS}, got {self.iterations}")
        require_positive_fp32(self.update_rms, "optim.muon.update_rms")


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    """Optimizer, clipping and schedule."""

    kind: OptimizerKind = OptimizerKind.adamw
    """Optimizer of the matrices in the blocks. Embedding, head and norms always have AdamW."""
    lr: float
    """Peak learning rate; with muP, that of the base width."""
    beta1: float
    """Decay of the first moment per step, 0 to 1."""
    beta2: float
    """Decay of the second moment per step, 0 to 1; it averages over about 1 / (1 - beta2) steps."""
    eps: float
    """Added to the root of the second moment, so that no update divides by zero."""
    weight_decay: float
    """Decoupled weight decay of matrices; norms have none."""
    decay_embeddings: bool
    """Also decay the embedding (and the head tied to it)."""
    clip_norm: float | None
    """Maximum global gradient norm; null: no clipping."""
    clip_value: float | None
    """Maximum absolute value of each gradient element; the norm of the result is then clipped to clip_norm. Costs one
    more all-reduce a step. null: no clipping by value."""
    qk_clip: float | None = None
    """Largest attention logit of a head: after an update whose logits exceeded it, query and key weights of the head
    (with QK-norm, the gains of the layer) are scaled down to it. Costs one more all-reduce a step. null: off."""
    schedule: ScheduleKind
    """Shape of the learning rate over the steps after the warm-up."""
    warmup_steps: int
    """Steps of the linear warm-up, which starts at lr / warmup_steps."""
    decay_steps: int
    """Steps of the final decay of schedule wsd; other schedules ignore it."""
    min_lr_fraction: float
    """Final learning rate of cosine, wsd and linear, as a fraction of lr."""
    moment_dtype: MomentDtype = MomentDtype.fp32
    """Number format of AdamW's moments, on the device, in snapshots and in checkpoints. Muon's momentum stays fp32."""
    muon: MuonConfig = field(default_factory=MuonConfig)

    def __post_init__(self) -> None:
        require_positive_fp32(self.lr, "optim.lr")
        for name in ("beta1", "beta2"):
            require(
                0 <= getattr(self, name) < 1,
                f"optim.{name}",
                f"must be at least 0 and below 1, got {getattr(self, name)}",
            )
        require_positive_fp32(self.eps, "optim.eps")
        require(self.weight_decay >= 0, "optim.weight_decay", f"must be 0 or more, got {self.weight_decay}")
        limits = {
            "clip_norm": "for no clipping",
            "clip_value": "for no clipping by value",
            "qk_clip": "for no clipping of logits",
        }
        for name, off in limits.items():
            if (limit := getattr(self, name)) is not None:
                require_positive_fp32(limit, f"optim.{name}", f", or null {off}")
        require(self.warmup_steps >= 0, "optim.warmup_steps", f"must be 0 or more, got {self.warmup_steps}")
        require(self.decay_steps >= 0, "optim.decay_steps", f"must be 0 or more, got {self.decay_steps}")
        require(
            0 <= self.min_lr_fraction <= 1, "optim.min_lr_fraction", f"must be from 0 to 1, got {self.min_lr_fraction}"
        )
