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
from harness.sentinel.policy.open_incident import Case
from harness.sentinel.policy.state import Chart

OPEN = "open"
FOR_PEOPLE = ABOUT_SPEED | {FindingKind.duplicate_batch}
"""Findings that open no case."""


@final
@dataclass(slots=True)
class Register:
    entries: dict[int, Incident] = field(default_factory=dict)
    """Open ones, by their number."""
    ended: list[Incident] = field(default_factory=list)
    """Not asked for yet."""

    def see(self, record: ReducedRecord, findings: Sequence[Finding], chart: Chart) -> None:
        """One iteration, after the policy has seen it."""
        is_trouble = record.refused or any(finding.kind not in FOR_PEOPLE for finding in findings)
        showing = [case.number for case in chart.cases if is_trouble and record.step <= case.end_step]
        for case in chart.cases:
            entry = self.entries.get(case.number)
            if entry is None:
                entry = self.entries[case.number] = _opened(case, record)
            if case.number in showing:
                entry.last, entry.last_step = record.iteration, max(entry.last_step, record.step)
            if case.onset < entry.onset:
                entry.onset, entry.onset_step = case.onset, case.onset_step
            _join(entry.kinds, case.kinds)
        of = self.entries.get((showing or [case.number for case in chart.cases] or [0])[-1])
        if of is not None:
            for finding in findings:
                _join(of.kinds, [str(finding.kind)])
                _join(of.ranks, finding.ranks)
                _join(of.groups, finding.groups)
                _join(of.cursors, finding.cursors)
        self.close(record.time, record.iteration, chart)

    def note(self, action: Action) -> None:
        """An action was decided."""
        entry = self.entries.get(action.incident)
        if entry is not None:
            _join(entry.actions, [str(action.kind)])
            if action.lr_scale != 1 and not action.in_fp8:  # what is given back is no sign of trouble
                entry.last = max(entry.last, action.iteration)

    def close(self, now: float, iteration: int, chart: Chart) -> None:
        """Tell what ended with the last record or outcome."""
        for number, verdict, spike_type in chart.closed:
            entry = self.entries.pop(number, None)
            if entry is not None:
                entry.time, entry.iteration = now, iteration
                entry.verdict, entry.spike_type, entry.is_open = str(verdict), spike_type, False
                self.ended.append(entry)

    def take(self, still_open: Iterable[Case] = ()) -> list[Incident]:
        """What ended since this was last asked, and how those stand that are still open."""
        told, self.ended = self.ended, []
        for case in still_open:
            entry = self.entries.get(case.number)
            if entry is not None:
                entry.time, entry.spike_type = time.time(), case.spike_type
                told.append(entry)
        return told


def _opened(case: Case, record: ReducedRecord) -> Incident:
    return Incident(
        time=record.time,
        iteration=record.iteration,
        number=case.number,
        kinds=list(case.kinds),
        onset=case.onset,
        onset_step=case.onset_step,
        last=record.iteration,
        last_step=record.step,
        verdict=OPEN,
        is_open=True,
    )


def _join(known: list[Any], more: Iterable[Any]) -> None:
    known += [each for each in dict.fromkeys(more) if each not in known]
