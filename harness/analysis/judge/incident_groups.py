"""Incidents: findings and rows grouped into stories with an onset, a peak and an end.

Why: a spike gives several findings, and what a person asks is how long it lasted, how high it went and whether the loss
came back.
How: one row after the other, in constant time. The first finding opens an incident, later ones join it while it is
open; another loss spike is another incident, since its detector was armed again in between. It is over once the loss,
smoothed over a few rows, is back at half a sigma above the mean of before and stays there for a while; or unresolved,
when it has not come back in `lingering_rows` twice over. The type says what became of it: 1 came back within 50 steps
of its peak, 2 lingered, 3 diverged.
Left out: deciding what to do. The policy counts its own incidents; these are for reports and for foreign logs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import final

from harness.config.sentinel import DetectConfig
from harness.core.events import ActionKind, Finding, FindingKind, ReducedRecord

UP_ROWS, DOWN_ROWS, SPREAD_ROWS, SMOOTHED_ROWS = 32, 8, 100, 4
"""Rows that the usual loss, which falls faster than it rises, its spread, and the present loss are means of."""
RECOVERED_SIGMAS, RECOVERED_STEPS = 0.5, 50
GRAVEST = (
    FindingKind.nonfinite,
    FindingKind.replica_mismatch,
    FindingKind.data_mismatch,
    FindingKind.divergence,
    FindingKind.loss_spike,
    FindingKind.level_shift,
    FindingKind.optimizer_reset,
    FindingKind.scale_collapse,
    FindingKind.fp8_range,
    FindingKind.grad_spike,
    FindingKind.rank_outlier,
    FindingKind.v_stale,
    FindingKind.weight_drift,
    FindingKind.lr_jump,
    FindingKind.duplicate_batch,
    FindingKind.slow,
    FindingKind.speed_recovered,
)
"""An incident is called after the gravest of its findings."""
OF_THE_LOSS = frozenset(
    {FindingKind.nonfinite, FindingKind.divergence, FindingKind.loss_spike, FindingKind.level_shift}
)
SEVERE = frozenset(
    {
        FindingKind.replica_mismatch,
        FindingKind.data_mismatch,
        FindingKind.optimizer_reset,
        FindingKind.scale_collapse,
    }
)


class Severity(StrEnum):
    low = "low"
    medium = "medium"
    high = "high"


@final
@dataclass(slots=True, kw_only=True)
class Incident:
    kind: FindingKind
    onset_step: int
    detected_step: int
    """When the first finding was made."""
    end_step: int | None = None
    """When the loss was back; None: not before the log ended, or not within reason."""
    severity: Severity = Severity.low
    spike_type: int | None = None
    """1 recovered, 2 lingering, 3 divergent; None where the loss was not touched."""
    base_loss: float
    """Mean of the rows before."""
    peak_step: int
    peak_loss: float
    """Highest loss; where none was finite, that of the onset."""
    num_findings: int = 1
    kinds: list[FindingKind] = field(default_factory=list)
    """Of all its findings, in order of appearance."""
    ranks: list[int] = field(default_factory=list)
    actions: list[ActionKind] = field(default_factory=list)
    """What a policy decided on it, where one was asked."""
    message: str
    """Of the finding it is called after."""


@final
@dataclass(slots=True)
class Incidents:
    cfg: DetectConfig
    mean: float = math.nan
    deviation: float = 0.0
    """Mean absolute deviation of the rows outside of incidents."""
    smoothed: float = 0.0
    seen: bool = False
    """Whether any row was finite."""
    open: Incident | None = None
    rows: int = 0
    """Since the open incident was found."""
    back: int = 0
    """Rows in a row with the loss back."""
    back_step: int = 0

    def observe(self, record: ReducedRecord, findings: Sequence[Finding]) -> list[Incident]:
        """The incidents that end with this row."""
        loss, ended = record.loss, []
        finite = math.isfinite(loss) and not record.refused
        if finite:
            self.smoothed = self.smoothed + (loss - self.smoothed) / SMOOTHED_ROWS if self.seen else loss
            self.seen = True
        for finding in findings:
            if self.open is not None and finding.kind is FindingKind.loss_spike in self.open.kinds:
                ended.append(self._close(self.open, record.step - 1))
            self._join(finding, record)
        if self.open is not None:
            ended += self._follow(self.open, record, finite)
        elif finite:
            self._learn(loss)
        return ended

    def finish(self) -> Iterator[Incident]:
        """The incident that was open when the log ended."""
        if self.open is not None:
            yield self._close(self.open, None)

    def _learn(self, loss: float) -> None:
        if self.mean != self.mean:
            self.mean = loss
        self.deviation += (abs(loss - self.mean) - self.deviation) / SPREAD_ROWS
        self.mean += (loss - self.mean) / (UP_ROWS if loss > self.mean else DOWN_ROWS)

    def _join(self, finding: Finding, record: ReducedRecord) -> None:
        onset = max(0, finding.step - max(0, finding.iteration - finding.onset))
        if self.open is None:
            self.rows, self.back = 0, 0
            self.open = Incident(
                kind=finding.kind,
                onset_step=onset,
                detected_step=record.step,
                base_loss=self.mean,
                peak_step=record.step,
                peak_loss=record.loss,
                num_findings=0,
                message=finding.message,
            )
        incident = self.open
        incident.num_findings += 1
        incident.ranks = sorted({*incident.ranks, *finding.ranks})
        if finding.kind not in incident.kinds:
            incident.kinds.append(finding.kind)
        if GRAVEST.index(finding.kind) < GRAVEST.index(incident.kind):
            incident.kind, incident.message = finding.kind, finding.message

    def _follow(self, incident: Incident, record: ReducedRecord, finite: bool) -> Iterator[Incident]:
        self.rows += 1
        if finite and not record.loss <= incident.peak_loss:
            incident.peak_step, incident.peak_loss = record.step, record.loss
            self.rows, self.back = min(self.rows, self.cfg.lingering_rows), 0
        sigma = 1.2533 * self.deviation
        base = incident.base_loss
        is_back = finite and (math.isnan(base) or self.smoothed <= base + RECOVERED_SIGMAS * sigma)
        untouched = not OF_THE_LOSS & set(incident.kinds)
        if is_back or (untouched and finite):
            self.back_step = record.step if self.back == 0 else self.back_step
            self.back += 1
            if self.back >= self.cfg.recovered_rows:
                yield self._close(incident, self.back_step)
        else:
            self.back = 0
            if finite and self.rows > 2 * self.cfg.lingering_rows:
                self.mean = self.smoothed
                yield self._close(incident, None)

    def _close(self, incident: Incident, end_step: int | None) -> Incident:
        self.open = None
        incident.end_step = end_step
        kinds = set(incident.kinds)
        if OF_THE_LOSS & kinds:
            if end_step is not None:
                incident.spike_type = 1 if end_step - incident.peak_step <= RECOVERED_STEPS else 2
            else:
                lasting = FindingKind.divergence in kinds or FindingKind.nonfinite in kinds
                incident.spike_type = 3 if lasting else 2
        if incident.spike_type == 3 or kinds & SEVERE:
            incident.severity = Severity.high
        elif incident.spike_type == 2 or FindingKind.nonfinite in kinds:
            incident.severity = Severity.medium
        return incident
