"""Columns: thinning keeps all extremes, and non-finite values are gaps."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analysis.dashboard.series import ROWS_AT_ONCE, ColumnTable, drawable_number, pack_table, thin


def table_of(values: list[object]) -> ColumnTable:
    table = ColumnTable()
    for index, value in enumerate(values):
        table.add(index + 1, float(index), ("loss",), (value,))
    return table


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-1e6, 1e6, width=32) | st.just("nan"), min_size=1, max_size=200), st.integers(1, 50))
def test_thinning_keeps_the_extremes_of_every_group(values: list[object], most: int) -> None:
    thinned = thin(table_of(values), most=most)
    known = [value for value in values if isinstance(value, float)]
    assert len(thinned.iterations) <= most
    if not known:
        assert not thinned.lows
        return
    assert np.nanmin(thinned.lows["loss"]) == min(known)
    assert np.nanmax(thinned.highs["loss"]) == max(known)
    for group, first in enumerate(thinned.iterations - 1):
        rows = [each for each in values[first : first + thinned.rows_each] if isinstance(each, float)]
        low, high = thinned.lows["loss"][group], thinned.highs["loss"][group]
        assert (low, high) == (min(rows), max(rows)) if rows else np.isnan(low) and np.isnan(high)


def test_one_step_spike_survives_thinning() -> None:
    values: list[object] = [2.0] * 10_000
    values[6_543] = 99.0
    thinned = thin(table_of(values), most=100)
    assert thinned.highs["loss"][65] == 99.0
    assert thinned.lows["loss"][65] == 2.0


@pytest.mark.parametrize("num_before", [3, ROWS_AT_ONCE, ROWS_AT_ONCE + 1])
def test_late_and_interrupted_columns_have_gaps(num_before: int) -> None:
    table = ColumnTable()
    for index in range(num_before):
        table.add(index, 0.0, ("a",), (1.0,))
    table.add(num_before, 0.0, ("a", "b"), (2.0, 5.0))
    table.add(num_before + 1, 0.0, ("a",), (3.0,))
    assert table.column("a").tolist() == [1.0] * num_before + [2.0, 3.0]
    b = table.column("b")
    assert np.isnan(b[:num_before]).all()
    assert b[num_before] == 5.0
    assert np.isnan(b[num_before + 1])


def test_non_finite_values_are_gaps() -> None:
    values: list[object] = ["nan", "inf", "-inf", None, 1e300, -1e300, float("inf"), True, 2, 0.5]
    expected = [np.nan] * 7 + [1.0, 2.0, 0.5]
    assert np.array_equal([drawable_number(value) for value in values], expected, equal_nan=True)
    assert np.array_equal(table_of(values).column("loss"), expected, equal_nan=True)


def test_packed_columns_can_be_decoded() -> None:
    data = pack_table(thin(table_of([1.5, 2.5, -3.0])))
    low = np.frombuffer(base64.b64decode(data["columns"]["loss"]["low"]), "<f4")
    assert low.tolist() == [1.5, 2.5, -3.0]
    assert "high" not in data["columns"]["loss"]
    assert np.frombuffer(base64.b64decode(data["iteration"]), "<f8").tolist() == [1, 2, 3]
    halves = pack_table(thin(table_of([1.0, 2.0, 5.0, 4.0]), most=2))["columns"]["loss"]
    assert np.frombuffer(base64.b64decode(halves["high"]), "<f4").tolist() == [2.0, 5.0]
