"""The register of incidents: what each was about, for reports; nothing is decided by it.

Why: a case of the policy forgets what no decision needs: which ranks and layers were named, which findings a refused
update raised, which batches were blamed before the first restore. A person who reads of it later needs all of that.
How: it looks over the policy's shoulder. A finding belongs to the open case that showed in the same iteration, and
where none did, to the newest. An entry becomes an `Incident` when its case is closed.
Left out: findings that open no case (slow, duplicate_batch) and come while none is open; the log has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from harness.core.events import ABOUT_SPEED, Action, Finding, FindingKind, Incident, ReducedRecord
from harness.sentinel.policy.open_incident import OpenIncident
from harness.sentinel.policy.state import PolicyState

OPEN = "open"
FOR_PEOPLE = ABOUT_SPEED | {FindingKind.duplicate_batch}
"""Findings that open no case."""


@final
@dataclass(slots=True)
class IncidentLog:
    entries: dict[int, Incident] = field(default_factory=dict)
    """Open ones, by their number."""
    ended: list[Incident] = field(default_factory=list)
    """Not asked for yet."""

    def on_record(self, record: ReducedRecord, findings: Sequence[Finding], policy_state: PolicyState) -> None:
        """One iteration, after the policy has seen it."""
        is_trouble = record.refused or any(finding.kind not in FOR_PEOPLE for finding in findings)
        showing = [
            incident.number
            for incident in policy_state.open_incidents
            if is_trouble and record.step <= incident.end_step
        ]
        for incident in policy_state.open_incidents:
            entry = self.entries.get(incident.number)
            if entry is None:
                entry = self.entries[incident.number] = _open_entry(incident, record)
            if incident.number in showing:
                entry.last, entry.last_step = record.iteration, max(entry.last_step, record.step)
            if incident.onset < entry.onset:
                entry.onset, entry.onset_step = incident.onset, incident.onset_step
            _add_new(entry.kinds, incident.kinds)
        of = self.entries.get((showing or [incident.number for incident in policy_state.open_incidents] or [0])[-1])
        if of is not None:
            for finding in findings:
                _add_new(of.kinds, [str(finding.kind)])
                _add_new(of.ranks, finding.ranks)
                _add_new(of.groups, finding.groups)
                _add_new(of.cursors, finding.cursors)
        self.close_ended(record.time, record.iteration, policy_state)

    def on_action(self, action: Action) -> None:
        """An action was decided."""
        entry = self.entries.get(action.incident)
        if entry is not None:
            _add_new(entry.actions, [str(action.kind)])
            if action.lr_scale != 1 and not action.in_fp8:  # what is given back is no sign of trouble
                entry.last = max(entry.last, action.iteration)

    def close_ended(self, now: float, iteration: int, policy_state: PolicyState) -> None:
        """Tell what ended with the last record or outcome."""
        for number, verdict, spike_type in policy_state.closed:
            entry = self.entries.pop(number, None)
            if entry is not None:
                entry.time, entry.iteration = now, iteration
                entry.verdict, entry.spike_type, entry.is_open = str(verdict), spike_type, False
                self.ended.append(entry)

    def drain(self, still_open: Iterable[OpenIncident] = ()) -> list[Incident]:
        """What ended since this was last asked, and how those stand that are still open."""
        told, self.ended = self.ended, []
        for incident in still_open:
            entry = self.entries.get(incident.number)
            if entry is not None:
                entry.time, entry.spike_type = time.time(), incident.spike_type
                told.append(entry)
        return told


def _open_entry(incident: OpenIncident, record: ReducedRecord) -> Incident:
    return Incident(
        time=record.time,
        iteration=record.iteration,
        number=incident.number,
        kinds=list(incident.kinds),
        onset=incident.onset,
        onset_step=incident.onset_step,
        last=record.iteration,
        last_step=record.step,
        verdict=OPEN,
        is_open=True,
    )


def _add_new(known: list[Any], more: Iterable[Any]) -> None:
    known += [each for each in dict.fromkeys(more) if each not in known]
