"""Collects the facts of each incident for reports. No decision depends on it.

Why: an `OpenIncident` drops what no decision needs: the ranks and layers that were named, the findings of a rejected
update, the batches that were blamed before the first restore. Reports need all of that.
How: it follows the policy state. A finding belongs to the open incident that had a finding in the same iteration, or
else to the newest one. An entry becomes an `Incident` event when its incident is closed. Entries are part of the
sentinel's state in a checkpoint, and follow the events that were logged since.
Left out: findings that open no incident (slow, duplicate_batch) while none is open; the event log has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, final

from harness.core.events import ABOUT_SPEED, Action, Event, Finding, FindingKind, Incident, ReducedRecord
from harness.sentinel.policy.open_incident import OpenIncident
from harness.sentinel.policy.policy_state import PolicyState

OPEN = "open"
INFORMATIVE = ABOUT_SPEED | {FindingKind.duplicate_batch, FindingKind.corruption_passed}
"""Findings that open no incident."""


@final
@dataclass(slots=True)
class IncidentLog:
    entries: dict[int, Incident] = field(default_factory=dict)
    """Incident number -> entry, of the open incidents."""
    ended: list[Incident] = field(default_factory=list)
    """Closed and not drained yet."""

    def state(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {"entries": [asdict(entry) for entry in self.entries.values()], "ended": list(map(asdict, self.ended))}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        entries = [Incident(**entry) for entry in state["entries"]]
        return cls({entry.number: entry for entry in entries}, [Incident(**entry) for entry in state["ended"]])

    def end_resume(self, since: Iterable[Event], policy_state: PolicyState) -> None:
        """Drop what an earlier start has logged, and the entries of incidents that a restart after a halt dropped."""
        logged = {event.number for event in since if isinstance(event, Incident) and not event.is_open}
        self.ended = [entry for entry in self.ended if entry.number not in logged]
        open_numbers = {incident.number for incident in policy_state.open_incidents}
        self.entries = {number: entry for number, entry in self.entries.items() if number in open_numbers}

    def on_record(self, record: ReducedRecord, findings: Sequence[Finding], policy_state: PolicyState) -> None:
        """Add one iteration; called after the policy has processed it."""
        incidents = policy_state.open_incidents
        is_suspicious = record.refused or any(finding.kind not in INFORMATIVE for finding in findings)
        showing = [each.number for each in incidents if is_suspicious and record.step <= each.end_step]
        for incident in incidents:
            entry = self.entries.get(incident.number)
            if entry is None:
                entry = self.entries[incident.number] = _open_entry(incident, record)
            if incident.number in showing:
                entry.last, entry.last_step = record.iteration, max(entry.last_step, record.step)
            if incident.onset < entry.onset:
                entry.onset, entry.onset_step = incident.onset, incident.onset_step
            _add_new(entry.kinds, incident.kinds)
        owner = self.entries.get((showing or [incident.number for incident in incidents] or [0])[-1])
        if owner is not None:
            for finding in findings:
                _add_new(owner.kinds, [str(finding.kind)])
                _add_new(owner.ranks, finding.ranks)
                _add_new(owner.groups, finding.groups)
                _add_new(owner.cursors, finding.cursors)
        self.close_ended(record.time, record.iteration, policy_state)

    def on_action(self, action: Action) -> None:
        """Add an action to the entry of its incident."""
        entry = self.entries.get(action.incident)
        if entry is not None:
            _add_new(entry.actions, [str(action.kind)])
            if action.lr_scale != 1 and not action.in_fp8:  # a return to the full lr or to fp8 does not prolong it
                entry.last = max(entry.last, action.iteration)

    def close_ended(self, now: float, iteration: int, policy_state: PolicyState) -> None:
        """Move the incidents closed by the last record or outcome to `ended`."""
        for number, verdict, spike_type in policy_state.closed:
            entry = self.entries.pop(number, None)
            if entry is not None:
                entry.time, entry.iteration = now, iteration
                entry.verdict, entry.spike_type, entry.is_open = str(verdict), spike_type, False
                self.ended.append(entry)

    def drain(self, still_open: Iterable[OpenIncident] = ()) -> list[Incident]:
        """Return the incidents closed since the last call, and the entries of `still_open` as they are."""
        drained, self.ended = self.ended, []
        for incident in still_open:
            entry = self.entries.get(incident.number)
            if entry is not None:
                entry.time, entry.spike_type = time.time(), incident.spike_type
                drained.append(entry)
        return drained


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
    known += [item for item in dict.fromkeys(more) if item not in known]
