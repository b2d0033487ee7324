"""What a replay shows: hardware or data, as a pure function of numbers.

| the log and two replays | verdict |
|---|---|
| the steps on the way there already differ from the log | not known: the replay is not faithful |
| the two replays differ from each other | not reproducible here |
| the replays agree, and the log says something else | transient: it was in the machine, not in the data |
| the replays agree with the log | deterministic; and then |
| the batch stands out as much on an older state | data: it is bad for any model |
| it does not | data x state: bad for this model at this moment |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import final

from harness.core.events import StepRecord

LOSS_TOLERANCE, NORM_TOLERANCE = 1e-3, 0.05
"""Relative; where the replay cannot have the same bits: another number of ranks, another device, no compilation."""
ALIKE = 0.5
"""On an older state the batch must stand out at least this much of what it does on the newer one."""
STANDS_OUT = 0.1
"""Nats above its neighbours from which a batch does."""


class Nature(StrEnum):
    transient = "transient"
    deterministic = "deterministic"
    irreproducible = "irreproducible"
    unknown = "unknown"


class Cause(StrEnum):
    data = "data"
    data_and_state = "data x state"
    state = "state"
    unknown = "unknown"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a step came to."""

    loss: float
    grad_norm: float
    group_grad_norms: dict[str, float]

    @classmethod
    def of(cls, record: StepRecord) -> Numbers:
        return cls(loss=record.loss, grad_norm=record.grad_norm, group_grad_norms=dict(record.group_grad_norms))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A batch among its neighbours, on one state."""

    checkpoint: str
    loss: float
    neighbours: list[float] = field(default_factory=list)

    @property
    def excess(self) -> float:
        """Nats above the middle of its neighbours; infinite where it alone is not finite."""
        if not self.neighbours:
            return math.nan
        usual = median(self.neighbours)
        if math.isfinite(self.loss):
            return self.loss - usual
        return math.inf if math.isfinite(usual) else 0.0


def is_same(one: Numbers, other: Numbers, *, exactly: bool) -> bool:
    """Bit for bit, NaN equal to NaN; or to rounding, where bits cannot be expected to agree."""
    pairs = [(one.loss, other.loss, LOSS_TOLERANCE), (one.grad_norm, other.grad_norm, NORM_TOLERANCE)]
    if exactly:
        groups = one.group_grad_norms.keys() | other.group_grad_norms.keys()
        pairs += [
            (one.group_grad_norms.get(name, math.nan), other.group_grad_norms.get(name, math.nan), 0.0)
            for name in groups
        ]
    return all(_agree(a, b, 0.0 if exactly else tolerance) for a, b, tolerance in pairs)


def _agree(one: float, other: float, tolerance: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other) and (tolerance > 0 or repr(one) == repr(other))
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def nature(logged: Numbers, first: Numbers, second: Numbers, *, is_faithful: bool, exactly: bool) -> Nature:
    """Whether what the log says comes again."""
    if not is_same(first, second, exactly=exactly):
        return Nature.irreproducible
    if is_same(first, logged, exactly=exactly):
        return Nature.deterministic
    return Nature.transient if is_faithful else Nature.unknown


def cause(found: Nature, here: Standing, before: Standing | None) -> Cause:
    """Whether the batch is bad by itself; asked of what comes again only."""
    if found is not Nature.deterministic or before is None or not (here.neighbours and before.neighbours):
        return Cause.unknown
    if here.excess < STANDS_OUT:
        return Cause.state
    return Cause.data if before.excess >= ALIKE * here.excess else Cause.data_and_state
