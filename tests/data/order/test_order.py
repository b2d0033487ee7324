"""The order is a bijection, looks random, and visits every sample exactly once per epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.data.order.order import (
    WIDE_BITS,
    Stretch,
    num_unrepeated,
    permute,
    permute_many,
    samples_at,
    samples_in,
    shuffled,
    turns_of,
    unpermute_many,
)

SEEDS = st.integers(0, 2**63 - 1)
KEYS = st.tuples(SEEDS, st.integers(0, 2**40))


@settings(deadline=None)
@given(length=st.integers(1, 3000), key=KEYS)
def test_permutation_is_a_bijection(length: int, key: tuple[int, int]) -> None:
    images = permute_many(np.arange(length), length, key)
    np.testing.assert_array_equal(np.sort(images), np.arange(length))


@settings(deadline=None)
@given(length=st.integers(1, 2**62), key=KEYS, data=st.data())
def test_scalar_equals_vector(length: int, key: tuple[int, int], data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=8))
    images = permute_many(np.array(indices, dtype=np.int64), length, key)
    assert images.dtype == np.int64
    assert images.tolist() == [permute(index, length, key) for index in indices]


@settings(deadline=None)
@given(length=st.integers(1, 2**62), key=KEYS, data=st.data())
def test_the_inverse_finds_every_index_again(length: int, key: tuple[int, int], data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, length - 1), max_size=40)), dtype=np.int64)
    np.testing.assert_array_equal(unpermute_many(permute_many(indices, length, key), length, key), indices)


def test_order_of_released_versions_is_unchanged() -> None:
    assert permute_many(np.arange(10), 10, (0, 0)).tolist() == [0, 3, 6, 2, 8, 7, 5, 9, 1, 4]
    assert permute(0, 10**12, (2**63 - 1, 3)) == 736374674355
    assert shuffled(8, (3, 4)).tolist() == [2, 1, 3, 4, 5, 7, 6, 0]


@pytest.mark.parametrize(
    ("length", "images"),
    [
        (2**4, [11, 5, 14]),
        (2**4 + 1, [1, 2, 14]),
        (2**15, [6161, 31641, 15287]),
        (2**15 + 1, [17199, 8733, 16965]),
        (2**16, [43336, 58352, 16965]),
        (2**16 + 1, [17375, 2933, 10591]),
    ],
)
def test_order_is_unchanged_where_the_word_gets_wider(length: int, images: list[int]) -> None:
    """A length of 2**n + 1 needs one bit more than 2**n; from 16 bits on there are fewer rounds."""
    assert permute_many(np.arange(3), length, (5, 2)).tolist() == images
    assert permute_many(np.arange(13), length, (5, 2)).tolist()[:3] == images, "many at once, by numpy"


FIRST, ADDED, LATER = range(4, 9), range(20, 24), range(30, 33)


def test_order_of_a_source_with_added_files_is_unchanged() -> None:
    stretches = [Stretch(0, 0, (FIRST,)), Stretch(5, 1, (ADDED,)), Stretch(9, 2, (FIRST, ADDED, LATER))]
    passes = np.split(samples_in(np.arange(25), stretches, seed=7), [5, 9, 21])
    assert [each.tolist() for each in passes] == [
        [5, 8, 4, 7, 6],
        [23, 22, 20, 21],
        [4, 7, 8, 32, 31, 30, 5, 23, 6, 22, 21, 20],
        [21, 30, 6, 20],
    ]
    assert samples_in(np.array([24, 0, 5]), stretches, seed=7).tolist() == [20, 5, 23], "turns in any order"


@pytest.mark.parametrize(
    ("stretches", "expected"),
    [
        ([Stretch(0, 0, (FIRST,))], 5),
        ([Stretch(0, 0, (FIRST, ADDED))], 9),
        ([Stretch(0, 0, (FIRST,)), Stretch(5, 1, (ADDED,))], 9),
        ([Stretch(0, 0, (FIRST,)), Stretch(10, 1, (ADDED,))], 5),
        ([Stretch(0, 0, (FIRST,)), Stretch(5, 1, (ADDED,)), Stretch(9, 2, (FIRST, ADDED))], 9),
        ([Stretch(0, 0, (FIRST,)), Stretch(5, 1, (ADDED, FIRST))], 5),
    ],
)
def test_the_first_turn_that_repeats_a_sample(stretches: list[Stretch], expected: int) -> None:
    assert num_unrepeated(stretches) == expected


@pytest.mark.parametrize("length", [2**WIDE_BITS, 10**6 + 3, 10**12])
def test_wide_ranges_look_shuffled_with_fewer_rounds(length: int) -> None:
    """Images of chosen positions, and distances of neighbours, are uniform over many keys (chi-square)."""
    num_keys = 1500
    places = np.array([0, 1, length // 2, length // 2 + 1, length - 1])
    images = np.stack([permute_many(places, length, (seed, 1)) for seed in range(num_keys)])
    expected = np.full(16, num_keys / 16)
    for values in (*images.T, (images[:, 1] - images[:, 0]) % length, (images[:, 3] - images[:, 2]) % length):
        assert _chi_square(np.bincount(values * 16 // length, minlength=16), expected) < 45


@pytest.mark.parametrize("length", [17, 1000, 4097])
def test_looks_shuffled(length: int) -> None:
    """The image of every position is uniform, and neighbours are separated (chi-square over many keys)."""
    num_keys = 500
    images = np.stack([permute_many(np.arange(length), length, (seed, 0)) for seed in range(num_keys)])
    bins = images * 16 // length
    expected = np.bincount(np.arange(length) * 16 // length) * num_keys / length
    for position in (0, 1, length // 2, length - 1):
        assert _chi_square(np.bincount(bins[:, position], minlength=16), expected) < 45
    steps = np.diff(images[:40], axis=1) % length
    counts = np.bincount(steps.ravel(), minlength=length)[1:]
    assert _chi_square(counts, np.full(length - 1, steps.size / (length - 1))) < length + 6 * (2 * length) ** 0.5


@pytest.mark.parametrize("length", [3, 4])
def test_all_orders_of_a_tiny_range_occur(length: int) -> None:
    orders = {tuple(permute_many(np.arange(length), length, (seed, 0)).tolist()) for seed in range(400)}
    assert len(orders) == {3: 6, 4: 24}[length]


def test_seed_and_epoch_change_the_order() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2)]
    images = [permute_many(np.arange(1000), 1000, key) for key in keys]
    for number, one in enumerate(images):
        for other in images[:number]:
            assert (one == other).mean() < 0.01


@settings(deadline=None)
@given(num_samples=st.integers(1, 60), part=st.integers(1, 70), seed=SEEDS)
def test_each_epoch_visits_each_sample_once(num_samples: int, part: int, seed: int) -> None:
    turns = np.arange(3 * num_samples)
    parts = [
        samples_at(turns[first : first + part], num_samples=num_samples, seed=seed)
        for first in range(0, len(turns), part)
    ]
    for epoch, samples in enumerate(np.concatenate(parts).reshape(3, num_samples)):
        np.testing.assert_array_equal(np.sort(samples), np.arange(num_samples))
        found = turns_of(samples, epoch=epoch, num_samples=num_samples, seed=seed)
        np.testing.assert_array_equal(found, epoch * num_samples + np.arange(num_samples))


def test_consecutive_epochs_differ() -> None:
    first, second = (samples_at(np.arange(500) + start, num_samples=500, seed=7) for start in (0, 500))
    assert (first == second).mean() < 0.02


def test_turn_at_a_large_index_is_fast() -> None:
    samples = samples_at(np.arange(8) + 8 * 10**12, num_samples=10**9 + 7, seed=3)
    assert len(set(samples.tolist())) == 8
    assert samples.min() >= 0
    assert samples.max() < 10**9 + 7


def test_shuffled_is_a_different_permutation_for_each_key() -> None:
    orders = [shuffled(64, (seed, index)) for seed in range(4) for index in range(50)]
    assert all(sorted(order.tolist()) == list(range(64)) for order in orders)
    assert len({order.tobytes() for order in orders}) == 200
    firsts = np.bincount([int(shuffled(8, (0, index))[0]) for index in range(4000)], minlength=8)
    assert _chi_square(firsts, np.full(8, 500.0)) < 30


def _chi_square(counts: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(((counts - expected) ** 2 / expected).sum())
