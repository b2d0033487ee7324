"""Detects fp8 underflow and saturation (fp8_range).

Why: with one scale per tensor, a single huge value makes the others underflow to zero, and the layer stops learning
long before the loss shows it.
How: each probe reports the share of values of each layer group that underflow, and the share of activation, weight and
gradient tensors that saturate. A finding is raised again only after a probe in which the share was well below its
bound. bf16 steps are clean by definition, so underflow that remains after the return to fp8 is a new finding.
Left out: non-finite steps; another detector raises them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from harness.config.sentinel import DetectConfig
from harness.core.events import Finding, FindingKind, ReducedRecord
from harness.sentinel.detect.guards import make_finding

CLEAN = 0.5
"""A share that exceeded its bound is clean again below this fraction of it."""
MOST_NAMED = 4
"""Layer groups that a message names."""


@final
@dataclass(slots=True)
class RangeGuard:
    raised: list[str] = field(default_factory=list)
    """Layer groups and roles with a finding that are not clean again."""
    clean_until: int = 0
    """The last iteration known to be clean."""

    def observe(self, record: ReducedRecord, cfg: DetectConfig) -> Iterator[Finding]:
        if record.in_fp8 is False:
            self.raised, self.clean_until = [], record.iteration
        if not (record.fp8 or record.fp8_underflow) or not math.isfinite(record.loss + record.grad_norm):
            return
        saturated = {role: float(health["saturated"]) for role, health in record.fp8.items()}
        limits = ((record.fp8_underflow, cfg.fp8_underflow), (saturated, cfg.fp8_saturated))
        underflowing, saturating = (_new_excesses(shares, bound, self.raised) for shares, bound in limits)
        self.raised = [
            name
            for shares, bound in limits
            for name, share in shares.items()
            if share > (CLEAN * bound if name in self.raised else bound)
        ]
        if underflowing or saturating:
            yield self._make_finding(record, underflowing, saturating, cfg)
        elif not self.raised:
            self.clean_until = record.iteration

    def _make_finding(
        self,
        record: ReducedRecord,
        underflowing: Mapping[str, float],
        saturating: Mapping[str, float],
        cfg: DetectConfig,
    ) -> Finding:
        """A finding whose onset follows the last clean step; no batch is blamed."""
        shares, bound = (underflowing, cfg.fp8_underflow) if underflowing else (saturating, cfg.fp8_saturated)
        messages = []
        if underflowing:
            share = f"{max(underflowing.values()):.0%} of the values of {_list_names(underflowing)}"
            messages.append(f"{share} underflow to zero in fp8, above {cfg.fp8_underflow:.0%}")
        if saturating:
            share = f"{max(saturating.values()):.0%} of the tensors of {_list_names(saturating)}"
            messages.append(f"{share} saturate in fp8, above {cfg.fp8_saturated:.0%}")
        finding = make_finding(FindingKind.fp8_range, record, max(shares.values()), bound, "; ".join(messages))
        finding.onset = min(self.clean_until + 1, record.iteration)
        finding.groups, finding.cursors = list(underflowing), []
        return finding


def _new_excesses(shares: Mapping[str, float], bound: float, raised: list[str]) -> dict[str, float]:
    """Shares above the bound that were not raised before, largest first."""
    excesses = {name: share for name, share in shares.items() if share > bound and name not in raised}
    return dict(sorted(excesses.items(), key=lambda item: -item[1]))


def _list_names(names: Mapping[str, float]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(list(names)[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
