"""The assignment of matrices to ranks: every matrix once, work shared evenly, places that do not overlap."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from harness.optim import matrix_owners
from harness.optim.matrix_owners import Matrix, assign_matrices, largest_load, newton_schulz_flops

BLOCK: list[Matrix] = [(64, 64), (32, 64), (32, 64), (64, 64), (176, 64), (176, 64), (64, 176)]
SHAPES = BLOCK * 6


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 64])
def test_every_matrix_has_one_owner_and_one_place(num_ranks: int) -> None:
    batches = assign_matrices(SHAPES, num_ranks)
    numbers = [number for batch in batches for owned in batch.owned for number in owned]
    assert sorted(numbers) == list(range(len(SHAPES)))
    assert all(SHAPES[number] == (batch.rows, batch.columns) for batch in batches for number in batch.places)
    places = sorted((place, batch.part_size) for batch in batches for place in batch.places.values())
    assert places[0][0] == 0
    assert all(place + size == after for (place, size), (after, _) in pairwise(places))
    assert sum(places[-1]) == batches[-1].end
    assert all(batch.part_rows * num_ranks >= batch.rows > (batch.part_rows - 1) * num_ranks for batch in batches)


def test_the_matrices_of_an_owner_are_joined() -> None:
    """They travel as one part of the all-to-all."""
    (batch,) = assign_matrices([(5, 3)] * 4, 2)
    assert batch.owned == ((0, 2), (1, 3))
    assert batch.part_size == 9, "three of five rows, padded"
    assert batch.sizes == [18, 18]
    assert batch.places == {0: 0, 2: 9, 1: 18, 3: 27}


@pytest.mark.parametrize(("num_ranks", "excess"), [(2, 1.01), (8, 1.05), (16, 1.3)])
def test_work_is_shared_evenly(num_ranks: int, excess: float) -> None:
    whole = largest_load(SHAPES, 1, 5)
    assert whole == sum(newton_schulz_flops(shape, 5) for shape in SHAPES)
    assert whole / num_ranks <= largest_load(SHAPES, num_ranks, 5) <= excess * whole / num_ranks


def test_flops_count_the_gemms_of_the_short_side() -> None:
    assert newton_schulz_flops((2, 3), 1) == newton_schulz_flops((3, 2), 1) == 2 * (2 * 2 * 3 + 2 * 2 * 2 + 2 * 2 * 3)


def test_batches_of_a_shape_are_about_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_owners, "MAX_BATCH_VALUES", 21 * 64)
    assert [len(batch.owned[0]) for batch in assign_matrices([(8, 8)] * 24, 1)] == [12, 12]


def test_a_batch_is_limited_for_each_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_owners, "MAX_BATCH_VALUES", 2 * 64 * 64)
    batches = assign_matrices([(64, 64)] * 7 + [(200, 64)], 2)
    found = Counter(len(owned) for batch in batches for owned in batch.owned)
    assert max(found) == 2
    assert batches[0].rows == 200, "a matrix above the limit is a batch of its own, and the largest work comes first"
    assert sum(found.elements()) == 8
