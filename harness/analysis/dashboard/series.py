"""Stores the numbers of a run as columns, and thins them without losing spikes.

Why: a page or a terminal has a thousand pixels, and a run has a million steps.
How: a column is a float32 array; missing and non-finite values are NaN and draw as gaps. `thin` splits the rows into
equal groups and keeps the lowest and highest value of each, so no extreme is lost. `pack` encodes arrays as
little-endian base64, which a browser reads without parsing numbers.
Left out: float64 columns. Six digits are more than a picture shows; times, which need more, are stored separately.
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
"""Rows of one table on a page; a longer run is thinned to this many groups."""

ROWS_AT_ONCE = 4096
NAN = math.nan
LARGEST = float(np.finfo(np.float32).max)


@final
@dataclass(slots=True)
class ColumnTable:
    """Columns of equal length with the iteration and time of each row; a column may start at a later row.

    Rows are buffered and converted to columns in bulk, which is several times faster than one at a time.
    """

    iterations: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, array[float]] = field(default_factory=dict)
    _buffer: list[Sequence[Any]] = field(default_factory=list)
    _names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.iterations)

    def add(self, iteration: int, time: float, names: Sequence[str], values: Sequence[Any]) -> None:
        """Append a row; columns not in `names` have a gap there."""
        if names != self._names:
            self.flush()
            self._names = names
        self.iterations.append(iteration)
        self.times.append(time)
        self._buffer.append(values)
        if len(self._buffer) >= ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Convert buffered rows to columns."""
        before = len(self) - len(self._buffer)
        for name, values in zip(self._names, zip(*self._buffer, strict=True), strict=False):
            column = self.columns.setdefault(name, array("f"))
            column.extend([NAN] * (before - len(column)))
            column.extend(_to_floats(values))
        self._buffer = []

    def column(self, name: str, first: int = 0) -> NDArray[np.float32]:
        """The values from row `first` on."""
        self.flush()
        known = np.array(self.columns.get(name, array("f")), np.float32)
        return np.concatenate([known, np.full(len(self) - len(known), NAN, np.float32)])[first:]


def _to_floats(values: Sequence[Any]) -> array[float]:
    """Values as float32; converted in bulk if all are finite numbers, which is the usual case."""
    try:
        column = array("f", values)
    except (TypeError, OverflowError):
        return array("f", map(drawable_number, values))
    return column if math.isfinite(sum(column)) else array("f", map(drawable_number, values))


@final
@dataclass(frozen=True, slots=True)
class ThinnedTable:
    """Groups of rows: the first iteration and time of each, and its lowest and highest values."""

    iterations: NDArray[np.int64]
    times: NDArray[np.float64]
    lows: dict[str, NDArray[np.float32]]
    highs: dict[str, NDArray[np.float32]]
    rows_each: int


def thin(table: ColumnTable, *, most: int = MOST_ROWS, first: int = 0) -> ThinnedTable:
    """The rows from `first` on in at most `most` groups; columns with no value are left out."""
    table.flush()
    num_rows = len(table) - first
    rows_each = max(1, -(-num_rows // most))
    starts = np.arange(0, num_rows, rows_each)
    lows, highs = {}, {}
    for name in table.columns:
        values = table.column(name, first)
        if not np.isnan(values).all():
            lows[name], highs[name] = extremes(values, starts)
    return ThinnedTable(
        iterations=np.frombuffer(table.iterations, np.int64)[first::rows_each].copy(),
        times=np.frombuffer(table.times, np.float64)[first::rows_each].copy(),
        lows=lows,
        highs=highs,
        rows_each=rows_each,
    )


def extremes(values: NDArray[np.float32], starts: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Lowest and highest value of each group, ignoring gaps; a group of only gaps is a gap."""
    if len(starts) == len(values):
        return values, values
    return np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def pack_table(thinned: ThinnedTable) -> dict[str, Any]:
    """The table as JSON-ready data; highs only if they differ from the lows."""
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
    """The bytes of an array, little-endian, as base64."""
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()


def drawable_number(value: Any) -> float:
    """A value of the log for drawing; NaN if it is missing or not finite (the log has NaN and Inf as strings)."""
    return float(value) if isinstance(value, float | int) and -LARGEST <= value <= LARGEST else NAN


def outlier(spread: Mapping[str, Any] | None) -> tuple[Any, Any, float]:
    """Median over the ranks, the value farthest from it, and the rank of that value."""
    worst = spread.get("worst") if spread else None
    if not spread or not worst:
        return NAN, NAN, NAN
    rank, value = worst[0]
    return spread.get("median"), value, rank
