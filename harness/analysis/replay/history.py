"""Reads the event log as a tree of states, to find the steps from a checkpoint to any logged step.

Why: iterations only increase, but after a rewind, a rollback or a restart the next one starts from an older state. A
replay must follow the same path.
How: every record has a parent, the iteration whose state it started from; usually the previous one. `find_path` walks
back from a step to the newest checkpoint on disk. A rejected update changes nothing, so it is not part of the path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from harness.config.errors import ConfigError
from harness.core.events import Action, CheckpointSaved, Event, Finding, Outcome, RunStarted, StepRecord
from harness.core.rundir import RunDir
from harness.sentinel.policy.policy_state import RESTORES

REPLAY_FILE = "replay.json"
START = 0
"""Iteration of the initial state of a run."""


@final
@dataclass(slots=True)
class History:
    """Step records of a run with the state each started from, and the checkpoints that were saved."""

    records: dict[int, StepRecord] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    """Iteration -> the iteration whose state it started from."""
    checkpoints: dict[str, int] = field(default_factory=dict)
    """Directory -> the iteration it was saved after."""
    worlds: dict[int, int] = field(default_factory=dict)
    """First iteration of each start -> its number of ranks."""
    findings: list[Finding] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)

    def world_size(self, iteration: int) -> int:
        """Number of ranks at an iteration."""
        return [size for first, size in self.worlds.items() if first <= iteration][-1]


def read(events: Iterable[Event]) -> History:
    """Read the events of a log."""
    history, current = History(), START
    for event in events:
        match event:
            case StepRecord():
                history.records[event.iteration] = event
                history.parents[event.iteration] = current
                current = event.iteration
            case RunStarted():
                history.worlds[event.iteration + 1] = event.world_size
                current = _iteration_of(event.resumed_from or "", history.checkpoints)
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
    """Iteration of the restored state, parsed from the target of an outcome or of a resume."""
    snapshot = re.match(r"snapshot of iteration (\d+)", target)
    return int(snapshot[1]) if snapshot else checkpoints.get(target.partition(";")[0], START)


def guilty_step(history: History, incident: int) -> StepRecord:
    """The guilty step of an incident: its first rejected update, or else the step of its onset."""
    actions = [action for action in history.actions if action.incident == incident]
    if not actions:
        known = sorted({action.incident for action in history.actions if action.incident})
        numbers = ", ".join(map(str, known)) or "none"
        raise ConfigError("--incident", f"no incident {incident}; incidents of this run: {numbers}")
    last = actions[0].iteration
    onsets = [found.onset for found in history.findings if actions[0].onset <= found.iteration <= last]
    first = min([actions[0].onset, *onsets])
    records = [history.records[at] for at in range(first, last + 1) if at in history.records]
    refused = [record for record in records if record.refused]
    if not records:
        raise ConfigError("--incident", f"the log has no step between iterations {first} and {last}")
    return (refused or records)[0]


class ReplayPath(NamedTuple):
    """The steps from a checkpoint to a logged step."""

    checkpoint: str | None
    """The state to start from; None: the initial state, which the seed determines."""
    records: list[StepRecord]
    """The steps to replay; the requested one is last."""


def find_path(history: History, iteration: int, available: Collection[str]) -> ReplayPath:
    """The shortest path from an available checkpoint to a step."""
    taken = {history.checkpoints[name]: name for name in sorted(available) if name in history.checkpoints}
    steps, current = [history.records[iteration]], history.parents[iteration]
    while current != START and current not in taken:
        record = history.records[current]
        if not record.refused:
            steps.append(record)
        current = history.parents[current]
    return ReplayPath(taken.get(current), steps[::-1])


def older_checkpoint(history: History, iteration: int, available: Collection[str], than: str | None) -> str | None:
    """The next older checkpoint on the same path; None: the initial state."""
    before = history.checkpoints.get(than or "", START)
    states, current = set(), history.parents[iteration]
    while current != START:
        states.add(current)
        current = history.parents[current]
    taken = {name: history.checkpoints.get(name, START) for name in available}
    earlier = [(at, name) for name, at in taken.items() if at in states and at < before]
    return max(earlier)[1] if earlier else None


def read_replay(folder: Path) -> dict[str, Any] | None:
    """The result of a replay in the folder of an incident; None: there is none, or it cannot be read."""
    try:
        tree = json.loads((folder / REPLAY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def read_replays(run: RunDir) -> list[dict[str, Any]]:
    """All results of replays in a run directory."""
    folders = sorted(path.parent for path in run.incidents.glob(f"*/{REPLAY_FILE}"))
    return [tree for folder in folders if (tree := read_replay(folder)) is not None]
