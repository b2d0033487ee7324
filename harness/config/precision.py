"""Config section `precision`: the number format of the matmuls, loss scaling, fp8 recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from harness.config.errors import require

FP8_SIDE = 16
"""Every dimension of an fp8 GEMM is a multiple of this."""
LOSS_SCALES = (1.0, 2.0**64)
"""Range of the first loss scale. The sentinel treats a scale below 1 as collapsed. It treats more than 64 overflows in
a row as damage, and 64 halvings bring the largest of these scales to 1."""


class PrecisionKind(StrEnum):
    """Number format of the matmuls."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class Fp8Recipe(StrEnum):
    """How the quantization scales are computed."""

    current = "current"
    """One scale per tensor, from its own amax: no state, nothing to roll back."""
    delayed = "delayed"
    """One scale per tensor, from its amax in the last steps: one pass over the tensor, but the history is state."""
    block = "block"
    """One scale per 128 values of an activation or gradient, and per 128 x 128 values of a weight."""


class Fp8Engine(StrEnum):
    """Implementation of the fp8 GEMMs."""

    transformer_engine = "transformer_engine"
    emulated = "emulated"
    """The same rounding in plain torch, on any device: for tests and drills, not for speed."""


@dataclass(slots=True, kw_only=True)
class Fp8Config:
    """Which GEMMs use fp8 with precision=fp8, and how; all others use bf16."""

    recipe: Fp8Recipe
    """How the scales are computed."""
    engine: Fp8Engine
    """Implementation of the fp8 GEMMs."""
    attention: bool
    """Use fp8 for the projections of attention."""
    mlp: bool
    """Use fp8 for the projections of the MLP."""
    keep_first_blocks: int
    """Number of first blocks that stay bf16."""
    keep_last_blocks: int
    """Number of last blocks that stay bf16."""
    history_steps: int
    """delayed only: number of last steps whose amax determines the scale."""

    def __post_init__(self) -> None:
        for name in ("keep_first_blocks", "keep_last_blocks"):
            require(getattr(self, name) >= 0, f"precision.fp8.{name}", f"must be 0 or more, got {getattr(self, name)}")
        require(self.history_steps >= 1, "precision.fp8.history_steps", f"must be at least 1, got {self.history_steps}")
        uses_fp8 = self.attention or self.mlp
        require(uses_fp8, "precision.fp8.mlp", "must be true if precision.fp8.attention is false, or nothing is fp8")


@dataclass(slots=True, kw_only=True)
class PrecisionPhase:
    """A planned change of the precision of an fp8 run."""

    from_batch: int = 0
    """The first batch index of the phase."""
    from_fraction: float | None = None
    """The same as a fraction of train.num_steps, above 0 and below 1; if set, it replaces from_batch."""
    kind: PrecisionKind
    """bf16 and fp8 in turns; fp32 and fp16 are rejected."""


@dataclass(slots=True, kw_only=True)
class PrecisionConfig:
    """Number formats and loss scaling."""

    kind: PrecisionKind
    """Number format of the matmuls; master weights and gradient reduction stay fp32, and AdamW's moments have
    optim.moment_dtype."""
    fp8: Fp8Config
    initial_loss_scale: float
    """fp16 only: loss scale of the first step, 1 to 2**64, also of the first in fp16 after another precision."""
    loss_scale_growth_interval: int
    """fp16 only: clean steps after which the loss scale doubles; an overflow halves it at once."""
    phases: list[PrecisionPhase] = field(default_factory=list)
    """fp8 only: planned changes between fp8 and bf16, in order of batch index: {from_batch or from_fraction, kind}; the
    run starts in fp8. {from_fraction: 0.9, kind: bf16}: bf16 for the last tenth of the run."""

    def __post_init__(self) -> None:
        scale, interval = self.initial_loss_scale, self.loss_scale_growth_interval
        least, most = LOSS_SCALES
        message = f"must be from {least:g} to 2**64 ({most:.3g}), got {scale}: "
        message += "the sentinel halts a run with a scale below 1 or with more than 64 overflows in a row"
        require(least <= scale <= most, "precision.initial_loss_scale", message)
        require(interval >= 1, "precision.loss_scale_growth_interval", f"must be at least 1, got {interval}")
        message = f"must be empty with precision={self.kind}: only a run in fp8 changes its precision"
        require(not self.phases or self.kind is PrecisionKind.fp8, "precision.phases", message)

    def resolve_phases(self, num_steps: int) -> None:
        """Compute the first batch of each phase that is given as a fraction of the run, and check their order."""
        earlier, kind = 0, self.kind
        for number, phase in enumerate(self.phases):
            key, fraction = f"precision.phases[{number}]", phase.from_fraction
            key_of_start = f"{key}.from_batch"
            if fraction is not None:
                message = f"must be above 0 and below 1, got {fraction}"
                require(0 < fraction < 1, f"{key}.from_fraction", message)
                phase.from_batch = round(fraction * num_steps)
            message = f"must be above {earlier}, the start of the phase before, got {phase.from_batch}"
            if fraction is not None:
                key_of_start = f"{key}.from_fraction"
                message = f"must give a batch above {earlier}, the start of the phase before; {fraction} of "
                message += f"train.num_steps={num_steps} gives {phase.from_batch}"
            require(phase.from_batch > earlier, key_of_start, message)
            valid = phase.kind in (PrecisionKind.bf16, PrecisionKind.fp8) and phase.kind is not kind
            other = PrecisionKind.bf16 if kind is PrecisionKind.fp8 else PrecisionKind.fp8
            message = f"must be {other}, because the phase before is in {kind}, got {phase.kind}"
            require(valid, f"{key}.kind", message)
            earlier, kind = phase.from_batch, phase.kind

    def kind_at(self, batch: int) -> PrecisionKind:
        """The planned precision of a batch."""
        return next((phase.kind for phase in reversed(self.phases) if phase.from_batch <= batch), self.kind)
