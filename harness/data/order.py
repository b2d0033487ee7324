"""The order of the data as arithmetic: batch index in, sample ids out, no state and no array of all samples.

Why: a skip, a rewind, a resume or another number of ranks must meet the same batches again, and a corpus of billions of
samples must not cost a shuffled index in memory.
How: an epoch visits the samples in a seeded format-preserving permutation of `range(length)`: a Feistel network over
just enough bits, walked again whenever it leaves the range. The network covers less than twice the range, so a lookup
takes fewer than two walks on average. The same expressions serve Python integers and numpy arrays.
Left out: strength against an adversary; the hash only has to look random to a model.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

NUM_ROUND_PAIRS = 4
"""Each pair changes both halves once. Two serve a large range; four also shuffle a range of a few samples."""

WORD_MASK = 2**64 - 1

GOLDEN = 0x9E3779B97F4A7C15
"""2 ** 64 over the golden ratio: multiples of it are spread evenly over the words."""

Key = tuple[int, int]
"""What a permutation depends on: the seed and the epoch."""

Word = TypeVar("Word", int, NDArray[Any])


def sample_ids(batch_index: int, *, batch_size: int, num_samples: int, seed: int) -> NDArray[np.int64]:
    """The samples of one global batch; a batch may run over the end of an epoch into the next."""
    position, end = batch_index * batch_size, (batch_index + 1) * batch_size
    parts = []
    while position < end:
        epoch, first = divmod(position, num_samples)
        last = min(num_samples, first + end - position)
        parts.append(permute_many(np.arange(first, last, dtype=np.int64), num_samples, (seed, epoch)))
        position += last - first
    return np.concatenate(parts)


def permute(index: int, length: int, key: Key) -> int:
    """Where `index` goes in the permutation of `range(length)` that `key` chooses."""
    assert 0 <= index < length
    bits, keys = (length - 1).bit_length(), _round_keys(key)
    image = _encipher(index, bits, keys)
    while image >= length:
        image = _encipher(image, bits, keys)
    return image


def permute_many(indices: NDArray[np.int64], length: int, key: Key) -> NDArray[np.int64]:
    """`permute` of each index."""
    bits, keys = (length - 1).bit_length(), _round_keys(key)
    images = _encipher(indices.astype(np.uint64), bits, keys)
    while (outside := images >= length).any():
        images[outside] = _encipher(images[outside], bits, keys)
    return images.astype(np.int64)


@lru_cache(maxsize=64)
def _round_keys(key: Key) -> tuple[tuple[int, int], ...]:
    seed, epoch = key
    state = _mix(_mix(seed ^ GOLDEN) ^ epoch)
    words = [_mix(state + turn * GOLDEN & WORD_MASK) for turn in range(1, 2 * NUM_ROUND_PAIRS + 1)]
    return tuple(zip(words[::2], words[1::2], strict=True))


def _encipher(word: Word, bits: int, keys: tuple[tuple[int, int], ...]) -> Word:
    """One walk through the network: a bijection of `bits`-bit words, whose halves may differ by one bit."""
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    low, high = word & low_mask, word >> low_bits
    for high_key, low_key in keys:
        high = high ^ (_mix(low ^ high_key) & high_mask)
        low = low ^ (_mix(high ^ low_key) & low_mask)
    return high << low_bits | low


def _mix(word: Word) -> Word:
    """The finaliser of splitmix64: every bit of the result depends on every bit of `word`."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD_MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD_MASK
    mixed: Word = word ^ word >> 31
    return mixed
