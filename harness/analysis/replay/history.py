"""Which state each step was made on: the log read as a tree, so that any step can be reached again from a checkpoint.

Why: iterations never go back but states do. After a rewind, a rollback or a restart the next iteration is made on an
older state, and a replay must take the same way there.
How: every record has a parent, the iteration whose state it began from; usually the one before it. `way` walks back
from a step to the newest state that still lies on disk. A refused update changed nothing, so it is left out on the way.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, final

from harness.config.errors import ConfigError
from harness.core.events import Action, CheckpointSaved, Event, Finding, Outcome, RunStarted, StepRecord
from harness.sentinel.policy.state import RESTORES

START = 0
"""The iteration of the state that a run begins with."""


@final
@dataclass(slots=True)
class History:
    records: dict[int, StepRecord] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    """Iteration -> the iteration whose state it began from."""
    checkpoints: dict[str, int] = field(default_factory=dict)
    """Directory -> the iteration it was taken after."""
    worlds: dict[int, int] = field(default_factory=dict)
    """First iteration of each start -> its number of ranks."""
    findings: list[Finding] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)

    def world_size(self, iteration: int) -> int:
        """How many ranks made an iteration."""
        return [size for first, size in self.worlds.items() if first <= iteration][-1]


def read(events: Iterable[Event]) -> History:
    """Fold a log."""
    history, current = History(), START
    for event in events:
        match event:
            case StepRecord():
                history.records[event.iteration] = event
                history.parents[event.iteration] = current
                current = event.iteration
            case RunStarted():
                history.worlds[event.iteration + 1] = event.world_size
                current = history.checkpoints.get(event.resumed_from or "", START)
            case Outcome(succeeded=True) if event.kind in RESTORES:
                current = _iteration_of(event.target, history.checkpoints)
            case CheckpointSaved():
                history.checkpoints[event.directory] = event.iteration
            case Finding():
                history.findings.append(event)
            case Action():
                history.actions.append(event)
            case _:
                pass
    return history


def _iteration_of(target: str, checkpoints: dict[str, int]) -> int:
    """The iteration of the state that a restore went back to, as its outcome names it."""
    snapshot = re.match(r"snapshot of iteration (\d+)", target)
    return int(snapshot[1]) if snapshot else checkpoints.get(target.partition(";")[0], START)


def guilty(history: History, incident: int) -> StepRecord:
    """The step an incident is about: the first that was refused where one was, else the one where it began."""
    answers = [action for action in history.actions if action.incident == incident]
    if not answers:
        known = sorted({action.incident for action in history.actions if action.incident})
        there = f"there are {', '.join(map(str, known))}" if known else "the run has none"
        raise ConfigError("--incident", f"no incident {incident}; {there}")
    last = answers[0].iteration
    onsets = [found.onset for found in history.findings if answers[0].onset <= found.iteration <= last]
    first = min([answers[0].onset, *onsets])
    known_records = [history.records[each] for each in range(first, last + 1) if each in history.records]
    refused = [record for record in known_records if record.refused]
    if not known_records:
        raise ConfigError("--incident", f"the log holds no step between iterations {first} and {last}")
    return (refused or known_records)[0]


class Way(NamedTuple):
    """How a step is reached."""

    checkpoint: str | None
    """The state to begin with; None: that of the beginning, which the seed gives."""
    records: list[StepRecord]
    """The steps from there on, the one in question last."""


def way(history: History, iteration: int, available: Collection[str]) -> Way:
    """The shortest one from a checkpoint that is there."""
    taken = {history.checkpoints[name]: name for name in sorted(available) if name in history.checkpoints}
    steps, current = [history.records[iteration]], history.parents[iteration]
    while current != START and current not in taken:
        record = history.records[current]
        if not record.refused:
            steps.append(record)
        current = history.parents[current]
    return Way(taken.get(current), steps[::-1])


def older(history: History, iteration: int, available: Collection[str], than: str | None) -> str | None:
    """The next older checkpoint on the same way; None: the beginning."""
    before = history.checkpoints.get(than or "", START)
    states, current = set(), history.parents[iteration]
    while current != START:
        states.add(current)
        current = history.parents[current]
    taken = {name: history.checkpoints.get(name, START) for name in available}
    earlier = [(at, name) for name, at in taken.items() if at in states and at < before]
    return max(earlier)[1] if earlier else None
