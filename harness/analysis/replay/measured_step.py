"""What a replay measures of the guilty step and the run did not: activations, token losses, probed norms.

Why: a run probes few of its steps, and the guilty one is rarely among them. Its state and its batch are still there, so
a replay can probe it afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from harness.analysis.replay.verdict import LOSS_TOLERANCE, Reproducibility, agree_within
from harness.core.event_json import parse_numbers
from harness.core.events import StepRecord

EMBEDDING = "embedding"
OF_FORWARD = ("activation_rms", "token_loss_counts")
OF_STATE = (
    *("param_norm", "group_param_norms", "v_norm", "beta2", "update_ratio", "square_ratio"),
    *("fp8", "fp8_underflow"),
)
"""Fields of a step record that only a probed step has: of its forward pass, and of weights, moments and gradients."""


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
    """Fields of the step record, as in `OF_FORWARD` and `OF_STATE`."""


def probed_fields(record: StepRecord, activations: list[ActivationRange]) -> dict[str, Any]:
    """The probed fields of a record, with the embedding's output before the layers."""
    fields = {name: getattr(record, name) for name in OF_FORWARD + OF_STATE}
    embedding = {point.point: point.rms for point in activations if point.point == EMBEDDING}
    return fields | {"activation_rms": embedding | record.activation_rms}


def add_measurements(records: list[StepRecord], replayed: dict[str, Any]) -> None:
    """Fill the probed fields of the replayed step, if the run did not probe it and the replay computed the same.

    The forward pass is the same if the loss is. Weights, moments and gradients are the same only if the whole step was
    reproduced: a fault that struck once is not in the replay.
    """
    if not replayed.get("measured") or not _has_same_loss(replayed):
        return
    names = OF_FORWARD + (OF_STATE if replayed["nature"] == Reproducibility.deterministic else ())
    for record in records:
        if record.iteration == replayed["iteration"] and not record.token_loss_counts:
            for name, value in replayed["measured"]["probed"].items():
                if name in names and value not in (None, {}, []):
                    setattr(record, name, parse_numbers(value))


def _has_same_loss(replayed: dict[str, Any]) -> bool:
    logged, again = (float(replayed[name]["loss"]) for name in ("logged", "first"))
    return replayed["left_the_log_at"] is None and agree_within(logged, again, LOSS_TOLERANCE)
