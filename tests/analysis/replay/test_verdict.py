"""Hardware or data: the table of a replay."""

from __future__ import annotations

import math

import pytest

from harness.analysis.replay.verdict import Cause, Nature, Numbers, Standing, cause, is_same, nature


def numbers(loss: float, norm: float = 1.0, **groups: float) -> Numbers:
    return Numbers(loss=loss, grad_norm=norm, group_grad_norms=groups)


LOGGED = numbers(9.0, 30.0, blocks=30.0)
CLEAN = numbers(3.0, 1.0, blocks=1.0)


@pytest.mark.parametrize(
    ("first", "second", "is_faithful", "expected"),
    [
        (CLEAN, CLEAN, True, Nature.transient),
        (LOGGED, LOGGED, True, Nature.deterministic),
        (LOGGED, CLEAN, True, Nature.irreproducible),
        (CLEAN, CLEAN, False, Nature.unknown),
        (LOGGED, LOGGED, False, Nature.deterministic),
    ],
)
def test_nature(first: Numbers, second: Numbers, is_faithful: bool, expected: Nature) -> None:
    assert nature(LOGGED, first, second, is_faithful=is_faithful, exactly=True) is expected


def test_one_bit_counts_where_bits_are_expected_and_only_there() -> None:
    other = numbers(math.nextafter(9.0, 10.0), 30.0, blocks=30.0)
    assert not is_same(LOGGED, other, exactly=True)
    assert is_same(LOGGED, other, exactly=False)
    assert not is_same(LOGGED, numbers(9.0, 30.0, blocks=31.0), exactly=True)
    assert not is_same(LOGGED, numbers(9.1, 30.0), exactly=False)


def test_nan_equals_nan_and_is_no_number() -> None:
    broken = numbers(math.nan, math.nan)
    assert is_same(broken, broken, exactly=True)
    assert not is_same(broken, CLEAN, exactly=True)
    assert not is_same(broken, CLEAN, exactly=False)
    assert not is_same(broken, numbers(math.inf, math.nan), exactly=True)
    assert is_same(broken, numbers(math.inf, math.inf), exactly=False)


def standing(loss: float, *neighbours: float) -> Standing:
    return Standing(checkpoint="", loss=loss, neighbours=list(neighbours))


@pytest.mark.parametrize(
    ("here", "before", "expected"),
    [
        (standing(9.0, 3.0, 3.1), standing(8.0, 4.0, 4.1), Cause.data),
        (standing(9.0, 3.0, 3.1), standing(4.2, 4.0, 4.1), Cause.data_and_state),
        (standing(9.0, 9.1, 9.0), standing(4.2, 4.0, 4.1), Cause.state),
        (standing(math.nan, 3.0, 3.1), standing(4.2, 4.0, 4.1), Cause.data_and_state),
        (standing(math.nan, 3.0, 3.1), standing(math.nan, 4.0, 4.1), Cause.data),
        (standing(math.nan, math.nan), standing(4.2, 4.0, 4.1), Cause.state),
        (standing(9.0), standing(4.2), Cause.unknown),
        (standing(9.0, 3.0), None, Cause.unknown),
    ],
)
def test_cause(here: Standing, before: Standing | None, expected: Cause) -> None:
    assert cause(Nature.deterministic, here, before) is expected
    assert cause(Nature.transient, here, before) is Cause.unknown
