"""Groups findings, actions and outcomes of an event log into incidents.

An action names its incident; findings since the incident's onset belong to it; an outcome gives an action's result and
cost. An incident event from the policy gives the verdict. Actions of an operator belong to no incident.
Losses and costs of an incident come from `harness.analysis.postmortem.gather`, as in its post-mortem.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from harness.analysis.postmortem.gather import (
    OPEN,
    IncidentSummary,
    incidents,
    read_run_facts,
    state_of_incident,
    summarize_incident,
)
from harness.analysis.postmortem.incident_numbers import AFTER_RECORDS
from harness.core.events import Action, ActionKind, Event, Finding, Incident, Outcome, RunEnded, RunStarted
from harness.core.rundir import RunDir

MOST_FINDINGS = 200
"""Findings kept while they wait for an action, and findings kept for one incident."""


@final
@dataclass(slots=True, kw_only=True)
class TakenAction:
    """An action and its outcome."""

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
    """The latest iteration known to belong to it."""
    time: float
    """Time of its first event in the log."""
    kinds: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    actions: list[TakenAction] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    cursors: set[int] = field(default_factory=set)
    verdict: str = OPEN
    """How it ended."""
    spike_type: int | None = None


@final
@dataclass(slots=True)
class IncidentStories:
    """Incidents of a run by number, updated with the events of its log in order."""

    by_number: dict[int, IncidentStory] = field(default_factory=dict)
    _waiting: list[Finding] = field(default_factory=list)
    _log: list[Event] = field(default_factory=list)
    """Events that the numbers of incidents are computed from."""
    _settled: dict[int, IncidentSummary] = field(default_factory=dict, compare=False)
    """Summaries that later steps cannot change."""

    def __len__(self) -> int:
        return len(self.by_number)

    def summaries(self, run: RunDir, *, last: int) -> dict[int, IncidentSummary]:
        """Numbers and cost of each incident; `last` is the newest iteration of the log."""
        found: dict[int, IncidentSummary] = {}
        if not run.events.exists() or not self.by_number:
            return found
        facts = read_run_facts(run, self._log)
        for incident in incidents(self._log):
            summary = self._settled.get(incident.number)
            if summary is None:
                summary = summarize_incident(run, incident, self._log, facts)
                if not incident.is_open and last > incident.last + AFTER_RECORDS:
                    self._settled[incident.number] = summary
            found[incident.number] = summary
        return found

    def state_of(self, number: int) -> str:
        """How an incident ended, in words."""
        story = self.by_number[number]
        end = next((event for event in reversed(self._log) if isinstance(event, RunEnded | RunStarted)), None)
        has_halted = any(taken.kind == ActionKind.halt for taken in story.actions)
        return state_of_incident(story.verdict, has_halted=has_halted, has_ended=isinstance(end, RunEnded))

    @property
    def num_open(self) -> int:
        return sum(self.state_of(number) == OPEN for number in self.by_number)

    def add(self, event: Event) -> None:
        if isinstance(event, Finding | Action | Outcome | Incident | RunStarted | RunEnded):
            self._log.append(event)
        match event:
            case Finding():
                self._waiting = [*self._waiting[-MOST_FINDINGS:], event]
            case Action() if event.incident > 0:
                self._add_action(event)
            case Outcome() if event.incident in self.by_number:
                self._add_outcome(self.by_number[event.incident], event)
            case Incident():
                self._close(event)
            case _:
                pass

    def _story(self, number: int, *, onset: int, last: int, time: float) -> IncidentStory:
        """The incident with this number, extended to cover `onset` to `last`, with the findings since its onset."""
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

    def _add_action(self, action: Action) -> None:
        story = self._story(action.incident, onset=action.onset, last=action.iteration, time=action.time)
        story.actions.append(
            TakenAction(
                kind=str(action.kind),
                iteration=action.iteration,
                time=action.time,
                reason=action.reason,
                exclude=list(action.exclude),
            )
        )

    def _add_outcome(self, story: IncidentStory, outcome: Outcome) -> None:
        story.last = max(story.last, outcome.iteration)
        taken = next((action for action in reversed(story.actions) if action.kind == outcome.kind), None)
        if taken is not None:
            taken.succeeded, taken.target = outcome.succeeded, outcome.target
            taken.steps_lost, taken.tokens_lost = outcome.steps_lost, outcome.tokens_lost
            taken.seconds = outcome.seconds
