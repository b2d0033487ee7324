"""Incidents of a run, put together from its findings, actions and outcomes.

How: an action names its incident; findings that lie in what it answers belong to it; an outcome says what it came to
and cost. When the policy closes an incident, the log says what became of it. Costs add up over an incident. What an
operator ordered is no incident.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from harness.core.events import Action, Event, Finding, Incident, Outcome

MOST_FINDINGS = 200
"""Waiting for an action, and of one incident."""


@final
@dataclass(slots=True, kw_only=True)
class Taken:
    """An action and what came of it."""

    kind: str
    iteration: int
    time: float
    reason: str
    exclude: list[int]
    succeeded: bool | None = None
    """None: no outcome yet."""
    target: str = ""
    steps_lost: int = 0
    tokens_lost: int = 0
    seconds: float = 0.0


@final
@dataclass(slots=True, kw_only=True)
class IncidentStory:
    number: int
    onset: int
    """Iteration where it probably began."""
    last: int
    """The latest iteration that is known to belong to it."""
    time: float
    """Of its first word in the log."""
    kinds: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    actions: list[Taken] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    cursors: set[int] = field(default_factory=set)
    verdict: str = "open"
    """What became of it."""
    spike_type: int | None = None

    @property
    def steps_lost(self) -> int:
        return sum(taken.steps_lost for taken in self.actions)

    @property
    def tokens_lost(self) -> int:
        return sum(taken.tokens_lost for taken in self.actions)

    @property
    def seconds(self) -> float:
        return sum(taken.seconds for taken in self.actions)


@final
@dataclass(slots=True)
class Incidents:
    """Folds the events of a log, in their order."""

    by_number: dict[int, IncidentStory] = field(default_factory=dict)
    _waiting: list[Finding] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.by_number)

    def add(self, event: Event) -> None:
        match event:
            case Finding():
                self._waiting = [*self._waiting[-MOST_FINDINGS:], event]
            case Action() if event.incident > 0:
                self._answer(event)
            case Outcome() if event.incident in self.by_number:
                self._conclude(self.by_number[event.incident], event)
            case Incident():
                self._close(event)
            case _:
                pass

    def _story(self, number: int, *, onset: int, last: int, time: float) -> IncidentStory:
        """The incident of that number, reaching at least from `onset` to `last`, with the findings that lie in it."""
        story = self.by_number.get(number)
        if story is None:
            story = self.by_number[number] = IncidentStory(number=number, onset=onset, last=last, time=time)
        story.onset, story.last = min(story.onset, onset), max(story.last, last)
        mine = [finding for finding in self._waiting if finding.iteration >= story.onset]
        self._waiting = [finding for finding in self._waiting if finding.iteration < story.onset]
        story.findings = [*story.findings, *mine][:MOST_FINDINGS]
        for finding in mine:
            story.ranks |= set(finding.ranks)
            story.groups |= set(finding.groups)
            story.cursors |= set(finding.cursors)
            story.kinds += [str(finding.kind)] * (finding.kind not in story.kinds)
        return story

    def _close(self, event: Incident) -> None:
        story = self._story(event.number, onset=event.onset, last=event.last, time=event.time)
        story.kinds = list(event.kinds) or story.kinds
        story.ranks |= set(event.ranks)
        story.groups |= set(event.groups)
        story.cursors |= set(event.cursors)
        story.verdict, story.spike_type = event.verdict, event.spike_type

    def _answer(self, action: Action) -> None:
        story = self._story(action.incident, onset=action.onset, last=action.iteration, time=action.time)
        story.actions.append(
            Taken(
                kind=str(action.kind),
                iteration=action.iteration,
                time=action.time,
                reason=action.reason,
                exclude=list(action.exclude),
            )
        )

    def _conclude(self, story: IncidentStory, outcome: Outcome) -> None:
        story.last = max(story.last, outcome.iteration)
        taken = next((each for each in reversed(story.actions) if each.kind == outcome.kind), None)
        if taken is not None:
            taken.succeeded, taken.target = outcome.succeeded, outcome.target
            taken.steps_lost, taken.tokens_lost = outcome.steps_lost, outcome.tokens_lost
            taken.seconds = outcome.seconds
