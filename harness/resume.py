"""Opens a run directory and resumes the run from its newest verified checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from harness.build import Parts
from harness.checkpoint import store
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.control import stop_requests
from harness.control.apply import ordered_factor
from harness.core import rundir
from harness.core.events import CheckpointJudged, Event, RunStarted
from harness.core.locking import run_lease
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.data.corpus.corpus_record import render_record
from harness.distributed.collectives import run_on_all_ranks, run_on_rank_zero
from harness.recovery import set_rate
from harness.run_corpus import RunData
from harness.telemetry.event_log import events_since, last_iteration


@dataclass(frozen=True, slots=True)
class Opened:
    """What rank 0 found on disk; it is broadcast to all ranks."""

    run: RunDir
    last_iteration: int
    changes: dict[str, Any]
    """Config keys that were changed on purpose since the last start."""
    problem: str = ""


def open_run(cfg: Config, data: RunData) -> Opened:
    """Create the run directory if needed and take its lease. `Opened.problem` says why that is not possible."""
    rundir.name_run(cfg)
    run = rundir.locate(cfg)
    seen = 0
    try:
        rundir.check_resume(cfg, run)
        run_lease.hold(run.path, cfg.run.lease_s)
        seen = max(last_iteration(run.events), 0)
        corpus = render_record(data.record)
        changes = rundir.prepare_run_dir(cfg, run, iteration=seen, corpus=corpus, data_changes=data.changes)
        stop_requests.clear_stop_file(run)
        return Opened(run, seen, changes)
    except ConfigError as error:
        return Opened(run, seen, {}, problem=str(error))


def resume(cfg: Config, parts: Parts, opened: Opened) -> tuple[RunState, list[Event]]:
    """Load the newest verified checkpoint, or start from scratch; returns the state and the events to log."""
    found = store.load_newest(
        opened.run.checkpoints, parts.tensors(), world=parts.world, retry_s=cfg.checkpoint.retry_s
    )
    state, directory = found.loaded or (RunState(), None)
    parts.update.measure_digest()
    restore_sentinel(parts, state, opened)
    state.iteration = max(state.iteration, opened.last_iteration)
    if directory is not None:
        parts.checkpoints.continue_from(directory, state)
    parts.sentinel.policy.policy_state.resume(state.iteration, state.step)
    set_rate(parts, state)
    now, iteration = time.time(), state.iteration
    damaged: list[Event] = [
        CheckpointJudged(
            time=now, iteration=iteration, directory=error.path.parent.name, health="damaged", reason=str(error)
        )
        for error in found.damage
    ]
    started = RunStarted(
        time=now,
        iteration=iteration,
        world_size=parts.world.size,
        num_steps=cfg.train.num_steps,
        step=state.step,
        resumed_from=directory,
    )
    return state, [*damaged, started]


def restore_sentinel(parts: Parts, state: RunState, opened: Opened) -> None:
    """Restore the detectors as of the checkpoint, and the policy with everything that the log says it decided since."""
    since = run_on_rank_zero(lambda: events_since(opened.run.events, state.iteration))
    run_on_all_ranks(lambda: parts.sentinel.resume(state.sentinel, since))
    state.lr_factor = run_on_rank_zero(lambda: ordered_factor(opened.run, state.lr_factor))
    state.sentinel = {}
