"""What a record and its findings call for where nothing else is known.

| finding | alone | otherwise |
|---|---|---|
| grad_spike, v_stale, rank_outlier, lr_jump | watch: harmless unless harm follows | the known cause of what follows |
| weight_drift | watch: a matter of weight decay, for a person | |
| loss_spike | watch | rewind where its cause is known or it does not turn; roll back where it lingers |
| level_shift | watch: other data, accepted in the end | roll back after a cause, or where it is large |
| nonfinite | refused: skip; applied: roll back | refused several times in a row: rewind |
| (refused for its size) | skip | several times in a row: rewind; where the older state refuses too: skip again |
| (refused after lr_jump) | rewind, blame no batch: the wrong rate did it | |
| divergence | roll back | |
| optimizer_reset | roll back, blame no batch | watch where there is nothing to go back to: moments come again |
| scale_collapse | roll back, blame no batch, then cool | |
| fp8_range | bf16 for a while, nothing restored | a known cause: restore, blame no batch, then bf16 |
| replica_mismatch, data_mismatch | halt | |
| slow, speed_recovered, duplicate_batch | nothing: for people | |

The held-out loss is checked (`harness.sentinel.policy.held_out_level`) at a loss spike without a known cause, and
before every rewind or rollback of an incident whose numbers are finite, once for each restore. It decides whether the
state is damaged and the answer of the table follows, or the data changed. So many rejected updates in one incident lead
to the same check, and so does the first one after a planned change.

Left out: whatever only one rank knows (its clock, its memory, facts of its rows). A `ReducedRecord` does not have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, final

from harness.core.events import FindingKind, ReducedRecord
from harness.sentinel.policy.open_incident import CAUSES, Rung

FIRST_RUNG = {
    FindingKind.grad_spike: Rung.watch,
    FindingKind.v_stale: Rung.watch,
    FindingKind.rank_outlier: Rung.watch,
    FindingKind.lr_jump: Rung.watch,
    FindingKind.weight_drift: Rung.watch,
    FindingKind.loss_spike: Rung.watch,
    FindingKind.level_shift: Rung.watch,
    FindingKind.nonfinite: Rung.rollback,
    FindingKind.divergence: Rung.rollback,
    FindingKind.optimizer_reset: Rung.rollback,
    FindingKind.scale_collapse: Rung.rollback,
    FindingKind.replica_mismatch: Rung.halt,
    FindingKind.data_mismatch: Rung.halt,
}
"""What a finding calls for where nothing else is known; one that is not here calls for nothing, but for fp8_range: that
is a cure at once (`Chart`)."""
BATCH_FINDINGS = CAUSES | {FindingKind.nonfinite, FindingKind.loss_spike, FindingKind.level_shift}
"""What a refused batch may raise; its update was never applied, so that excluding it is all there is to do."""
LONGEST_OVERFLOW = 64
"""Overflows in a row that a loss scale may need to find its place; more are no matter of the scale."""


class Response(NamedTuple):
    """What a record calls for; budgets, and what was tried before, may make it more."""

    rung: Rung
    incident: int
    reason: str
    check_first: bool = False
    """Whether the held-out loss is checked first, where that is possible."""


def is_overflow(record: ReducedRecord) -> bool:
    """Dynamic loss scaling at work: the gradient overflowed, the scale halves, the batch is innocent."""
    scale = record.loss_scale
    return scale is not None and scale >= 1 and math.isfinite(record.loss) and not math.isfinite(record.grad_norm)


def has_finite_update(record: ReducedRecord) -> bool:
    """A batch can be out of all proportion; what is not a number, batch after batch, comes from elsewhere."""
    return math.isfinite(record.loss) and math.isfinite(record.grad_norm)


def is_within_gradient_bound(record: ReducedRecord) -> bool:
    """Whether the gate would let the gradient norm alone through: garbage raises it far more than new data does."""
    return record.grad_norm <= record.bounds.get("grad_norm", math.inf)


def has_broken_weights(record: ReducedRecord) -> bool:
    norms = [*record.group_param_norms.values(), *([] if record.param_norm is None else [record.param_norm])]
    return not all(math.isfinite(norm) for norm in norms)


@final
@dataclass(slots=True)
class Rejections:
    """Updates refused since the last one that was applied."""

    num_in_row: int = 0
    since: int = 0
    """Iteration of the first of them."""
    num_overflows: int = 0
    """Loss-scale overflows, which are not among them."""

    def add(self, record: ReducedRecord) -> bool:
        """Whether the update was refused, and not by a loss scale that seeks its place."""
        is_refusal = record.refused
        if record.refused and is_overflow(record):
            self.num_overflows += 1
            is_refusal = self.num_overflows > LONGEST_OVERFLOW
        elif not record.refused:
            self.num_in_row = self.num_overflows = 0
        if is_refusal:
            self.since = self.since if self.num_in_row else record.iteration
            self.num_in_row += 1
        return is_refusal
