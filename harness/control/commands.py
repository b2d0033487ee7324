"""The operator commands of `harness ctl`, and their JSON form.

The command line writes a command and the run reads it, perhaps in another version of the code and days later. Both
sides validate with the same dataclasses. Keys that are missing, unknown or of the wrong type are rejected. A field with
a default may be missing and is written only if it differs, so that older files and older runs stay readable.

Left out: checks that need the run (does this source exist, is there such a checkpoint), which are in
`harness.control.order_checks`, and the stop command, which must also work as a plain `touch STOP`
(`harness.control.stop_requests`).
"""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, assert_never, final

from harness.config.errors import ConfigError, require
from harness.config.profile import MOST_PROFILED_STEPS

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
class SkipBatches:
    """Exclude a range of batches that the run has not read yet."""

    first: int
    last: int
    """Inclusive."""

    def __post_init__(self) -> None:
        check_range("skip", self.first, self.last)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnskipBatches:
    """Re-include the excluded batches of a range, whoever excluded them."""

    first: int
    last: int
    """Inclusive."""

    def __post_init__(self) -> None:
        check_range("unskip", self.first, self.last)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Roll back to the newest checkpoint at or before a step that is not tainted."""

    to_step: int
    exclude: tuple[int, ...] = ()
    """First and last batch (inclusive) to exclude; empty: none."""

    def __post_init__(self) -> None:
        if self.exclude:
            require(len(self.exclude) == 2, "rollback", f"exclude must be first and last batch, got {self.exclude}")
            check_range("rollback", *self.exclude)
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
        check_printable("exclude", self.source)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reweight:
    """Change the weights of data sources from the next batch on."""

    weights: dict[str, float]
    """Source -> weight, relative to the weights of the others; 0: off. Sources that are not named keep theirs."""

    def __post_init__(self) -> None:
        require(bool(self.weights), "reweight", "must name a source and its weight")
        for name, weight in self.weights.items():
            check_printable("reweight", name)
            message = f"the weight of {name!r} must be 0 or more and finite, got {weight}"
            require(0 <= weight < math.inf, "reweight", message)


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
class Profile:
    """Profile the next steps."""

    num_steps: int
    ranks: tuple[int, ...] = ()
    """Empty: all."""

    def __post_init__(self) -> None:
        valid = 1 <= self.num_steps <= MOST_PROFILED_STEPS
        require(valid, "profile", f"must be 1 to {MOST_PROFILED_STEPS} steps, got {self.num_steps}")
        require(all(rank >= 0 for rank in self.ranks), "profile", f"ranks must be 0 or more, got {list(self.ranks)}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Pause the loop with its state in memory. Commands are still processed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Continue after a pause."""


Order = (
    Skip
    | SkipBatches
    | UnskipBatches
    | Rollback
    | Rate
    | ExcludeSource
    | Reweight
    | Precision
    | SaveCheckpoint
    | Profile
    | Pause
    | Resume
)

ORDERS: dict[str, type[Order]] = {
    "skip": Skip,
    "skip_batches": SkipBatches,
    "unskip": UnskipBatches,
    "rollback": Rollback,
    "lr": Rate,
    "exclude": ExcludeSource,
    "reweight": Reweight,
    "precision": Precision,
    "checkpoint": SaveCheckpoint,
    "profile": Profile,
    "pause": Pause,
    "resume": Resume,
}
"""Command name in the file -> its dataclass. On the command line, skip writes `skip` or `skip_batches`."""


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
        return json.dumps({"command": name} | order_fields(self.order) | given)


def order_fields(order: Order) -> dict[str, Any]:
    """The fields of an order as plain data, without those that have their default."""
    given = {field.name: field.default for field in fields(order)}
    return {name: value for name, value in asdict(order).items() if value != given[name]}


def check_range(key: str, first: int, last: int) -> None:
    """Raise `ConfigError` unless `first` to `last` (inclusive) is a range of batches of a sensible size."""
    require(0 <= first <= last < 2**63, key, f"needs batches A..B with 0 <= A <= B, got {first}..{last}")
    message = f"must be 1 to {MOST_BATCHES:,} batches, got {last - first + 1}"
    require(last - first < MOST_BATCHES, key, message)


def check_printable(key: str, name: str) -> None:
    """Raise `ConfigError` unless a name can be shown: JSON may hold half a character, which no output can write."""
    require(name.isprintable(), key, f"the name of a source must be printable, got {name!r}")


def describe_batches(first: int, last: int) -> str:
    return f"batch {first}" if first == last else f"batches {first}..{last}"


def in_words(order: Order) -> str:
    """Describe an order, to be read after "asked the run to"."""
    match order:
        case Skip(num_batches=1):
            return "skip the next batch"
        case Skip():
            return f"skip the next {order.num_batches} batches"
        case SkipBatches():
            return f"skip {describe_batches(order.first, order.last)}"
        case UnskipBatches():
            return f"re-include {describe_batches(order.first, order.last)}"
        case Rollback(exclude=()):
            return f"roll back to step {order.to_step}"
        case Rollback():
            return f"roll back to step {order.to_step} and exclude {describe_batches(*order.exclude)}"
        case Rate(factor=1):
            return "restore the learning rate"
        case Rate():
            return f"multiply the learning rate by {order.factor:g}"
        case ExcludeSource():
            return f"exclude the source {order.source}"
        case Reweight():
            return "set the weight of " + ", ".join(f"{name} to {weight:g}" for name, weight in order.weights.items())
        case Precision():
            return f"compute in {order.kind}"
        case SaveCheckpoint():
            return "save a checkpoint"
        case Profile():
            where = f" on rank {', '.join(map(str, order.ranks))}" if order.ranks else ""
            return f"profile {'a step' if order.num_steps == 1 else f'{order.num_steps} steps'}{where}"
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
    needed = {field.name for field in fields(ORDERS[name]) if field.default is MISSING}
    message = f"takes {', '.join(expected) or 'nothing'}, got {reprlib.repr(sorted(given))}"
    require(needed <= given.keys() <= expected.keys(), name, message)
    return ORDERS[name](**{key: parse_field(name, key, expected[key], value) for key, value in given.items()})


def parse_field(order: str, key: str, kind: str, value: Any) -> Any:
    """Check the type of one field; a list from JSON becomes a tuple."""
    match kind, value:
        case ("int", int()) | ("float", int() | float()) if not isinstance(value, bool):
            return value
        case "str", str():
            return value
        case "tuple[int, ...]", [*numbers] if all(type(number) is int for number in numbers):
            return tuple(numbers)
        case "dict[str, float]", dict() if all(type(number) in (int, float) for number in value.values()):
            try:
                return {str(name): float(number) for name, number in value.items()}
            except OverflowError:
                raise ConfigError(
                    order, f"{key} must be floats, got an integer above {sys.float_info.max:.2g}"
                ) from None
    raise ConfigError(order, f"{key} must be of type {kind}, got {reprlib.repr(value)}")


def one_line(text: str) -> str:
    """Return the text as one line of printable characters."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return "".join(character if character.isprintable() else "?" for character in line)
