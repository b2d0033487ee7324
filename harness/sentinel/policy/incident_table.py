"""The incidents of a run that are open, and those that the last event closed.

How: findings within `region_steps` of an incident belong to it; any other opens a new one. An incident that nothing is
watched for is closed as cured after `clean_steps` without a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

from harness.config.sentinel import PolicyConfig
from harness.core.events import ReducedRecord
from harness.sentinel.policy.lineage import Lineage
from harness.sentinel.policy.open_incident import ClosedIncident, IncidentVerdict, OpenIncident
from harness.sentinel.policy.suspect_sources import SuspectSources


@final
@dataclass(slots=True, kw_only=True)
class IncidentTable:
    cfg: PolicyConfig
    opened: list[OpenIncident] = field(default_factory=list)
    """Open incidents, the oldest first."""
    num_incidents: int = 0
    """Opened so far; the number of the newest one."""
    closed: list[ClosedIncident] = field(default_factory=list)
    """Incidents closed by the last record or outcome."""

    def find(self, number: int) -> OpenIncident | None:
        return next((incident for incident in self.opened if incident.number == number), None)

    def find_or_open(
        self,
        kind: str,
        record: ReducedRecord,
        *,
        onset: int,
        cursors: Sequence[int],
        lineage: Lineage,
        suspects: SuspectSources,
    ) -> OpenIncident:
        """Add a finding to the open incident near its onset, or open a new one."""
        onset = max(onset, 0)
        there = lineage.last_seen(onset)
        onset_step = max(record.step - (record.iteration - onset), 0) if there is None else there.step
        newest_first = reversed(self.opened)
        incident = next((each for each in newest_first if self._is_near(each, onset_step, record.step)), None)
        if incident is None:
            self.num_incidents += 1
            incident = OpenIncident(number=self.num_incidents, onset=onset, onset_step=onset_step, end_step=record.step)
            self.opened.append(incident)
        incident.add_finding(kind, onset=onset, onset_step=onset_step, step=record.step, cursors=cursors)
        if incident.onset == onset:
            normal = lineage.normal_before(onset)
            incident.level, incident.sigma = (None, 0.0) if normal is None else normal
        if onset == record.iteration:
            incident.source = suspects.source_of(record)
        return incident

    def give_back(self, ranges: Iterable[Sequence[int]]) -> None:
        """Record that these rejected batches are consumed again; none is given back twice."""
        for incident in self.opened:
            again = [int(batch) for batch, _, _ in incident.refused if any(a <= batch <= b for a, b in ranges)]
            incident.given_back = sorted({*incident.given_back, *again})

    def forget_rejections(self) -> None:
        """Drop what the rejected updates of a discarded state said about the open incidents."""
        for incident in self.opened:
            incident.refused, incident.given_back, incident.num_excessive = [], [], 0

    def close(self, incident: OpenIncident, verdict: IncidentVerdict) -> None:
        self.opened.remove(incident)
        is_spike = verdict not in (IncidentVerdict.harmless, IncidentVerdict.accepted)
        self.closed.append(ClosedIncident(incident.number, verdict, incident.spike_type if is_spike else None))

    def close_passed(self, step: int) -> None:
        """Close the incidents whose place the run has passed with clean steps."""
        for incident in [incident for incident in self.opened if not incident.is_watched]:
            if step >= incident.end_step + self.cfg.clean_steps:
                self.close(incident, IncidentVerdict.cured)

    def close_undone(self, step: int) -> None:
        """Close the untreated incidents that began after a restored step: their steps were undone."""
        for incident in [each for each in self.opened if not each.is_treated and each.onset_step > step]:
            self.close(incident, IncidentVerdict.undone)

    def _is_near(self, incident: OpenIncident, first_step: int, last_step: int) -> bool:
        region = self.cfg.region_steps
        return incident.onset_step - region <= last_step and first_step <= incident.end_step + region
