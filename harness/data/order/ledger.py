"""The ledger: append-only file of excluded batches and changed source weights, each with its reason.

Why: the data is a pure function of the batch index, so a skipped batch is one number. A run that restarts with this
file sees the same batches as a run that had it from the start.
How: one JSON line per entry, on disk before the entry takes effect. A line with `kind` weights changes the mixture from
some batch on, one with `kind` revoke gives batches back, any other excludes a range. In memory the excluded ranges are
merged into sorted, disjoint ones, so that a lookup is one bisection; the entries stay as they were written.
A batch that is given back is not consumed at its own index. It is consumed when the run reaches batch `from_batch`,
just before that one. So the order of the batches is a function of the file alone: a run that starts with the final
ledger consumes the same batches in the same order as the run that wrote it.
A later entry for the same sources or the same batches wins. Lines of kind revoke have version 2, so that a harness
version that does not support them stops with an error instead of losing batches.
"""

from __future__ import annotations

import json
import math
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Self, final

from harness.config.errors import ConfigError, StorageError
from harness.core.rundir import append_line
from harness.core.transient_io import TRANSIENT_ERRORS, retry_transient

VERSION = 1
REVOKE_VERSION = 2
"""Version of lines of kind revoke."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    first: int
    last: int
    """Inclusive."""
    reason: str
    time: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reweighting:
    from_batch: int
    weights: dict[str, float]
    """Source -> weight; 0: off."""
    reason: str
    time: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    batches: list[list[int]]
    """First and last batch (inclusive) of each range that is given back."""
    from_batch: int
    """They are consumed when the run reaches this batch, just before it."""
    reason: str
    time: float
    is_repeat: bool = False
    """Batches of the present data whose update failed: no change of the data. Written only if true."""


Entry = Exclusion | Reweighting | Revocation


class NextBatch(NamedTuple):
    """The next batch to consume, and the cursor after it."""

    batch: int
    cursor: int
    given_back: int
    """How many of the batches given back at `cursor` are consumed after this one."""

    @property
    def position(self) -> int:
        """Position in the data order: the batch itself, or the batch before which it is given back."""
        return self.cursor if self.given_back else self.batch


@final
@dataclass(slots=True)
class Ledger:
    path: Path | None = None
    """File that new entries are appended to; None: in memory only, as on every rank but 0."""
    entries: list[Entry] = field(default_factory=list)
    """In the order in which they were written."""
    revision: int = 0
    """Changes with the order of the batches, also when an exclusion that was tried is taken back. What is computed from
    the ledger is valid for one revision."""
    _firsts: list[int] = field(default_factory=list)
    _lasts: list[int] = field(default_factory=list)
    _seen: list[int] = field(default_factory=list)
    """For each excluded range, how many batches before it are not excluded."""
    _given: dict[int, list[int | None]] = field(default_factory=dict)
    """Batch -> the batches given back just before it, in order; None: excluded, or given back elsewhere, since then.
    Positions in a list never change, because the `given_back` of a snapshot counts them."""

    @classmethod
    def load(cls, path: Path, *, writer: bool = True) -> Self:
        """Read the ledger from a file; empty if there is none. Only a `writer` appends new entries to the file."""
        return cls.of(_read(path), path=path if writer else None)

    @classmethod
    def of(cls, entries: Iterable[Entry], *, path: Path | None) -> Self:
        """A ledger of these entries; later entries are appended to `path` if it is given."""
        ledger = cls(path)
        for entry in entries:
            ledger._add(entry)
        return ledger

    def exclude(self, first: int, last: int, reason: str) -> None:
        """Exclude the batches `first` to `last` (inclusive)."""
        if not 0 <= first <= last:
            raise ValueError(f"an exclusion needs 0 <= first <= last, got {first} .. {last}")
        self._write(Exclusion(first=first, last=last, reason=reason, time=time.time()))

    def reweight(self, from_batch: int, weights: Mapping[str, float], reason: str) -> None:
        """Change the weights of the named sources from a batch on; 0 turns a source off."""
        if not (from_batch >= 0 and weights and _are_weights(weights)):
            raise ValueError(f"needs weights of 0 or more and from_batch >= 0, got {weights} from {from_batch}")
        named = {name: float(weight) for name, weight in weights.items()}
        self._write(Reweighting(from_batch=from_batch, weights=named, reason=reason, time=time.time()))

    def give_back(self, batches: list[list[int]], from_batch: int, reason: str, *, is_repeat: bool = False) -> None:
        """Consume these batches just before batch `from_batch`, whether they were excluded or passed without
        training."""
        if not _are_ranges(batches, from_batch):
            raise ValueError(f"needs ranges [first, last] of batches before {from_batch}, got {batches}")
        entry = Revocation(batches=batches, from_batch=from_batch, reason=reason, time=time.time(), is_repeat=is_repeat)
        self._write(entry)

    @contextmanager
    def trying_exclusion(self, first: int, last: int) -> Iterator[None]:
        """Exclude these batches inside the context only; nothing is written."""
        entries, given = list(self.entries), {point: list(batches) for point, batches in self._given.items()}
        ranges = list(self._firsts), list(self._lasts), list(self._seen)
        self._add(Exclusion(first=first, last=last, reason="tried", time=time.time()))
        try:
            yield
        finally:
            self.entries, self._given = entries, given
            self._firsts, self._lasts, self._seen = ranges
            self.revision += 1

    @property
    def revocations(self) -> tuple[Revocation, ...]:
        """In the order in which they were written."""
        return tuple(entry for entry in self.entries if isinstance(entry, Revocation))

    @property
    def reweightings(self) -> tuple[Reweighting, ...]:
        """In the order in which they were written."""
        return tuple(entry for entry in self.entries if isinstance(entry, Reweighting))

    def is_excluded(self, index: int) -> bool:
        """Whether a batch is never consumed; a batch that is given back is consumed."""
        return self.next_index(index) != index and not any(index in batches for batches in self._given.values())

    @property
    def num_excluded(self) -> int:
        """How many batches are never consumed."""
        hidden = sum(last - first + 1 for first, last in zip(self._firsts, self._lasts, strict=True))
        return hidden - sum(batch is not None for batches in self._given.values() for batch in batches)

    def next_batch(self, cursor: int, given_back: int = 0) -> NextBatch:
        """What a run at `cursor` consumes next; `given_back` of the batches given back there are consumed already."""
        index = self.next_index(cursor)
        for point in sorted(point for point in self._given if cursor <= point <= index):
            start = given_back if point == cursor else 0
            for number, batch in enumerate(self._given[point][start:], start=start):
                if batch is not None:
                    return NextBatch(batch, point, number + 1)
        return NextBatch(index, index + 1, 0)

    def next_index(self, cursor: int) -> int:
        """The first batch index from `cursor` on that is not excluded, given-back batches aside."""
        place = bisect_right(self._firsts, cursor) - 1
        return max(cursor, self._lasts[place] + 1) if place >= 0 else cursor

    def nth(self, consumed: int) -> int:
        """The batch index that is consumed after `consumed` others, given-back batches aside; O(log exclusions)."""
        assert consumed >= 0
        place = bisect_right(self._seen, consumed) - 1
        return self._lasts[place] + 1 + consumed - self._seen[place] if place >= 0 else consumed

    def next_range(self, cursor: int, num_batches: int) -> tuple[int, int]:
        """First and last of the next `num_batches` batches that are not excluded, given-back batches aside."""
        first = self.next_index(cursor)
        num_seen = bisect_left(range(first + 1), first, key=self.nth)
        return first, self.nth(num_seen + num_batches - 1)

    def excluded_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """The ranges of excluded batches between `first` and `last` (inclusive), without those given back."""
        given = sorted(batch for batch in self._given_back() if first <= batch <= last)
        found = []
        for start, end in zip(self._firsts, self._lasts, strict=True):
            begin, end = max(start, first), min(end, last)
            for batch in [*(batch for batch in given if begin <= batch <= end), end + 1]:
                if begin < batch <= end + 1:
                    found.append((begin, batch - 1))
                begin = batch + 1
        return found

    def is_given_back(self, batch: int) -> bool:
        """Whether the batch is consumed at another place than its own."""
        return batch in self._given_back()

    def num_consumed(self, first: int, last: int, cursor: int, given_back: int = 0) -> int:
        """How many of the batches `first` to `last` a run at this place has consumed; excluded ones do not count."""
        last = min(last, cursor - 1)
        if last < first:
            return 0
        awaited = {
            batch
            for point, batches in self._given.items()
            for batch in batches[given_back if point == cursor else 0 :]
            if point >= cursor and batch is not None and first <= batch <= last
        }
        excluded = sum(end - start + 1 for start, end in self.excluded_ranges(first, last))
        return last - first + 1 - excluded - len(awaited)

    def _given_back(self) -> set[int]:
        return {batch for batches in self._given.values() for batch in batches if batch is not None}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def _write(self, entry: Entry) -> None:
        if self.path is not None:
            _mend(self.path)
            append_line(self.path, _line(entry))
        self._add(entry)

    def _add(self, entry: Entry) -> None:
        """Apply an entry to the order of the batches."""
        self.entries.append(entry)
        self.revision += 1
        match entry:
            case Exclusion(first=first, last=last):
                self._hide(first, last)
            case Revocation(batches=batches, from_batch=from_batch):
                for first, last in batches:
                    self._hide(first, last)
                given = [batch for first, last in batches for batch in range(first, last + 1)]
                self._given[from_batch] = [*self._given.get(from_batch, []), *given]

    def _hide(self, first: int, last: int) -> None:
        """Exclude a range, also from where its batches were given back before. The range is merged with all ranges it
        overlaps or touches, so that the batch after a merged range is never excluded."""
        for point, batches in self._given.items():
            self._given[point] = [None if batch is not None and first <= batch <= last else batch for batch in batches]
        start = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        first = min([first, *self._firsts[start:end]])
        last = max([last, *self._lasts[start:end]])
        self._firsts[start:end], self._lasts[start:end] = [first], [last]
        del self._seen[start:]
        for place in range(start, len(self._firsts)):
            seen, end_before = (self._seen[-1], self._lasts[place - 1] + 1) if place else (0, 0)
            self._seen.append(seen + self._firsts[place] - end_before)


def return_points(batches: list[list[int]], cursor: int) -> list[tuple[list[list[int]], int]]:
    """(ranges, the batch before which they are consumed) for excluded ranges that a run at `cursor` re-includes.

    What the run has passed comes next. What is ahead comes just before the batch behind it, which is its own place.
    """
    passed = [[first, min(last, cursor - 1)] for first, last in batches if first < cursor]
    ahead = [[max(first, cursor), last] for first, last in batches if last >= cursor]
    return [*([(passed, cursor)] if passed else []), *(([span], span[1] + 1) for span in ahead)]


NOT_WRITTEN = ("is_repeat", False)


def _line(entry: Entry) -> str:
    match entry:
        case Reweighting():
            head = {"version": VERSION, "kind": "weights"}
        case Revocation():
            head = {"version": REVOKE_VERSION, "kind": "revoke"}
        case _:
            head = {"version": VERSION}
    return json.dumps({key: value for key, value in (head | asdict(entry)).items() if (key, value) != NOT_WRITTEN})


def _are_ranges(batches: object, from_batch: int) -> bool:
    """Whether these are ranges of batches before `from_batch`."""
    if not isinstance(batches, list) or not batches:
        return False
    pairs = [pair for pair in batches if isinstance(pair, list | tuple) and len(pair) == 2]
    whole = all(isinstance(number, int) and not isinstance(number, bool) for pair in pairs for number in pair)
    return len(pairs) == len(batches) and whole and all(0 <= first <= last < from_batch for first, last in pairs)


def _are_weights(weights: Mapping[str, object]) -> bool:
    return all(isinstance(weight, int | float) and 0 <= weight < math.inf for weight in weights.values())


def _read(path: Path) -> Iterator[Entry]:
    try:
        *lines, tail = retry_transient(path.read_bytes).split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in TRANSIENT_ERRORS:
            raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from None
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield _parse(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}", f"is not an entry: {error}") from None
    if _is_whole(tail):
        yield _parse(tail)


def _parse(line: bytes) -> Entry:
    match json.loads(line):
        case {
            "version": 2,
            "kind": "revoke",
            "batches": list(batches),
            "from_batch": int(from_batch),
            "reason": str(reason),
            "time": int() | float() as when,
            **rest,
        }:
            if _are_ranges(batches, from_batch):
                is_repeat = rest.get("is_repeat") is True
                return Revocation(batches=batches, from_batch=from_batch, reason=reason, time=when, is_repeat=is_repeat)
            raise ValueError("it needs ranges [first, last] of batches before from_batch")
        case {"kind": "revoke"}:
            raise ValueError("kind 'revoke' needs version 2, batches, from_batch, reason and time")
        case {"version": int(version)} if version != VERSION:
            allowed = f"allowed is {VERSION}, or {REVOKE_VERSION} with kind revoke"
            raise ValueError(f"it has version {version}, {allowed}")
        case {
            "version": 1,
            "kind": "weights",
            "from_batch": int(from_batch),
            "weights": dict(weights),
            "reason": str(reason),
            "time": int() | float() as when,
        }:
            if from_batch >= 0 and weights and _are_weights(weights):
                return Reweighting(from_batch=from_batch, weights=weights, reason=reason, time=when)
        case {"kind": kind}:
            needed = "weights needs version, from_batch, weights, reason and time"
            raise ValueError(f"kind {kind!r} must be weights or revoke; {needed}")
        case {
            "version": 1,
            "first": int(first),
            "last": int(last),
            "reason": str(reason),
            "time": int() | float() as when,
        }:
            if 0 <= first <= last:
                return Exclusion(first=first, last=last, reason=reason, time=when)
            raise ValueError("it needs 0 <= first <= last")
    raise ValueError("it needs version, reason, time, and 0 <= first <= last or weights of 0 or more from a batch on")


def _is_whole(tail: bytes) -> bool:
    try:
        _parse(tail)
    except ValueError:
        return False
    return True


def _mend(path: Path) -> None:
    """Repair the end of the file after a crash: remove a truncated last line, or add a missing newline."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        tail = file.read().rpartition(b"\n")[2]
        if tail and _is_whole(tail):
            file.write(b"\n")
        else:
            file.seek(-len(tail), os.SEEK_END)
            file.truncate()
