"""Shared drawing code for the pictures of an incident: the time axis and its marks.

The incident is shaded. An action is a line with its name above, an injected fault a dashed line with its name below,
and a cross at the top a non-finite value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from harness.analysis.postmortem.evidence import Evidence
from harness.core.events import ActionKind, StepRecord
from harness.telemetry.run_picture import BLUE, GREY, GRID, INK, ORANGE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADE = "#fbe3e1"
WIDE_RANGE = 30
"""Values that differ by more than this factor are drawn on a logarithmic axis."""
MOST_LABELS = 6
SMALL, SMALLER = 8.5, 7.0
Series = list[tuple[int, float]]


def series(records: Sequence[StepRecord], value: Callable[[StepRecord], float | None]) -> Series:
    """Iterations and values of the records that have one; a non-finite value is a gap."""
    points = [(record.iteration, value(record)) for record in records]
    return [(at, number if math.isfinite(number) else math.nan) for at, number in points if number is not None]


def bf16_stretches(records: Sequence[StepRecord]) -> list[tuple[int, int]]:
    """First and last iteration of each stretch that an fp8 run computed in bf16."""
    stretches: list[tuple[int, int]] = []
    was = False
    for record in records:
        if record.in_fp8 is False:
            first = stretches.pop()[0] if was else record.iteration
            stretches.append((first, record.iteration))
        was = record.in_fp8 is False
    return stretches


def with_bf16_gaps(points: Series, evidence: Evidence) -> Series:
    """Points with a gap for every stretch in bf16, where fp8 was not measured."""
    gaps = [(first, math.nan) for first, _ in bf16_stretches(evidence.records)]
    return sorted([*points, *gaps], key=lambda point: point[0]) if points else []


def draw_line(axes: Axes, points: Series, colour: str, label: str, *, dashed: bool = False) -> None:
    """A curve; nothing if there are no points."""
    if any(not math.isnan(value) for _, value in points):
        style, marker = "--" if dashed else "-", "o" if len(points) == 1 else None
        width = 0.9 if dashed else 1.3
        axes.plot(
            *zip(*points, strict=True), color=colour, linewidth=width, linestyle=style, marker=marker, label=label
        )


def draw_dots(axes: Axes, points: Series, colour: str, label: str) -> None:
    if any(not math.isnan(value) for _, value in points):
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, s=16, color=colour, label=label, zorder=5)


def finish_axes(
    axes: Axes,
    evidence: Evidence,
    unit: str,
    *,
    gaps: Sequence[int] = (),
    is_map: bool = False,
    labels: bool = True,
    from_zero: bool = False,
) -> bool:
    """Add the time axis with its marks; returns whether any data is drawn."""
    is_drawn = is_map or bool(axes.lines or axes.collections)
    incident = evidence.incident
    if not is_map:
        axes.axvspan(evidence.onset - 0.5, incident.last + 0.5, color=SHADE, zorder=0)
        _use_log_scale_if_wide(axes)
        if from_zero and axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
    if evidence.records:
        first, last = evidence.records[0].iteration, evidence.records[-1].iteration
        axes.set_xlim(first - 1, max(last, first) + 2)
    _draw_marks(axes, evidence, labels=labels)
    if gaps:
        transform = axes.get_xaxis_transform()
        axes.scatter(
            gaps, [0.96] * len(gaps), marker="x", s=22, color=RED, transform=transform, label="not finite", zorder=6
        )
    style_axes(axes, unit)
    axes.set_xlabel("iteration" if axes.get_subplotspec() is None or _is_last(axes) else "", fontsize=SMALL, color=INK)
    if axes.get_legend_handles_labels()[0] and not is_map:
        beside = (1.0, 1.0)  # a legend over the axes would cover curves
        axes.legend(frameon=False, fontsize=SMALLER, labelcolor=INK, loc="upper left", bbox_to_anchor=beside)
    return is_drawn


def _is_last(axes: Axes) -> bool:
    spec = axes.get_subplotspec()
    return spec is None or spec.is_last_row()


def _use_log_scale_if_wide(axes: Axes) -> None:
    """Use a logarithmic axis if the values span more than `WIDE_RANGE`."""
    drawn = [np.asarray(curve.get_ydata(), dtype=float) for curve in axes.lines]
    values = [value for curve in drawn for value in curve.tolist() if value > 0]
    if values and axes.get_yscale() == "linear" and max(values) > WIDE_RANGE * min(values):
        axes.set_yscale("log")


def _draw_marks(axes: Axes, evidence: Evidence, *, labels: bool) -> None:
    transform = axes.get_xaxis_transform()
    actions = [
        (action.iteration, str(action.kind)) for action in evidence.actions if action.kind is not ActionKind.watch
    ]
    faults = [(fault.iteration, fault.kind) for fault in evidence.faults]
    for marks, colour, style, height in ((actions, ORANGE, "-", 1.01), (faults, INK, "--", 0.02)):
        for at in sorted({at for at, _ in marks}):
            axes.axvline(at, color=colour, linewidth=0.8, linestyle=style, alpha=0.7, zorder=1)
        if labels:
            firsts = {name: at for at, name in reversed(marks)}
            for number, (name, at) in enumerate(sorted(firsts.items(), key=lambda item: item[1])[:MOST_LABELS]):
                up = height + 0.07 * number if height > 0.5 else height + 0.08 * number
                axes.text(at, up, f" {name}", transform=transform, fontsize=SMALLER, color=colour, clip_on=False)


def draw_two(figure: Figure, evidence: Evidence, upper: tuple[Series, str], lower: tuple[Series, str]) -> bool:
    """Two curves, one above the other; returns whether there is any data."""
    both_axes = figure.subplots(2, 1, sharex=True)
    drawn = False
    for axes, (points, name), is_first in zip(both_axes, (upper, lower), (True, False), strict=True):
        draw_line(axes, points, BLUE, name)
        drawn = bool(points) or drawn
        finish_axes(axes, evidence, "", labels=is_first)
    return drawn


def style_axes(axes: Axes, unit: str) -> None:
    """Grid, colours and sizes of every picture."""
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(length=0, labelsize=SMALL - 0.5, colors=INK)
    axes.set_ylabel(unit, fontsize=SMALL, color=INK)
