"""The events of a log as the policy took them: each record with the findings that were made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from harness.core.events import Action, Event, Finding, HeldOutMeasured, Outcome, RunStarted, StepRecord

Heard = Action | Outcome | RunStarted | HeldOutMeasured


class Judged(NamedTuple):
    record: StepRecord
    findings: list[Finding]


def judged(events: Iterable[Event]) -> Iterator[Judged | Heard]:
    """What the policy heard, in order; other events, which may lie between a record and its findings, are left out."""
    waiting: Judged | None = None
    for event in events:
        match event:
            case Finding():
                if waiting is not None and event.iteration == waiting.record.iteration:
                    waiting.findings.append(event)
                continue
            case StepRecord() | Action() | Outcome() | RunStarted() | HeldOutMeasured():
                if waiting is not None:
                    yield waiting
                waiting = Judged(event, []) if isinstance(event, StepRecord) else None
                if not isinstance(event, StepRecord):
                    yield event
    if waiting is not None:
        yield waiting
