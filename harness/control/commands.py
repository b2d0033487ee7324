"""What an operator may ask of a run that goes on, in words that are checked wherever they come from.

Why: the command line writes them, the run reads them, perhaps in another version and days later; both must hold the
same thing for possible, and say in one line what is not.
How: an order is a small dataclass that refuses what can never be; a command is an order with who gave it, when and why.
In a file it is one JSON object. Keys that are missing, unknown or of another type are refused, not guessed.
Left out: what depends on the run (is there such a source, such a checkpoint) is known to those who have the run.
Stop is none of these, because it must also be heard from a plain `touch`: see `harness.control.stop_requests`.
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
"""The ledger is append-only: a slip of the finger must not exclude a corpus."""
LARGEST_FACTOR = 10.0
PRECISIONS = ("bf16", "fp8")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Never see the next batches."""

    num_batches: int

    def __post_init__(self) -> None:
        valid = 1 <= self.num_batches <= MOST_BATCHES
        require(valid, "skip", f"must be 1 to {MOST_BATCHES:,} batches, got {self.num_batches}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Go back to the newest sound checkpoint at or before a step."""

    to_step: int

    def __post_init__(self) -> None:
        require(0 <= self.to_step < 2**63, "rollback", f"must be to step 0 or later, got {self.to_step}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Multiply the learning rate of the schedule; 1 restores it."""

    factor: float

    def __post_init__(self) -> None:
        valid = 0 < self.factor <= LARGEST_FACTOR
        require(valid, "lr", f"must be a factor above 0 and at most {LARGEST_FACTOR:g}, got {self.factor}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludeSource:
    """Read a source of data no more."""

    source: str

    def __post_init__(self) -> None:
        require(bool(self.source), "exclude", "must name a source")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Compute a run in fp8 in bf16 until told otherwise, or in fp8 again."""

    kind: str

    def __post_init__(self) -> None:
        require(self.kind in PRECISIONS, "precision", f"must be {' or '.join(PRECISIONS)}, got {self.kind}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Save now."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Stay where the run is, in memory, and hear commands."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Go on after a pause."""


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
"""Word of the command line and of the file -> what it asks for."""
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An order, and who gave it."""

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
        (word,) = [word for word, kind in ORDERS.items() if isinstance(self.order, kind)]
        given = {"who": self.who, "time": self.time, "reason": self.reason}
        return json.dumps({"command": word} | asdict(self.order) | given)


def in_words(order: Order) -> str:
    """What is asked, to be read after "asked the run to"."""
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


def from_json(text: bytes, *, id: str) -> Command:
    """The command a file holds; a `ConfigError` says in one line why it holds none."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError("", "is not JSON") from None
    match words:
        case {"command": str(word), "who": str(who), "time": int() | float() as when, "reason": str(reason), **rest}:
            require(word in ORDERS, "", f"has no known command: {reprlib.repr(word)}; known are {', '.join(ORDERS)}")
            order = order_of(word, {str(key): value for key, value in rest.items()})
            return Command(id=id, order=order, who=one_line(who), time=when, reason=one_line(reason))
        case _:
            raise ConfigError("", "needs command, who, time and reason")


def order_of(word: str, given: Mapping[str, Any]) -> Order:
    """The order with that word and those fields."""
    expected = {field.name: str(field.type) for field in fields(ORDERS[word])}
    message = f"takes {', '.join(expected) or 'nothing'}, got {reprlib.repr(sorted(given))}"
    require(given.keys() == expected.keys(), word, message)
    for name, kind in expected.items():
        valid = type(given[name]) in _TYPES[kind]
        require(valid, word, f"{name} must be of type {kind}, got {reprlib.repr(given[name])}")
    return ORDERS[word](**given)


def one_line(text: str) -> str:
    """Words that any log and any terminal can show."""
    words = " ".join(text.encode(errors="replace").decode().split())
    return "".join(letter if letter.isprintable() else "?" for letter in words)
