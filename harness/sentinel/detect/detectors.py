"""The detectors: turn step records into findings, one record after the other, without torch.

Why: findings must be equal on every rank and when the log is replayed, so they are a function of the records and of a
state that is plain data. The state is part of every snapshot; a rewind restores it, so undone records leave no trace.
How: the loss and gradient curves, plus one guard for each other finding. A rejected update can raise a finding but does
not change any baseline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Self, final

from harness.config.sentinel import DetectConfig
from harness.core.events import Finding, ReducedRecord
from harness.sentinel.detect import loss_curve
from harness.sentinel.detect.corruption import CorruptionGuard
from harness.sentinel.detect.fp8_range import RangeGuard
from harness.sentinel.detect.guards import (
    EXPECTED_ROWS,
    BatchGuard,
    NonfiniteGuard,
    RankGuard,
    RateGuard,
    ScaleGuard,
    WeightGuard,
    broken_groups,
)
from harness.sentinel.detect.learning import LearningGuard
from harness.sentinel.detect.loss_curve import CurveWatch
from harness.sentinel.detect.precursor import PrecursorGuard
from harness.sentinel.detect.second_moment import MomentGuard
from harness.sentinel.detect.step_time import SpeedGuard


@final
@dataclass(slots=True)
class Detectors:
    cfg: DetectConfig
    curves: CurveWatch = field(default_factory=CurveWatch)
    nonfinite: NonfiniteGuard = field(default_factory=NonfiniteGuard)
    weights: WeightGuard = field(default_factory=WeightGuard)
    moments: MomentGuard = field(default_factory=MomentGuard)
    rate: RateGuard = field(default_factory=RateGuard)
    batches: BatchGuard = field(default_factory=BatchGuard)
    scale: ScaleGuard = field(default_factory=ScaleGuard)
    ranges: RangeGuard = field(default_factory=RangeGuard)
    speed: SpeedGuard = field(default_factory=SpeedGuard)
    ranks: RankGuard = field(default_factory=RankGuard)
    learning: LearningGuard = field(default_factory=LearningGuard)
    corruption: CorruptionGuard = field(default_factory=CorruptionGuard)
    precursor: PrecursorGuard = field(default_factory=PrecursorGuard)
    sparse: DetectConfig | None = None
    """`cfg` with numbers of rows for `sparse_interval`; derived, not part of the state."""
    sparse_interval: int = 0

    def observe(self, record: ReducedRecord) -> list[Finding]:
        """Return the findings of one record, given all earlier ones."""
        found: list[Finding] = []
        broken = not (math.isfinite(record.loss) and math.isfinite(record.grad_norm))
        if broken or self.nonfinite.raised or broken_groups(record.group_param_norms):
            found += self.nonfinite.observe(record)
        if record.loss_scale is not None:
            found += self.scale.observe(record)
        if record.in_fp8 is not None:
            found += self.ranges.observe(record, self.cfg)
        if record.ranks or record.mismatched_ranks or record.changed_ranks or self.ranks.mismatched:
            found += self.ranks.observe(record)
        if record.other_data:
            found += self.batches.compare(record)
        if record.recomputed is not None:
            found += self.corruption.observe(record)
        if record.refused:
            return found + ([] if broken else list(self.curves.observe_rejected(record, self.cfg)))
        if math.isfinite(record.lr):
            found += self.rate.observe(record)
        if not broken:
            warming = float(self.rate.rising or record.in_planned_change)
            found += self.curves.observe(record, self._curve_config(), warming)
            if self.learning.is_judged:
                found += self.learning.observe(record)
        if record.param_norm is not None or record.group_param_norms:
            found += self.weights.observe(record)
        if record.v_norm is not None or record.square_ratio is not None:
            found += self.moments.observe(record)
        if record.attention_logits:
            found += self.precursor.observe(record, self.cfg)
        if record.fingerprint:
            found += self.batches.observe(record)
        if record.median_step_s:
            found += self.speed.observe(record)
        return found

    def _curve_config(self) -> DetectConfig:
        """The config with numbers of rows that fit the steps between rows."""
        interval = round(self.curves.interval)
        if interval <= 1:
            return self.cfg
        if self.sparse is None or interval != self.sparse_interval:
            self.sparse, self.sparse_interval = loss_curve.scale_rows(self.cfg, interval), interval
        return self.sparse

    def on_start(self, machines: dict[str, list[int]]) -> None:
        """A start of the run has these machines and ranks: forget what is known of ranks on other machines."""
        self.corruption.on_start(machines)

    def expect_lr_change(self) -> None:
        """The learning rate is about to change on purpose: raise no lr_jump for the next `EXPECTED_ROWS`."""
        self.rate.expected = EXPECTED_ROWS
        self.precursor.forget_update_ratios()

    def accept_level(self, *, loss: float | None = None, grad_norm: float | None = None) -> None:
        """Set the baseline to these levels, or to the present ones."""
        self.curves.accept_level(loss=loss, grad_norm=grad_norm)

    def state(self) -> dict[str, Any]:
        """A copy of the whole state as plain data; field names are part of the checkpoint format."""
        return {name: _plain(getattr(self, name)) for name in PARTS}

    @classmethod
    def restore(cls, cfg: DetectConfig, state: dict[str, Any]) -> Self:
        """Restore from `state()`, also after JSON; a guard that is missing in it starts in its initial state."""
        parts: dict[str, Any] = {
            name: kind(**_copy(state.get(name, {}))) for name, kind in PARTS.items() if name != "curves"
        }
        return cls(cfg, curves=loss_curve.restore_curve_watch(_copy(state["curves"])), **parts)


PARTS: dict[str, Any] = {
    "curves": CurveWatch,
    "nonfinite": NonfiniteGuard,
    "weights": WeightGuard,
    "moments": MomentGuard,
    "rate": RateGuard,
    "batches": BatchGuard,
    "scale": ScaleGuard,
    "ranges": RangeGuard,
    "speed": SpeedGuard,
    "ranks": RankGuard,
    "learning": LearningGuard,
    "corruption": CorruptionGuard,
    "precursor": PrecursorGuard,
}


def _plain(part: Any) -> dict[str, Any]:
    return {item.name: _copy(getattr(part, item.name)) for item in fields(part)}


def _copy(value: Any) -> Any:
    match value:
        case dict():
            return {key: _copy(child) for key, child in value.items()}
        case list() | tuple():
            return [_copy(child) for child in value]
        case _:
            return value
