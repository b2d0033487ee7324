"""Batch sizes of a run and the tokens that follow from them.

Why: with `train.batch_size_warmup`, or after a resume with another batch size, "steps x tokens of a batch" is wrong.
Data order, time to the end and costs use the same arithmetic instead.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from harness.core.events import StepRecord
from harness.core.rundir import RunDir


class BatchSize(NamedTuple):
    """Global batch size from a batch on."""

    from_batch: int
    batch_size: int


@final
class BatchSizes:
    """Maps (batch index, row) to the position in the stream of samples, and back.

    A run that changes its batch size keeps the indices of its batches: a batch has the size that was configured when it
    was consumed, and the stream of samples continues without a gap.
    """

    def __init__(self, sizes: Sequence[BatchSize]) -> None:
        assert sizes[0].from_batch == 0
        self._starts = [size.from_batch for size in sizes]
        self._sizes = [size.batch_size for size in sizes]
        self._positions = [0]
        for (start, size), following in zip(sizes, self._starts[1:], strict=False):
            self._positions.append(self._positions[-1] + (following - start) * size)

    @property
    def largest(self) -> int:
        return max(self._sizes)

    @property
    def is_constant(self) -> bool:
        return len(self._sizes) == 1

    def at(self, index: int) -> int:
        """Rows of the batch with this index."""
        return self._sizes[bisect_right(self._starts, index) - 1]

    def smallest_from(self, index: int) -> int:
        """Rows of the smallest batch from this one on."""
        return min(self._sizes[bisect_right(self._starts, index) - 1 :])

    def num_alike(self, index: int) -> int | None:
        """How many batches from this one on have the same size; None: all."""
        place = bisect_right(self._starts, index)
        return self._starts[place] - index if place < len(self._starts) else None

    def position(self, index: int) -> int:
        """The position of a batch's first row."""
        place = bisect_right(self._starts, index) - 1
        return self._positions[place] + (index - self._starts[place]) * self._sizes[place]

    def find(self, position: int) -> tuple[int, int]:
        """Batch index and offset in the batch of a position."""
        place = bisect_right(self._positions, position) - 1
        batches, offset = divmod(position - self._positions[place], self._sizes[place])
        return self._starts[place] + batches, offset


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSchedule:
    """Tokens of each batch of a run."""

    sizes: BatchSizes
    sequence_length: int

    def tokens_of(self, cursors: Iterable[int]) -> int:
        """Tokens of the batches with these indices."""
        return sum(self.sizes.at(max(0, cursor)) for cursor in cursors) * self.sequence_length

    def tokens_ahead(self, cursor: int, num_batches: int) -> int:
        """Tokens of the next batches, this one first, if none of them is excluded."""
        end = cursor + max(0, num_batches)
        return (self.sizes.position(end) - self.sizes.position(cursor)) * self.sequence_length

    def left_s(self, record: StepRecord, *, num_steps: int) -> float | None:
        """Seconds from this step to the last one, at its throughput; None if it has none."""
        if not 0 < record.tokens_per_s < math.inf:
            return None
        return self.tokens_ahead(record.cursor + 1, num_steps - record.step) / record.tokens_per_s


def read_token_schedule(run: RunDir, train: Mapping[str, Any]) -> TokenSchedule | None:
    """The schedule of a run: the sizes that it recorded, else those of `train`, a section of the configuration as plain
    values. None if neither says."""
    sizes = _recorded_sizes(run) or _configured_sizes(train)
    length = train.get("sequence_length")
    if not sizes or not isinstance(length, int) or length < 1:
        return None
    return TokenSchedule(sizes=BatchSizes(sizes), sequence_length=length)


def _recorded_sizes(run: RunDir) -> list[BatchSize]:
    """The sizes in corpus.json; empty if it is missing, or cannot be read."""
    try:
        return _checked(json.loads(run.corpus.read_bytes())["batch_sizes"])
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _configured_sizes(train: Mapping[str, Any]) -> list[BatchSize]:
    """As `TrainConfig.size_stages`, for the configuration of any version; empty if it has no batch size."""
    try:
        stages = train.get("batch_size_warmup") or []
        starts = [0, *(stage["until_batch"] for stage in stages)]
        sizes = [*(stage["batch_size"] for stage in stages), train["batch_size"]]
        return _checked(list(zip(starts, sizes, strict=True)))
    except (TypeError, KeyError, ValueError):
        return []


def _checked(pairs: Sequence[Sequence[int]]) -> list[BatchSize]:
    """The sizes, if they are in order from batch 0 on; else `ValueError`."""
    sizes = [BatchSize(int(first), int(size)) for first, size in pairs]
    starts = [size.from_batch for size in sizes]
    if starts[:1] != [0] or starts != sorted(set(starts)) or min(size.batch_size for size in sizes) < 1:
        raise ValueError("batch sizes must begin at batch 0, in order")
    return sizes
