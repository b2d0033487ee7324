"""Decides from a replay whether hardware, data or model state caused a bad step; pure functions of numbers.

| the log and two replays | verdict |
|---|---|
| earlier steps already differ from the log | unknown: the replay is not faithful |
| the two replays differ from each other | irreproducible |
| the replays agree with each other and differ from the log | transient: a hardware fault, not the data |
| the replays agree with the log | deterministic; then |
| - loss and gradient norm of the step are ordinary | none |
| - the batch stands out as much on an older state | data: bad for any state of the model |
| - the batch stands out only on this state | data x state: bad for the model at this step |
| - the batch does not stand out | state: the weights are bad |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any, final

from harness.core.events import StepRecord

LOSS_TOLERANCE, NORM_TOLERANCE = 1e-3, 0.05
"""Relative tolerances if the replay cannot be bit-identical: another world size or another device, or a run that was
compiled or on GPUs without run.deterministic."""
ALIKE = 0.5
"""The batch is bad on both states if its excess on the older state is at least this fraction of its excess now."""
STANDS_OUT = 0.1
"""Excess over its neighbours, in nats, from which a batch stands out."""
LOSS_SPREADS, NORM_FACTOR, LEAST_EARLIER = 3.0, 3.0, 8
"""A step stands out if its loss is this many spreads above that of the steps before it, or its gradient norm above this
many times theirs; fewer steps do not say what is usual."""


class Reproducibility(StrEnum):
    """Whether the logged step is reproduced by a replay."""

    transient = "transient"
    deterministic = "deterministic"
    irreproducible = "irreproducible"
    unknown = "unknown"


class Origin(StrEnum):
    """What makes a reproducible step bad."""

    data = "data"
    data_and_state = "data x state"
    state = "state"
    none = "none"
    """The step is ordinary."""
    unknown = "unknown"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """Loss and gradient norms of a step."""

    loss: float
    grad_norm: float
    group_grad_norms: dict[str, float]

    @classmethod
    def of(cls, record: StepRecord) -> StepNumbers:
        return cls(loss=record.loss, grad_norm=record.grad_norm, group_grad_norms=dict(record.group_grad_norms))

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchComparison:
    """Loss of a batch and of its neighbours, on one state."""

    checkpoint: str
    loss: float
    neighbours: list[float] = field(default_factory=list)

    @property
    def excess(self) -> float:
        """Loss above the median of the neighbours, in nats; Inf if only this batch is not finite."""
        if not self.neighbours:
            return math.nan
        usual = median(self.neighbours)
        if math.isfinite(self.loss):
            return self.loss - usual
        return math.inf if math.isfinite(usual) else 0.0


def is_same(one: StepNumbers, other: StepNumbers, *, exactly: bool) -> bool:
    """Whether two steps agree: bit for bit (NaN equals NaN) if `exactly`, else within tolerance."""
    pairs = [(one.loss, other.loss, LOSS_TOLERANCE), (one.grad_norm, other.grad_norm, NORM_TOLERANCE)]
    if exactly:
        groups = one.group_grad_norms.keys() | other.group_grad_norms.keys()
        pairs += [
            (one.group_grad_norms.get(name, math.nan), other.group_grad_norms.get(name, math.nan), 0.0)
            for name in groups
        ]
    return all(agree_within(a, b, 0.0 if exactly else tolerance) for a, b, tolerance in pairs)


def agree_within(one: float, other: float, tolerance: float) -> bool:
    """Whether two numbers agree within a relative tolerance; with a tolerance NaN and Inf count as the same."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other) and (tolerance > 0 or repr(one) == repr(other))
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def classify(
    logged: StepNumbers, first: StepNumbers, second: StepNumbers, *, is_faithful: bool, exactly: bool
) -> Reproducibility:
    """Whether two replays of a step agree with each other and with the log."""
    if not is_same(first, second, exactly=exactly):
        return Reproducibility.irreproducible
    if is_same(first, logged, exactly=exactly):
        return Reproducibility.deterministic
    return Reproducibility.transient if is_faithful else Reproducibility.unknown


def reproduced_iteration(replayed: dict[str, Any]) -> int | None:
    """The iteration whose step the replay in a `replay.json` reproduced, from finite weights; None: it did not."""
    has_finite_weights = not any(seen.get("broken_weights") for seen in replayed.get("seen", {}).values())
    is_reproduced = replayed.get("nature") == Reproducibility.deterministic and has_finite_weights
    return int(replayed["iteration"]) if is_reproduced else None


def stands_out(step: StepRecord, earlier: Sequence[StepRecord]) -> bool:
    """Whether a step was rejected, is not finite, or is above the applied steps before it in loss or gradient norm."""
    finite = [numbers for record in earlier if (numbers := StepNumbers.of(record)).is_finite]
    if step.refused or not StepNumbers.of(step).is_finite or len(finite) < LEAST_EARLIER:
        return True
    usual = median(numbers.loss for numbers in finite)
    spread = 1.4826 * median(abs(numbers.loss - usual) for numbers in finite)
    usual_norm = median(numbers.grad_norm for numbers in finite)
    return step.loss > usual + max(LOSS_SPREADS * spread, STANDS_OUT) or step.grad_norm > NORM_FACTOR * usual_norm


def find_origin(
    found: Reproducibility, here: BatchComparison, before: BatchComparison | None, *, is_ordinary: bool
) -> Origin:
    """Whether the batch or the state is bad; unknown unless the step is reproducible, none if it is ordinary."""
    if found is not Reproducibility.deterministic:
        return Origin.unknown
    if is_ordinary:
        return Origin.none
    if before is None or not (here.neighbours and before.neighbours):
        return Origin.unknown
    if here.excess < STANDS_OUT:
        return Origin.state
    return Origin.data if before.excess >= ALIKE * here.excess else Origin.data_and_state


def describe_precision(kind: str, logged: StepNumbers, replayed: StepNumbers, in_fp32: StepNumbers | None) -> str:
    """Whether the number format made a step non-finite, from the same step in fp32; empty: it was not computed."""
    if in_fp32 is None:
        return ""
    if not in_fp32.is_finite:
        return "structural: the step is not finite in fp32 either"
    if not replayed.is_finite:
        return f"{kind} overflow: the step is finite in fp32"
    if not logged.is_finite:
        return f"neither: the replay is finite in {kind} as well as in fp32"
    return f"no overflow: the step is finite in {kind} and in fp32"
