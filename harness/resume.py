"""Opens a run directory and resumes the run from its newest state: a snapshot in memory or a verified checkpoint."""

from __future__ import annotations

import sys
import time
import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.build import Parts
from harness.checkpoint import store
from harness.checkpoint.integrity import Damaged, OtherVersion
from harness.checkpoint.memory_resume import RestoredSnapshot, SnapshotBounds, load_newest_snapshot
from harness.config.errors import ConfigError, StorageError
from harness.config.schema import Config
from harness.control import stop_requests
from harness.control.apply import ordered_factor
from harness.control.inbox import config_changes
from harness.core import rundir
from harness.core.events import CheckpointJudged, Event, RunStarted
from harness.core.locking import run_lease
from harness.core.node_name import machine_name
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.data.corpus.corpus_record import render_record
from harness.distributed.collectives import gather_results, run_on_all_ranks, run_on_rank_zero
from harness.planned_changes import DataChange, newest_data_change, newest_schedule_change
from harness.recovery import set_rate
from harness.run_corpus import RunData
from harness.telemetry.evaluation_process import require_evaluation
from harness.telemetry.event_log import (
    events_since,
    find_done_step,
    last_iteration,
    last_recorded_iteration,
    read_non_step_events,
    require_appendable,
)
from harness.telemetry.sinks.sink_checks import require_sinks


@dataclass(frozen=True, slots=True)
class Opened:
    """What rank 0 found on disk; it is broadcast to all ranks."""

    run: RunDir
    last_iteration: int
    changes: dict[str, Any]
    """Config keys that were changed on purpose since the last start."""
    is_new: bool = True
    """There is no run to resume. Its configuration is written."""
    done_step: int = 0
    """Steps of the run if the last start ended with all of them done, else 0."""
    problem: str = ""


def clear_old_stop_file(cfg: Config) -> None:
    """Remove the file STOP of the last start, before anything that takes long; on rank 0, and only without a launcher,
    which has done it. A run that another process writes keeps it: ConfigError."""
    if cfg.run.name is None or stop_requests.holds_for_this_start():
        return
    run = rundir.locate(cfg)
    if run.stop.exists():
        run_lease.require_free(run.path, wait=False)
        stop_requests.clear_stop_file(run)


def open_run(cfg: Config, data: RunData) -> Opened:
    """Create the run directory if needed and take its lease. `Opened.problem` says why that is not possible.

    Only a new run gets its configuration here; `accept_config` replaces that of a run that is resumed.
    """
    rundir.name_run(cfg)
    run = rundir.locate(cfg)
    seen = 0
    try:
        rundir.check_resume(cfg, run)
        require_sinks(cfg.telemetry)
        require_evaluation(cfg.eval)
        run_lease.hold(run.path, cfg.run.lease_s)
        require_appendable(run)
        seen = max(last_iteration(run.events), 0)
        changes = rundir.create_run_dir(cfg, run) | data.changes
        if is_new := not rundir.has_begun(run):
            rundir.record_config(cfg, run, changes, iteration=seen, corpus=render_record(data.record))
        return Opened(run, seen, changes, is_new, find_done_step(run.events))
    except ConfigError as error:
        return Opened(run, seen, {}, problem=str(error))


def accept_config(cfg: Config, data: RunData, opened: Opened) -> None:
    """Make the configuration and the data of this start those of the run, and log what changed; on rank 0.

    Only after all ranks have loaded the state: a start that is rejected or killed before leaves the run as it was.
    """
    if not opened.is_new:
        corpus = render_record(data.record)
        rundir.record_config(cfg, opened.run, opened.changes, iteration=opened.last_iteration, corpus=corpus)


def explain_lost_end(opened: Opened, state: RunState, *, num_steps: int) -> str:
    """Why a run that was finished trains again; empty if it was not finished or does not train again."""
    done = opened.done_step
    if state.step >= min(done, num_steps):
        return ""
    place = f"continues from step {state.step:,}" if state.step else "starts over"
    lost = f"no checkpoint of step {done:,} can be loaded"
    return f"{opened.run.path}: all {done:,} steps were done, but {lost}; the run {place}"


def find_data_change(run: RunDir) -> DataChange | None:
    """The newest resume with other data. It is read from the run directory: an earlier start may have begun with it,
    or the launcher of a job may have accepted it."""
    changes = config_changes(run)
    return newest_data_change(changes, read_non_step_events(run.events) if changes else [])


def find_schedule_change(opened: Opened) -> int:
    """The iteration after which the newest resume with another learning-rate schedule began; -1: there was none."""
    this_start = rundir.make_config_change_event(opened.changes, iteration=opened.last_iteration)
    return newest_schedule_change([*config_changes(opened.run), this_start])


class LoadedState(NamedTuple):
    """The state that a run continues from, and where it was found."""

    state: RunState
    source: str | None
    """A checkpoint directory or a snapshot; None in a new run."""
    damage: list[Damaged]
    snapshot: RestoredSnapshot | None = None


def resume(cfg: Config, parts: Parts, opened: Opened) -> tuple[RunState, list[Event]]:
    """Load the newest state in memory or on disk, or start from scratch; returns the state and the events to log."""
    loaded = load_state(parts, opened)
    state, snapshot, damage = loaded.state, loaded.snapshot, loaded.damage
    parts.loss_scale.adapt()
    parts.update.measure_digest()
    restore_sentinel(parts, state, opened)
    state.iteration = max(state.iteration, opened.last_iteration)
    if snapshot is not None:
        damage = parts.checkpoints.continue_from_snapshot(state)
    elif loaded.source is not None:
        parts.checkpoints.continue_from(loaded.source, state)
    parts.sentinel.policy.policy_state.resume(state.iteration, state.step)
    set_rate(parts, state)
    now, iteration = time.time(), state.iteration
    damaged: list[Event] = [
        CheckpointJudged(
            time=now, iteration=iteration, directory=error.path.parent.name, health="damaged", reason=str(error)
        )
        for error in damage
    ]
    started = RunStarted(
        time=now,
        iteration=iteration,
        world_size=parts.world.size,
        num_steps=cfg.train.num_steps,
        step=state.step,
        resumed_from=loaded.source,
        in_memory=snapshot is not None,
        fetched_ranks=[] if snapshot is None else snapshot.fetched,
        machines=gather_machines(),
    )
    parts.sentinel.on_run_started(started)
    return state, [*damaged, started]


def gather_machines() -> dict[str, list[int]]:
    """Machine -> its ranks."""
    machines: dict[str, list[int]] = {}
    for rank, name in enumerate(gather_results(machine_name)):
        machines.setdefault(name, []).append(rank)
    return machines


def load_state(parts: Parts, opened: Opened) -> LoadedState:
    """Restore the newest state that every rank can reach: a snapshot in memory, else a checkpoint, else the initial
    one. Snapshots of other states are withdrawn.

    The id of this start is written last: a start that is killed before leaves all snapshots to the next one.
    """
    is_allowed = parts.ring.shared is not None and not opened.changes
    snapshot = load_newest_snapshot(parts.ring, find_bounds(opened.run)) if is_allowed else None
    if snapshot is not None:
        source = f"snapshot of iteration {snapshot.state.iteration}"
        loaded = LoadedState(snapshot.state, source, [], snapshot)
    else:
        retry = parts.checkpoints.make_retry()
        found = store.load_newest(opened.run.checkpoints, parts.tensors(), world=parts.world, retry=retry)
        state, directory = found.loaded or (RunState(), None)
        loaded = LoadedState(state, directory, found.damage)
    begin_start(parts, opened.run, kept=None if snapshot is None else snapshot.state.iteration)
    return loaded


def find_bounds(run: RunDir) -> SnapshotBounds:
    """Which snapshots in memory the run may resume from: those of its newest start, newer than what is on disk.

    If the newest checkpoint cannot be read, none may: the load from disk retries, and reports the error.
    """

    def find() -> SnapshotBounds:
        try:
            oldest = store.newest_saved_iteration(run.checkpoints)
        except (StorageError, OtherVersion):
            oldest = sys.maxsize
        return SnapshotBounds(rundir.read_start(run), oldest, last_recorded_iteration(run.events))

    return run_on_rank_zero(find)


def begin_start(parts: Parts, run: RunDir, *, kept: int | None) -> None:
    """Give this start its id: on the snapshots of iteration `kept`, which all ranks restored, then in the run."""
    start = run_on_rank_zero(lambda: uuid.uuid4().hex)
    shared = parts.ring.shared
    run_on_all_ranks(lambda: None if shared is None else shared.begin_start(start, kept))
    run_on_rank_zero(lambda: rundir.write_start(run, start))


def restore_sentinel(parts: Parts, state: RunState, opened: Opened) -> None:
    """Restore the detectors as of the loaded state, and the policy with all that it has decided since by the log."""
    since = run_on_rank_zero(lambda: events_since(opened.run.events, state.iteration))
    parts.sentinel.schedule_changed_at = run_on_rank_zero(lambda: find_schedule_change(opened))
    run_on_all_ranks(lambda: parts.sentinel.resume(state.sentinel, since, iteration=state.iteration))
    state.lr_factor = run_on_rank_zero(lambda: ordered_factor(opened.run, state.lr_factor))
    state.sentinel = {}
