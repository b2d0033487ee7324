"""The mixture gives exact shares, neither skips nor repeats a turn, and can be inverted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.errors import ConfigError
from harness.core.batch_sizes import BatchSize, BatchSizes
from harness.data.order.mixture import Change, Mixture, MixturePhase, MixtureRecipe, phases_of

WEIGHTS = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=7)
CHANGES = st.lists(
    st.tuples(st.integers(0, 25), st.dictionaries(st.integers(0, 6), st.sampled_from([0.0, 0.3, 2.0]), max_size=4)),
    max_size=4,
)


def _mixture(*weights: float, batch_size: int = 8, seed: int = 5) -> Mixture:
    return Mixture([MixturePhase(0, weights)], batch_size=batch_size, seed=seed)


def _stream(mixture: Mixture, num_batches: int) -> tuple[np.ndarray, np.ndarray]:
    sources, turns = zip(*(mixture.batch(index) for index in range(num_batches)), strict=True)
    return np.stack(sources), np.stack(turns)


@settings(deadline=None, max_examples=60)
@given(weights=WEIGHTS, changes=CHANGES, batch_size=st.integers(1, 20))
def test_turns_come_in_order_without_a_gap_and_are_found_again(
    weights: list[float], changes: list[tuple[int, dict[int, float]]], batch_size: int
) -> None:
    """Also across phases: whatever the weights, a source neither repeats nor skips a sample."""
    base = {f"source{number}": weight for number, weight in enumerate(weights)}
    named = [
        Change(start, {f"source{number}": weight for number, weight in given.items() if number < len(weights)})
        for start, given in changes
    ]
    try:
        phases = phases_of(base, named)
    except ConfigError:
        return
    mixture = Mixture(phases, batch_size=batch_size, seed=3)
    following = [0] * len(weights)
    for index in range(40):
        sources, turns = mixture.batch(index)
        assert len(sources) == len(turns) == batch_size
        for number in range(len(weights)):
            own = np.sort(turns[sources == number])
            np.testing.assert_array_equal(own, np.arange(following[number], following[number] + len(own)))
            following[number] += len(own)
        for row in range(batch_size):
            assert mixture.find(int(sources[row]), int(turns[row])) == (index, row)


@settings(deadline=None, max_examples=60)
@given(weights=WEIGHTS, num_batches=st.integers(1, 40), batch_size=st.integers(1, 64))
def test_every_prefix_has_each_share(weights: list[float], num_batches: int, batch_size: int) -> None:
    sources, _ = _stream(_mixture(*weights, batch_size=batch_size), num_batches)
    counts = np.cumsum([np.bincount(batch, minlength=len(weights)) for batch in sources], axis=0)
    places = np.arange(1, num_batches + 1)[:, None] * batch_size
    expected = places * np.array(weights) / sum(weights)
    levels = (len(weights) - 1).bit_length()
    assert np.abs(counts - expected).max() <= levels / 2 + 1e-3


def test_shares_are_exact_over_whole_periods() -> None:
    sources, _ = _stream(_mixture(1, 2, 5, batch_size=16), 50)
    for batch in sources:
        assert np.bincount(batch).tolist() == [2, 4, 10], "16 rows are two whole periods of 8"
    sources, _ = _stream(_mixture(0.001, 0.999, batch_size=8), 1000)
    assert (sources == 0).sum() == 8


def test_tiny_weight_gets_its_share_at_large_indices() -> None:
    mixture = _mixture(1e-7, 1.0, batch_size=1)
    (first, _), (second, _) = mixture.find(0, 10) or (0, 0), mixture.find(0, 1_000_010) or (0, 0)
    assert (second - first) / 1_000_000 == pytest.approx(1e7, rel=0.01)
    assert mixture.batch(first)[0].tolist() == [0]


@pytest.mark.parametrize(
    ("weights", "rare", "first"), [((1e-12, 1.0), 0, 2**29 - 1), ((1.0, 1e-12), 1, 2**29), ((3.0, 2e-9), 1, 2**29)]
)
def test_smallest_share_is_two_to_the_minus_30(weights: tuple[float, float], rare: int, first: int) -> None:
    """A smaller weight still gets its turns, the first in the middle of the first 2**30 positions."""
    mixture = _mixture(*weights, batch_size=1)
    assert [mixture.find(rare, turn) for turn in range(3)] == [(first + turn * 2**30, 0) for turn in range(3)]
    assert [mixture.batch(first + shift)[0].tolist() for shift in (-1, 0, 1)] == [[1 - rare], [rare], [1 - rare]]


def test_batch_at_a_large_index_is_fast() -> None:
    mixture = _mixture(1, 2, 5)
    sources, turns = mixture.batch(10**12)
    assert (sources == 0).sum() == 1
    assert abs((sources == 2).sum() - 5) <= 1
    assert turns[sources == 2].min() == pytest.approx(5e12, rel=1e-8)


def test_rows_of_a_source_are_shuffled() -> None:
    """Otherwise a rank would always see the same source, and its loss would stand out."""
    sources, _ = _stream(_mixture(1, 1, batch_size=8), 400)
    by_row = (sources == 0).mean(axis=0)
    assert np.abs(by_row - 0.5).max() < 0.13


def test_a_single_source_keeps_its_plain_order() -> None:
    sources, turns = _mixture(0.3, batch_size=4).batch(7)
    assert sources.tolist() == [0] * 4
    assert turns.tolist() == [28, 29, 30, 31]


def test_seed_changes_only_the_row_order_within_a_batch() -> None:
    for index in range(10):
        pairs = [
            set(zip(*map(np.ndarray.tolist, _mixture(1, 2, seed=seed).batch(index)), strict=True)) for seed in (1, 2)
        ]
        assert pairs[0] == pairs[1]
    assert _mixture(1, 2, seed=1).batch(0)[1].tolist() != _mixture(1, 2, seed=2).batch(0)[1].tolist()


def test_a_phase_begins_at_its_batch() -> None:
    base = {"a": 1.0, "b": 1.0, "c": 2.0}
    mixture = Mixture(phases_of(base, [Change(5, {"b": 0.0}), Change(9, {"a": 0.0, "b": 1.0})]), batch_size=4, seed=0)
    counts = [np.bincount(mixture.batch(index)[0], minlength=3).tolist() for index in range(12)]
    assert counts[:5] == [[1, 1, 2]] * 5
    assert all(count[1] == 0 and sum(count) == 4 for count in counts[5:9])
    assert all(count[0] == 0 for count in counts[9:])
    plain = Mixture(phases_of(base, []), batch_size=4, seed=0)
    for index in range(5):
        assert all(map(np.array_equal, mixture.batch(index), plain.batch(index)))
    assert mixture.find(0, 10**6) is None, "switched off, it never gets so far"


def test_phases_accumulate_and_the_ledger_wins() -> None:
    base = {"a": 1.0, "b": 1.0}
    planned = [Change(10, {"a": 2.0}), Change(30, {"b": 5.0})]
    assert phases_of(base, planned) == [MixturePhase(0, (1, 1)), MixturePhase(10, (2, 1)), MixturePhase(30, (2, 5))]
    same_batch = [Change(10, {"b": 3.0}), *planned]
    assert phases_of(base, same_batch)[1] == MixturePhase(10, (2, 3)), "two changes of one batch add up"
    poisoned = Change(20, {"b": 0.0})
    assert phases_of(base, planned, [poisoned]) == [
        MixturePhase(0, (1, 1)),
        MixturePhase(10, (2, 1)),
        MixturePhase(20, (2, 0)),
        MixturePhase(30, (2, 0)),
    ], "a source that was turned off does not come back by plan"
    again = Change(15, {"b": 0.5})
    assert phases_of(base, [], [poisoned, again]) == [
        MixturePhase(0, (1, 1)),
        MixturePhase(15, (1, 0.5)),
        MixturePhase(20, (1, 0.5)),
    ]


def test_amendment_equals_a_configured_phase() -> None:
    recipe = MixtureRecipe(weights={"a": 1, "b": 3}, changes=[Change(4, {"b": 0.5})], batch_size=6, seed=1)
    amended = MixtureRecipe(weights={"a": 1, "b": 3}, changes=[], batch_size=6, seed=1).mixture([Change(4, {"b": 0.5})])
    for index in range(12):
        assert all(map(np.array_equal, recipe.mixture().batch(index), amended.batch(index)))


def test_invalid_mixture_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^data\.sources: the ledger sets the weight of 'x'; there are only a, b$"):
        phases_of({"a": 1, "b": 1}, [], [Change(3, {"x": 0.0})])
    with pytest.raises(ConfigError, match=r"^data\.sources: no source has a weight above 0 from batch 7 on$"):
        phases_of({"a": 1, "b": 1}, [Change(5, {"a": 0.0})], [Change(7, {"b": 0.0})])
    with pytest.raises(ConfigError, match=r"^data\.sources: the weights from batch 7 on have no finite sum$"):
        phases_of({"a": 1, "b": 1}, [Change(5, {"a": 1.7e308})], [Change(7, {"b": 1.7e308})])


@pytest.mark.parametrize("weights", [{"a": 1.0}, {"a": 2.0, "b": 1.0}])
def test_batches_equals_batch_for_each_index(weights: dict[str, float]) -> None:
    changes = [Change(5, {"a": 3.0})]
    mixture = MixtureRecipe(weights=weights, changes=changes, batch_size=6, seed=4).mixture()
    sources, turns = mixture.batches(3, 7)
    for row, index in enumerate(range(3, 10)):
        one_source, one_turn = mixture.batch(index)
        np.testing.assert_array_equal(sources[row], one_source)
        np.testing.assert_array_equal(turns[row], one_turn)


SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=5)
"""Batches that pass at a size, and that size."""


def _sizes(lengths: list[tuple[int, int]]) -> list[BatchSize]:
    starts = np.cumsum([0, *(length for length, _ in lengths[:-1])]).tolist()
    return [BatchSize(start, size) for start, (_, size) in zip(starts, lengths, strict=True)]


@settings(deadline=None)
@given(
    lengths=SIZES,
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any),
    changes=st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 5), min_size=3, max_size=3)), max_size=2),
    seed=st.integers(0, 99),
)
def test_changed_batch_size_repeats_and_skips_no_turn(
    lengths: list[tuple[int, int]], weights: list[int], changes: list[tuple[int, list[int]]], seed: int
) -> None:
    """Whatever the sizes, weights and phases: each source's turns come once each, without a gap."""
    phases = [MixturePhase(0, tuple(weights))]
    for batch, others in sorted(dict(changes).items()):
        if batch > 0 and any(others[: len(weights)]):
            phases.append(MixturePhase(batch, tuple(others[: len(weights)])))
    mixture = Mixture(phases, batch_size=99, seed=seed, sizes=_sizes(lengths))
    num_batches = sum(length for length, _ in lengths) + 5
    turns: list[list[int]] = [[] for _ in weights]
    for index in range(num_batches):
        assert mixture.turns_before(index) == [len(seen) for seen in turns]
        sources, own = mixture.batch(index)
        assert len(sources) == mixture.sizes.at(index)
        for row, (source, turn) in enumerate(zip(sources.tolist(), own.tolist(), strict=True)):
            turns[source].append(turn)
            assert mixture.find(source, turn) == (index, row)
            assert mixture.batches_of(source, np.array([turn])).tolist() == [index]
        for source, seen in enumerate(turns):
            assert list(mixture.turns_in(source, index)) == sorted(own[sources == source].tolist())
            end = mixture.num_turns(source)
            assert (end is None) == (phases[-1].weights[source] > 0)
            assert end is None or len(seen) <= end
    assert all(sorted(seen) == list(range(len(seen))) for seen in turns)


@given(lengths=SIZES)
def test_positions_are_continuous_where_the_size_changes(lengths: list[tuple[int, int]]) -> None:
    listed = _sizes(lengths)
    sizes, position = BatchSizes(listed), 0
    for index in range(sum(length for length, _ in lengths) + 3):
        assert sizes.position(index) == position
        assert all(sizes.find(position + row) == (index, row) for row in range(sizes.at(index)))
        assert sizes.num_alike(index) == next(
            (size.from_batch - index for size in listed if size.from_batch > index), None
        )
        position += sizes.at(index)
    assert sizes.largest == max(size for _, size in lengths)
