"""Vocabulary of the rules: causes of an incident, panels that are cited, and the result of a rule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple, final


class Panel(IntEnum):
    """Pictures of an incident, by number."""

    loss = 1
    rate = 2
    gradient = 3
    activations = 4
    moments = 5
    weights = 6
    token_losses = 7
    tokens = 8
    ranks = 9
    scale = 10
    throughput = 11


class Cause(StrEnum):
    corrupted_rank = "corrupted rank"
    fp16_overflow = "fp16 overflow"
    fp8_range = "fp8 range"
    optimizer_reset = "optimizer reset"
    lr_discontinuity = "LR discontinuity"
    beta2_stale = "beta2 stale"
    long_tail_token = "long-tail token"
    scrambled_data = "scrambled or corrupted data"
    data_duplicate = "data duplicate"
    other_data = "other data"
    structural = "structural"
    lr_too_high = "LR too high"


class Reason(NamedTuple):
    """One sentence with its numbers, and the panel that shows them."""

    text: str
    panel: Panel


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """How well one cause fits the evidence."""

    cause: Cause
    score: float
    """From 0 (ruled out) to 1 (observed directly)."""
    support: Reason | None
    """Evidence for the cause; None: there is none."""
    against: Reason | None
    """Evidence against the cause; None: there is none."""


def rate_cause(cause: Cause, score: float, support: Reason | None, against: Reason | None = None) -> RuleResult:
    """The result of a rule, with the score clamped to [0, 1]."""
    return RuleResult(cause=cause, score=round(min(max(score, 0.0), 1.0), 3), support=support, against=against)
