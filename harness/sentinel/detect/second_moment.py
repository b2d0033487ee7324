"""Detects a second moment of Adam that lags behind the gradients (v_stale) or was lost (optimizer_reset).

How: v_stale is a burst of gradients relative to the second moment, or a jump of the second moment itself. An update
shrinks the second moment by at most a factor beta2, so a smaller value than decay allows was not caused by updates:
optimizer_reset. A resume may change beta2 between two probes: the smaller one holds then. If a log does not contain
beta2, most of the moment must be gone between two probes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from harness.core.events import Finding, FindingKind, ReducedRecord
from harness.sentinel.detect.guards import SETTLED_STEPS, make_finding

STALE_RATIO, MOMENT_FACTOR = 4.0, 10.0
"""Bounds of a burst: gradient norm over the root of the second moment; second moment over its recent median."""
EMPTIED, ROUNDING = 0.3, 0.99
"""Smallest plausible share of the second moment without a known beta2; and of what decay leaves, with a known one."""


@final
@dataclass(slots=True)
class MomentGuard:
    norms: list[float] = field(default_factory=list)
    """Norms of the last probes, newest last."""
    step: int = 0
    """Step of the last probe."""
    raised: bool = False
    beta2: float | None = None
    """Of the last probe."""

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        ratio = record.square_ratio or 0.0
        is_known = record.v_norm is not None and math.isfinite(record.v_norm)
        norm = record.v_norm if record.v_norm is not None and is_known else 0.0
        if record.step >= SETTLED_STEPS and (ratio or is_known):
            usual = sorted(self.norms)[len(self.norms) // 2] if self.norms else 0.0
            burst = bool(usual) and norm > MOMENT_FACTOR * usual
            if (ratio > STALE_RATIO or burst) and not self.raised:
                value, bound = (ratio, STALE_RATIO) if ratio > STALE_RATIO else (norm, MOMENT_FACTOR * usual)
                message = f"squared gradients are far above Adam's second moment: {value:.3g}, limit {bound:.3g}"
                yield make_finding(FindingKind.v_stale, record, value, bound, message)
            self.raised = ratio > STALE_RATIO or burst
            least = self._least(record)
            if is_known and norm < least:
                message = f"Adam's second moment fell from {self.norms[-1]:.3g} to {norm:.3g} between two probes"
                yield make_finding(FindingKind.optimizer_reset, record, norm, least, message)
                self.norms = []
        if norm > 0:
            self.norms, self.step, self.beta2 = [*self.norms[-2:], norm], record.step, record.beta2

    def _least(self, record: ReducedRecord) -> float:
        """The smallest norm that updates since the last probe can explain: each keeps at least a share beta2."""
        if not self.norms:
            return 0.0
        if record.beta2 is None:
            return EMPTIED * min(self.norms)
        beta2 = record.beta2 if self.beta2 is None else min(self.beta2, record.beta2)
        return float(ROUNDING * self.norms[-1] * beta2 ** max(record.step - self.step, 0))
