"""Maps each finding and each rejected update to its first response.

| finding | by itself | otherwise |
|---|---|---|
| grad_spike, v_stale, rank_outlier, lr_jump | watch: harmless unless damage follows | known cause of what follows |
| weight_drift | watch: a matter of weight decay, for a human | |
| precursor | attention logits: clip them from now on (QK-clip); others: watch | |
| loss_spike | watch | rewind if its cause is known or it does not recover; roll back if it lingers |
| level_shift | watch: new data, accepted in the end | roll back after a known cause, or if it is large |
| nonfinite | rejected: skip; applied: roll back | rejected several times in a row: rewind |
| (rejected for its size) | skip | several times in a row: rewind; if the restored state rejects it too: skip again |
| (rejected after lr_jump) | rewind, blame no batch: the learning rate was wrong | |
| divergence | roll back | |
| optimizer_reset | roll back, blame no batch | watch if there is no state to restore: training rebuilds the moments |
| scale_collapse | roll back, blame no batch, then cool | |
| fp8_range | bf16 for a while, nothing restored | as a known cause: restore, blame no batch, then bf16 |
| weights_changed | rewind, blame no batch | |
| corruption | rejected: skip the batch and consume it again next | not rejected: watch |
| corrupting_rank | rewind before the last clean check, blame no batch | after a restore: halt |
| replica_mismatch, data_mismatch | halt | |
| never_learned | nothing: there is no good state to restore; for humans | |
| slow, speed_recovered, duplicate_batch, corruption_passed | nothing: for humans | |

The held-out loss is checked (`harness.sentinel.policy.held_out_level`) at a loss spike without a known cause, and
before every rewind or rollback of an incident whose numbers are finite, once per restore. It tells damage (the table
applies) from new data (the new level is accepted). `refused_in_row` rejected updates in one incident lead to the same
check, and so does the first one after a planned change.

A record may call for several things, and so do the records in flight at a check or a trial. A restore makes all others
void. Without one, none is lost that no later record calls for again: a rejected batch, bf16, QK-clip.

Left out: facts of a single rank (its clock, its memory, its rows). A `ReducedRecord` does not contain them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, final

from harness.core.events import Action, ActionKind, FindingKind, ReducedRecord
from harness.sentinel.policy.open_incident import CAUSES, Rung

FIRST_RUNG = {
    FindingKind.grad_spike: Rung.watch,
    FindingKind.v_stale: Rung.watch,
    FindingKind.rank_outlier: Rung.watch,
    FindingKind.lr_jump: Rung.watch,
    FindingKind.weight_drift: Rung.watch,
    FindingKind.precursor: Rung.watch,
    FindingKind.loss_spike: Rung.watch,
    FindingKind.level_shift: Rung.watch,
    FindingKind.nonfinite: Rung.rollback,
    FindingKind.divergence: Rung.rollback,
    FindingKind.optimizer_reset: Rung.rollback,
    FindingKind.scale_collapse: Rung.rollback,
    FindingKind.weights_changed: Rung.rewind,
    FindingKind.corruption: Rung.watch,
    FindingKind.corrupting_rank: Rung.rewind,
    FindingKind.replica_mismatch: Rung.halt,
    FindingKind.data_mismatch: Rung.halt,
}
"""First rung of each finding. A finding that is not listed has no response, except fp8_range, which calls for a cure at
once (`Response.leaves_fp8`)."""
CURES = (ActionKind.precision, ActionKind.swap, ActionKind.cool)
"""Tried in this order."""
BATCH_FINDINGS = CAUSES | {FindingKind.nonfinite, FindingKind.loss_spike, FindingKind.level_shift}
"""Findings that a rejected batch may raise. Its update was not applied, so excluding the batch is enough."""
EXCESSIVE_GRADIENT = 40.0
"""Gradient norm over its level. In drills new data raised it at most 29-fold, and garbage 41- to 68-fold."""
LONGEST_OVERFLOW = 64
"""Overflows in a row that dynamic loss scaling may need to find its scale; more have another cause."""


class Response(NamedTuple):
    """What a record calls for. Budgets and earlier attempts may raise the rung."""

    rung: Rung
    incident: int
    reason: str
    check_first: bool = False
    """Check the held-out loss first, if possible."""
    gives_back: bool = False
    """Skip: the batch is innocent and is consumed again next."""
    clips_logits: bool = False
    """Watch: clip the attention logits from now on."""
    outranks_check: bool = False
    """It holds whatever the held-out loss is, which is being checked."""
    batch: int | None = None
    """The batch of the rejected update that it answers."""
    leaves_fp8: bool = False
    """A cure comes first, if one applies: bf16 for a while."""

    @property
    def is_owed(self) -> bool:
        """Whether it is still acted on after another response that restores nothing: no later record calls for it
        again."""
        return self.batch is not None or self.clips_logits or self.leaves_fp8

    @property
    def excludes_batch(self) -> bool:
        """Whether the batch of a rejected update is skipped for good."""
        return self.batch is not None and not self.gives_back

    @property
    def urgency(self) -> tuple[bool, Rung, bool, Rung]:
        """The highest is acted on first. A restore makes the others void, and a cure precedes a skip."""
        return self.outranks_check, max(self.rung, Rung.skip), self.leaves_fp8, self.rung

    def is_answered_by(self, action: Action) -> bool:
        """Whether an action does what is owed."""
        match action.kind:
            case ActionKind.skip:
                ranges = [*action.give_back, *([action.exclude] if action.exclude else [])]
                return self.batch is not None and any(first <= self.batch <= last for first, last in ranges)
            case ActionKind.qk_clip:
                return self.clips_logits
            case _:
                return self.leaves_fp8 and action.kind in CURES

    def without_restore(self) -> Self:
        """What is owed of it if there is no restore."""
        rung = min(self.rung, Rung.watch) if self.batch is None else Rung.skip
        return self._replace(rung=rung, check_first=False)

    @classmethod
    def restore(cls, saved: list[Any]) -> Self | None:
        """Restore from a list of the fields. One of an older version does not say which batch it answers, and is
        dropped, as a restart drops it anyway."""
        return cls(Rung(saved[0]), *saved[1:]) if len(saved) == len(cls._fields) else None


def is_overflow(record: ReducedRecord) -> bool:
    """The gradient overflowed under dynamic loss scaling: the scale halves, and the batch is not to blame."""
    scale = record.loss_scale
    return scale is not None and scale >= 1 and math.isfinite(record.loss) and not math.isfinite(record.grad_norm)


def is_corrupted(record: ReducedRecord) -> bool:
    """The update was rejected because a micro-batch that was computed twice differs: the batch is not to blame."""
    return record.refused and bool(record.corrupted_ranks)


def has_finite_update(record: ReducedRecord) -> bool:
    """Loss and gradient norm are finite. A bad batch can make them large; repeated NaN has another cause."""
    return math.isfinite(record.loss) and math.isfinite(record.grad_norm)


def has_excessive_gradient(record: ReducedRecord, level: float | None) -> bool:
    """Whether the gradient norm is above its own bound, or far above its level: bad batches raise it much more than new
    data does. The bound alone is too high early in a run, when the gradients of the first steps widen it."""
    far_above = math.inf if level is None else EXCESSIVE_GRADIENT * level
    return record.grad_norm > min(record.bounds.get("grad_norm", math.inf), far_above)


def has_broken_weights(record: ReducedRecord) -> bool:
    """Norms of weights are not finite, and no rank's weights changed without an update: that has its own finding."""
    norms = [*record.group_param_norms.values(), *([] if record.param_norm is None else [record.param_norm])]
    return not record.changed_ranks and not all(math.isfinite(norm) for norm in norms)


@final
@dataclass(slots=True)
class Rejections:
    """Updates rejected since the last one that was applied."""

    num_in_row: int = 0
    since: int = 0
    """Iteration of the first of them."""
    num_overflows: int = 0
    """Loss-scale overflows; not counted in `num_in_row`."""

    def add(self, record: ReducedRecord) -> bool:
        """Count a record; returns whether its update was rejected for another reason than a loss-scale overflow, or
        a batch without a token to predict, which is not counted."""
        if record.is_empty:
            return False
        is_rejection = record.refused
        if record.refused and is_overflow(record):
            self.num_overflows += 1
            is_rejection = self.num_overflows > LONGEST_OVERFLOW
        elif not record.refused:
            self.num_in_row = self.num_overflows = 0
        if is_rejection:
            self.since = self.since if self.num_in_row else record.iteration
            self.num_in_row += 1
        return is_rejection
