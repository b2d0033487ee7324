"""The ledger: batches that must never be seen (again), each with the reason it was excluded.

Why: with the data a pure function of its index, a skipped batch is one number; a run that restarts from this file meets
the same batches as one that knew it from the start.
How: one JSON line an exclusion, on disk before the exclusion counts. In memory overlapping ranges are merged into
sorted, disjoint ones, so that a lookup is one bisection; the entries stay as they were written.
Left out: taking an exclusion back. The file is append-only.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self, final

from harness.config import ConfigError
from harness.rundir import append_line

VERSION = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    first: int
    last: int
    """Inclusive."""
    reason: str
    time: float


@final
@dataclass(slots=True)
class Ledger:
    path: Path | None = None
    """Where exclusions are written; None: in memory only, as on every rank but the first."""
    entries: list[Exclusion] = field(default_factory=list)
    """As they were written, in that order."""
    _firsts: list[int] = field(default_factory=list)
    _lasts: list[int] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, *, writer: bool = True) -> Self:
        """The ledger a file holds, empty where there is none; only the writer's exclusions go back to the file."""
        ledger = cls(path if writer else None)
        for entry in _read(path):
            ledger._add(entry)
        return ledger

    def exclude(self, first: int, last: int, reason: str) -> None:
        """Never see the batches `first` to `last` (inclusive) again."""
        if not 0 <= first <= last:
            raise ValueError(f"batches are excluded from 0 <= first to last >= first, got {first} .. {last}")
        entry = Exclusion(first=first, last=last, reason=reason, time=time.time())
        if self.path is not None:
            _mend(self.path)
            append_line(self.path, json.dumps({"version": VERSION} | asdict(entry)))
        self._add(entry)

    def is_excluded(self, index: int) -> bool:
        return self.next_index(index) != index

    def next_index(self, cursor: int) -> int:
        """The first batch index from `cursor` on that may be seen."""
        place = bisect_right(self._firsts, cursor) - 1
        return max(cursor, self._lasts[place] + 1) if place >= 0 else cursor

    def __iter__(self) -> Iterator[Exclusion]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def _add(self, entry: Exclusion) -> None:
        """Merge the range with all it overlaps or touches, so that what follows a merged range may be seen."""
        self.entries.append(entry)
        start = bisect_left(self._lasts, entry.first - 1)
        end = bisect_right(self._firsts, entry.last + 1)
        first = min([entry.first, *self._firsts[start:end]])
        last = max([entry.last, *self._lasts[start:end]])
        self._firsts[start:end], self._lasts[start:end] = [first], [last]


def _read(path: Path) -> Iterator[Exclusion]:
    try:
        *lines, tail = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield _parse(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}", f"is not an exclusion: {error}") from None
    if _is_whole(tail):
        yield _parse(tail)


def _parse(line: bytes) -> Exclusion:
    match json.loads(line):
        case {"version": int(version)} if version != VERSION:
            raise ValueError(f"it has version {version}, allowed is {VERSION}")
        case {
            "version": 1,
            "first": int(first),
            "last": int(last),
            "reason": str(reason),
            "time": int() | float() as when,
        }:
            if 0 <= first <= last:
                return Exclusion(first=first, last=last, reason=reason, time=when)
    raise ValueError("it needs version, 0 <= first <= last, reason and time")


def _is_whole(tail: bytes) -> bool:
    try:
        _parse(tail)
    except ValueError:
        return False
    return True


def _mend(path: Path) -> None:
    """End the file with a whole line: what a crash cut short is dropped, what lacks only its newline gets it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        tail = file.read().rpartition(b"\n")[2]
        if tail and _is_whole(tail):
            file.write(b"\n")
        else:
            file.seek(-len(tail), os.SEEK_END)
            file.truncate()
