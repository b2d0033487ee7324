"""Groups findings of a log into incidents with an onset, a peak and an end.

Why: a spike causes several findings. A reader asks how long it lasted, how high it went, and if the loss recovered.
How: rows are processed in order, each in constant time. The first finding opens an incident, and later findings join it
while it is open. A further loss spike of an applied update starts a new incident, because its detector was re-armed in
between. An incident ends when the smoothed loss is back within half a sigma of the mean before it, in `recovered_rows`
more rows than it is not. It is closed without an end if the loss has not recovered in twice `lingering_rows` rows and
no longer falls, or not before the next spike. A rejected update can raise the peak, and is a row that is not recovered;
its loss enters no mean. The type of a spike follows from its trajectory (`harness.sentinel.detect.trajectory`); a
non-finite loss is type 3.
Left out: actions. The policy numbers its own incidents; these groups are for reports and for logs of other programs.
Findings about speed, too: they last long, and an incident of the loss would begin where an unrelated one of them did.
A gradient that overflows in fp16, too: a run finds its loss scale that way. A scale that collapses is an incident.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import final

from harness.config.sentinel import DetectConfig
from harness.core.events import ABOUT_SPEED, ActionKind, Finding, FindingKind, ReducedRecord
from harness.sentinel.detect.trajectory import RecoveryTrend, classify_trajectory, has_recovered
from harness.sentinel.policy.responses import is_overflow

UP_ROWS, DOWN_ROWS, SPREAD_ROWS, SMOOTHED_ROWS = 32, 8, 100, 4
"""Rows averaged by the usual loss when it rises, by the usual loss when it falls, by its spread, and by the smoothed
loss."""
NUM_LEVEL, LONGEST_ONSET = 25, 50
"""Losses whose median is the level before an onset; rows between the onset of a spike and its finding."""
GRAVEST = (
    FindingKind.nonfinite,
    FindingKind.replica_mismatch,
    FindingKind.weights_changed,
    FindingKind.corrupting_rank,
    FindingKind.data_mismatch,
    FindingKind.divergence,
    FindingKind.loss_spike,
    FindingKind.level_shift,
    FindingKind.never_learned,
    FindingKind.optimizer_reset,
    FindingKind.scale_collapse,
    FindingKind.fp8_range,
    FindingKind.corruption,
    FindingKind.grad_spike,
    FindingKind.rank_outlier,
    FindingKind.v_stale,
    FindingKind.weight_drift,
    FindingKind.precursor,
    FindingKind.lr_jump,
    FindingKind.duplicate_batch,
    FindingKind.corruption_passed,
)
"""Findings by gravity, without those about speed. The kind of an incident is the gravest of its findings."""
OF_THE_LOSS = frozenset(
    {FindingKind.nonfinite, FindingKind.divergence, FindingKind.loss_spike, FindingKind.level_shift}
)
SLOW_CHANGES = (FindingKind.divergence, FindingKind.level_shift)
"""Findings whose onset may be hundreds of rows ago. Their bound is the loss before it."""
SEVERE = frozenset(
    {
        FindingKind.replica_mismatch,
        FindingKind.weights_changed,
        FindingKind.corrupting_rank,
        FindingKind.data_mismatch,
        FindingKind.never_learned,
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
class IncidentGroup:
    """One incident of a log; the fields are the JSON keys of `harness judge`."""

    kind: FindingKind
    onset_step: int
    detected_step: int
    """Step of the first finding."""
    end_step: int | None = None
    """Step at which the loss had recovered, at least the onset, because a restore lowers the step. None: the log ended
    before, or the incident was closed without recovery."""
    severity: Severity = Severity.low
    spike_type: int | None = None
    """1 recovered, 2 lingering, 3 divergent; None if the loss was not affected."""
    base_loss: float
    """Loss level before the onset."""
    peak_step: int
    peak_loss: float
    """Highest loss, also of rejected updates; if none was finite, the loss at the onset."""
    num_findings: int = 1
    kinds: list[FindingKind] = field(default_factory=list)
    """Kinds of all its findings, in order of appearance."""
    ranks: list[int] = field(default_factory=list)
    actions: list[ActionKind] = field(default_factory=list)
    """Actions that the policy decided on, if a policy was run."""
    message: str
    """Message of the gravest finding."""


@final
@dataclass(slots=True)
class IncidentGrouper:
    """Groups the findings of a log, row by row."""

    cfg: DetectConfig
    mean: float = math.nan
    deviation: float = 0.0
    """Mean absolute deviation of the loss outside incidents."""
    smoothed: float = 0.0
    seen: bool = False
    """Whether any row had a finite loss."""
    open: IncidentGroup | None = None
    rows: int = 0
    """Rows since the open incident was detected."""
    back: int = 0
    """Rows with a recovered loss minus rows without, since it last was zero."""
    back_step: int = 0
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=NUM_LEVEL + LONGEST_ONSET))
    """Step and loss of the last rows outside incidents, oldest first."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_LEVEL))
    """Last losses of the open incident."""
    trend: RecoveryTrend = field(default_factory=RecoveryTrend)
    is_nonfinite: bool = False
    """A loss of the open incident was not finite."""
    has_spiked: bool = False
    """The spike detector raised a finding in the open incident. It raises the next one once it is re-armed."""

    @property
    def sigma(self) -> float:
        """Standard deviation of the loss outside incidents."""
        return 1.2533 * self.deviation

    def observe(self, record: ReducedRecord, findings: Sequence[Finding]) -> list[IncidentGroup]:
        """The incidents that end with this row."""
        loss, ended = record.loss, []
        finite = math.isfinite(loss) and not record.refused
        is_spike = not record.refused and any(finding.kind is FindingKind.loss_spike for finding in findings)
        if self.open is not None and is_spike and self.has_spiked:
            ended.append(self._close(self.open, self.back_step if self.back > 0 else None))
        if finite:
            self.smoothed = self.smoothed + (loss - self.smoothed) / SMOOTHED_ROWS if self.seen else loss
            self.seen = True
        for finding in findings:
            is_search = finding.kind is FindingKind.nonfinite and record.refused and is_overflow(record)
            if finding.kind not in ABOUT_SPEED and not is_search:
                self._add_finding(finding, record)
        self.has_spiked = self.has_spiked or is_spike
        if self.open is not None:
            ended += self._update_open(self.open, record, finite)
        elif finite:
            self._update_baseline(record.step, loss)
        return ended

    def finish(self) -> Iterator[IncidentGroup]:
        """The incident that is open at the end of the log, if any."""
        if self.open is not None:
            yield self._close(self.open, None)

    def _update_baseline(self, step: int, loss: float) -> None:
        if self.mean != self.mean:
            self.mean = loss
        self.losses.append((step, loss))
        self.deviation += (abs(loss - self.mean) - self.deviation) / SPREAD_ROWS
        self.mean += (loss - self.mean) / (UP_ROWS if loss > self.mean else DOWN_ROWS)

    def _level_before(self, onset: int, finding: Finding) -> float:
        """Median of the kept losses before a step; if there is none, the bound of a slow change, or the mean loss."""
        losses = [loss for step, loss in self.losses if step < onset]
        if losses:
            return median(losses[-NUM_LEVEL:])
        return finding.bound if finding.kind in SLOW_CHANGES else self.mean

    def _add_finding(self, finding: Finding, record: ReducedRecord) -> None:
        onset = max(0, finding.step - max(0, finding.iteration - finding.onset))
        level = self._level_before(onset, finding)
        if self.open is None:
            self.rows, self.back, self.is_nonfinite, self.has_spiked = 0, 0, False, False
            self.trend = RecoveryTrend(moved_at=record.step)
            self.recent.clear()
            self.open = IncidentGroup(
                kind=finding.kind,
                onset_step=onset,
                detected_step=record.step,
                base_loss=level,
                peak_step=record.step,
                peak_loss=record.loss,
                num_findings=0,
                message=finding.message,
            )
        incident = self.open
        if finding.kind in SLOW_CHANGES and incident.base_loss - level > self.sigma:  # it began before the incident
            incident.onset_step, incident.base_loss, self.back = onset, level, 0
        incident.num_findings += 1
        incident.ranks = sorted({*incident.ranks, *finding.ranks})
        if finding.kind not in incident.kinds:
            incident.kinds.append(finding.kind)
        if GRAVEST.index(finding.kind) < GRAVEST.index(incident.kind):
            incident.kind, incident.message = finding.kind, finding.message

    def _update_open(self, incident: IncidentGroup, record: ReducedRecord, finite: bool) -> Iterator[IncidentGroup]:
        self.rows += 1
        if math.isfinite(record.loss) and not record.loss <= incident.peak_loss:
            incident.peak_step, incident.peak_loss = record.step, record.loss
            self.rows, self.back = min(self.rows, self.cfg.lingering_rows), 0
        self.is_nonfinite = self.is_nonfinite or not math.isfinite(record.loss)
        base = incident.base_loss
        if finite:
            self.recent.append(record.loss)
            self.trend.follow(self.smoothed, record.step, level=base, sigma=self.sigma)
        is_back = finite and (math.isnan(base) or has_recovered(level=base, sigma=self.sigma, loss=self.smoothed))
        untouched = not OF_THE_LOSS & set(incident.kinds)
        if is_back or (untouched and finite):
            self.back_step = record.step if self.back == 0 else self.back_step
            self.back += 1
            if self.back >= self.cfg.recovered_rows:
                yield self._close(incident, self.back_step)
        else:
            self.back = max(0, self.back - 1)
            is_recovering = self.trend.is_recovering(record.step, patience=self.cfg.lingering_rows)
            if finite and self.rows > 2 * self.cfg.lingering_rows and not is_recovering:
                self.mean = self.smoothed
                is_level = median(self.recent) - base <= self.sigma  # what noise does not tell from the level before
                yield self._close(incident, record.step if is_level else None)

    def _close(self, incident: IncidentGroup, end_step: int | None) -> IncidentGroup:
        self.open = None
        incident.end_step = None if end_step is None else max(end_step, incident.onset_step)
        kinds = set(incident.kinds)
        if OF_THE_LOSS & kinds:
            incident.spike_type = self._classify(incident)
        if (incident.spike_type == 3 and end_step is None) or kinds & SEVERE:
            incident.severity = Severity.high
        elif incident.spike_type in (2, 3) or FindingKind.nonfinite in kinds:
            incident.severity = Severity.medium
        return incident

    def _classify(self, incident: IncidentGroup) -> int:
        """The type of the spike, by the trajectory of the loss."""
        if self.is_nonfinite:
            return 3
        if incident.end_step is not None:
            return 1
        if FindingKind.divergence in incident.kinds:
            return 3
        is_rising = self.trend.direction > 0
        level, peak = incident.base_loss, incident.peak_loss
        return max(
            2, classify_trajectory(level=level, sigma=self.sigma, peak=peak, loss=self.smoothed, is_rising=is_rising)
        )
