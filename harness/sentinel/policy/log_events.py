"""The events of a log as the policy took them: each record with the findings that were made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from harness.core.events import Action, Event, Finding, HeldOutMeasured, Outcome, RunStarted, StepRecord

PolicyEvent = Action | Outcome | RunStarted | HeldOutMeasured


class JudgedRecord(NamedTuple):
    record: StepRecord
    findings: list[Finding]


def pair_findings(events: Iterable[Event]) -> Iterator[JudgedRecord | PolicyEvent]:
    """What the policy heard, in order; other events, which may lie between a record and its findings, are left out."""
    waiting: JudgedRecord | None = None
    for event in events:
        match event:
            case Finding():
                if waiting is not None and event.iteration == waiting.record.iteration:
                    waiting.findings.append(event)
                continue
            case StepRecord() | Action() | Outcome() | RunStarted() | HeldOutMeasured():
                if waiting is not None:
                    yield waiting
                waiting = JudgedRecord(event, []) if isinstance(event, StepRecord) else None
                if not isinstance(event, StepRecord):
                    yield event
    if waiting is not None:
        yield waiting
