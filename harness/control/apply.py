"""Runs operator commands inside the training loop: rank 0 reads them, all ranks apply them at the same iteration.

A command becomes the same `Action` that the policy uses, with incident number 0.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from harness.build import Parts
from harness.config.errors import EXIT_HALTED, EXIT_INTERRUPTED, ConfigError
from harness.control import stop_requests
from harness.control.commands import (
    Command,
    ExcludeSource,
    Order,
    Pause,
    Precision,
    Profile,
    Rate,
    Resume,
    Reweight,
    Rollback,
    SaveCheckpoint,
    Skip,
    SkipBatches,
    UnskipBatches,
    order_fields,
)
from harness.control.inbox import REFUSED, intervention_event, interventions
from harness.control.order_checks import check_order, require_unread
from harness.core.events import (
    BY_OPERATOR,
    Action,
    ActionKind,
    Intervention,
    Outcome,
    RunEnded,
    RunRestarted,
    RunStarted,
)
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.distributed.collectives import broadcast, gather_results
from harness.recovery import run_action, run_actions
from harness.run import Ending, Run
from harness.telemetry.event_log import read_non_step_events
from harness.telemetry.heartbeat import Phase
from harness.trials import TrainStep

PAUSE_POLL_S = 1.0


def run_operator_commands(run: Run, train_step: TrainStep, *, is_paused: bool = False) -> Ending | None:
    """Apply all waiting commands. A paused run stays in this function until it is resumed or stopped."""
    while True:
        for command in broadcast(run.inbox.take() if run.inbox else []):
            is_paused = isinstance(command.order, Pause) or (is_paused and not isinstance(command.order, Resume))
            changes, ending = apply_command(run, command, train_step)
            event = intervention_event(command, run.state.iteration, changes)
            run.reporter.emit_after_pause(event)
            if run.inbox:
                run.inbox.done(command, event)
            if ending is not None:
                return ending
        if not is_paused:
            return None
        run.heartbeat.beat(run.state, Phase.pause)
        if run.inbox:
            run.inbox.wait(PAUSE_POLL_S)
        if any(gather_results(lambda: bool(run.stop))):
            return Ending(EXIT_INTERRUPTED, "stopped")


def continue_pause(run: Run, train_step: TrainStep) -> Ending | None:
    """Pause again if this start has interrupted a pause. The pause is logged again, for the tools that read the log."""
    if run.pause is None:
        return None
    run.reporter.emit_after_pause(replace(run.pause, time=time.time(), iteration=run.state.iteration))
    return run_operator_commands(run, train_step, is_paused=True)


def find_interrupted_pause(run: RunDir) -> Intervention | None:
    """Return the pause in which the start before this one lost a rank, on rank 0; call before this start is logged.

    None unless this start is a restart inside the job: whoever starts a run again wants it to train.
    """
    if not stop_requests.is_restart_inside_job():
        return None
    is_restart = False
    for event in reversed(read_non_step_events(run.events)):
        match event:
            case RunRestarted():
                is_restart = True
            case RunEnded() if is_restart:
                pass  # the ranks ended because the launcher stopped them for the restart
            case RunStarted() | RunEnded():
                return None
            case Intervention(changes={"command": "pause" | "resume" as command, **rest}) if REFUSED not in rest:
                return event if command == "pause" else None
            case _:
                pass
    return None


def apply_command(run: Run, command: Command, train_step: TrainStep) -> tuple[dict[str, Any], Ending | None]:
    """Apply one command if it can be done; returns its result for the log, and why the run must end, or None."""
    order, parts = command.order, run.parts
    if refusal := broadcast(refusal_of(run.directory, order) if run.inbox else ""):
        return {REFUSED: refusal}, None
    if isinstance(order, SaveCheckpoint):
        parts.checkpoints.request_save()
    if isinstance(order, Rate):
        run.state.lr_factor = order.factor
    try:
        if isinstance(order, Profile):
            folder = run.profiler.request(run.state, num_steps=order.num_steps, ranks=order.ranks)
            return changes_of(order, None, None) | {"folder": str(folder)}, None
        with run.heartbeat.during(Phase.restore):  # a rollback waits for the current write
            action = action_of(order, command.reason, parts, run.state)
    except ConfigError as error:
        return {REFUSED: str(error)}, None
    except OSError as error:
        return {REFUSED: f"cannot be done: {error}"}, None
    if action is None:
        return changes_of(order, None, None), None
    parts.sentinel.on_operator_action(action)
    outcome = run_action(run, action)
    changes = changes_of(order, action, outcome)
    if outcome.is_torn:
        return changes, Ending(EXIT_HALTED, outcome.reason)
    return changes, run_actions(run, parts.sentinel.on_outcome(outcome), train_step)


def action_of(order: Order, reason: str, parts: Parts, state: RunState) -> Action | None:
    """Return the action for a command, or None if it needs none. A collective: every rank calls it.

    Raises `ConfigError` on all ranks if the place of the run in its data forbids it.
    """
    ledger = parts.ledger
    action = Action(
        time=time.time(),
        iteration=state.iteration,
        kind=ActionKind.watch,
        step=state.step,
        incident=BY_OPERATOR,
        reason=reason,
        onset=state.iteration,
    )
    match order:
        case Skip():
            action.kind, action.exclude = ActionKind.skip, [*ledger.next_range(state.cursor, order.num_batches)]
        case SkipBatches():
            require_unread(ledger, order, state.cursor, state.given_back)
            action.kind, action.exclude = ActionKind.skip, [order.first, order.last]
        case UnskipBatches():
            excluded = ledger.excluded_ranges(order.first, order.last)
            action.kind, action.give_back = ActionKind.include, [[first, last] for first, last in excluded]
        case Rollback():
            action.exclude = [*order.exclude]
            targets = parts.checkpoints.rollback_targets(until_step=order.to_step)
            action.kind, action.onset = ActionKind.rollback, targets[0][1] + 1 if targets else 0
        case Rate():
            action.kind, action.lr_scale = ActionKind.cool, parts.sentinel.policy.lr_scale * order.factor
        case ExcludeSource():
            action.kind, action.source = ActionKind.swap, order.source
        case Reweight():
            action.kind, action.weights = ActionKind.reweight, dict(order.weights)
        case Precision():
            action.kind, action.in_fp8 = ActionKind.precision, order.kind == "fp8"
        case _:
            return None
    return action


def refusal_of(run: RunDir, order: Order) -> str:
    """Return why this run cannot do it, or an empty string; on rank 0, which reads the disk.

    An I/O error is a reason too, because the other ranks wait for the answer.
    """
    try:
        check_order(run, order)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"cannot be checked: {error}"
    return ""


def ordered_factor(run: RunDir, otherwise: float) -> float:
    """Return the newest learning-rate factor that an operator set. It outlives a restore.

    Each of the two files may lack an intervention: a write to it failed, or a power failure took the end of the log.
    """
    logged = [event for event in read_non_step_events(run.events) if isinstance(event, Intervention)]
    done = [
        event for event in [*interventions(run), *logged] if {REFUSED, "factor"} & event.changes.keys() == {"factor"}
    ]
    newest = max(done, key=lambda event: (event.iteration, event.time), default=None)
    return otherwise if newest is None else float(newest.changes["factor"])


def changes_of(order: Order, action: Action | None, outcome: Outcome | None) -> dict[str, Any]:
    """Return the result of a command, as it is logged."""
    changes = order_fields(order)
    if action is None or outcome is None:
        return changes
    if not outcome.succeeded:
        return changes | {REFUSED: outcome.reason or "there is no state to restore"}
    batches = {"batches": action.exclude or action.give_back} if action.exclude or action.give_back else {}
    cost = {"target": outcome.target, "steps_lost": outcome.steps_lost} if outcome.target else {}
    return changes | batches | cost | {"step": outcome.step}
