"""The table of verdicts of a replay: hardware, data or state."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.analysis.replay.verdict import (
    BatchComparison,
    Origin,
    Reproducibility,
    StepNumbers,
    classify,
    find_origin,
    is_same,
    stands_out,
)
from harness.core.events import StepRecord
from tests.sentinel.series import record


def numbers(loss: float, norm: float = 1.0, **groups: float) -> StepNumbers:
    return StepNumbers(loss=loss, grad_norm=norm, group_grad_norms=groups)


LOGGED = numbers(9.0, 30.0, blocks=30.0)
CLEAN = numbers(3.0, 1.0, blocks=1.0)


@pytest.mark.parametrize(
    ("first", "second", "is_faithful", "expected"),
    [
        (CLEAN, CLEAN, True, Reproducibility.transient),
        (LOGGED, LOGGED, True, Reproducibility.deterministic),
        (LOGGED, CLEAN, True, Reproducibility.irreproducible),
        (CLEAN, CLEAN, False, Reproducibility.unknown),
        (LOGGED, LOGGED, False, Reproducibility.deterministic),
    ],
)
def test_reproducibility(first: StepNumbers, second: StepNumbers, is_faithful: bool, expected: Reproducibility) -> None:
    assert classify(LOGGED, first, second, is_faithful=is_faithful, exactly=True) is expected


def test_one_bit_matters_only_in_exact_mode() -> None:
    other = numbers(math.nextafter(9.0, 10.0), 30.0, blocks=30.0)
    assert not is_same(LOGGED, other, exactly=True)
    assert is_same(LOGGED, other, exactly=False)
    assert not is_same(LOGGED, numbers(9.0, 30.0, blocks=31.0), exactly=True)
    assert not is_same(LOGGED, numbers(9.1, 30.0), exactly=False)


def test_nan_equals_nan_but_no_number() -> None:
    broken = numbers(math.nan, math.nan)
    assert is_same(broken, broken, exactly=True)
    assert not is_same(broken, CLEAN, exactly=True)
    assert not is_same(broken, CLEAN, exactly=False)
    assert not is_same(broken, numbers(math.inf, math.nan), exactly=True)
    assert is_same(broken, numbers(math.inf, math.inf), exactly=False)


def comparison(loss: float, *neighbours: float) -> BatchComparison:
    return BatchComparison(checkpoint="", loss=loss, neighbours=list(neighbours))


@pytest.mark.parametrize(
    ("here", "before", "expected"),
    [
        (comparison(9.0, 3.0, 3.1), comparison(8.0, 4.0, 4.1), Origin.data),
        (comparison(9.0, 3.0, 3.1), comparison(4.2, 4.0, 4.1), Origin.data_and_state),
        (comparison(9.0, 9.1, 9.0), comparison(4.2, 4.0, 4.1), Origin.state),
        (comparison(math.nan, 3.0, 3.1), comparison(4.2, 4.0, 4.1), Origin.data_and_state),
        (comparison(math.nan, 3.0, 3.1), comparison(math.nan, 4.0, 4.1), Origin.data),
        (comparison(math.nan, math.nan), comparison(4.2, 4.0, 4.1), Origin.state),
        (comparison(9.0), comparison(4.2), Origin.unknown),
        (comparison(9.0, 3.0), None, Origin.unknown),
    ],
)
def test_origin(here: BatchComparison, before: BatchComparison | None, expected: Origin) -> None:
    assert find_origin(Reproducibility.deterministic, here, before, is_ordinary=False) is expected
    assert find_origin(Reproducibility.deterministic, here, before, is_ordinary=True) is Origin.none
    assert find_origin(Reproducibility.transient, here, before, is_ordinary=True) is Origin.unknown


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (record(20, 2.17, 0.75), False),
        (record(20, 2.6, 0.75), True),
        (record(20, 2.1, 2.5), True),
        (record(20, math.nan, 0.75), True),
        (replace(record(20, 2.1, 0.75), refused=True), True),
    ],
)
def test_an_ordinary_step_does_not_stand_out(step: StepRecord, expected: bool) -> None:
    earlier = [record(at, 2.1 + 0.02 * (at % 5), 0.7) for at in range(20)]
    assert stands_out(step, earlier) is expected
    assert stands_out(step, earlier[:3]), "three steps do not say what is usual"
