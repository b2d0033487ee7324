"""What a replay measures of the guilty step and the run did not: activations, token losses, probed norms.

Why: a run probes few of its steps, and the guilty one is rarely among them. Its state and its batch are still there, so
a replay can probe it afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from harness.core.events import StepRecord, parse_numbers

EMBEDDING = "embedding"
PROBED = (
    *("activation_rms", "token_loss_counts", "param_norm", "group_param_norms", "v_norm", "beta2"),
    *("update_ratio", "square_ratio", "fp8", "fp8_underflow"),
)
"""Fields of a step record that only a probed step has."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRange:
    """Size of the values at one point of the forward pass, over the whole batch."""

    point: str
    """Module, or the residual stream after a block."""
    rms: float
    amax: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A token that was hard to predict."""

    row: int
    """Row of the global batch."""
    position: int
    token: int
    loss: float
    """In nats."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    activations: list[ActivationRange] = field(default_factory=list)
    worst_tokens: list[TokenLoss] = field(default_factory=list)
    """The tokens with the highest losses, highest first; NaN counts as highest."""
    probed: dict[str, Any] = field(default_factory=dict)
    """Fields of the step record, as in `PROBED`."""


def probed_fields(record: StepRecord, activations: list[ActivationRange]) -> dict[str, Any]:
    """The probed fields of a record, with the embedding's output before the layers."""
    fields = {name: getattr(record, name) for name in PROBED}
    embedding = {point.point: point.rms for point in activations if point.point == EMBEDDING}
    return fields | {"activation_rms": embedding | record.activation_rms}


def add_measurements(records: list[StepRecord], replayed: dict[str, Any]) -> None:
    """Fill the probed fields of the replayed step, if the run did not probe it and the replay followed the log."""
    measured = replayed.get("measured") or {}
    if replayed.get("left_the_log_at") is not None:
        return
    for record in records:
        if record.iteration == replayed.get("iteration") and not record.token_loss_counts:
            for name, value in measured.get("probed", {}).items():
                if name in PROBED and value not in (None, {}, []):
                    setattr(record, name, parse_numbers(value))
