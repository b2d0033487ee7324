"""Recovery: carries out the actions of the policy and of operators, on all ranks at once, inside the running processes.

A restore first records what it is about to do, then does it. Checkpoints taken since the target are tainted and the
excluded batches are in the ledger before the weights change, so a run that is killed in between cannot resume from the
state that it was leaving. Weights, moments, counters, loss scale, the gate's history and the detectors' memory are
restored together with the cursor. The policy's state, the iteration counter and the operator's settings are kept.

Every action ends in an `Outcome` with its cost. An action that fails has an outcome too, and the policy escalates. A
write error on rank 0 is an outcome on all ranks: nothing counts before it is on disk. Without a restore, the batch of a
rejected update must be in the ledger: if it cannot be written, the run ends with exit code 75 and saves nothing. It
resumes from before that batch. A restore that fails after it began to overwrite the weights leaves them inconsistent,
and the run halts.

Left out: a change of precision, and clipping of logits. The loop asks the policy for them in every iteration, so they
are also right after a restart and after a restore. Here the outcome only says whether the run can change it.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness.build import Parts
from harness.checkpoint import store
from harness.config.errors import EXIT_HALTED, StorageError
from harness.core.events import Action, ActionKind, Outcome
from harness.core.state import RunState
from harness.data.order.ledger import return_points
from harness.distributed.collectives import gather_results
from harness.run import Ending, Run
from harness.sentinel.policy.policy_state import RESTORES
from harness.step import evaluate, held_out_mean
from harness.telemetry.heartbeat import Phase
from harness.trials import TrainStep, TrialSteps, adopt_counters, drop_steps, restore_steps, run_trial

LEDGER_ACTIONS = (ActionKind.skip, ActionKind.accept)
"""Without their entry, a rejected batch would be neither trained nor in the ledger."""


class Restored(NamedTuple):
    """The run state that was restored, and a description of where it came from."""

    state: RunState
    target: str


class TornError(Exception):
    """A restore failed halfway: the weights are neither the old nor the restored ones. All ranks raise it."""


def run_actions(run: Run, action: Action | None, train_step: TrainStep) -> Ending | None:
    """Carry out an action and those that follow from its outcome; returns why the run must end, or None.

    `train_step` issues one training step; a trial trains with it. The steps of a trial that the run keeps count after
    the actions that follow from it, because they were trained with these in force. Raises `StorageError` on all ranks
    if an action that the run cannot continue without is not in the ledger.
    """
    kept: TrialSteps | None = None
    while action is not None:
        if action.kind is ActionKind.trial:
            outcome, kept = run_trial(run, action, train_step)
        else:
            outcome = run_action(run, action)
            if kept is not None and not outcome.succeeded:
                drop_steps(run, kept)
                kept = None
        if action.kind in LEDGER_ACTIONS and not outcome.succeeded:
            raise ledger_error(run, outcome)
        if action.kind is ActionKind.halt:
            return Ending(EXIT_HALTED, action.reason)
        if outcome.is_torn:
            return Ending(EXIT_HALTED, outcome.reason)
        action = run.parts.sentinel.on_outcome(outcome)
    return None if kept is None else keep_steps(run, kept, train_step)


def ledger_error(run: Run, outcome: Outcome) -> StorageError:
    """The error of an action whose entry could not be written; all ranks raise it."""
    error = StorageError(errno.EIO, f"cannot write it: {outcome.reason}", str(run.directory.ledger))
    error.is_shared = True
    return error


def keep_steps(run: Run, kept: TrialSteps, train_step: TrainStep) -> Ending | None:
    """Continue from the end of the steps of a trial, and process their reports as those of any other steps in flight.

    A checkpoint that was due in between is saved after the next step; an evaluation is made now.
    """
    cfg, parts, state = run.cfg, run.parts, run.state
    first_step = state.step
    restore_steps(run, kept)
    adopt_counters(state, kept)
    run.reporter.resume_clock(kept.begun_s)
    for facts, values in kept.reports:
        parts.mailbox.put_back(facts, values)
    for facts, values in parts.mailbox.read(everything=True):
        _, action = run.process_report(facts, values)
        if (ending := run_actions(run, action, train_step)) is not None:
            return ending
    run.reporter.resume_clock(time.perf_counter())
    if any(parts.checkpoints.is_due(step) for step in range(first_step + 1, state.step + 1)):
        parts.checkpoints.request_save()
    every = cfg.eval.every_steps
    if every and any(step % every == 0 for step in range(first_step, state.step)):
        run.reporter.emit_after_pause(
            evaluate(parts, state, cfg=cfg, beat=lambda: run.heartbeat.beat(state, Phase.evaluate))
        )
    return None


def run_action(run: Run, action: Action) -> Outcome:
    """Log an action, carry it out, and log its outcome.

    After a restore, reports of the steps that it undid are logged and not processed, except a request to save. If the
    restore failed, they stay in the mailbox and are processed like all others.
    """
    run.reporter.emit_event(action)
    if action.kind is ActionKind.check:
        for facts, values in run.parts.mailbox.read(everything=True):  # these steps stay
            run.process_report(facts, values)
    with run.heartbeat.during(Phase.restore):
        outcome = recover(action, run.parts, run.state, root=run.directory.checkpoints)
    if action.kind in RESTORES and outcome.succeeded:
        in_flight = [run.log_step(facts, values) for facts, values in run.parts.mailbox.read(everything=True)]
        outcome.steps_lost -= sum(record.refused for record in in_flight)  # counted as applied when they were issued
        if any(record.save_requested for record in in_flight):
            run.parts.checkpoints.request_save()
    run.reporter.emit_after_pause(outcome)
    return outcome


def recover(action: Action, parts: Parts, state: RunState, *, root: Path) -> Outcome:
    """Carry out one action and measure its cost. Changes `state` in place. Every rank must pass the same action."""
    begun_s, before = time.monotonic(), replace(state)
    restored: Restored | None = None
    held_out_loss: float | None = None
    failure: OSError | TornError | None = None
    try:
        if action.kind is ActionKind.check:
            held_out_loss = held_out_mean(parts)
        restored = dispatch(action, parts, state, root=root)
    except (OSError, TornError) as error:
        failure = error
    if restored is not None:
        state.return_to(restored.state)
        parts.sentinel.rewind(restored.state.sentinel, iteration=restored.state.iteration)
        parts.checkpoints.continue_after_restore(state)
        parts.loss_scale.adapt()
        parts.update.measure_digest()
        parts.fp8_layers.reset_scale_history()
        parts.check.forget()
    set_rate(parts, state, is_restored=restored is not None)
    is_done = action.kind is not ActionKind.precision or parts.fp8_layers.can_fall_back
    if action.kind in RESTORES:
        is_done = restored is not None
    is_done = is_done and failure is None
    return Outcome(
        time=time.time(),
        iteration=state.iteration,
        kind=action.kind,
        incident=action.incident,
        succeeded=is_done,
        step=state.step,
        target=restored.target if restored else "",
        steps_lost=before.step - state.step,
        tokens_lost=before.tokens - state.tokens,
        seconds=time.monotonic() - begun_s,
        reason="" if failure is None else " ".join(str(failure).split()),
        is_torn=isinstance(failure, TornError),
        held_out_loss=held_out_loss,
    )


def dispatch(action: Action, parts: Parts, state: RunState, *, root: Path) -> Restored | None:
    """Call the function for this kind of action. Raises `OSError` or `TornError` on all ranks if it fails."""
    match action.kind:
        case ActionKind.rewind:
            return rewind(action, parts)
        case ActionKind.rollback:
            return roll_back(action, parts, root=root)
        case ActionKind.skip:
            exclude(action, parts)
            give_back(action, parts, state)
        case ActionKind.swap:
            assert action.source is not None
            reweight(action, {action.source: 0.0}, parts, state)
        case ActionKind.reweight:
            reweight(action, action.weights, parts, state)
        case ActionKind.include:
            give_back(action, parts, state)
        case ActionKind.accept:
            accept(action, parts, state)
        case ActionKind.check | ActionKind.cool | ActionKind.watch | ActionKind.halt:
            pass
        case ActionKind.precision | ActionKind.qk_clip:
            pass  # the loop asks the policy in every iteration
        case ActionKind.trial:
            raise AssertionError("run_trial carries it out")
    return None


def reweight(action: Action, weights: Mapping[str, float], parts: Parts, state: RunState) -> None:
    """Set weights of sources from here on. Raises `OSError` if a later batch would have no source left."""
    if not parts.batches.can_reweight(state.cursor, weights):
        raise OSError(f"with {describe_weights(weights)} no source would have a weight above 0")
    write_ledger(parts, lambda: parts.ledger.reweight(state.cursor, weights, reason_with_author(action)))


def describe_weights(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} at {weight:g}" for name, weight in weights.items())


def accept(action: Action, parts: Parts, state: RunState) -> None:
    """Re-anchor the gate at the loss of the new data, and schedule the batches that were skipped because of it."""
    give_back(action, parts, state)
    parts.ring.finish_copy()
    parts.gate.reopen(loss=action.level, grad_norm=action.grad_level)


def give_back(action: Action, parts: Parts, state: RunState) -> None:
    """Schedule batches again: those that the run has passed come next, the others in their place."""
    give = partial(parts.ledger.give_back, reason=reason_with_author(action), is_repeat=action.kind is ActionKind.skip)
    for batches, from_batch in return_points(action.give_back, state.cursor):
        write_ledger(parts, partial(give, batches, from_batch))


def rewind(action: Action, parts: Parts) -> Restored | None:
    """Restore the newest in-memory snapshot from before the onset that every rank has."""
    slot = parts.ring.agree_on_target(before=action.onset)
    if slot is None:
        return None
    persist_before_restore(action, parts, iteration=slot.state.iteration)
    return Restored(parts.ring.restore(slot), f"snapshot of iteration {slot.state.iteration}")


def roll_back(action: Action, parts: Parts, *, root: Path) -> Restored | None:
    """Restore the newest good checkpoint from before the onset that passes verification."""
    taken = dict(rollback_candidates(action, parts))
    begun: list[str] = []

    def begin(name: str) -> None:
        persist_before_restore(action, parts, iteration=taken[name])
        begun.append(name)

    try:
        found = store.load_first(
            root,
            taken,
            parts.tensors(),
            world=parts.world,
            retry=parts.checkpoints.make_retry(),
            prepare=begin,
            skip_unreadable=True,
        )
    except OSError as error:
        if begun:
            raise TornError(f"rollback to {begun[-1]} failed halfway: {error}") from None
        raise
    if found.loaded is None and begun:
        problem = "; ".join(map(str, [*found.damage, *found.unread]))
        raise TornError(f"rollback to {begun[-1]} failed halfway, and no other checkpoint could be restored: {problem}")
    if found.loaded is None:
        return None
    return Restored(found.loaded.state, "; ".join([found.loaded.name, *map(str, [*found.damage, *found.unread])]))


def rollback_candidates(action: Action, parts: Parts) -> list[tuple[str, int]]:
    """List the checkpoints that a rollback may restore, newest first; collective.

    An operator's rollback may also use a checkpoint that is not proven good yet.
    """
    if action.incident:
        return parts.checkpoints.rollback_targets(before=action.onset)
    return [
        (name, taken)
        for name, taken in parts.checkpoints.rollback_targets(until_step=action.step)
        if taken < action.onset
    ]


def persist_before_restore(action: Action, parts: Parts, *, iteration: int) -> None:
    """Write what must be on disk before the run continues from the state after `iteration`.

    Shared snapshots are withdrawn first, on all ranks before anything is on disk: a run that is killed in between must
    not resume from one that it was leaving.
    """
    parts.ring.withdraw_from(iteration + 1)
    parts.checkpoints.taint_since(iteration, reason_with_author(action))
    exclude(action, parts)
    parts.checkpoints.discard_after(iteration)


def exclude(action: Action, parts: Parts) -> None:
    """Add the batches of an action to the ledger."""
    if action.exclude:
        first, last = action.exclude
        write_ledger(parts, lambda: parts.ledger.exclude(first, last, reason_with_author(action)))


def write_ledger(parts: Parts, write: Callable[[], None]) -> None:
    """Add an entry to the ledger: on rank 0, which owns the file, then on the other ranks.

    Raises `OSError` on all ranks if it cannot be written; then no rank's ledger has changed.
    """
    gather_results(lambda: write() if parts.world.is_first else None)
    if not parts.world.is_first:
        write()


def reason_with_author(action: Action) -> str:
    """Return who decided the action, and why, for the ledger and the catalog."""
    return f"incident {action.incident}: {action.reason}" if action.incident else f"by an operator: {action.reason}"


def set_rate(parts: Parts, state: RunState, *, is_restored: bool = True) -> None:
    """Set the learning-rate factor of the policy and the operator again after older weights were restored.

    If the factor was lowered since the restored state, the learning rate drops once more; the detectors expect that.
    """
    parts.update.lr_target = parts.sentinel.policy.lr_scale * state.lr_factor
    if is_restored and parts.update.lr_scale.item() > parts.update.lr_target:  # sync: only after a restore
        parts.sentinel.detectors.expect_lr_change()
