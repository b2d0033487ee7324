"""What an operator orders, as actions that all ranks carry out alike; their incident is 0, which is a person's."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import asdict
from typing import Any

from harness.build import Parts
from harness.config.errors import ConfigError
from harness.control.commands import ExcludeSource, Order, Precision, Rate, Rollback, Skip
from harness.control.inbox import REFUSED, check, interventions
from harness.core.events import Action, ActionKind, Outcome
from harness.core.rundir import RunDir
from harness.core.state import RunState
from harness.data.order.ledger import Ledger
from harness.distributed.collectives import from_first

BY_A_PERSON = 0


def action_of(order: Order, reason: str, parts: Parts, state: RunState) -> Action | None:
    """The action that answers an order; None where it takes none. All ranks must ask."""
    action = Action(
        time=time.time(),
        iteration=state.iteration,
        kind=ActionKind.watch,
        step=state.step,
        incident=BY_A_PERSON,
        reason=reason,
        onset=state.iteration,
    )
    match order:
        case Skip():
            action.kind, action.exclude = ActionKind.skip, next_batches(parts.ledger, state.cursor, order.num_batches)
        case Rollback():
            targets = from_first(lambda: parts.keeper.targets(until_step=order.to_step))
            action.kind, action.onset = ActionKind.rollback, targets[0][1] + 1 if targets else 0
        case Rate():
            action.kind, action.lr_scale = ActionKind.cool, parts.sentinel.policy.lr_scale * order.factor
        case ExcludeSource():
            action.kind, action.source = ActionKind.swap, order.source
        case Precision():
            action.kind, action.in_fp8 = ActionKind.precision, order.kind == "fp8"
        case _:
            return None
    return action


def next_batches(ledger: Ledger, cursor: int, num_batches: int) -> list[int]:
    """First and last index of the next batches that would be seen; those excluded before do not count."""
    first = ledger.next_index(cursor)
    num_seen = bisect_left(range(first + 1), first, key=ledger.nth)
    return [first, ledger.nth(num_seen + num_batches - 1)]


def refusal_of(run: RunDir, order: Order) -> str:
    """Why this run cannot do that; empty where it can. On rank 0, which sees the disk; a disk that does not answer is
    a reason too, because the other ranks wait for one."""
    try:
        check(run, order)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"cannot be checked: {error}"
    return ""


def ordered_factor(run: RunDir, otherwise: float) -> float:
    """The last factor on the learning rate that was ordered, which also holds where an older checkpoint does not know
    it."""
    done = [event.changes for event in interventions(run) if REFUSED not in event.changes]
    return next((float(changes["factor"]) for changes in reversed(done) if "factor" in changes), otherwise)


def changes_of(order: Order, action: Action | None, outcome: Outcome | None) -> dict[str, Any]:
    """What came of an order, for the books."""
    changes: dict[str, Any] = asdict(order)
    if action is None or outcome is None:
        return changes
    if not outcome.succeeded:
        return changes | {REFUSED: outcome.reason or "there is nothing to go back to"}
    batches = {"batches": action.exclude} if action.exclude else {}
    cost = {"target": outcome.target, "steps_lost": outcome.steps_lost} if outcome.target else {}
    return changes | batches | cost | {"step": outcome.step}
