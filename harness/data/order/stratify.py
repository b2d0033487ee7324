"""Limits rare tokens per batch: no batch contains more than `max_per_batch` occurrences of any rare token.

Why: many occurrences of a token that the model has hardly seen, in one batch, are a known cause of loss spikes.
How: one scan of the data finds rare tokens and the samples that contain them (`harness.data.order.rare_token_rows`).
Each epoch of a source then repairs the plain order: in batch after batch, a sample that would exceed the limit is
swapped with the next sample of the source without rare tokens, in a batch that has room; if none follows, with the
nearest before. The result is a small table of moved turns. All other turns stay, each sample is still visited exactly
once, and the order does not depend on the number of ranks. Occurrences are counted over inputs and targets, so both
keep the limit.
A sample that holds a rare token more often than the limit cannot be split. It counts as the limit, so that its batch
holds no other sample with that token; `StratifyReport` counts these samples.
A batch that straddles two epochs of a source belongs to the earlier one: its part in the later epoch gets no rare
token. So no epoch depends on another, and batches can be computed in any order. In a mixture, each source also counts
the rare tokens that the sources before it put into the same batches.
New weights from the ledger map later turns to other batches. What was read must not change: each amendment is a stage,
which repairs the order of the stage before it, only from its first batch on. So the order follows from config and
ledger alone, and each epoch stays a permutation.
Left out: other batch sizes and added files, which a run with this limit rejects. Where no batch has room, samples stay
in their place; at the start of a run `check_limit` rejects that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from harness.config.errors import require
from harness.data.order.mixture import Mixture
from harness.data.order.order import turns_of
from harness.data.order.rare_token_rows import RareTokens

Ints = NDArray[np.int64]

KEY = "data.stratify.max_per_batch"
MOST_UNPLACED = 8
"""Samples without a place after which an epoch is left as it is: each of them costs a search through all batches."""
NUM_CACHED = 256
"""Epochs of sources whose tables are kept."""


class StratifiedSource(NamedTuple):
    """What the order of a source depends on, besides the mixture."""

    rare: RareTokens
    num_samples: int
    seed: int


class OrderStage(NamedTuple):
    """The mixture after an amendment of the ledger, which holds from a batch on; the first one is the configured."""

    mixture: Mixture
    from_batch: int = 0


class StratifyReport(NamedTuple):
    """What the limit applies to."""

    num_tokens: int
    """Rare tokens."""
    num_samples: int
    """Samples that contain one."""
    num_unsplittable: int
    """Samples that hold a rare token more often than the limit."""
    most: int
    """Most occurrences of one rare token in one sample."""
    max_per_batch: int

    def in_words(self) -> str:
        limit = f"at most {self.max_per_batch} of each in a batch"
        line = f"{self.num_tokens:,} rare tokens in {self.num_samples:,} sequences, {limit}"
        if not self.num_unsplittable:
            return line
        alone = "none shares a batch with another sequence that holds the token"
        return f"{line}; {self.num_unsplittable:,} sequences hold one more often, up to {self.most} times: {alone}"


class Entries(NamedTuple):
    """Batch, token and count of the rare tokens of one epoch of a source, as three arrays."""

    batches: Ints
    tokens: Ints
    counts: Ints


class PlacedTurns(NamedTuple):
    """The order of one epoch of a source."""

    table: dict[int, int]
    """Turn -> the turn of the plain order whose sample it gets; turns that are not named keep theirs."""
    unplaced: tuple[int, int] | None
    """(token, count) of a sample for which no batch had room; None: the limit is kept."""


@final
class StratifiedOrder:
    """The sample order of all sources with the limit applied; pure, so safe to use from several threads."""

    def __init__(
        self, sources: Sequence[StratifiedSource], stages: Sequence[OrderStage], *, max_per_batch: int
    ) -> None:
        assert len(stages) >= 1
        self._unclipped = tuple(sources)
        self._sources = [source._replace(rare=_clip(source.rare, max_per_batch)) for source in sources]
        self._stages = tuple(stages)
        self._max_per_batch = max_per_batch
        self._width = 1 + max(int(source.rare.tokens.max(initial=0)) for source in sources)
        self._placed = lru_cache(maxsize=NUM_CACHED)(self._place)
        self._entries = lru_cache(maxsize=NUM_CACHED)(self._find_entries)

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def amended(self, stages: Sequence[OrderStage]) -> StratifiedOrder:
        """The order with other amendments of the mixture."""
        return StratifiedOrder(self._unclipped, stages, max_per_batch=self._max_per_batch)

    def turns(self, source: int, turns: Ints) -> Ints:
        """Map turns of a source to the turns of the plain order whose samples they get."""
        for epoch in np.unique(turns // self._sources[source].num_samples).tolist():
            if table := self.table(source, epoch):
                turns = np.array([table.get(turn, turn) for turn in turns.tolist()], dtype=np.int64)
        return turns

    def table(self, source: int, epoch: int) -> dict[int, int]:
        """The moved turns of one epoch of a source."""
        return self._placed(len(self._stages) - 1, source, epoch).table

    def check_limit(self, source: int, epoch: int) -> None:
        """Raise `ConfigError` if some batch of an epoch exceeds the limit by more than one sample that holds more."""
        unplaced = self._placed(len(self._stages) - 1, source, epoch).unplaced
        if unplaced is not None:
            token, count = unplaced
            message = f"must be above {self._max_per_batch}: no batch has room for {count} more of token {token}"
            require(False, KEY, f"{message}; or choose a smaller data.stratify.rare_below")

    def report(self) -> StratifyReport:
        """What the limit applies to."""
        rare = [source.rare for source in self._unclipped]
        limit = self._max_per_batch
        return StratifyReport(
            num_tokens=len(np.unique(np.concatenate([each.tokens for each in rare]))),
            num_samples=sum(len(np.unique(each.samples)) for each in rare),
            num_unsplittable=sum(len(np.unique(each.samples[each.counts > limit])) for each in rare),
            most=max(int(each.counts.max(initial=0)) for each in rare),
            max_per_batch=limit,
        )

    def _place(self, stage: int, source: int, epoch: int) -> PlacedTurns:
        before = self._placed(stage - 1, source, epoch) if stage else PlacedTurns({}, None)
        span = self._open_turns(stage, source, epoch)
        if len(span) == 0 or len(self._sources[source].rare.samples) == 0:
            return before
        repair = _Repair(
            self._sources[source].rare,
            self._positions(before, source, epoch),
            span=span,
            schedule=_Schedule(self._stages[stage].mixture, source),
            others=self._others(stage, source, span),
            limit=self._max_per_batch,
            width=self._width,
        )
        table = dict(before.table)
        for turn, other in repair.swaps.items():
            table[turn] = before.table.get(other, other)
        moved = {turn: plain for turn, plain in table.items() if turn != plain}
        return PlacedTurns(moved, repair.unplaced or before.unplaced)

    def _open_turns(self, stage: int, source: int, epoch: int) -> range:
        """The turns of an epoch that a stage may still move: those that come, from its first batch on."""
        mixture, from_batch = self._stages[stage]
        num_samples, end = self._sources[source].num_samples, mixture.num_turns(source)
        first, stop = epoch * num_samples, (epoch + 1) * num_samples
        start = max(first, mixture.turns_before(from_batch)[source]) if stage else first
        return range(start, stop if end is None else min(stop, end))

    def _positions(self, placed: PlacedTurns, source: int, epoch: int) -> Ints:
        """The turn of each entry of the rare tokens of a source in one epoch."""
        rare, num_samples, seed = self._sources[source]
        turns = turns_of(rare.samples, epoch=epoch, num_samples=num_samples, seed=seed)
        inverse = {plain: turn for turn, plain in placed.table.items()}
        return np.array([inverse.get(turn, turn) for turn in turns.tolist()], dtype=np.int64) if inverse else turns

    def _find_entries(self, stage: int, source: int, epoch: int) -> Entries:
        mixture, rare = self._stages[stage].mixture, self._sources[source].rare
        turns = self._positions(self._placed(stage, source, epoch), source, epoch)
        end = mixture.num_turns(source)
        comes = turns < (end if end is not None else np.inf)
        return Entries(mixture.batches_of(source, turns[comes]), rare.tokens[comes], rare.counts[comes])

    def _others(self, stage: int, source: int, span: range) -> dict[int, int]:
        """Batch x width + token -> occurrences from the sources before this one, in the batches of these turns."""
        mixture, own = self._stages[stage].mixture, np.unique(self._sources[source].rare.tokens)
        loads: dict[int, int] = {}
        if source == 0:
            return loads
        first, last = mixture.batches_of(source, np.array([span.start, span.stop - 1])).tolist()
        begins, ends = mixture.turns_before(first), mixture.turns_before(last + 1)
        for other in range(source):
            num_samples = self._sources[other].num_samples
            for epoch in range(begins[other] // num_samples, -(-ends[other] // num_samples)):
                batches, tokens, counts = self._entries(stage, other, epoch)
                here = (batches >= first) & (batches <= last) & np.isin(tokens, own)
                keys = (batches[here] * self._width + tokens[here]).tolist()
                for key, count in zip(keys, counts[here].tolist(), strict=True):
                    loads[key] = loads.get(key, 0) + count
        return loads


def _clip(rare: RareTokens, limit: int) -> RareTokens:
    """Count a sample that holds a token more often than the limit as the limit: nothing else fits beside it."""
    return rare._replace(counts=np.minimum(rare.counts, limit))


class _Schedule(NamedTuple):
    """Where the turns of one source come."""

    mixture: Mixture
    source: int

    def batch_of(self, turn: int) -> int:
        return int(self.mixture.batches_of(self.source, np.array([turn]))[0])

    def batches_of(self, turns: Ints) -> Ints:
        return self.mixture.batches_of(self.source, turns)

    def turns_in(self, batch: int) -> range:
        return self.mixture.turns_in(self.source, batch)


class _Repair:
    """Computes the swaps of one epoch of one source, among the turns of `span`."""

    def __init__(
        self,
        rare: RareTokens,
        turns: Ints,
        *,
        span: range,
        schedule: _Schedule,
        others: Mapping[int, int],
        limit: int,
        width: int,
    ) -> None:
        here = np.flatnonzero((turns >= span.start) & (turns < span.stop))
        by_turn = here[np.argsort(turns[here], kind="stable")]
        self._turns, self._tokens, self._counts = turns[by_turn], rare.tokens[by_turn], rare.counts[by_turn]
        self._span = span
        self._schedule = schedule
        self._others = others
        self._limit = limit
        self._width = width
        first = schedule.batch_of(span.start)
        self._first_open = first if schedule.turns_in(first).start == span.start else first + 1
        """The first batch that is not shared with the previous epoch."""
        keys = schedule.batches_of(self._turns) * width + self._tokens
        self._keys, entry_key = np.unique(keys, return_inverse=True)
        self._loads = np.bincount(entry_key, weights=self._counts, minlength=len(self._keys)).astype(np.int64)
        self._loads += np.array([others.get(key, 0) for key in self._keys.tolist()], dtype=np.int64)
        self._moved_in: dict[int, int] = {}
        self.swaps: dict[int, int] = {}
        """Turn -> turn, in both directions."""
        self.unplaced: tuple[int, int] | None = None
        self._num_unplaced = 0
        is_wrong = (self._loads > limit) | (self._keys // width < self._first_open)
        for batch in np.unique(self._keys[is_wrong] // width).tolist():
            self._relieve(batch)

    def _relieve(self, batch: int) -> None:
        """Move samples out of a batch that exceeds the limit; out of one shared with the previous epoch, all of
        them."""
        loads: dict[int, int] = {}
        for turn in np.unique(self._turns[self._entries(self._turns_in(batch))]).tolist():
            held = self._held(turn)
            before = {token: loads.get(token, self._others.get(batch * self._width + token, 0)) for token in held}
            fits = all(before[token] + count <= self._limit for token, count in held.items())
            if (fits and batch >= self._first_open) or not self._move(turn, batch, held):
                loads |= {token: before[token] + count for token, count in held.items()}

    def _move(self, turn: int, here: int, held: dict[int, int]) -> bool:
        """Swap a sample with one without rare tokens in a batch that has room; False if there is none."""
        if self._num_unplaced == MOST_UNPLACED:
            return False
        for batch in self._candidates(here):
            if all(self._load(batch, token) + count <= self._limit for token, count in held.items()):
                if (free := self._free_turn(batch)) is None:
                    continue
                self.swaps |= {turn: free, free: turn}
                for token, count in held.items():
                    for key, change in (batch * self._width + token, count), (here * self._width + token, -count):
                        self._moved_in[key] = self._moved_in.get(key, 0) + change
                return True
        self._num_unplaced += 1
        self.unplaced = max(held.items(), key=lambda item: self._load(here, item[0]))
        return False

    def _candidates(self, here: int) -> Iterator[int]:
        """The batches with turns of the source after a batch, then those before it, nearest first."""
        turn = self._turns_in(here).stop
        while turn < self._span.stop:
            yield (batch := self._schedule.batch_of(turn))
            turn = self._schedule.turns_in(batch).stop
        turn = self._turns_in(here).start - 1
        while turn >= self._span.start and (batch := self._schedule.batch_of(turn)) >= self._first_open:
            yield batch
            turn = self._schedule.turns_in(batch).start - 1

    def _free_turn(self, batch: int) -> int | None:
        """The first turn of a batch whose sample contains no rare token."""
        turns = self._turns_in(batch)
        taken = set(self._turns[self._entries(turns)].tolist()) | self.swaps.keys()
        return next((turn for turn in turns if turn not in taken), None)

    def _load(self, batch: int, token: int) -> int:
        key = batch * self._width + token
        place = int(np.searchsorted(self._keys, key))
        is_planned = place < len(self._keys) and self._keys[place] == key
        planned = int(self._loads[place]) if is_planned else self._others.get(key, 0)
        return planned + self._moved_in.get(key, 0)

    def _held(self, turn: int) -> dict[int, int]:
        entries = self._entries(range(turn, turn + 1))
        return dict(zip(self._tokens[entries].tolist(), self._counts[entries].tolist(), strict=True))

    def _turns_in(self, batch: int) -> range:
        """The turns of a batch that belong to this epoch and may be moved."""
        turns = self._schedule.turns_in(batch)
        return range(max(turns.start, self._span.start), min(turns.stop, self._span.stop))

    def _entries(self, turns: range) -> slice:
        start, end = np.searchsorted(self._turns, (turns.start, turns.stop))
        return slice(int(start), int(end))
