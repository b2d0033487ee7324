"""Summaries of the per-rank slots."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from harness.core.events import Finding
from harness.sentinel.detect.guards import RankGuard
from harness.sentinel.device.slots import (
    LIMBS,
    MAX_NAMED,
    MAX_WORST,
    SLOTS,
    Numbers,
    find_mismatched,
    find_misread,
    rank_spread,
    ranks_by_digest,
    share_sizes,
    split_fingerprint,
    sum_fingerprints,
    summarize_slots,
)
from tests.sentinel.series import record


def table(num_ranks: int, **rows: ArrayLike) -> Numbers:
    filled = np.zeros((len(SLOTS), num_ranks), dtype=np.float32)
    for name, values in rows.items():
        filled[SLOTS.index(name)] = np.asarray(values)
    return filled


@given(st.lists(st.one_of(st.floats(-1e6, 1e6, width=32), st.just(math.nan), st.just(math.inf)), min_size=1))
def test_a_spread_is_that_of_the_finite_values(values: list[float]) -> None:
    numbers = np.array(values, dtype=np.float32)
    finite = numbers[np.isfinite(numbers)].astype(np.float64)
    found = rank_spread(numbers)
    if not len(finite):
        assert found == {}
        return
    assert found["median"] == np.median(finite)
    distances = np.abs(finite - np.median(finite))
    assert found["spread"] == pytest.approx(1.4826 * np.median(distances), rel=1e-5, abs=1e-6)
    assert len(found["worst"]) == min(len(finite), MAX_WORST)
    assert all(numbers[rank] == value for rank, value in found["worst"])
    assert len({rank for rank, _ in found["worst"]}) == len(found["worst"])
    named = [abs(value - found["median"]) for _, value in found["worst"]]
    assert named == pytest.approx(sorted(distances, reverse=True)[: len(named)], rel=1e-5, abs=1e-6)


def test_gradient_norms_are_unscaled_and_times_are_named() -> None:
    found = summarize_slots(
        table(3, loss=[1.0, 2.0, 9.0], grad_square=[4.0, 16.0, 36.0], busy_s=[0.5, 0.5, 0.75]), divisor=2.0, replicate=1
    )
    assert found.ranks["loss"]["worst"][0] == [2, 9.0]
    assert dict(found.ranks["grad_norm"]["worst"]) == {0: 1.0, 1: 2.0, 2: 3.0}
    assert found.ranks["step_time_s"] == {"median": 0.5, "spread": 0.0, "worst": [[2, 0.75], [0, 0.5], [1, 0.5]]}
    assert (found.nonfinite_ranks, found.mismatched_ranks, found.digests) == ([], [], {})


def test_signals_that_are_not_measured_are_left_out() -> None:
    assert summarize_slots(table(3, loss=[1.0, 2.0, 3.0]), divisor=1.0, replicate=1).ranks.keys() == {"loss"}


def test_world_size_1_has_no_spread_but_can_be_nonfinite() -> None:
    found = summarize_slots(table(1, loss=[1.0], grad_square=[math.nan]), divisor=1.0, replicate=1)
    assert found.ranks == {}
    assert found.nonfinite_ranks == [0]


def test_nonfinite_ranks_are_named_and_do_not_change_the_spread() -> None:
    rows = table(5, loss=[1.0, math.nan, 1.0, 1.0, 2.0], grad_square=[1.0, 1.0, math.inf, 1.0, 1.0])
    found = summarize_slots(rows, divisor=1.0, replicate=1)
    assert found.nonfinite_ranks == [1, 2]
    assert found.ranks["loss"]["median"] == 1.0
    assert found.ranks["loss"]["worst"][0] == [4, 2.0]
    assert all(math.isfinite(value) for _, value in found.ranks["grad_norm"]["worst"])


def test_a_record_does_not_grow_with_the_cluster() -> None:
    rows = table(1000, loss=math.nan, decision=np.arange(1000), weights_low=np.arange(1000))
    found = summarize_slots(rows, divisor=1.0, replicate=2)
    assert len(found.nonfinite_ranks) == len(found.mismatched_ranks) == MAX_NAMED
    assert len(found.digests) <= 8
    assert found.ranks == {}, "no finite loss"


@pytest.mark.parametrize(
    ("digests", "replicate", "expected"),
    [
        ([5, 6, 5, 6], 2, []),
        ([5, 6, 5, 7], 2, [1, 3]),
        ([5, 6, 5, 6, 5, 7], 3, [5]),
        ([8, 6, 5, 6, 5, 7], 3, [0, 5]),
        ([1, 1, 2, 2], 4, [0, 1, 2, 3]),
        ([1, 1, 2, 1], 4, [2]),
        ([1, 2, 3], 3, [0, 1, 2]),
    ],
)
def test_replicas_that_differ_from_the_majority(digests: list[int], replicate: int, expected: list[int]) -> None:
    assert find_mismatched(np.array(digests, dtype=np.float32), replicate=replicate) == expected


def test_digests_are_reported_only_if_they_differ() -> None:
    largest = 2**24 - 1
    assert ranks_by_digest(np.full(6, largest, dtype=np.float32)) == {}
    grouped = ranks_by_digest(np.array([7, largest, 7, 7, 7, 7], dtype=np.float32))
    assert grouped == {"000007": [0, 2, 3, 4], "ffffff": [1]}


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=200))
def test_fingerprints_sent_as_floats_add_up_exactly(fingerprints: list[int]) -> None:
    rows = np.array([split_fingerprint(each) for each in fingerprints], dtype=np.float32).T
    assert sum_fingerprints(*rows) == sum(fingerprints) % 2**64
    facts = summarize_slots(table(len(fingerprints), **dict(zip(LIMBS, rows, strict=True))), divisor=1.0, replicate=1)
    total = sum(fingerprints) % 2**64
    assert facts.fingerprint == (f"{total:016x}" if total else "")


def test_the_step_time_that_all_ranks_share_is_the_median() -> None:
    assert summarize_slots(table(1, step_s=[0.5]), divisor=1.0, replicate=1).median_step_s == 0.5
    assert summarize_slots(table(3, step_s=[0.5, 9.0, 0.25]), divisor=1.0, replicate=1).median_step_s == 0.5


def test_a_rank_with_another_plan_is_named() -> None:
    facts = summarize_slots(table(4, plan=[7, 7, 9, 7]), divisor=1.0, replicate=1)
    assert facts.other_data == {"plan": [2]}
    assert summarize_slots(table(2, plan=[7, 9]), divisor=1.0, replicate=1).other_data == {"plan": [0, 1]}


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("num_ranks", "wrong"), [(3, [1]), (5, [0]), (5, [4]), (16, [3]), (16, [4, 5, 6])])
def test_a_rank_that_reads_other_tokens_is_named(num_ranks: int, wrong: list[int], stride: int) -> None:
    """The owner of row r and the rank `stride` before it read it; a wrong rank reads everything otherwise."""
    true = np.arange(1, num_ranks + 1, dtype=np.float32)
    own, other = true.copy(), np.roll(true, -stride)
    assert find_misread(own, other, stride=stride) == []
    own[wrong] += 100
    other[wrong] += 1000
    assert find_misread(own, other, stride=stride) == wrong


def test_if_two_ranks_disagree_once_both_are_named() -> None:
    own, other = np.array([1, 2, 3, 4], dtype=np.float32), np.array([2, 3, 4, 1], dtype=np.float32)
    other[1] = 9
    assert find_misread(own, other, stride=1) == [1, 2]
    assert find_misread(np.zeros(4, dtype=np.float32), np.zeros(4, dtype=np.float32), stride=1) == []


def test_ranks_that_share_their_rows_count_once_and_are_compared() -> None:
    limbs = [split_fingerprint(fingerprint) for fingerprint in (5, 5, 2**63 + 7, 2**63 + 7)]
    rows = {name: [limb[place] for limb in limbs] for place, name in enumerate(LIMBS)}
    facts = summarize_slots(table(4, **rows), divisor=1.0, replicate=1, context=2)
    assert facts.fingerprint == f"{2**63 + 12:016x}"
    assert facts.other_data == {}
    assert summarize_slots(table(4, **rows), divisor=1.0, replicate=1, context=4).other_data == {"rows": [0, 1, 2, 3]}
    alone = {**rows, LIMBS[0]: [5, 5, 5, 9], LIMBS[1]: [0] * 4, LIMBS[2]: [0] * 4}
    assert summarize_slots(table(4, **alone), divisor=1.0, replicate=1, context=4).other_data == {"rows": [3]}


def test_a_loss_is_compared_between_context_groups() -> None:
    """Ranks of a group compute different positions. What a position usually adds is known from the other groups."""
    alone = summarize_slots(table(2, loss=[2.0, 4.0]), divisor=1.0, replicate=1, context=2).ranks["loss"]
    assert (alone["median"], alone["spread"]) == (3.0, 0.0)
    healthy = [2.0, 4.0, 3.0, 5.0, 1.5, 3.5]
    spread = summarize_slots(table(6, loss=healthy), divisor=1.0, replicate=1, context=2).ranks["loss"]
    assert spread["median"] == 3.0
    assert sorted(spread["worst"]) == [[2, 4.0], [3, 4.0], [4, 2.5], [5, 2.5]]
    poisoned = [2.0, 4.0, 2.0, 4.0, 2.0, 40.0]
    spread = summarize_slots(table(6, loss=poisoned), divisor=1.0, replicate=1, context=2).ranks["loss"]
    assert (spread["median"], spread["spread"]) == (3.0, 0.0)
    assert spread["worst"][0] == [5, 39.0], "the rank, not its group"
    broken = summarize_slots(table(6, loss=[2.0, math.nan, *healthy[2:]]), divisor=1.0, replicate=1, context=2)
    assert broken.nonfinite_ranks == [1]


def rank_findings(norms: NDArray[np.float64], batch_size: int) -> list[Finding]:
    """Findings on the gradient norms of ranks [steps, ranks] that share such a batch."""
    guard = RankGuard()
    tables = [table(norms.shape[1], grad_square=row**2) for row in norms]
    facts = [summarize_slots(each, divisor=1.0, replicate=1, batch_size=batch_size) for each in tables]
    return [found for step, each in enumerate(facts) for found in guard.observe(record(step, 3.0, ranks=each.ranks))]


@pytest.mark.parametrize("growth", [0.5, 0.8, 1.0])
@pytest.mark.parametrize(("num_ranks", "batch_size"), [(3, 4), (3, 16), (4, 5), (4, 7), (4, 11), (16, 17), (16, 40)])
def test_a_rank_with_more_rows_is_no_outlier(num_ranks: int, batch_size: int, growth: float) -> None:
    """Norms grow with the number of rows, or with its root if the gradients are noise."""
    usual = share_sizes(batch_size, num_ranks, 1) ** growth
    healthy = usual * np.random.default_rng(0).normal(1.0, 0.01, (50, num_ranks))
    assert rank_findings(healthy, batch_size) == []
    for rank in (0, num_ranks - 1):  # they have the smallest share and the largest one
        broken = healthy.copy()
        broken[30, rank] *= 40.0
        (finding,) = rank_findings(broken, batch_size)
        assert (finding.step, finding.ranks) == (30, [rank])


def test_norms_of_different_shares_are_compared_as_if_all_had_the_largest() -> None:
    rows: dict[str, list[float]] = {"grad_square": [1.0, 1.0, math.nan, 4.0, 1.75**2, 2.25]}
    found = summarize_slots(table(6, **rows), divisor=1.0, replicate=1, batch_size=5, context=2)
    assert found.ranks["grad_norm"]["median"] == 1.75, "the first two ranks have one row of the five"
    assert sorted(found.ranks["grad_norm"]["worst"])[:2] == [[0, 1.75], [1, 1.75]]
    assert found.nonfinite_ranks == [2]
    even = summarize_slots(table(6, **rows), divisor=1.0, replicate=1, batch_size=6, context=2)
    assert even == summarize_slots(table(6, **rows), divisor=1.0, replicate=1, context=2)


def test_the_source_of_a_nan_is_named_in_its_context_group() -> None:
    """Rank 3 sends a NaN in exchange 5, rank 2 gets it and sends it on in exchange 6."""
    broken = [1.0, 1.0, math.nan, math.nan, 1.0, math.nan]
    rows: dict[str, list[float]] = {"grad_square": broken, "exchange": [0, 0, 6, 5, 0, 0]}
    assert summarize_slots(table(6, **rows), divisor=1.0, replicate=1, context=2).nonfinite_ranks == [3, 5]
    rows["exchange"] = [0, 0, 5, 5, 0, 0]
    assert summarize_slots(table(6, **rows), divisor=1.0, replicate=1, context=2).nonfinite_ranks == [2, 3, 5]
    healthy: dict[str, list[float]] = {"grad_square": [1.0] * 4, "exchange": [0, 3, 0, 0]}
    assert not summarize_slots(table(4, **healthy), divisor=1.0, replicate=1, context=2).nonfinite_ranks


def test_the_source_of_wrong_bits_is_named_in_its_context_group() -> None:
    rows = {"corruption": [0, 0, 4, 3], "corrupted_exchange": [0, 0, 7, 4]}
    own = summarize_slots(table(4, **rows), divisor=1.0, replicate=1, context=2, recomputed=0)
    assert (own.corrupted_ranks, own.corrupted_stage) == ([3], 2)
    both = {"corruption": [4, 3, 4, 3], "corrupted_exchange": [7, 4, 7, 4]}
    across = summarize_slots(table(4, **both), divisor=1.0, replicate=1, context=2, recomputed=2)
    assert across.corrupted_ranks == [1, 3], "two groups cannot tell which of them is wrong"
    at_the_end = {"corruption": [0, 9, 0, 0], "corrupted_exchange": [0] * 4}
    assert summarize_slots(
        table(4, **at_the_end), divisor=1.0, replicate=1, context=2, recomputed=0
    ).corrupted_ranks == [1]
