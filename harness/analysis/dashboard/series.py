"""Numbers of a run as columns, one row an iteration, and their thinning that loses no spike.

Why: a page or a terminal has a thousand pixels and a run has a million steps.
How: a column is an array of 32-bit floats; what is not finite or not there is NaN, which draws as a gap. `thin` cuts
the rows into even groups and keeps the lowest and the highest value of each, so no extreme is lost, however narrow.
`pack` writes arrays as base64, little end first, as a browser reads them back without parsing numbers.
Left out: 64-bit values. Six digits are more than a picture shows; times, which need more, are kept apart.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 131_072
"""What a page holds of one table; a run that is longer is thinned to so many groups."""

ROWS_AT_ONCE = 4096
NAN = math.nan
LARGEST = float(np.finfo(np.float32).max)


@final
@dataclass(slots=True)
class Table:
    """Columns of equal length over the iteration and the time of each row; a column may begin late.

    Rows wait as they came and are turned into columns many at a time, which is several times quicker than one by one.
    """

    iterations: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, array[float]] = field(default_factory=dict)
    _waiting: list[Sequence[Any]] = field(default_factory=list)
    _names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.iterations)

    def add(self, iteration: int, time: float, names: Sequence[str], values: Sequence[Any]) -> None:
        """One row more; a column that is not named has a gap there."""
        if names != self._names:
            self.settle()
            self._names = names
        self.iterations.append(iteration)
        self.times.append(time)
        self._waiting.append(values)
        if len(self._waiting) >= ROWS_AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Turn the rows that wait into columns."""
        before = len(self) - len(self._waiting)
        for name, values in zip(self._names, zip(*self._waiting, strict=True), strict=False):
            column = self.columns.setdefault(name, array("f"))
            column.extend([NAN] * (before - len(column)))
            column.extend(_numbers(values))
        self._waiting = []

    def column(self, name: str, first: int = 0) -> NDArray[np.float32]:
        """The values from row `first` on."""
        self.settle()
        known = np.array(self.columns.get(name, array("f")), np.float32)
        return np.concatenate([known, np.full(len(self) - len(known), NAN, np.float32)])[first:]


def _numbers(values: Sequence[Any]) -> array[float]:
    """In one go where all are numbers that fit, as is the rule."""
    try:
        column = array("f", values)
    except (TypeError, OverflowError):
        return array("f", map(number, values))
    return column if math.isfinite(sum(column)) else array("f", map(number, values))


@final
@dataclass(frozen=True, slots=True)
class Thinned:
    """Groups of rows: where each begins, and between what its values lie."""

    iterations: NDArray[np.int64]
    times: NDArray[np.float64]
    lows: dict[str, NDArray[np.float32]]
    highs: dict[str, NDArray[np.float32]]
    rows_each: int


def thin(table: Table, *, most: int = MOST_ROWS, first: int = 0) -> Thinned:
    """The rows from `first` on in at most `most` groups; columns without a single number are left out."""
    table.settle()
    num_rows = len(table) - first
    rows_each = max(1, -(-num_rows // most))
    starts = np.arange(0, num_rows, rows_each)
    lows, highs = {}, {}
    for name in table.columns:
        values = table.column(name, first)
        if not np.isnan(values).all():
            lows[name], highs[name] = extremes(values, starts)
    return Thinned(
        iterations=np.frombuffer(table.iterations, np.int64)[first::rows_each].copy(),
        times=np.frombuffer(table.times, np.float64)[first::rows_each].copy(),
        lows=lows,
        highs=highs,
        rows_each=rows_each,
    )


def extremes(values: NDArray[np.float32], starts: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Lowest and highest value of each group, passing over gaps; a group of gaps is a gap."""
    if len(starts) == len(values):
        return values, values
    return np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def packed(thinned: Thinned) -> dict[str, Any]:
    """As JSON: the highs only where they differ from the lows."""
    columns = {}
    for name, low in thinned.lows.items():
        high = thinned.highs[name]
        columns[name] = {"low": pack(low)} if high is low else {"low": pack(low), "high": pack(high)}
    return {
        "num_rows": len(thinned.iterations),
        "rows_each": thinned.rows_each,
        "iteration": pack(thinned.iterations.astype(np.float64)),
        "time": pack(thinned.times),
        "columns": columns,
    }


def pack(values: NDArray[Any]) -> str:
    """The bytes of an array as base64, little end first."""
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()


def number(value: Any) -> float:
    """A number of the log for drawing: NaN where it is missing or not finite (the log has NaN and Inf as strings)."""
    return float(value) if isinstance(value, float | int) and -LARGEST <= value <= LARGEST else NAN


def outlier(spread: Mapping[str, Any] | None) -> tuple[Any, Any, float]:
    """Median over the ranks, the value farthest from it, and whose it is."""
    worst = spread.get("worst") if spread else None
    if not spread or not worst:
        return NAN, NAN, NAN
    rank, value = worst[0]
    return spread.get("median"), value, rank
