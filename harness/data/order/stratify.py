"""Limits rare tokens per batch: no batch contains more than `max_per_batch` occurrences of any rare token.

Why: many occurrences of a token that the model has hardly seen, in one batch, are a known cause of loss spikes.
How: one scan of the data finds the rare tokens and the samples that contain them. A run keeps the result in an index
file, so that the data is scanned once and not by every rank at every start. Each epoch then repairs the plain order: in
batch after batch, a sample that would exceed the limit is swapped with the next sample without rare tokens, in a batch
that has room; if none follows, with the nearest before. The result is a small table of swapped turns. All other turns
stay, each sample is still visited exactly once, and the order does not depend on the number of ranks. Occurrences are
counted over inputs and targets, so both keep the limit.
A batch that straddles two epochs belongs to the earlier one: its part in the later epoch gets no rare token. So no
epoch depends on another, and batches can be computed in any order.
Left out: mixtures, whose batches contain samples of several epochs at once.
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
    """(sample, rare token, count) as three arrays; sorted by sample, one entry per pair."""

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
    """The result of `find_rare`, read from the index file if that was made for the same data."""
    found = None if index is None else read_rare_index(index, rare_index_key(corpus, samples, below=below))
    return find_rare(corpus, samples, below=below) if found is None else found


def rare_index_key(corpus: Corpus, samples: range, *, below: int) -> str:
    """Identifies the data and the threshold that the rare tokens depend on."""
    return f"{corpus.fingerprint()} {corpus.vocab_size} {samples.start}..{samples.stop} below {below}"


def read_rare_index(path: Path, key: str) -> RareTokens | None:
    """Read an index file; None if it does not exist, is broken, or was made for other data."""
    try:
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            if str(file["key"]) != key:
                return None
            return RareTokens(*(file[name] for name in RareTokens._fields))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def write_rare_index(path: Path, corpus: Corpus, samples: range, *, below: int) -> None:
    """Scan the data and write the index file, unless it is up to date."""
    key = rare_index_key(corpus, samples, below=below)
    if read_rare_index(path, key) is not None:
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
    """The sample order of one source with the limit applied; pure, so safe to use from several threads."""

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
            message = f"must be at least {count}: sequence {sample} alone contains token {token} that often"
            require(count <= max_per_batch, KEY, f"{message}, got {max_per_batch}")

    def turns(self, turns: Ints) -> Ints:
        """Map turns to the turns of the plain order whose samples they get."""
        epochs = turns // self._num_samples
        for epoch in np.unique(epochs).tolist():
            if table := self.swaps(epoch):
                turns = np.array([table.get(turn, turn) for turn in turns.tolist()], dtype=np.int64)
        return turns

    def _compute_swaps(self, epoch: int) -> dict[int, int]:
        """Turn -> turn, in both directions, for all swaps of one epoch."""
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
    """Computes the swaps of one epoch."""

    def __init__(
        self, rare: RareTokens, turns: Ints, *, pass_turns: range, batch_size: int, max_per_batch: int
    ) -> None:
        by_turn = np.argsort(turns, kind="stable")
        self._turns, self._tokens, self._counts = turns[by_turn], rare.tokens[by_turn], rare.counts[by_turn]
        self._pass = pass_turns
        self._batch_size = batch_size
        self._limit = max_per_batch
        self._first_open = -(-pass_turns.start // batch_size)
        """The first batch that is not shared with the previous epoch."""
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
        """Move samples out of a batch that exceeds the limit; out of one shared with the previous epoch, all of
        them."""
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
        """The first turn of a batch whose sample contains no rare token."""
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
    """Yield all samples in chunks, each with the number of its first sample."""
    for first in range(0, len(samples), SCAN_SAMPLES):
        yield first, np.stack([corpus.sample(sample) for sample in samples[first : first + SCAN_SAMPLES]])
