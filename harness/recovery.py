"""Recovery: carries out what was decided, on all ranks at once and inside the running processes.

How: a restore first writes down what it will do, then does it: checkpoints taken since are tainted and the guilty
batches are in the ledger before the weights change, so a run that is killed in between cannot resume from what it was
leaving. Weights, moments, counters, loss scale, the gate's history and the detectors' memory come back together with
the cursor; what the policy remembers, the attempts and the operator's word go on.
Every action ends in an `Outcome` with its cost; one that could not be carried out says so, and the policy climbs.
What rank 0 cannot write is an outcome on all ranks: nothing counts before it is on disk. A restore that fails after it
began to fill the weights leaves them torn, and the run halts.
Left out: the change to another precision. The loop asks the policy for it in every iteration, so that a restart and a
restore find it right; here is only said whether the run has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from harness.build import Parts
from harness.checkpoint import store
from harness.checkpoint.io_retry import Patience
from harness.core.events import Action, ActionKind, Outcome
from harness.core.state import RunState
from harness.distributed.collectives import from_first, together
from harness.sentinel.policy.state import RESTORES
from harness.step import held_out_sums


class Restored(NamedTuple):
    state: RunState
    target: str


class TornError(Exception):
    """A restore failed halfway: the weights are neither the old nor the restored ones. Raised on all ranks alike."""


def recover(action: Action, parts: Parts, state: RunState, *, root: Path) -> Outcome:
    """Carry out an action; `state` is changed in place. All ranks must call it with the same action."""
    begun_s, before = time.monotonic(), replace(state)
    restored: Restored | None = None
    held_out_loss: float | None = None
    failure: OSError | TornError | None = None
    try:
        if action.kind is ActionKind.check:
            held_out_loss = held_out_mean(parts)
        restored = carry_out(action, parts, state, root=root)
    except (OSError, TornError) as error:
        failure = error
    if restored is not None:
        state.return_to(restored.state)
        parts.sentinel.rewind(restored.state.sentinel)
        parts.products.forget()
        parts.check.forget()
    set_rate(parts, state, is_restored=restored is not None)
    is_done = action.kind is not ActionKind.precision or parts.products.can_fall_back
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


def carry_out(action: Action, parts: Parts, state: RunState, *, root: Path) -> Restored | None:
    """Do what an action says; `OSError` or `TornError` on all ranks where it cannot be done."""
    match action.kind:
        case ActionKind.rewind:
            return rewind(action, parts)
        case ActionKind.rollback:
            return roll_back(action, parts, root=root)
        case ActionKind.skip:
            exclude(action, parts)
        case ActionKind.swap:
            swap(action, parts, state)
        case ActionKind.accept:
            accept(action, parts, state)
        case ActionKind.check | ActionKind.cool | ActionKind.watch | ActionKind.halt | ActionKind.precision:
            pass
    return None


def swap(action: Action, parts: Parts, state: RunState) -> None:
    """Turn a source off from here on; `OSError` where some later batch would have no source left, which no run could
    open."""
    assert action.source is not None
    off = {action.source: 0.0}
    if not parts.batches.can_reweight(state.cursor, off):
        raise OSError(f"without {action.source} no source would have a weight above 0")
    write_down(parts, lambda: parts.ledger.reweight(state.cursor, off, reason_of(action)))


def held_out_mean(parts: Parts) -> float | None:
    """The loss of the current weights on the fixed held-out rows; None where there are none."""
    if not parts.check.rows:
        return None
    loss_sum, tokens = held_out_sums(parts).tolist()  # sync: an incident waits for the answer
    return float(loss_sum / tokens)


def accept(action: Action, parts: Parts, state: RunState) -> None:
    """Take the loss of the new data as the gate's level, and consume next what was skipped for it."""
    if action.give_back:
        batches, cursor = action.give_back, state.cursor
        write_down(parts, lambda: parts.ledger.give_back(batches, cursor, reason_of(action)))
    parts.gate.reopen(loss=action.level, grad_norm=action.grad_level)


def rewind(action: Action, parts: Parts) -> Restored | None:
    """To the newest snapshot in memory from before the onset that all ranks hold."""
    slot = parts.ring.agree(before=action.onset)
    if slot is None:
        return None
    prepare(action, parts, iteration=slot.state.iteration)
    return Restored(parts.ring.restore(slot), f"snapshot of iteration {slot.state.iteration}")


def roll_back(action: Action, parts: Parts, *, root: Path) -> Restored | None:
    """To the newest good checkpoint from before the onset that is whole and can be read."""
    taken = dict(from_first(lambda: targets(action, parts)))
    begun: list[str] = []

    def begin(name: str) -> None:
        prepare(action, parts, iteration=taken[name])
        begun.append(name)

    try:
        found = store.load_first(
            root,
            taken,
            parts.tensors(),
            world=parts.world,
            patience=Patience(parts.keeper.retry_s),
            prepare=begin,
            passes_over=True,
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


def targets(action: Action, parts: Parts) -> list[tuple[str, int]]:
    """Where a rollback may go, newest first; on rank 0. A person's may go to what has not proved good yet."""
    if action.incident:
        return parts.keeper.targets(before=action.onset)
    return [(name, taken) for name, taken in parts.keeper.targets(until_step=action.step) if taken < action.onset]


def prepare(action: Action, parts: Parts, *, iteration: int) -> None:
    """What must be on disk before the run goes on from the state after `iteration`."""
    parts.keeper.taint_since(iteration, reason_of(action))
    exclude(action, parts)
    parts.keeper.go_back(iteration)


def exclude(action: Action, parts: Parts) -> None:
    if action.exclude:
        first, last = action.exclude
        write_down(parts, lambda: parts.ledger.exclude(first, last, reason_of(action)))


def write_down(parts: Parts, write: Callable[[], None]) -> None:
    """Add to the ledger on rank 0, which has the file, and on the other ranks once it is on disk.

    `OSError` on all ranks where it cannot be written; no rank's ledger has changed then.
    """
    together(lambda: write() if parts.world.is_first else None)
    if not parts.world.is_first:
        write()


def reason_of(action: Action) -> str:
    """Who decided it, and why."""
    return f"incident {action.incident}: {action.reason}" if action.incident else f"by an operator: {action.reason}"


def set_rate(parts: Parts, state: RunState, *, is_restored: bool = True) -> None:
    """The policy's and the operator's factor on the learning rate, whatever came back with older weights.

    Where it was lowered since then, it falls once more, and the detectors, which forgot the first time, are told.
    """
    parts.update.lr_target = parts.sentinel.policy.lr_scale * state.lr_factor
    if is_restored and parts.update.lr_scale.item() > parts.update.lr_target:  # sync: older weights are rare
        parts.sentinel.detectors.expect_lr_change()
