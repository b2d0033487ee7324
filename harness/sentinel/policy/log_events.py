"""Groups the events of a log as the policy processes them: each record together with its findings.

A state of an iteration holds the decisions that were taken on its record, and the log has these behind that record.
`drop_known` leaves them out, so that a resume applies no decision twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from harness.core.events import Action, Event, Finding, HeldOutMeasured, Outcome, RunStarted, StepRecord, TrialMeasured

PolicyEvent = Action | Outcome | RunStarted | HeldOutMeasured | TrialMeasured


DecisionKey = list[str | int]
"""What identifies an action or an outcome near one record, on every rank: its event, iteration, kind and incident."""


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


def decision_key(event: Action | Outcome) -> DecisionKey:
    return [event.name, event.iteration, str(event.kind), event.incident]


def drop_known(events: Iterable[Event], known: Sequence[DecisionKey]) -> Iterator[Event]:
    """Yield the events of a log without the known actions and outcomes before its next record or start.

    Not every known one must be there: the log of an iteration may begin later, and a line may be lost.
    """
    remaining = list(known)
    for event in events:
        if isinstance(event, StepRecord | RunStarted):
            remaining = []
        if isinstance(event, Action | Outcome) and (key := decision_key(event)) in remaining:
            del remaining[: remaining.index(key) + 1]
            continue
        yield event
