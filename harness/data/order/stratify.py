"""Rare tokens spread out: no batch holds more than so many occurrences of any of them.

Why: a token that the model has hardly seen, many times in one batch, is one of the known beginnings of a loss spike.
How: one scan of the data finds the rare tokens and the samples that hold them; a run keeps what it found in an index
file, so that it is scanned once and not by every rank at every start. Each pass then repairs the plain order:
batch after batch, a sample that would exceed the limit changes places with the next one that holds no rare token, in a
batch that has room; where none follows, with the nearest before. What remains is a small table of exchanged turns. All
other turns stay as they are, each sample is still visited exactly once, and the order is the same on any number of
ranks. Occurrences are counted over inputs and targets, so both keep the limit.
A batch that a pass shares with the one before is left to that one: its part in the later pass gets no rare token. So no
pass depends on another, and any batch can be asked for at random.
Left out: mixtures, whose batches have samples of several passes at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple, final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from harness.config.errors import ConfigError, require
from harness.data.corpus.corpus import Corpus, Tokens
from harness.data.order.order import turns_of

Ints = NDArray[np.int64]

SCAN_SAMPLES = 256
KEY = "data.stratify.max_per_batch"


class RareTokens(NamedTuple):
    """Which samples hold which rare tokens, how often; sorted by sample, one entry a pair."""

    samples: Ints
    tokens: Ints
    counts: Ints


def find_rare(corpus: Corpus, samples: range, *, below: int) -> RareTokens:
    """Scan the samples for tokens with fewer than `below` occurrences; sample numbers count from the first one."""
    frequencies = np.zeros(corpus.vocab_size, dtype=np.int64)
    for _, rows in _scan(corpus, samples):
        frequencies += np.bincount(rows[:, :-1].ravel(), minlength=corpus.vocab_size)
    is_rare = frequencies < below
    pairs, counts = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for first, rows in _scan(corpus, samples):
        row, column = np.nonzero(is_rare[rows])
        held = (first + row) * corpus.vocab_size + rows[row, column]
        for found, part in zip((pairs, counts), np.unique(held, return_counts=True), strict=True):
            found.append(part)
    return RareTokens(*np.divmod(np.concatenate(pairs), corpus.vocab_size), np.concatenate(counts))


def rare_tokens(corpus: Corpus, samples: range, *, below: int, index: Path | None = None) -> RareTokens:
    """What `find_rare` finds, read from the index file where that was made for the same data."""
    found = None if index is None else read_index(index, index_key(corpus, samples, below=below))
    return find_rare(corpus, samples, below=below) if found is None else found


def index_key(corpus: Corpus, samples: range, *, below: int) -> str:
    """What the rare tokens depend on."""
    return f"{corpus.fingerprint()} {corpus.vocab_size} {samples.start}..{samples.stop} below {below}"


def read_index(path: Path, key: str) -> RareTokens | None:
    """The rare tokens that a file holds; None where it does not exist, is broken, or was made for other data."""
    try:
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            if str(file["key"]) != key:
                return None
            return RareTokens(*(file[name] for name in RareTokens._fields))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def make_index(path: Path, corpus: Corpus, samples: range, *, below: int) -> None:
    """Scan the data and write what was found, unless the file holds it already."""
    key = index_key(corpus, samples, below=below)
    if read_index(path, key) is not None:
        return
    rare = find_rare(corpus, samples, below=below)
    scratch = path.with_name(f".{path.name}.tmp")
    with scratch.open("wb") as file:
        np.savez(file, key=np.array(key), **rare._asdict())
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


@final
class StratifiedOrder:
    """The order of one source, repaired; pure, and safe to use from several threads."""

    def __init__(self, rare: RareTokens, *, num_samples: int, batch_size: int, seed: int, max_per_batch: int) -> None:
        self._rare = rare
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._seed = seed
        self._max_per_batch = max_per_batch
        self.swaps = lru_cache(maxsize=4)(self._compute_swaps)
        if len(rare.counts):
            worst = int(rare.counts.argmax())
            sample, token, count = (int(part[worst]) for part in rare)
            message = f"must be at least {count}: token {token} occurs so often in sequence {sample} alone"
            require(count <= max_per_batch, KEY, f"{message}, got {max_per_batch}")

    def turns(self, turns: Ints) -> Ints:
        """The turns of the plain order whose samples these turns get."""
        epochs = turns // self._num_samples
        for epoch in np.unique(epochs).tolist():
            if table := self.swaps(epoch):
                turns = np.array([table.get(turn, turn) for turn in turns.tolist()], dtype=np.int64)
        return turns

    def _compute_swaps(self, epoch: int) -> dict[int, int]:
        """Turn -> turn, both ways, for all that are exchanged in one pass."""
        first = epoch * self._num_samples
        turns = turns_of(self._rare.samples, epoch=epoch, num_samples=self._num_samples, seed=self._seed)
        repair = _Repair(
            self._rare,
            turns,
            pass_turns=range(first, first + self._num_samples),
            batch_size=self._batch_size,
            max_per_batch=self._max_per_batch,
        )
        return repair.swaps


class _Repair:
    """The repair of one pass."""

    def __init__(
        self, rare: RareTokens, turns: Ints, *, pass_turns: range, batch_size: int, max_per_batch: int
    ) -> None:
        by_turn = np.argsort(turns, kind="stable")
        self._turns, self._tokens, self._counts = turns[by_turn], rare.tokens[by_turn], rare.counts[by_turn]
        self._pass = pass_turns
        self._batch_size = batch_size
        self._limit = max_per_batch
        self._first_open = -(-pass_turns.start // batch_size)
        """The first batch that is not shared with the pass before."""
        self._width = int(self._tokens.max(initial=0)) + 1
        keys = self._turns // batch_size * self._width + self._tokens
        self._keys, entry_key = np.unique(keys, return_inverse=True)
        self._loads = np.bincount(entry_key, weights=self._counts, minlength=len(self._keys)).astype(np.int64)
        self._moved_in: dict[int, int] = {}
        self.swaps: dict[int, int] = {}
        is_wrong = (self._loads > max_per_batch) | (self._keys // self._width < self._first_open)
        for batch in np.unique(self._keys[is_wrong] // self._width).tolist():
            self._relieve(batch)

    def _relieve(self, batch: int) -> None:
        """Move out of a batch what exceeds its limit; from one shared with the pass before, everything."""
        loads: dict[int, int] = {}
        for turn in np.unique(self._turns[self._entries(batch * self._batch_size, self._batch_size)]).tolist():
            held = self._held(turn)
            fits = all(loads.get(token, 0) + count <= self._limit for token, count in held.items())
            if fits and batch >= self._first_open:
                for token, count in held.items():
                    loads[token] = loads.get(token, 0) + count
            else:
                self._move(turn, held)

    def _move(self, turn: int, held: dict[int, int]) -> None:
        here, last = turn // self._batch_size, (self._pass.stop - 1) // self._batch_size
        for batch in chain(range(here + 1, last + 1), range(here - 1, self._first_open - 1, -1)):
            if all(self._load(batch, token) + count <= self._limit for token, count in held.items()):
                if (free := self._free_turn(batch)) is None:
                    continue
                self.swaps |= {turn: free, free: turn}
                for token, count in held.items():
                    for key, change in (batch * self._width + token, count), (here * self._width + token, -count):
                        self._moved_in[key] = self._moved_in.get(key, 0) + change
                return
        token, count = max(held.items(), key=lambda item: self._load(here, item[0]))
        message = f"must be above {self._limit}: no batch has room for {count} more of token {token}"
        raise ConfigError(KEY, f"{message}; or choose a smaller data.stratify.rare_below")

    def _free_turn(self, batch: int) -> int | None:
        """The first turn of a batch whose sample holds no rare token."""
        first = max(batch * self._batch_size, self._pass.start)
        end = min((batch + 1) * self._batch_size, self._pass.stop)
        taken = set(self._turns[self._entries(first, end - first)].tolist()) | self.swaps.keys()
        return next((turn for turn in range(first, end) if turn not in taken), None)

    def _load(self, batch: int, token: int) -> int:
        key = batch * self._width + token
        place = int(np.searchsorted(self._keys, key))
        planned = int(self._loads[place]) if place < len(self._keys) and self._keys[place] == key else 0
        return planned + self._moved_in.get(key, 0)

    def _held(self, turn: int) -> dict[int, int]:
        entries = self._entries(turn, 1)
        return dict(zip(self._tokens[entries].tolist(), self._counts[entries].tolist(), strict=True))

    def _entries(self, first: int, count: int) -> slice:
        start, end = np.searchsorted(self._turns, (first, first + count))
        return slice(int(start), int(end))


def _scan(corpus: Corpus, samples: range) -> Iterator[tuple[int, Tokens]]:
    """All samples, some at a time, with the number of the first one."""
    for first in range(0, len(samples), SCAN_SAMPLES):
        yield first, np.stack([corpus.sample(sample) for sample in samples[first : first + SCAN_SAMPLES]])
