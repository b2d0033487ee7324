"""Draws `loss.png` from the event log: loss above, gradient norm and learning rate below.

NaN and Inf are gaps, rejected updates are marks on the axis, an empty log gives empty axes. The x axis is the
iteration, which never decreases; dotted lines are resumes. The legend is above the axes, where no line runs through it.
Time and memory are bounded: from a log with more than `BUDGET_BYTES` of ordinary steps a sample is drawn
(`harness.telemetry.log_index`). It has every evaluation, resume and rejected update, and the extremes of each block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.event_json import parse
from harness.core.events import EvalRecord, Event, RunStarted, StepRecord
from harness.telemetry.log_index import PLAIN, sample_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#24292f", "#e6e8eb"
BLUE, LIGHT_BLUE, ORANGE, RED, GREY = "#2563a8", "#a9c8e8", "#e07b1f", "#c8322b", "#7d8590"
SIZE_INCHES, DOTS_PER_INCH = (8.0, 4.7), 150
LONGEST_SERIES = 5000
BUDGET_BYTES = 32 << 20
"""Approximate limit of the ordinary steps that are read for a picture."""
WIDE_RANGE = 30
"""Gradient norms that differ by more than this factor are drawn on a logarithmic axis."""


@dataclass(slots=True)
class Curves:
    """The series of a run. Values that are not finite are NaN, which is drawn as a gap."""

    iterations: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    eval_iterations: list[int] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)


def draw(events: Path, out: Path) -> None:
    """Draw the log `events` and write the picture to `out` (PNG)."""
    figure = run_figure(collect(events), title=out.resolve().parent.name)
    scratch = out.with_name(f".{out.name}.tmp")
    figure.savefig(scratch, format="png")
    scratch.replace(out)


def run_figure(curves: Curves, *, title: str) -> Figure:
    """The two panels of a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.9, 1])
    figure.suptitle(plain_text(title), x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    _draw_loss(top, curves)
    _draw_gradient(bottom, curves)
    return figure


def plain_text(text: str) -> str:
    """A name for matplotlib, which reads what is between two dollars as a formula and fails if it is none."""
    return text.encode(errors="replace").decode().replace("$", r"\$")


def collect(events: Path) -> Curves:
    """Read the series of a log."""
    curves = Curves()
    for line in sample_lines(events, budget_bytes=BUDGET_BYTES).lines:
        if plain := PLAIN.match(line):  # ten times faster than parsing the JSON
            curves.iterations.append(int(plain[1]))
            curves.losses.append(_drawable(float(plain[3])))
            curves.grad_norms.append(_drawable(float(plain[4])))
            curves.rates.append(_drawable(float(plain[5])))
            continue
        for event in parse(line.decode(errors="replace")):
            _add(curves, event)
    return curves


def _add(curves: Curves, event: Event) -> None:
    match event:
        case StepRecord():
            curves.iterations.append(event.iteration)
            curves.losses.append(math.nan if event.is_empty else _drawable(event.loss))
            curves.grad_norms.append(math.nan if event.is_empty else _drawable(event.grad_norm))
            curves.rates.append(_drawable(event.lr))
            if event.refused:
                curves.refused.append(event.iteration)
        case EvalRecord():
            curves.eval_iterations.append(event.iteration)
            curves.eval_losses.append(_drawable(event.loss))
        case RunStarted() if event.resumed_from is not None:
            curves.resumed.append(event.iteration)
        case _:
            pass


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving mean over about a thirtieth of the run, over less near the start; NaN values are ignored."""
    reach = max(1, len(values) // 60)
    totals = list(accumulate((0.0 if math.isnan(value) else value for value in values), initial=0.0))
    counts = list(accumulate((not math.isnan(value) for value in values), initial=0))
    means = []
    for index in range(len(values)):
        near = min(reach, index)
        first, last = index - near, min(len(values), index + near + 1)
        count = counts[last] - counts[first]
        means.append((totals[last] - totals[first]) / count if count else math.nan)
    return means


def _draw_loss(axes: Axes, curves: Curves) -> None:
    x = _thin(curves.iterations)
    marker = "o" if len(x) == 1 else None
    axes.plot(x, _thin(curves.losses), color=LIGHT_BLUE, linewidth=0.9, marker=marker, label="each step")
    axes.plot(x, _thin(smooth(curves.losses)), color=BLUE, linewidth=1.8, label="smoothed")
    if curves.eval_losses:
        axes.plot(
            curves.eval_iterations,
            curves.eval_losses,
            color=ORANGE,
            linewidth=1.0,
            marker="o",
            markersize=5.0,
            markeredgecolor="white",
            label="held out",
            zorder=4,
        )
    axes.set_ylabel("loss (nats per token)", color=INK)
    _style_axes(axes, curves)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.2,
        ncols=5,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
    )


def _draw_gradient(axes: Axes, curves: Curves) -> None:
    x = _thin(curves.iterations)
    marker = "o" if len(x) == 1 else None
    axes.plot(x, _thin(curves.grad_norms), color=BLUE, linewidth=0.9, marker=marker)
    norms = [norm for norm in curves.grad_norms if norm > 0]
    if norms and max(norms) > WIDE_RANGE * min(norms):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("gradient norm", color=BLUE)
    axes.set_xlabel("iteration", color=INK)
    _style_axes(axes, curves)
    right = axes.twinx()
    right.plot(x, _thin(curves.rates), color=GREY, linewidth=1.4, linestyle="--")
    right.set_ylabel("learning rate", color=GREY)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter("{x:g}")
    right.locator_params(axis="y", nbins=4)
    right.tick_params(length=0, labelsize=8.5, colors=GREY)
    right.spines[:].set_visible(False)


def _style_axes(axes: Axes, curves: Curves) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    for index, iteration in enumerate(curves.resumed):
        label = "resumed" if index == 0 else None
        axes.axvline(iteration, color=GREY, linewidth=1.0, linestyle=":", label=label)
    if curves.refused:
        transform = axes.get_xaxis_transform()
        at_the_bottom = [0.0] * len(curves.refused)
        axes.scatter(
            curves.refused,
            at_the_bottom,
            marker="^",
            s=28,
            color=RED,
            transform=transform,
            clip_on=False,
            zorder=5,
            label="rejected",
        )


def _drawable(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _thin(values: Sequence[float]) -> Sequence[float]:
    """At most a few thousand evenly spaced values: more than the picture has pixel columns."""
    return values[:: max(1, len(values) // LONGEST_SERIES)]
