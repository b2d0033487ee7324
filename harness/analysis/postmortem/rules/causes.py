"""The causes that are told apart, the pictures that are cited, and what a rule says of a cause."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple, final


class Panel(IntEnum):
    """The pictures of an incident, by number."""

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
    """One sentence with its numbers, and the picture where they are seen."""

    text: str
    panel: Panel


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    cause: Cause
    score: float
    support: Reason | None
    """What speaks for it; None: nothing."""
    against: Reason | None
    """What speaks against it; None: nothing."""


def ruled(cause: Cause, score: float, support: Reason | None, against: Reason | None = None) -> Judgement:
    return Judgement(cause=cause, score=round(min(max(score, 0.0), 1.0), 3), support=support, against=against)
