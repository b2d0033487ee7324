"""The range of fp8: numbers that it turns into zero, or that lie beyond it (fp8_range).

Why: with one scale for a tensor, one number out of all proportion leaves no room for the others: they become zero, and
the layer learns nothing, long before the loss shows it.
How: every probe tells what share of the numbers of each layer group became zero, and in what share of the activations,
weights and gradients something lay far beyond the range. What was found is found again only after a probe in which it
was well below its bound; steps in bf16 are clean by nature, so that whatever is still there when fp8 comes back is new.
Left out: steps that are not finite. A number that is none fits into no range, and another finding tells of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from harness.config.sentinel import DetectConfig
from harness.core.events import Finding, FindingKind, ReducedRecord
from harness.sentinel.detect.guards import found_now

CLEAN = 0.5
"""Of its bound: a share that was beyond it is clean again below."""
MOST_NAMED = 4
"""Layer groups that a message names."""


@final
@dataclass(slots=True)
class RangeGuard:
    raised: list[str] = field(default_factory=list)
    """Layer groups and roles that were found and are not clean again."""
    clean_until: int = 0
    """The last iteration that is known to be clean."""

    def observe(self, record: ReducedRecord, cfg: DetectConfig) -> Iterator[Finding]:
        if record.in_fp8 is False:
            self.raised, self.clean_until = [], record.iteration
        if not (record.fp8 or record.fp8_underflow) or not math.isfinite(record.loss + record.grad_norm):
            return
        saturated = {role: float(health["saturated"]) for role, health in record.fp8.items()}
        judged = ((record.fp8_underflow, cfg.fp8_underflow), (saturated, cfg.fp8_saturated))
        zeroed, beyond = (_fresh(shares, bound, self.raised) for shares, bound in judged)
        self.raised = [
            name
            for shares, bound in judged
            for name, share in shares.items()
            if share > (CLEAN * bound if name in self.raised else bound)
        ]
        if zeroed or beyond:
            yield self._found(record, zeroed, beyond, cfg)
        elif not self.raised:
            self.clean_until = record.iteration

    def _found(
        self, record: ReducedRecord, zeroed: Mapping[str, float], beyond: Mapping[str, float], cfg: DetectConfig
    ) -> Finding:
        """It began after the last step that is known to be clean; no batch is to blame."""
        shares, bound = (zeroed, cfg.fp8_underflow) if zeroed else (beyond, cfg.fp8_saturated)
        told = []
        if zeroed:
            often = f"{max(zeroed.values()):.0%} of the numbers of {_listed(zeroed)} became zero in fp8"
            told.append(f"{often}, above {cfg.fp8_underflow:.0%}")
        if beyond:
            often = f"{max(beyond.values()):.0%} of the tensors of {_listed(beyond)} went far beyond the range of fp8"
            told.append(f"{often}, above {cfg.fp8_saturated:.0%}")
        finding = found_now(FindingKind.fp8_range, record, max(shares.values()), bound, "; ".join(told))
        finding.onset = min(self.clean_until + 1, record.iteration)
        finding.groups, finding.cursors = list(zeroed), []
        return finding


def _fresh(shares: Mapping[str, float], bound: float, raised: list[str]) -> dict[str, float]:
    """What is beyond its bound and was not before, the worst first."""
    beyond = {name: share for name, share in shares.items() if share > bound and name not in raised}
    return dict(sorted(beyond.items(), key=lambda each: -each[1]))


def _listed(names: Mapping[str, float]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(list(names)[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
