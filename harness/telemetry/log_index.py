"""Block index of the event log, so that a reader of a multi-gigabyte log reads only the part it needs.

Why: a run of a million steps has a log of several GB. The dashboard, the terminal view, a post-mortem and a resume must
not read all of it, and must not hold all of it in memory.
How: the log is divided into blocks of about 1 MiB of whole lines. For each block the index holds the byte range, the
range of iterations, the position of every line that is not an ordinary step (findings, actions, rejected steps, ...),
of the step before each of them and of the first step after a start, and the positions of the extreme values of loss and
gradient norm. The run appends one line per block to `events.index` beside the log. The index is optional: parts that it
does not cover, or covers wrongly, are scanned, which costs one pass over the raw lines and no parsing. Readers write
nothing. A log may lose its end in a power failure, and a block of the lost part may stay in the index: readers trust no
block from the first one on that does not fit the log, and the next start removes those, before the log grows past them.
`between` and `rare_lines` are exact. `sample_lines` is exact for a log up to its budget in bytes. From a longer log it
takes all lines that are not ordinary steps, the extremes of each block, and evenly spaced stretches of ordinary steps.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, final

from harness.core.rundir import write_atomically

BLOCK_BYTES = 1 << 20
LARGEST_BLOCK_BYTES = 8 << 20
"""A block ends before an ordinary step, or at this size if there is none."""
SCAN_BYTES = 4 << 20
BUDGET_BYTES = 64 << 20
"""Approximate limit of the ordinary steps that `sample_lines` reads."""
MOST_BLOCKS = 4096
"""`sample_lines` merges blocks beyond this number, so that the number of extremes does not grow with the log."""

NUMBER = rb"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
PLAIN = re.compile(
    rb'\{"event":"step","time":[^,]*,"iteration":(\d+),"step":(\d+),"cursor":\d+,"tokens":\d+,'
    rb'"loss":(' + NUMBER + rb'),"grad_norm":(' + NUMBER + rb'),"lr":(' + NUMBER + rb"),"
    rb'(?:"tokens_per_s":' + NUMBER + rb',)?"refused":false,'
)
"""An applied step with finite loss and gradient norm. Groups: iteration, step, loss, gradient norm, learning rate."""
TOKENS_PER_S = re.compile(rb'"tokens_per_s":(' + NUMBER + rb")[,}]")
STEP = re.compile(rb'\{"event":"step","time":[^,]*,"iteration":(\d+),')
START = b'{"event":"run_started",'

Extreme = tuple[float, int]
"""A value and the position of its line."""


def index_path(log: Path) -> Path:
    return log.with_suffix(".index")


@final
@dataclass(slots=True)
class LogBlock:
    """Index entry of the whole lines from byte `start` to byte `end`."""

    start: int
    end: int
    first: int | None = None
    """Lowest iteration of a step; None: the block has no step."""
    last: int | None = None
    """Highest iteration of a step."""
    rare: list[int] = field(default_factory=list)
    """Positions of the lines that are not ordinary steps, of the ordinary step before each of them, and of the first
    ordinary step after a start, which ends its starting time."""
    low: Extreme | None = None
    """Lowest loss of the ordinary steps."""
    high: Extreme | None = None
    """Highest loss of the ordinary steps."""
    norm: Extreme | None = None
    """Highest gradient norm of the ordinary steps."""
    previous: int | None = None
    """Position of the last line if that is an ordinary step that `rare` does not have; not on disk."""
    is_starting: bool = False
    """Whether no ordinary step has followed the last start; not on disk."""

    def add(self, line: bytes) -> None:
        """Extend the block by the next whole line."""
        place, self.end = self.end, self.end + len(line)
        if plain := PLAIN.match(line):
            loss, norm = float(plain[3]), float(plain[4])
            self.low = (loss, place) if self.low is None else min(self.low, (loss, place))
            self.high = (loss, place) if self.high is None else max(self.high, (loss, place))
            self.norm = (norm, place) if self.norm is None else max(self.norm, (norm, place))
            self._extend_range(int(plain[1]))
            if self.is_starting:
                self.rare.append(place)
            self.previous = None if self.is_starting else place
            self.is_starting = False
            return
        if step := STEP.match(line):
            self._extend_range(int(step[1]))
        if self.previous is not None:
            self.rare.append(self.previous)
        self.rare.append(place)
        self.previous = None
        self.is_starting = self.is_starting or line.startswith(START)

    def _extend_range(self, iteration: int) -> None:
        self.first = iteration if self.first is None else min(self.first, iteration)
        self.last = iteration if self.last is None else max(self.last, iteration)

    def is_full(self, line: bytes) -> bool:
        """Whether `line` starts another block. A finding stays in the block of its step."""
        size_bytes = self.end - self.start
        return size_bytes >= LARGEST_BLOCK_BYTES or (size_bytes >= BLOCK_BYTES and PLAIN.match(line) is not None)

    def merge(self, later: LogBlock) -> LogBlock:
        """This block and the next one as one block."""
        firsts = [block.first for block in (self, later) if block.first is not None]
        lasts = [block.last for block in (self, later) if block.last is not None]
        return LogBlock(
            start=self.start,
            end=later.end,
            first=min(firsts, default=None),
            last=max(lasts, default=None),
            rare=[*self.rare, *later.rare],
            low=min((low for low in (self.low, later.low) if low is not None), default=None),
            high=max((high for high in (self.high, later.high) if high is not None), default=None),
            norm=max((norm for norm in (self.norm, later.norm) if norm is not None), default=None),
        )

    @property
    def kept(self) -> list[int]:
        """Positions of the lines that every sample includes, in order."""
        extremes = (self.low, self.high, self.norm)
        return sorted({*self.rare, *(extreme[1] for extreme in extremes if extreme is not None)})

    def to_json(self) -> str:
        values = asdict(self)
        del values["previous"], values["is_starting"]
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Self:
        values: dict[str, Any] = json.loads(line)
        for name in ("low", "high", "norm"):
            values[name] = None if values[name] is None else (float(values[name][0]), int(values[name][1]))
        return cls(**values)


def blocks_of(lines: Iterable[bytes], start: int) -> Iterator[LogBlock]:
    """Divide whole lines into blocks; the first line is at byte `start`."""
    block = LogBlock(start, start)
    for line in lines:
        if block.is_full(line):
            yield block
            block = LogBlock(block.end, block.end)
        block.add(line)
    if block.end > block.start:
        yield block


def read_blocks(log: Path) -> list[LogBlock]:
    """All blocks of the log: from the index, and by a scan of the parts that it does not cover."""
    if not log.is_file():
        return []
    found: list[LogBlock] = []
    with log.open("rb") as file:
        end = 0
        for block in _read_index(log, file):
            found += blocks_of(whole_lines(file, end, block.start), end)
            found.append(block)
            end = block.end
        found += blocks_of(whole_lines(file, end), end)
    return found


def repair_index(log: Path) -> int:
    """Remove what does not fit the log from its index; returns the byte position where the last block ends.

    Only the writer of the log may call this.
    """
    with log.open("rb") as file:
        blocks = _read_index(log, file)
    kept = "".join(block.to_json() + "\n" for block in blocks)
    if kept != _index_text(log):
        write_atomically(index_path(log), kept)
    return blocks[-1].end if blocks else 0


def _index_text(log: Path) -> str:
    try:
        return index_path(log).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_index(log: Path, file: BinaryIO) -> list[LogBlock]:
    """The blocks in `events.index` up to the first one that does not fit the log.

    Skips a line that a crash cut short. Of two blocks that overlap, the one that was written later counts.
    """
    blocks: list[LogBlock] = []
    for line in _index_text(log).splitlines():
        try:
            block = LogBlock.from_json(line)
        except (ValueError, KeyError, TypeError, IndexError):
            continue
        while blocks and blocks[-1].end > block.start:
            blocks.pop()
        blocks.append(block)
    size_bytes = os.fstat(file.fileno()).st_size
    return list(
        takewhile(
            lambda block: block.end <= size_bytes and all(_is_line_start(file, at) for at in (block.start, block.end)),
            blocks,
        )
    )


def _is_line_start(file: BinaryIO, place: int) -> bool:
    return place == 0 or os.pread(file.fileno(), 1, place - 1) == b"\n"


def whole_lines(file: BinaryIO, start: int, end: int | None = None) -> Iterator[bytes]:
    """The whole lines from byte `start` to byte `end`, or to the end of the log."""
    file.seek(start)
    place = start
    while end is None or place < end:
        chunk = file.readlines(SCAN_BYTES if end is None else min(SCAN_BYTES, end - place))
        if not chunk:
            return
        for line in chunk:
            if not line.endswith(b"\n") or (end is not None and place >= end):
                return
            place += len(line)
            yield line


def rare_lines(log: Path) -> Iterator[bytes]:
    """Every line that is not an ordinary step, in order; also some ordinary steps."""
    blocks = read_blocks(log)
    if not blocks:
        return
    with log.open("rb") as file:
        for block in blocks:
            for place in block.rare:
                file.seek(place)
                yield file.readline()


def between(log: Path, first: int, last: int) -> Iterator[bytes]:
    """The steps in this range of iterations, both ends included; also other lines near them that are no steps."""
    chosen = [
        block
        for block in read_blocks(log)
        if block.first is not None and block.last is not None and block.first <= last and block.last >= first
    ]
    if not chosen:
        return
    with log.open("rb") as file:
        for block in chosen:
            for line in whole_lines(file, block.start, block.end):
                step = STEP.match(line)
                if step is None or first <= int(step[1]) <= last:
                    yield line


class LogSample(NamedTuple):
    """Lines of a log, or an even sample of them."""

    lines: Iterator[bytes]
    end: int
    """Byte position up to which the log was read."""
    is_whole: bool
    """Whether the sample holds every line."""


def sample_lines(
    log: Path, *, start: int = 0, budget_bytes: int = BUDGET_BYTES, with_extremes: bool = True
) -> LogSample:
    """The whole lines from byte `start` on, or an even sample if they exceed the budget."""
    size_bytes = log.stat().st_size if log.is_file() else 0
    if size_bytes - start <= budget_bytes:
        lines, end = _whole(log, start)
        return LogSample(iter(lines), end, is_whole=True)
    blocks = [block for block in read_blocks(log) if block.start >= start]
    end = blocks[-1].end if blocks else start
    while len(blocks) > MOST_BLOCKS:
        *older, newest = blocks
        pairs = [older[place : place + 2] for place in range(0, len(older), 2)]
        blocks = [*(pair[0].merge(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs), newest]
    if not with_extremes:
        blocks = [replace(block, low=None, high=None, norm=None) for block in blocks]
    return LogSample(_sample(log, blocks, budget_bytes // max(1, len(blocks))), end, is_whole=False)


def _whole(log: Path, start: int) -> tuple[list[bytes], int]:
    if not log.is_file():
        return [], start
    with log.open("rb") as file:
        lines = list(whole_lines(file, start))
    return lines, start + sum(map(len, lines))


def _sample(log: Path, blocks: list[LogBlock], bytes_each: int) -> Iterator[bytes]:
    """Yield the first `bytes_each` bytes of each block and its `kept` lines; all lines of the last block."""
    with log.open("rb") as file:
        for number, block in enumerate(blocks):
            is_last = number == len(blocks) - 1
            head = block.end if is_last else min(block.end, block.start + bytes_each)
            read = block.start
            for line in whole_lines(file, block.start, head):
                read += len(line)
                yield line
            for place in block.kept:
                if place >= read:
                    file.seek(place)
                    yield file.readline()


@final
class IndexWriter:
    """Appends the blocks of a growing log to its index. An error ends the index and nothing else."""

    def __init__(self, log: Path, start: int) -> None:
        self._log = log
        self.block = LogBlock(start, start)

    def add(self, line: bytes) -> bool:
        """Index the line that was just appended to the log.

        Returns False if the positions are unknown because another process wrote to the log, or if the index cannot be
        written.
        """
        if self.block.is_full(line):
            try:
                if self._log.stat().st_size != self.block.end + len(line):
                    return False
                with index_path(self._log).open("a", encoding="utf-8") as file:
                    file.write(self.block.to_json() + "\n")
            except OSError:
                return False
            self.block = LogBlock(self.block.end, self.block.end)
        self.block.add(line)
        return True
