"""Draws the loss of a log with its incidents marked.

The log is reduced while it is read to at most `MOST_COLUMNS` columns, each with the lowest and the highest loss of its
rows, so that no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.telemetry.run_picture import plain_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_COLUMNS = 4096
SIZE_INCHES, DOTS_PER_INCH = (9.0, 4.2), 150
INK, GRID, BLUE, ORANGE, RED = "#24292f", "#e6e8eb", "#2563a8", "#e07b1f", "#c8322b"
LARGEST_STEP = 2**63 - 1
"""Matplotlib draws no larger integers."""
MARGIN = 0.08
WHOLE_WITHIN = 4.0
"""The first losses are in the picture if the axis then is at most this many times as high as without them."""


class MarkedIncident(Protocol):
    """The fields of an incident that the picture uses."""

    @property
    def kind(self) -> str: ...

    @property
    def severity(self) -> str: ...

    @property
    def onset_step(self) -> int: ...

    @property
    def end_step(self) -> int | None: ...


@dataclass(slots=True)
class Trace:
    """The loss curve of a log in a bounded number of columns."""

    columns: list[tuple[int, float, float]] = field(default_factory=list)
    """First step, lowest and highest finite loss; NaN if none was finite."""
    rows_each: int = 1
    filled: int = 0
    """Rows in the last column."""
    num_rows: int = 0
    first_step: int = 0
    last_step: int = 0
    largest_step: int = 0
    """Largest absolute value."""

    def add(self, step: int, loss: float) -> None:
        """Add one row."""
        if self.num_rows == 0:
            self.first_step = step
        self.num_rows += 1
        self.last_step = step
        self.largest_step = max(self.largest_step, abs(step))
        value = loss if math.isfinite(loss) else math.nan
        if self.columns and self.filled < self.rows_each:
            self.filled += 1
            last = self.columns[-1]
            if not last[1] <= value <= last[2]:
                self.columns[-1] = _merge(last, (step, value, value))
            return
        self.columns.append((step, value, value))
        self.filled = 1
        if len(self.columns) >= MOST_COLUMNS:
            pairs = zip(self.columns[::2], self.columns[1::2], strict=True)
            self.columns = [_merge(first, second) for first, second in pairs]
            self.rows_each *= 2
            self.filled = self.rows_each


def draw(trace: Trace, incidents: Sequence[MarkedIncident], out: Path, *, title: str) -> None:
    """Write the picture to `out` (PNG)."""
    judged_figure(trace, incidents, title=title).savefig(out, format="png")


def judged_figure(trace: Trace, incidents: Sequence[MarkedIncident], *, title: str) -> Figure:
    """The loss of a log with its incidents."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    axes = figure.subplots()
    columns = _with_gaps(trace.columns)
    steps = [step for step, _, _ in columns]
    lows, highs = [low for _, low, _ in columns], [high for _, _, high in columns]
    axes.fill_between(steps, lows, highs, color=BLUE, linewidth=0.8)
    axes.plot(steps, highs, color=BLUE, linewidth=0.8)
    for incident in incidents:
        end = trace.last_step if incident.end_step is None else incident.end_step
        color = RED if incident.severity == "high" else ORANGE
        axes.axvspan(incident.onset_step, max(end, incident.onset_step + 1), color=color, alpha=0.25, linewidth=0)
        axes.annotate(
            str(incident.kind),
            (incident.onset_step, 1.0),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="right",
            fontsize=7,
            color=color,
        )
    bottom, top = _view(lows, highs)
    axes.set_ylim(bottom, top)
    highest = max((high for high in highs if high == high), default=top)
    cut = f" (the first losses, up to {highest:.4g}, are above the picture)" if highest > top else ""
    heading = f"{plain_text(title)}: {len(incidents)} incidents"
    axes.set_title(heading, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(f"step{cut}", color=INK)
    axes.set_ylabel("loss", color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _with_gaps(columns: Sequence[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """The columns with a gap wherever the steps go back, as after a rollback: no line leads back through the curve."""
    found: list[tuple[int, float, float]] = []
    for column in columns:
        if found and column[0] < found[-1][0]:
            found.append((column[0], math.nan, math.nan))
        found.append(column)
    return found


def _merge(first: tuple[int, float, float], second: tuple[int, float, float]) -> tuple[int, float, float]:
    lows = [low for low in (first[1], second[1]) if low == low]
    highs = [high for high in (first[2], second[2]) if high == high]
    return first[0], min(lows, default=math.nan), max(highs, default=math.nan)


def _view(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """Range of the y axis: all losses; without those of the first tenth, where the loss falls steeply, if they would
    take most of it."""
    later = max((high for high in highs[len(highs) // 10 :] if high == high), default=1.0)
    bottom = min((low for low in lows if low == low), default=0.0)
    whole = max((high for high in highs if high == high), default=later)
    top = whole if whole - bottom <= WHOLE_WITHIN * (later - bottom) else later
    margin = MARGIN * max(top - bottom, 1e-3)
    return bottom - margin, top + margin
