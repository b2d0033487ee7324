"""Vocabulary of the rules: causes of an incident, panels that are cited, and the result of a rule."""

from __future__ import annotations

from collections.abc import Sequence
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


KNOWN = 0.5
"""Score from which the first hypothesis is reported as the root cause."""
RULED_OUT = 0.2
"""Score up to which evidence against a cause rules it out."""


class Cause(StrEnum):
    planned_change = "planned change of data"
    corrupted_rank = "corrupted rank"
    destructive_update = "destructive update"
    fp16_overflow = "fp16 overflow"
    fp8_range = "fp8 range"
    numerical_cascade = "numerical cascade"
    optimizer_reset = "optimizer reset"
    lr_discontinuity = "LR discontinuity"
    beta2_stale = "beta2 stale"
    long_tail_token = "long-tail token"
    scrambled_data = "scrambled or corrupted data"
    data_duplicate = "data duplicate"
    other_data = "other data"
    structural = "structural"
    lr_too_high = "LR too high"


class CauseStatus(StrEnum):
    """What the evidence says about a cause."""

    likely = "likely"
    possible = "possible"
    ruled_out = "ruled out"
    not_examined = "not examined"


class Reason(NamedTuple):
    """One sentence with its numbers, and the panel that shows them."""

    text: str
    panel: Panel | None
    """None: the configuration shows it."""


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
    details: tuple[Reason, ...] = ()
    """Further evidence for the cause, each with its own panel."""
    missing: Reason | None = None
    """What would have to be measured to judge the cause; None: it was judged."""

    @property
    def status(self) -> CauseStatus:
        if self.missing is not None:
            return CauseStatus.not_examined
        if self.score >= KNOWN:
            return CauseStatus.likely
        return CauseStatus.ruled_out if self.against is not None and self.score <= RULED_OUT else CauseStatus.possible

    @property
    def reason(self) -> Reason:
        """The evidence that the status rests on."""
        against_first = self.missing, self.against, self.support
        found = against_first if self.status is CauseStatus.ruled_out else (self.missing, self.support, self.against)
        return next(reason for reason in found if reason is not None)


def rate_cause(
    cause: Cause,
    score: float,
    support: Reason | None,
    against: Reason | None = None,
    *,
    details: Sequence[Reason] = (),
) -> RuleResult:
    """The result of a rule that has its evidence, with the score clamped to [0, 1]."""
    score = round(min(max(score, 0.0), 1.0), 3)
    return RuleResult(cause=cause, score=score, support=support, against=against, details=tuple(details))


def leave_unexamined(cause: Cause, missing: str, panel: Panel | None) -> RuleResult:
    """The result of a rule whose evidence was not recorded. It counts neither for nor against the cause."""
    return RuleResult(cause=cause, score=0.0, support=None, against=None, missing=Reason(missing, panel))
