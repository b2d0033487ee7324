"""Groups the events of a log as the policy processes them: each record together with its findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from harness.core.events import Action, Event, Finding, HeldOutMeasured, Outcome, RunStarted, StepRecord, TrialMeasured

PolicyEvent = Action | Outcome | RunStarted | HeldOutMeasured | TrialMeasured


class JudgedRecord(NamedTuple):
    record: StepRecord
    findings: list[Finding]


def pair_findings(events: Iterable[Event]) -> Iterator[JudgedRecord | PolicyEvent]:
    """Yield the events that the policy processes, in order. Others, also between a record and its findings, are
    dropped."""
    pending: JudgedRecord | None = None
    for event in events:
        match event:
            case Finding():
                if pending is not None and event.iteration == pending.record.iteration:
                    pending.findings.append(event)
                continue
            case StepRecord() | Action() | Outcome() | RunStarted() | HeldOutMeasured() | TrialMeasured():
                if pending is not None:
                    yield pending
                pending = JudgedRecord(event, []) if isinstance(event, StepRecord) else None
                if not isinstance(event, StepRecord):
                    yield event
    if pending is not None:
        yield pending
