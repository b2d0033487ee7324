"""Adam's second moment: too slow for the gradients (v_stale), or thrown away (optimizer_reset).

How: a burst of gradients stands out against the moment, or in it. An update takes at most 1 - beta2 of the moment away,
however small the gradient: less than so much decay leaves was not taken by updates. Where a log does not tell beta2, a
large share must be gone between two probes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from harness.core.events import Finding, FindingKind, ReducedRecord
from harness.sentinel.detect.guards import SETTLED_STEPS, found_now

STALE_RATIO, MOMENT_FACTOR = 4.0, 10.0
"""Gradient over root of the second moment, and second moment over what it was before: a burst."""
EMPTIED, ROUNDING = 0.3, 0.99
"""What must be left of the second moment, where beta2 is not known; and of what decay leaves, where it is."""


@final
@dataclass(slots=True)
class MomentGuard:
    norms: list[float] = field(default_factory=list)
    """The last probes, newest last."""
    step: int = 0
    """Of the last probe."""
    raised: bool = False

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        ratio = record.square_ratio or 0.0
        is_known = record.v_norm is not None and math.isfinite(record.v_norm)
        norm = record.v_norm if record.v_norm is not None and is_known else 0.0
        if record.step >= SETTLED_STEPS and (ratio or is_known):
            usual = sorted(self.norms)[len(self.norms) // 2] if self.norms else 0.0
            burst = bool(usual) and norm > MOMENT_FACTOR * usual
            if (ratio > STALE_RATIO or burst) and not self.raised:
                value, bound = (ratio, STALE_RATIO) if ratio > STALE_RATIO else (norm, MOMENT_FACTOR * usual)
                words = f"squared gradients far above Adam's second moment: {value:.3g} against at most {bound:.3g}"
                yield found_now(FindingKind.v_stale, record, value, bound, words)
            self.raised = ratio > STALE_RATIO or burst
            least = self._least(record)
            if is_known and norm < least:
                words = f"Adam's second moment fell from {self.norms[-1]:.3g} to {norm:.3g} between two probes"
                yield found_now(FindingKind.optimizer_reset, record, norm, least, words)
                self.norms = []
        if norm > 0:
            self.norms, self.step = [*self.norms[-2:], norm], record.step

    def _least(self, record: ReducedRecord) -> float:
        """What must be left of the second moment since the last probe: each update takes away 1 - beta2 at most."""
        if not self.norms:
            return 0.0
        if record.beta2 is None:
            return EMPTIED * min(self.norms)
        return float(ROUNDING * self.norms[-1] * record.beta2 ** max(record.step - self.step, 0))
