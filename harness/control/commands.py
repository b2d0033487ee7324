"""The operator commands of `harness ctl`, and their JSON form.

The command line writes a command and the run reads it, perhaps in another version of the code and days later. Both
sides validate with the same dataclasses. Keys that are missing, unknown or of the wrong type are rejected.

Left out: checks that need the run (does this source exist, is there such a checkpoint), which are in
`harness.control.inbox`, and the stop command, which must also work as a plain `touch STOP`
(`harness.control.stop_requests`).
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, assert_never, final

from harness.config.errors import ConfigError, require

LONGEST_REASON = 1000
MOST_BATCHES = 1_000_000
"""A typing error must not exclude a whole corpus: the ledger is append-only."""
LARGEST_FACTOR = 10.0
PRECISIONS = ("bf16", "fp8")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Exclude the next batches."""

    num_batches: int

    def __post_init__(self) -> None:
        valid = 1 <= self.num_batches <= MOST_BATCHES
        require(valid, "skip", f"must be 1 to {MOST_BATCHES:,} batches, got {self.num_batches}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Roll back to the newest checkpoint at or before a step that is not tainted."""

    to_step: int

    def __post_init__(self) -> None:
        require(0 <= self.to_step < 2**63, "rollback", f"must be to step 0 or later, got {self.to_step}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Multiply the scheduled learning rate; a factor of 1 restores it."""

    factor: float

    def __post_init__(self) -> None:
        valid = 0 < self.factor <= LARGEST_FACTOR
        require(valid, "lr", f"must be a factor above 0 and at most {LARGEST_FACTOR:g}, got {self.factor}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludeSource:
    """Set the weight of a data source to 0."""

    source: str

    def __post_init__(self) -> None:
        require(bool(self.source), "exclude", "must name a source")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Switch an fp8 run to bf16, or back to fp8."""

    kind: str

    def __post_init__(self) -> None:
        require(self.kind in PRECISIONS, "precision", f"must be {' or '.join(PRECISIONS)}, got {self.kind}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Save a checkpoint now."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Pause the loop with its state in memory. Commands are still processed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Continue after a pause."""


Order = Skip | Rollback | Rate | ExcludeSource | Precision | SaveCheckpoint | Pause | Resume

ORDERS: dict[str, type[Order]] = {
    "skip": Skip,
    "rollback": Rollback,
    "lr": Rate,
    "exclude": ExcludeSource,
    "precision": Precision,
    "checkpoint": SaveCheckpoint,
    "pause": Pause,
    "resume": Resume,
}
"""Command name, on the command line and in the file -> its dataclass."""
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An order, with its author, time and reason."""

    id: str
    """Name of its file, without .json."""
    order: Order
    who: str
    time: float
    """Seconds since 1970."""
    reason: str

    def __post_init__(self) -> None:
        require(bool(self.who), "who", "must not be empty")
        require(bool(self.reason), "reason", "must not be empty")
        message = f"must have at most {LONGEST_REASON} characters, got {len(self.reason)}"
        require(len(self.reason) <= LONGEST_REASON, "reason", message)
        require(0 <= self.time < 1e12, "time", f"must be in seconds since 1970, got {self.time}")

    def to_json(self) -> str:
        (name,) = [name for name, kind in ORDERS.items() if isinstance(self.order, kind)]
        given = {"who": self.who, "time": self.time, "reason": self.reason}
        return json.dumps({"command": name} | asdict(self.order) | given)


def in_words(order: Order) -> str:
    """Describe an order, to be read after "asked the run to"."""
    match order:
        case Skip(num_batches=1):
            return "skip 1 batch"
        case Skip():
            return f"skip {order.num_batches} batches"
        case Rollback():
            return f"roll back to step {order.to_step}"
        case Rate(factor=1):
            return "restore the learning rate"
        case Rate():
            return f"multiply the learning rate by {order.factor:g}"
        case ExcludeSource():
            return f"exclude the source {order.source}"
        case Precision():
            return f"compute in {order.kind}"
        case SaveCheckpoint():
            return "save a checkpoint"
        case Pause():
            return "pause"
        case Resume():
            return "resume"
        case _:
            assert_never(order)


def parse_command(text: bytes, *, id: str) -> Command:
    """Parse a command file. Raises `ConfigError` with one line if it is not a valid command."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError("", "is not JSON") from None
    match content:
        case {"command": str(name), "who": str(who), "time": int() | float() as when, "reason": str(reason), **rest}:
            require(name in ORDERS, "", f"has no known command: {reprlib.repr(name)}; known are {', '.join(ORDERS)}")
            order = parse_order(name, {str(key): value for key, value in rest.items()})
            return Command(id=id, order=order, who=one_line(who), time=when, reason=one_line(reason))
        case _:
            raise ConfigError("", "needs command, who, time and reason")


def parse_order(name: str, given: Mapping[str, Any]) -> Order:
    """Build the order with this name from its fields."""
    expected = {field.name: str(field.type) for field in fields(ORDERS[name])}
    message = f"takes {', '.join(expected) or 'nothing'}, got {reprlib.repr(sorted(given))}"
    require(given.keys() == expected.keys(), name, message)
    for key, kind in expected.items():
        valid = type(given[key]) in _TYPES[kind]
        require(valid, name, f"{key} must be of type {kind}, got {reprlib.repr(given[key])}")
    return ORDERS[name](**given)


def one_line(text: str) -> str:
    """Return the text as one line of printable characters."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return "".join(character if character.isprintable() else "?" for character in line)
