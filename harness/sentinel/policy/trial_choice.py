"""Trials of remedies: which ones are tried after a restore, and which one is best.

Why: the ladder chooses by what usually helps. After a restore it is cheap to find out what helps this time: the state
is in memory, and so are the next batches.
How: a trial starts `LEAD_STEPS` before the place where the incident began, on the way back to it. The first candidate
changes nothing; it is what the run does without a trial. If it passes the place in good health, nothing else is tried
and its steps are kept, so such a trial costs two measurements of the held-out loss. Otherwise every candidate trains on
the same batches from the same state. The lowest held-out loss wins, and of several within `TIE` of it the least
intrusive one.
A healthy first candidate is not compared with the others, because a lower learning rate reduces the loss for some steps
whatever the state: like the end of a schedule it removes noise, and would win where nothing is wrong.
Left out: incidents whose cause a restore removes for good, such as a flipped bit or lost moments; QK-clip, which a
`precursor` of growing attention logits brings without a trial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self, final

from harness.core.events import FindingKind, TrialMeasured

LEAD_STEPS = 2
"""Steps before the onset of the incident at which a trial starts; the batch before the onset is blamed too."""
TIE = 0.01
"""Share of the held-out loss: losses that differ by less are equal, and one up to this above the start is healthy."""
GRAD_RISE = 3.0
"""A gradient norm that grew by more than this factor within a trial is unhealthy."""
DAMAGE = frozenset(
    {
        FindingKind.nonfinite,
        FindingKind.loss_spike,
        FindingKind.grad_spike,
        FindingKind.divergence,
        FindingKind.level_shift,
        FindingKind.scale_collapse,
        FindingKind.fp8_range,
    }
)
"""Findings on applied updates that show that a candidate fails."""
CURED_BY_RESTORE = frozenset(
    {
        FindingKind.optimizer_reset,
        FindingKind.weights_changed,
        FindingKind.corruption,
        FindingKind.corrupting_rank,
        FindingKind.replica_mismatch,
    }
)
"""Findings whose cause a restore removes; no remedy is tried."""


class TrialKind(StrEnum):
    """What a candidate changes, from the least to the most intrusive one."""

    unchanged = "unchanged"
    """Continue as the ladder chose."""
    wider = "wider"
    """Exclude further batches behind the excluded ones."""
    lower_lr = "lower_lr"
    """Lower the learning rate."""
    bf16 = "bf16"
    """Compute in bf16 instead of fp8."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCandidate:
    remedy: TrialKind
    lr_scale: float | None = None
    """lower_lr: the factor of the policy on the learning rate."""
    exclude: list[int] = field(default_factory=list)
    """wider: first and last batch index to exclude."""

    def as_dict(self) -> dict[str, Any]:
        """As it is logged, without the fields that it does not need."""
        return {name: value for name, value in asdict(self).items() if value not in (None, [])}

    @classmethod
    def parse(cls, logged: dict[str, Any]) -> Self:
        return cls(**(logged | {"remedy": TrialKind(logged["remedy"])}))


@final
@dataclass(slots=True, kw_only=True)
class OpenTrial:
    """A trial that was chosen and has no outcome yet."""

    incident: int
    candidates: list[dict[str, Any]]
    results: list[dict[str, Any]] = field(default_factory=list)

    def add(self, result: TrialMeasured) -> None:
        self.results.append({name: value for name, value in asdict(result).items() if name not in ("time", "seconds")})

    @property
    def winner(self) -> TrialCandidate:
        """The candidate to continue with; the first one if none was measured."""
        measured = [TrialMeasured(time=0.0, seconds=0.0, **result) for result in self.results]
        return TrialCandidate.parse(self.candidates[choose_candidate(measured)])


def is_healthy(result: TrialMeasured) -> bool:
    """Whether a candidate passed the place: no damage, neither in the held-out loss nor in the gradients."""
    if result.findings or 2 * result.num_refused > result.steps:
        return False
    has_risen = not result.held_out_loss <= result.held_out_before * (1 + TIE)
    return not has_risen and result.grad_norm <= GRAD_RISE * result.grad_norm_before


def choose_candidate(results: Sequence[TrialMeasured]) -> int:
    """The index of the best candidate; 0 without results."""
    if not results or is_healthy(results[0]):
        return 0
    losses = [result.held_out_loss if math.isfinite(result.held_out_loss) else math.inf for result in results]
    healthy = [index for index, result in enumerate(results) if is_healthy(result)]
    eligible = healthy or list(range(len(results)))
    limit = min(losses[index] for index in eligible) * (1 + TIE)
    return next(index for index in eligible if losses[index] <= limit)


def is_decided(results: Sequence[TrialMeasured]) -> bool:
    """Whether further candidates cannot change the choice: the first one is healthy."""
    return bool(results) and is_healthy(results[0])
