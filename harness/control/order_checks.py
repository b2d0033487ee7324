"""Checks whether a run can carry out an operator's order, judging by its directory.

The command line checks before it sends a command, and rank 0 before the run applies one: things change in between.
Left out: the exact place of a run in its data, which only the run knows (`harness.control.apply`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import yaml

from harness.checkpoint import catalog
from harness.checkpoint.catalog import Checkpoint, Health
from harness.config.errors import ConfigError, require
from harness.control.commands import (
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
    describe_batches,
)
from harness.core.events import StepRecord
from harness.core.rundir import RunDir
from harness.data.order.ledger import Ledger
from harness.data.order.mixture import Change, phases_of
from harness.telemetry.event_log import tail

NUM_LISTED = 8
"""Most checkpoints that a message lists."""


def check_order(run: RunDir, order: Order, *, before: Sequence[Order] = ()) -> None:
    """Raise `ConfigError` if this run cannot carry out an order after the orders `before`."""
    match order:
        case SkipBatches():
            _check_not_excluded(run, order)
        case UnskipBatches():
            _check_excluded(run, order, before)
        case Rollback():
            _check_target(run, order)
        case ExcludeSource():
            message = f"without {order.source!r} no source would have a weight above 0"
            _check_weights(run, "exclude", {order.source: 0.0}, before, message)
        case Reweight():
            message = "no source would have a weight above 0, or the weights no finite sum"
            _check_weights(run, "reweight", order.weights, before, message)
        case Precision():
            _check_precision(run, order)
        case Skip() | Rate() | SaveCheckpoint() | Profile() | Pause() | Resume():
            pass
        case _:
            assert_never(order)


def require_unread(ledger: Ledger, order: SkipBatches, cursor: int, given_back: int = 0) -> None:
    """Reject a skip of batches that the run was trained on: the ledger cannot undo that, a rollback can."""
    num_read = ledger.num_consumed(order.first, order.last, cursor, given_back)
    read = "" if order.first == order.last else f"{num_read:,} of "
    message = f"the run is at batch {cursor} and has read {read}{describe_batches(order.first, order.last)}"
    advice = f"undo that with rollback --to STEP --exclude {order.first}..{order.last}"
    require(num_read == 0, "skip", f"{message}; {advice}, or skip later batches")


def untainted_checkpoints(run: RunDir, to_step: int) -> list[Checkpoint]:
    """List the untainted checkpoints at or before a step, newest generation and step first."""
    sound = [each for each in catalog.list_checkpoints(run.checkpoints) if each.health is not Health.tainted]
    return [each for each in reversed(sound) if each.step <= to_step]


def list_targets(run: RunDir) -> str:
    """The checkpoints of a run with their health, newest first, in one line."""
    found = catalog.list_checkpoints(run.checkpoints)[::-1]
    named = [f"step {each.step} ({each.health})" for each in found[:NUM_LISTED]]
    rest = [f"and {len(found) - NUM_LISTED} older"] if len(found) > NUM_LISTED else []
    return ", ".join([*named, *rest]) or "none"


def last_record(run: RunDir) -> StepRecord | None:
    """Return the newest step record near the end of the log, or None."""
    return next((event for event in reversed(tail(run.events)) if isinstance(event, StepRecord)), None)


def read_config_tree(run: RunDir) -> dict[str, Any]:
    """Return the config of a run, or an empty dict if it cannot be parsed."""
    try:
        tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _check_not_excluded(run: RunDir, order: SkipBatches) -> None:
    excluded = Ledger.load(run.ledger, writer=False).excluded_ranges(order.first, order.last)
    is_new = excluded != [(order.first, order.last)]
    require(is_new, "skip", f"already excluded: {describe_batches(order.first, order.last)}")


def _check_excluded(run: RunDir, order: UnskipBatches, before: Sequence[Order]) -> None:
    """An order that waits may exclude batches first; then the run checks again."""
    if any(isinstance(each, Skip | SkipBatches | Rollback) for each in before):
        return
    excluded = Ledger.load(run.ledger, writer=False).excluded_ranges(order.first, order.last)
    message = f"{run.path} excludes no batch of {order.first}..{order.last}; its ledger is {run.ledger}"
    require(bool(excluded), "unskip", message)


def _check_target(run: RunDir, order: Rollback) -> None:
    record, to_step = last_record(run), order.to_step
    listed = f"checkpoints: {list_targets(run)}"
    if record is not None:
        message = f"must be to step {record.step}, the last, or before, got {to_step}; {listed}"
        require(to_step <= record.step, "rollback", message)
    targets = untainted_checkpoints(run, to_step)
    message = f"{run.path} has no checkpoint at or before step {to_step} that is not tainted; {listed}"
    require(bool(targets), "rollback", message)
    if order.exclude and (cursor := catalog.cursor_of(targets[0].path)) is not None:
        first = order.exclude[0]
        message = f"{targets[0].name} was trained on batches up to {cursor - 1}, and batch {first} is to be excluded"
        require(first >= cursor, "rollback", f"{message}; choose an earlier --to; {listed}")


def _check_weights(run: RunDir, key: str, weights: Mapping[str, float], before: Sequence[Order], message: str) -> None:
    """Check that these sources exist, and that every later batch has a source after the orders `before`."""
    data = _data_section(run)
    base = {source: section["weight"] for source, section in data["sources"].items()}
    for name in weights:
        require(name in base, key, f"no source {name!r}; {run.path} has {', '.join(base)}")
    record = last_record(run)
    cursor = 0 if record is None else record.cursor + 1
    planned = [Change(phase["from_batch"], phase["weights"]) for phase in data["phases"]]
    amended = [Change(entry.from_batch, entry.weights) for entry in Ledger.load(run.ledger, writer=False).reweightings]
    for each in before:
        match each:
            case ExcludeSource() if each.source in base:
                amended.append(Change(cursor, {each.source: 0.0}))
            case Reweight() if each.weights.keys() <= base.keys():
                amended.append(Change(cursor, each.weights))
    try:
        phases_of(base, planned, [*amended, Change(cursor, weights)])
    except ConfigError:
        raise ConfigError(key, message) from None


def _check_precision(run: RunDir, order: Precision) -> None:
    """Check that the run was started in fp8, and that its next batch is not in a planned phase in bf16: an order does
    not end such a phase."""
    section = read_config_tree(run).get("precision")
    if not isinstance(section, dict) or section.get("kind") != "fp8":
        raise ConfigError("precision", f"{run.path} was not started in fp8, so it has no precision to change")
    record = last_record(run)
    cursor = 0 if record is None else record.cursor + 1
    begun = [phase for phase in section.get("phases", []) if phase["from_batch"] <= cursor]
    if order.kind == "fp8" and begun and begun[-1]["kind"] == "bf16":
        message = f"batch {cursor:,} is in a phase in bf16 that precision.phases plans from batch "
        message += f"{begun[-1]['from_batch']:,}; resume with other phases and run.resume=changed"
        raise ConfigError("precision", message)


def _data_section(run: RunDir) -> dict[str, Any]:
    match read_config_tree(run):
        case {"data": {"sources": dict(), "phases": list()} as data}:
            return dict(data)
    raise ConfigError(str(run.config), "has no data.sources and data.phases")
