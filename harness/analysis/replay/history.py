"""Finds the steps from a checkpoint to any logged step, without reading the others.

Why: after a rewind, a rollback or a restart the next iteration starts from an older state. A replay must follow the
same path. A long log has gigabytes of steps, and the path usually has a few hundred.
How: iterations only increase, so every restore begins a stretch of iterations. Its first step starts from the restored
state, and every other one from the state that the step before it left. Restores and checkpoints are rare lines of the
log (`harness.telemetry.log_index`). A restored checkpoint that the log does not mention is a beginning: it was
imported, or a power failure took its line. `find_path` goes from a step back to the newest checkpoint on disk, stretch
by stretch; then only the steps in between are read. A rejected update changes nothing, so it is not part of the path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from harness.config.errors import ConfigError, require
from harness.core.events import Action, ActionKind, CheckpointSaved, Finding, Outcome, RunStarted, StepRecord
from harness.core.rundir import RunDir
from harness.sentinel.policy.incident_log import INFORMATIVE
from harness.sentinel.policy.policy_state import RESTORES
from harness.telemetry.event_log import read_non_step_events, read_steps

REPLAY_FILE = "replay.json"
START = 0
"""Iteration of the initial state of a run."""


NUM_EARLIER = 20
"""Steps before the requested one that it is compared with."""


class Restore(NamedTuple):
    """A start, a rewind or a rollback."""

    after: int
    """The last iteration before it."""
    target: int | None
    """The iteration whose state was restored; None: the log does not say, as for an imported model."""
    checkpoint: str = ""
    """The checkpoint that was restored; empty: a snapshot, or the initial state."""


class AcceptedLevel(NamedTuple):
    """An accepted level of the loss, at which the gate was re-anchored."""

    after: int
    """The last iteration before it."""
    loss: float | None
    grad_norm: float | None


@final
@dataclass(slots=True)
class History:
    """What a log says about the states of a run, without its steps."""

    log: Path
    restores: list[Restore] = field(default_factory=list)
    checkpoints: dict[str, int] = field(default_factory=dict)
    """Directory -> the iteration it was saved after."""
    worlds: dict[int, int] = field(default_factory=dict)
    """First iteration of each start -> its number of ranks."""
    findings: list[Finding] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    accepted: list[AcceptedLevel] = field(default_factory=list)
    """In order, without those that a restore undid before the next step."""
    logits_clipped_after: int | None = None
    """The last iteration before the policy began to clip attention logits; it never ends."""

    def world_size(self, iteration: int) -> int:
        """Number of ranks at an iteration."""
        size = self._known_size(iteration)
        message = f"has no run_started event before iteration {iteration}: the number of its ranks is not known"
        require(size > 0, str(self.log), message)
        return size

    def is_on_ranks(self, path: ReplayPath, num_ranks: int) -> bool:
        """Whether every step of a path was trained on this number of ranks."""
        return all(self._known_size(stretch.start) == num_ranks for stretch in path.stretches if stretch)

    def _known_size(self, iteration: int) -> int:
        """Number of ranks at an iteration; 0: not known."""
        return [0, *(size for first, size in self.worlds.items() if first <= iteration)][-1]


def read(log: Path) -> History:
    """Read the events of a log, except its steps."""
    history = History(log)
    for event in read_non_step_events(log):
        match event:
            case RunStarted():
                history.worlds[event.iteration + 1] = event.world_size
                _add_restore(history, event.iteration, event.resumed_from or "")
            case Outcome(kind=ActionKind.qk_clip):
                history.logits_clipped_after = event.iteration
            case Outcome(succeeded=True) if event.kind in RESTORES:
                _add_restore(history, event.iteration, event.target)
            case Outcome(succeeded=True, kind=ActionKind.accept):
                same = (each for each in reversed(history.actions) if each.incident == event.incident)
                if (action := next((each for each in same if each.kind is ActionKind.accept), None)) is not None:
                    history.accepted.append(AcceptedLevel(event.iteration, action.level, action.grad_level))
            case CheckpointSaved():
                history.checkpoints[event.directory] = event.iteration
            case Finding():
                history.findings.append(event)
            case Action():
                history.actions.append(event)
                if event.kind is ActionKind.qk_clip:
                    history.logits_clipped_after = event.iteration
            case _:
                pass
    return history


def _add_restore(history: History, after: int, target: str) -> None:
    history.restores.append(_parse_restore(after, target, history.checkpoints))
    history.accepted = [level for level in history.accepted if level.after != after]


def _parse_restore(after: int, target: str, checkpoints: dict[str, int]) -> Restore:
    """The restored state, from the target of an outcome or of a resume."""
    if not target:
        return Restore(after, START)
    if snapshot := re.match(r"snapshot of iteration (\d+)", target):
        return Restore(after, int(snapshot[1]))
    name = target.partition(";")[0]
    return Restore(after, checkpoints.get(name), name)


def guilty_step(history: History, incident: int) -> StepRecord:
    """The guilty step of an incident: its first rejected update, or else the step of its onset."""
    actions = [action for action in history.actions if action.incident == incident]
    if not actions:
        known = sorted({action.incident for action in history.actions if action.incident})
        numbers = ", ".join(map(str, known)) or "none"
        raise ConfigError("--incident", f"no incident {incident}; incidents of this run: {numbers}")
    last = actions[0].iteration
    first = _onset_of(actions[0], history.findings)
    records = read_steps(history.log, first, last)
    refused = [record for record in records if record.refused]
    if not records:
        raise ConfigError("--incident", f"the log has no step between iterations {first} and {last}")
    return (refused or records)[0]


def _onset_of(action: Action, findings: Sequence[Finding]) -> int:
    """The iteration where an incident began, by its first action and the findings up to it.

    The onset of a restore lies before it by a margin, in which other incidents may lie. What called for the restore was
    found last.
    """
    found = [
        finding
        for finding in findings
        if finding.kind not in INFORMATIVE and action.onset <= finding.iteration <= action.iteration
    ]
    if action.kind not in RESTORES:
        return min([action.onset, *(finding.onset for finding in found)])
    newest = max((finding.iteration for finding in found), default=action.onset)
    return min((finding.onset for finding in found if finding.iteration == newest), default=action.onset)


@final
@dataclass(frozen=True, slots=True)
class ReplayPath:
    """The way from a checkpoint to a logged step."""

    iteration: int
    """The requested step."""
    checkpoint: str | None
    """The state to start from; None: the initial state, which the seed determines."""
    older: str | None
    """The checkpoint before that one on the same path; None: the initial state."""
    has_older: bool
    """Whether there is an older state: False if the run began with `checkpoint`, or if it is not known."""
    stretches: list[range]
    """The iterations to replay, in order; the requested one is last."""

    @property
    def num_iterations(self) -> int:
        return sum(map(len, self.stretches))


def find_path(history: History, iteration: int, available: Collection[str]) -> ReplayPath:
    """The shortest path from an available checkpoint to a step; `ConfigError` if the state that it began with is
    neither available nor the initial one."""
    saved = {history.checkpoints[name]: name for name in available if name in history.checkpoints}
    on_path: dict[str, None] = {}
    stretches: list[range] = []
    restore = Restore(START, START)
    for restore, stretch in stretches_before(history, iteration):
        inside = sorted((at for at in saved if at in stretch and at < iteration), reverse=True)
        if not on_path:
            stretches.append(range(inside[0] + 1 if inside else stretch.start, stretch.stop))
        on_path |= dict.fromkeys(saved[at] for at in inside)
        if restore.checkpoint in available:
            on_path[restore.checkpoint] = None
    is_initial = restore.target == START and not restore.checkpoint
    problem = f"iteration {restore.after + 1} began with {restore.checkpoint}, which is neither on disk nor in the log"
    require(bool(on_path) or is_initial, str(history.log), problem)
    newest, older, *_ = [*on_path, None, None]
    has_older = newest is not None and (older is not None or is_initial)
    return ReplayPath(iteration, newest, older, has_older, stretches[::-1])


def stretches_before(history: History, iteration: int) -> Iterator[tuple[Restore, range]]:
    """The iterations that led to this one, itself included: from each restore on, the newest first."""
    last: int | None = iteration
    while last is not None and last > START:
        began = [restore for restore in history.restores if restore.after < last] or [Restore(START, START)]
        yield began[-1], range(began[-1].after + 1, last + 1)
        last = None if began[-1].target is None else min(began[-1].target, began[-1].after)


def read_path(history: History, path: ReplayPath) -> list[StepRecord]:
    """The steps to replay; the requested one is last."""
    records = [
        record
        for stretch in path.stretches
        if stretch
        for record in read_steps(history.log, stretch.start, stretch.stop - 1)
        if not record.refused or record.iteration == path.iteration
    ]
    return list({record.iteration: record for record in records}.values())


def applied_before(history: History, path: ReplayPath) -> list[StepRecord]:
    """The last applied steps before the requested one, at most `NUM_EARLIER`."""
    records = read_steps(history.log, path.iteration - NUM_EARLIER, path.iteration - 1)
    return [record for record in records if not record.refused]


def accepted_on_path(history: History, path: ReplayPath) -> list[AcceptedLevel]:
    """The levels that were accepted on the way, in order; each holds from the next step on."""
    return [level for level in history.accepted if any(level.after + 1 in stretch for stretch in path.stretches)]


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
