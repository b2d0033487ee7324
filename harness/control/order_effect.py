"""What an order would do to the data of a run, in one line, from the run directory; for an operator who is about to
send it.

Why: a wrong number must be seen before it is sent. The ledger is append-only.
How: the newest step record says where the run is, the ledger what is excluded, config and `corpus.json` how many tokens
a batch has. The run moves on until it applies the order, so "now" is the time of the question.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

from harness.config.errors import ConfigError, require
from harness.control.commands import (
    Order,
    Reweight,
    Rollback,
    Skip,
    SkipBatches,
    UnskipBatches,
    check_range,
    describe_batches,
)
from harness.control.order_checks import (
    list_targets,
    read_config_tree,
    require_unread,
    untainted_checkpoints,
)
from harness.core.batch_sizes import BatchSize, BatchSizes
from harness.core.event_json import parse
from harness.core.events import Action, ActionKind, Incident, Outcome, RunEnded, RunRestarted, RunStarted, StepRecord
from harness.core.locking.run_lease import dead_holder
from harness.core.rundir import RunDir
from harness.data.corpus.corpus_record import read_record
from harness.data.order.ledger import Ledger
from harness.telemetry.event_log import tail

Ranges = Sequence[tuple[int, int]]
RESTORING = (ActionKind.rewind, ActionKind.rollback)


def describe_effect(run: RunDir, order: Order) -> str:
    """What the order would exclude, re-include or change now; empty if it does none of these."""
    ledger = Ledger.load(run.ledger, writer=False)
    position = next_batch_of(run, ledger)
    match order:
        case Skip():
            if position is None:
                batches = "the next batch" if order.num_batches == 1 else f"the next {order.num_batches:,} batches"
                return f"excludes {batches} from where the run goes on"
            first, last = ledger.next_range(position, order.num_batches)
            return f"excludes {_describe(run, _unexcluded(ledger, first, last))} if it is applied now, at batch {first}"
        case SkipBatches():
            if position is not None:
                require_unread(ledger, order, position)
            where = f"; the run is at batch {position}" if position is not None else ""
            return f"excludes {_describe(run, _unexcluded(ledger, order.first, order.last))}{where}"
        case UnskipBatches():
            excluded = ledger.excluded_ranges(order.first, order.last)
            if not excluded:
                return f"re-includes nothing now: {describe_batches(order.first, order.last)} not excluded yet"
            return f"re-includes {_describe(run, excluded)}: {describe_return(excluded, position)}"
        case Rollback():
            return _describe_rollback(run, order, ledger)
        case Reweight():
            overrides = "; data.phases no longer changes these weights" if _has_phases(run) else ""
            where = f" now, from batch {position} on" if position is not None else ""
            return f"sets {', '.join(f'{name}={weight:g}' for name, weight in order.weights.items())}{where}{overrides}"
    return ""


def describe_return(excluded: Ranges, position: int | None) -> str:
    """When re-included batches are read, for a run at this batch."""
    if position is None:
        return "those that the run has passed are read next, the others in their place"
    num_passed = sum(max(0, min(last + 1, position) - first) for first, last in excluded)
    num_ahead = sum(last - first + 1 for first, last in excluded) - num_passed
    passed = [f"{num_passed:,} that the run has passed are read next"] if num_passed else []
    return ", ".join([*passed, *([f"{num_ahead:,} are read in their place"] if num_ahead else [])])


def next_batch_of(run: RunDir, ledger: Ledger) -> int | None:
    """The batch that the run reads next, by its log. None: not known, because it goes on from an older state: after a
    restore without a step, or at the next start of a run that has died."""
    recent = tail(run.events)
    if recent and dead_holder(run.path):
        return None
    for event in reversed(recent):
        match event:
            case StepRecord() if not ledger.is_given_back(event.cursor):
                return event.cursor + 1
            case Outcome(succeeded=True) if event.kind in RESTORING:
                return None
            case RunStarted():
                return 0 if event.step == 0 and event.resumed_from is None else None
            case RunEnded() | RunRestarted():
                return None
    return None if recent else 0


def incident_batches(run: RunDir, number: int) -> tuple[int, int]:
    """First and last batch that an incident blames: in its event, its actions, or else its iterations."""
    blamed: list[int] = []
    onset = end = None
    try:
        with run.events.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.startswith(('{"event":"incident"', '{"event":"action"')):
                    continue
                for event in parse(line):
                    match event:
                        case Incident(number=found) if found == number:
                            onset, end = event.onset, event.last
                            blamed += event.cursors
                        case Action(incident=found) if found == number:
                            onset, end = onset or event.onset, max(end or 0, event.iteration)
                            blamed += event.exclude
    except FileNotFoundError:
        pass
    if onset is None or end is None:
        raise ConfigError("--incident", f"{run.path} has no incident {number} in its log")
    blamed = blamed or _batches_of_iterations(run, onset, end)
    require(bool(blamed), "--incident", f"the log names no batch of incident {number}; give --exclude A..B")
    check_range("--incident", min(blamed), max(blamed))
    return min(blamed), max(blamed)


def _batches_of_iterations(run: RunDir, first: int, last: int) -> list[int]:
    with run.events.open(encoding="utf-8", errors="replace") as lines:
        records = (event for line in lines if line.startswith('{"event":"step"') for event in parse(line))
        return [event.cursor for event in records if isinstance(event, StepRecord) and first <= event.iteration <= last]


def _describe_rollback(run: RunDir, order: Rollback, ledger: Ledger) -> str:
    best = untainted_checkpoints(run, order.to_step)[0]
    target = f"restores {best.name} ({best.health})"
    if best.step != order.to_step:
        target = f"{target}, the newest at or before step {order.to_step}; checkpoints: {list_targets(run)}"
    if not order.exclude:
        return f"{target}; excludes no batch"
    return f"{target}; excludes {_describe(run, _unexcluded(ledger, *order.exclude))}"


def _describe(run: RunDir, ranges: Ranges) -> str:
    """Number of batches, the first and the last, and their tokens."""
    num_batches = sum(last - first + 1 for first, last in ranges)
    if not num_batches:
        return "no batch that is not excluded already"
    first, last = ranges[0][0], ranges[-1][1]
    span = f"batch {first}" if num_batches == 1 else f"{num_batches:,} batches, {first} to {last}"
    num_tokens = _count_tokens(run, ranges)
    return f"{span}, {num_tokens:,} tokens" if num_tokens else span


def _unexcluded(ledger: Ledger, first: int, last: int) -> Ranges:
    """The parts of a range that are not excluded yet."""
    edges = [(first - 1, first - 1), *ledger.excluded_ranges(first, last), (last + 1, last + 1)]
    gaps = [(before[1] + 1, after[0] - 1) for before, after in pairwise(edges)]
    return [(start, end) for start, end in gaps if start <= end]


def _count_tokens(run: RunDir, ranges: Ranges) -> int:
    """Tokens of these batches; 0 if the run directory does not say how large a batch is."""
    match read_config_tree(run):
        case {"train": {"batch_size": int(batch_size), "sequence_length": int(sequence_length)}}:
            record = read_record(run.corpus)
            sizes = BatchSizes([BatchSize(0, batch_size)] if record is None else record.sizes)
            rows = sum(sizes.position(last + 1) - sizes.position(first) for first, last in ranges)
            return rows * sequence_length
    return 0


def _has_phases(run: RunDir) -> bool:
    match read_config_tree(run):
        case {"data": {"phases": [_, *_]}}:
            return True
    return False


def parse_batches(text: str) -> tuple[int, int]:
    """Parse A..B (inclusive), or one batch N."""
    first, dots, last = text.partition("..")
    try:
        return int(first), int(last if dots else first)
    except ValueError:
        raise ConfigError("", f"must be A..B, first and last batch, got {json.dumps(text)}") from None
