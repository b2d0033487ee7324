"""The shuffled sample order as arithmetic: turn in, sample out, with no state and no index array in memory.

Why: a skip, a rewind, a resume or another number of ranks must reproduce the same batches, and a corpus of billions of
samples must not need a shuffled index in memory.
How: a source yields its samples in turns 0, 1, 2, ...; each epoch is a seeded format-preserving permutation of
`range(length)`: a Feistel network over just enough bits, applied again while the result is outside the range
(cycle-walking). The network covers less than twice the range, so a lookup needs fewer than two applications on average;
the network run backwards gives the inverse. The same expressions work on Python integers and numpy arrays.
Left out: cryptographic strength; the order only has to look random to a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

NUM_ROUND_PAIRS = 4
"""Pairs of Feistel rounds; each pair changes both halves once. Four suffice also for a range of a few samples."""

NUM_ROUND_PAIRS_WIDE = 2
"""Two pairs suffice for words of WIDE_BITS and more, whose halves are wide enough for the hash."""

WIDE_BITS = 16

WORD_MASK = 2**64 - 1

GOLDEN = 0x9E3779B97F4A7C15
"""2 ** 64 / golden ratio: its multiples are spread evenly over 64-bit words."""

Key = tuple[int, int]
"""(seed, epoch): selects a permutation."""

FEW = 12
"""Up to this many lookups are faster one by one in Python than in numpy."""

Word = TypeVar("Word", int, NDArray[Any])


EPOCHS_PER_STRETCH = 2**40
"""Epochs of stretch n are numbered from n times this, so that no two stretches share a permutation."""


class Stretch(NamedTuple):
    """Epochs over the same samples of a source, from a turn on until the next stretch begins.

    A source starts with one stretch; each time files are added during a run, it gets further ones.
    """

    from_turn: int
    number: int
    """Selects the permutations; 0 for the first stretch."""
    parts: tuple[range, ...]
    """The samples, as disjoint ranges."""

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.parts))

    @property
    def is_of_added(self) -> bool:
        """Whether it contains only samples of files that were added, not those before them too."""
        return self.number % 2 == 1


def samples_in(turns: NDArray[np.int64], stretches: Sequence[Stretch], *, seed: int) -> NDArray[np.int64]:
    """The samples of a source at these turns, over all its stretches."""
    if len(stretches) == 1:
        return _in_stretch(turns, stretches[0], seed=seed)
    numbers = np.searchsorted([stretch.from_turn for stretch in stretches], turns, side="right") - 1
    samples = np.empty_like(turns)
    for number in np.unique(numbers).tolist():
        now = numbers == number
        samples[now] = _in_stretch(turns[now], stretches[number], seed=seed)
    return samples


def num_unrepeated(stretches: Sequence[Stretch]) -> int:
    """The first turn at which a sample is repeated."""
    seen: set[range] = set()
    for stretch, following in zip(stretches, [*stretches[1:], None], strict=True):
        if seen.intersection(stretch.parts):
            return stretch.from_turn
        end = stretch.from_turn + stretch.num_samples
        if following is None or following.from_turn > end:
            return end
        seen.update(stretch.parts)
    raise AssertionError("the last stretch has no end")


def _in_stretch(turns: NDArray[np.int64], stretch: Stretch, *, seed: int) -> NDArray[np.int64]:
    first_epoch = stretch.number * EPOCHS_PER_STRETCH
    places = samples_at(turns - stretch.from_turn, num_samples=stretch.num_samples, seed=seed, first_epoch=first_epoch)
    if len(stretch.parts) == 1:
        return stretch.parts[0].start + places
    ends = np.cumsum([len(part) for part in stretch.parts])
    numbers = np.searchsorted(ends, places, side="right")
    shifts = np.array([part.stop for part in stretch.parts]) - ends
    samples: NDArray[np.int64] = places + shifts[numbers]
    return samples


def samples_at(turns: NDArray[np.int64], *, num_samples: int, seed: int, first_epoch: int = 0) -> NDArray[np.int64]:
    """The samples at these turns: epoch after epoch, each with its own permutation."""
    epochs, offsets = np.divmod(turns, num_samples)
    first, last = (int(epochs.min()), int(epochs.max())) if len(epochs) else (0, 0)
    if first == last:
        return permute_many(offsets, num_samples, (seed, first_epoch + first))
    samples = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        samples[now] = permute_many(offsets[now], num_samples, (seed, first_epoch + int(epoch)))
    return samples


def turns_of(samples: NDArray[np.int64], *, epoch: int, num_samples: int, seed: int) -> NDArray[np.int64]:
    """The turns of these samples in one epoch: the inverse of `samples_at`."""
    return epoch * num_samples + unpermute_many(samples, num_samples, (seed, epoch))


def permute(index: int, length: int, key: Key) -> int:
    """The image of `index` under the permutation of `range(length)` that `key` selects."""
    assert 0 <= index < length
    bits, keys = _network(length, key)
    image = _encipher(index, bits, keys)
    while image >= length:
        image = _encipher(image, bits, keys)
    return image


def permute_many(indices: NDArray[np.int64], length: int, key: Key) -> NDArray[np.int64]:
    """`permute` of each index."""
    if len(indices) <= FEW:
        return np.array([permute(index, length, key) for index in indices.tolist()], dtype=np.int64)
    bits, keys = _network(length, key)
    images = _encipher(indices.astype(np.uint64), bits, keys)
    while (outside := images >= length).any():
        images[outside] = _encipher(images[outside], bits, keys)
    return images.astype(np.int64)


def unpermute_many(images: NDArray[np.int64], length: int, key: Key) -> NDArray[np.int64]:
    """The inverse of `permute_many`."""
    bits, keys = _network(length, key)
    indices = _decipher(images.astype(np.uint64), bits, keys)
    while (outside := indices >= length).any():
        indices[outside] = _decipher(indices[outside], bits, keys)
    return indices.astype(np.int64)


def shuffled(length: int, key: Key) -> NDArray[np.int64]:
    """A small `range(length)` in the order that `key` selects."""
    ((state, _), *_) = _round_keys(key)
    order: NDArray[np.int64] = np.argsort(_mix(np.arange(length, dtype=np.uint64) ^ state), kind="stable")
    return order


def _network(length: int, key: Key) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Bits of the words that cover the range, and the round keys."""
    bits = (length - 1).bit_length()
    return bits, _round_keys(key)[: NUM_ROUND_PAIRS_WIDE if bits >= WIDE_BITS else NUM_ROUND_PAIRS]


@lru_cache(maxsize=64)
def _round_keys(key: Key) -> tuple[tuple[int, int], ...]:
    seed, epoch = key
    state = _mix(_mix(seed ^ GOLDEN) ^ epoch)
    words = [_mix(state + turn * GOLDEN & WORD_MASK) for turn in range(1, 2 * NUM_ROUND_PAIRS + 1)]
    return tuple(zip(words[::2], words[1::2], strict=True))


def _encipher(word: Word, bits: int, keys: tuple[tuple[int, int], ...]) -> Word:
    """Apply the Feistel network once: a bijection of `bits`-bit words, whose halves may differ by one bit."""
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    low, high = word & low_mask, word >> low_bits
    for high_key, low_key in keys:
        high = high ^ (_mix(low ^ high_key) & high_mask)
        low = low ^ (_mix(high ^ low_key) & low_mask)
    return high << low_bits | low


def _decipher(word: Word, bits: int, keys: tuple[tuple[int, int], ...]) -> Word:
    """The inverse of `_encipher`."""
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    low, high = word & low_mask, word >> low_bits
    for high_key, low_key in reversed(keys):
        low = low ^ (_mix(high ^ low_key) & low_mask)
        high = high ^ (_mix(low ^ high_key) & high_mask)
    return high << low_bits | low


def _mix(word: Word) -> Word:
    """The finaliser of splitmix64: every bit of the result depends on every bit of `word`."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD_MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD_MASK
    mixed: Word = word ^ word >> 31
    return mixed
