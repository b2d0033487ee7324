"""Findings do not depend on the unit of the loss, the first iteration, or how often a log has a row."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.events import Finding, StepRecord
from harness.sentinel.detect.detectors import Detectors
from tests.sentinel.series import config, kinds, losses, norms, records

CFG = config()

intervals = st.sampled_from([1, 5, 10])
factors = st.sampled_from([1e-3, 0.1, 0.5, 3.0, 40.0, 1e4])


def disturbed(seed: int, *, num: int = 420, every: int = 1) -> list[StepRecord]:
    """A run with spikes, bursts, level shifts and rejected rows at random places; rows are `every` steps apart."""
    random = Random(seed)
    values, grad_norms = losses(num, seed=seed), norms(num, seed=seed + 1)
    for _ in range(random.randrange(1, 4)):
        first, length = random.randrange(80, num - 60), random.choice((1, 3, 10, 60))
        height, burst = random.choice((1.05, 1.2, 1.6, 2.5)), random.choice((1.0, 1.5, 15.0))
        for place in range(first, min(first + length, num)):
            values[place], grad_norms[place] = height * values[place], burst * grad_norms[place]
    rows = records(values, grad_norms, every=every)
    for row in rows:
        row.refused = random.random() < 0.02
    return rows


def watch(rows: list[StepRecord]) -> list[Finding]:
    detectors = Detectors(CFG)
    return [finding for row in rows for finding in detectors.observe(row)]


def places(found: list[Finding]) -> list[tuple[str, int, int, list[int]]]:
    return [(str(finding.kind), finding.step, finding.onset, finding.cursors) for finding in found]


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), loss_factor=factors, norm_factor=factors, every=intervals)
def test_the_units_of_loss_and_gradient_do_not_matter(
    seed: int, loss_factor: float, norm_factor: float, every: int
) -> None:
    rows, scaled = disturbed(seed, every=every), disturbed(seed, every=every)
    for row in scaled:
        row.loss, row.grad_norm = loss_factor * row.loss, norm_factor * row.grad_norm
    found, again = watch(rows), watch(scaled)
    assert places(again) == places(found)
    for was, now in zip(found, again, strict=True):
        factor = norm_factor if was.kind == "grad_spike" else loss_factor
        assert now.value == pytest.approx(factor * was.value, rel=1e-6)
        assert now.bound == pytest.approx(factor * was.bound, rel=1e-6)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), iterations=st.integers(0, 10**6), batches=st.integers(0, 10**6), every=intervals)
def test_where_iterations_and_batches_begin_does_not_matter(
    seed: int, iterations: int, batches: int, every: int
) -> None:
    """As after rewinds, which iterations and batches count on from; the step is not moved, since a run starts steep."""
    moved = disturbed(seed, every=every)
    for row in moved:
        row.iteration, row.cursor = row.iteration + iterations, row.cursor + batches
    expected = [
        (kind, step, onset + iterations, [cursor + batches for cursor in cursors])
        for kind, step, onset, cursors in places(watch(disturbed(seed, every=every)))
    ]
    assert places(watch(moved)) == expected


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_the_clock_does_not_matter(seed: int) -> None:
    late = disturbed(seed)
    for row in late:
        row.time = 1e9 + 7.0 * row.iteration
    assert places(watch(late)) == places(watch(disturbed(seed)))


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), every=st.integers(2, 6))
def test_a_healthy_log_with_fewer_rows_raises_nothing_either(seed: int, every: int) -> None:
    rows = records(losses(900, seed=seed), norms(900, seed=seed + 1))
    assert watch(rows[::every]) == []


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), first=st.integers(400, 500), height=st.floats(1.4, 3.0), offset=st.integers(0, 1))
def test_a_spike_is_found_in_each_second_row_too(seed: int, first: int, height: float, offset: int) -> None:
    values, grad_norms = losses(600, seed=seed), norms(600, seed=seed + 1)
    for place in range(first, first + 12):
        values[place], grad_norms[place] = height * values[place], 2 * grad_norms[place]
    rows = records(values, grad_norms)
    for seen in (rows, rows[offset::2]):
        found = watch(seen)
        assert kinds(found) == ["loss_spike"]
        assert first - 12 <= found[0].onset <= first + 1, "a row that is high by chance may come before"
        assert first <= found[0].step <= first + 3


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), ratio=st.floats(12.0, 100.0), offset=st.integers(0, 1))
def test_a_burst_of_the_gradient_is_found_in_each_second_row_too(seed: int, ratio: float, offset: int) -> None:
    grad_norms = norms(600, seed=seed)
    grad_norms[450:452] = [ratio * norm for norm in grad_norms[450:452]]
    rows = records(losses(600, seed=seed + 1), grad_norms)
    for seen in (rows, rows[offset::2]):
        (finding,) = watch(seen)
        assert (finding.kind, finding.step) == ("grad_spike", 450 + (offset if len(seen) == 300 else 0))


def test_findings_do_not_depend_on_rejected_rows() -> None:
    """Whatever their values: rejected rows change no baseline."""
    rows = disturbed(5)
    refused = [row.refused for row in rows]
    assert any(refused)
    kept = watch([row for row in rows if not row.refused])
    for row in rows:
        if row.refused:
            row.loss = row.grad_norm = math.nan
    assert places([finding for finding in watch(rows) if finding.kind != "nonfinite"]) == places(kept)
