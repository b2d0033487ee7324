"""Facts about a batch: additive fingerprints, rarest tokens, entropy, rows per source."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data.batch_facts import NUM_RAREST, fingerprint, global_facts

ROWS = np.array([[1, 2, 3, 1], [1, 1, 5, 9], [1, 2, 3, 1], [7, 7, 7, 7]])
SOURCES = np.array([0, 2, 0, 2])


@settings(deadline=None)
@given(num_rows=st.integers(1, 12), world_size=st.sampled_from([1, 2, 3, 4, 6]), seed=st.integers(0, 99))
def test_fingerprints_of_ranks_add_up_in_any_order(num_rows: int, world_size: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 50_000, size=(num_rows * world_size, 6))
    parts = sum(fingerprint(part) for part in np.split(rows, world_size))
    assert parts % 2**64 == fingerprint(rows) == fingerprint(rows[::-1])
    assert 0 <= fingerprint(rows) < 2**64


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32, np.int64])
def test_a_fingerprint_does_not_depend_on_how_tokens_are_stored(dtype: type) -> None:
    assert fingerprint(ROWS.astype(dtype)) == fingerprint(ROWS)


def test_any_change_of_content_changes_the_fingerprint() -> None:
    seen = {fingerprint(ROWS), fingerprint(ROWS[:3]), fingerprint(ROWS[:, ::-1])}
    for row in range(4):
        for column in range(4):
            changed = ROWS.copy()
            changed[row, column] += 1
            seen.add(fingerprint(changed))
    twice = np.concatenate([ROWS, ROWS])
    assert fingerprint(twice) == 2 * fingerprint(ROWS) % 2**64
    assert len(seen | {fingerprint(twice)}) == 16, "the first and the third row are equal, and so are their changes"


def test_rarest_by_corpus_frequency() -> None:
    frequencies = np.array([0, 1000, 5, 800, 0, 700, 0, 6, 0, 5])
    facts = global_facts(ROWS, SOURCES, num_sources=3, frequencies=frequencies)
    assert [tuple(rare) for rare in facts.rarest] == [
        (9, 1, 5),
        (2, 2, 5),
        (7, 4, 6),
        (5, 1, 700),
        (3, 2, 800),
        (1, 6, 1000),
    ]


def test_rarest_by_the_batch_itself() -> None:
    facts = global_facts(ROWS, SOURCES, num_sources=3, frequencies=None)
    assert [tuple(rare) for rare in facts.rarest] == [
        (9, 1, None),
        (5, 1, None),
        (3, 2, None),
        (2, 2, None),
        (7, 4, None),
        (1, 6, None),
    ]
    many = global_facts(np.arange(100).reshape(4, 25), SOURCES, num_sources=3, frequencies=None)
    assert [rare.token for rare in many.rarest] == list(range(99, 99 - NUM_RAREST, -1))


def test_entropy_and_sources() -> None:
    facts = global_facts(np.arange(64).reshape(4, 16), SOURCES, num_sources=4, frequencies=None)
    assert facts.entropy_nats == pytest.approx(math.log(64))
    assert facts.rows_by_source == (2, 0, 2, 0)
    same = global_facts(np.full((4, 5), 3), SOURCES, num_sources=3, frequencies=None)
    assert same.entropy_nats == 0.0
    assert same.fingerprint == 4 * fingerprint(np.full((1, 5), 3)) % 2**64
