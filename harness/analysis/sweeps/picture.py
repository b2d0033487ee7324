"""The pictures of a sweep: the loss curves of all jobs, and the final loss over one or two of the swept keys.

What cannot be drawn is left out rather than refused: NaN and Inf are gaps, an empty cell of a heat map stays grey.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from harness.analysis.sweeps.ranking import SIGMAS, Basis, Grid, Ranking, Standing, grid, numeric_keys
from harness.analysis.sweeps.render import short_names
from harness.analysis.sweeps.sweep_record import Sweep, as_number
from harness.telemetry.run_picture import smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID_GREY, GREY, EMPTY = "#24292f", "#e6e8eb", "#b8bec6", "#f1f2f4"
COLORS = ("#2563a8", "#e07b1f", "#2e8b57", "#c8322b", "#7b52ab", "#0f9bb0", "#a0522d", "#d1479c")
"""Of the best jobs, in their order; all others are grey."""
SIZE_INCHES, DOTS_PER_INCH = (8.0, 4.7), 150
LONGEST_SERIES = 2000
WIDE_RANGE = 20
"""Values of a key that differ by more than this factor are drawn on a logarithmic axis."""
DARK = 0.55
"""From this part of the colour scale on, white text is easier to read."""

LONGEST_OF_TWO = 58
"""Letters of a name in the legend of which two fit side by side."""
LEAST_SPAN = 1e-6
LOWEST = " \N{BULLET}"

Picture = tuple[str, str]
"""Title, and the file beside the report."""


def draw_all(sweep: Sweep, ranking: Ranking, directory: Path, stem: str) -> list[Picture]:
    """Write every picture there is something to draw for; returns what was drawn."""
    pictures = []
    names = short_names(sweep.keys)
    if any(each.result.losses for each in ranking.standings):
        title = "loss curves of all jobs"
        save(curves(ranking, sweep.name), directory / f"{stem}-curves.png")
        pictures.append((title, f"{stem}-curves.png"))
    if not ranking.ranked:
        return pictures
    keys = numeric_keys(ranking.standings)
    for row_key, column_key in combinations(keys, 2):
        file = f"{stem}-{row_key}-{column_key}.png"
        save(heat_map(grid(ranking.standings, row_key, column_key), ranking), directory / file)
        pictures.append((f"{ranking.basis} loss by {names[row_key]} and {names[column_key]}", file))
    if len(keys) == 1:
        file = f"{stem}-{keys[0]}.png"
        save(one_key(ranking, keys[0]), directory / file)
        pictures.append((f"{ranking.basis} loss by {names[keys[0]]}", file))
    return pictures


def save(figure: Figure, path: Path) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    figure.savefig(scratch, format="png")
    scratch.replace(path)


def blank(size_inches: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=size_inches, dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")


def curves(ranking: Ranking, title: str) -> Figure:
    """Smoothed training loss of every job, held-out loss as points; the best ones in colour, in their order."""
    figure = blank(SIZE_INCHES)
    axes = figure.subplots()
    drawn = [each for each in ranking.standings if each.result.losses]
    for place, each in reversed(list(enumerate(drawn))):
        color = COLORS[place] if place < len(COLORS) else GREY
        draw_curve(axes, each, color, front=len(drawn) - place)
    axes.set_ylim(*view(drawn))
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.set_xlabel("iteration", color=INK)
    axes.set_ylabel(f"loss{' (points: held out)' if ranking.basis is Basis.held_out else ''}", color=INK)
    handles, names = axes.get_legend_handles_labels()
    handles, names = handles[::-1], names[::-1]
    if len(drawn) > len(COLORS):
        handles = [*handles, *axes.plot([], [], color=GREY)]
        names = [*names, f"{len(drawn) - len(COLORS)} others"]
    columns = 2 if max(map(len, names), default=0) <= LONGEST_OF_TWO else 1
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8, labelcolor=INK)
    dress(axes)
    return figure


def short_label(each: Standing) -> str:
    """What was swept, in few words."""
    names = short_names(list(each.result.job.overrides))
    words = [f"{names[key]}={value}" for key, value in each.result.job.overrides.items()]
    return f"{' '.join(words) or each.result.job.name}{'' if each.is_ranked else ' (not finished)'}"


def draw_curve(axes: Axes, each: Standing, color: str, *, front: int) -> None:
    result = each.result
    thin = max(1, len(result.losses) // LONGEST_SERIES)
    losses = smooth([loss if math.isfinite(loss) else math.nan for loss in result.losses])
    axes.plot(
        result.iterations[::thin],
        losses[::thin],
        color=color,
        linewidth=1.2,
        linestyle="-" if each.is_ranked else ":",
        label="_" if color == GREY else short_label(each),
        zorder=2 + front / 1000,
        marker="o" if len(losses) == 1 else None,
    )
    if color != GREY and result.evaluations:
        held_out = [loss if math.isfinite(loss) else math.nan for loss in result.evaluations]
        axes.scatter(
            result.evaluated_at,
            held_out,
            s=16,
            color=color,
            edgecolors="white",
            linewidths=0.6,
            zorder=4 + front / 1000,
        )


def view(drawn: Sequence[Standing]) -> tuple[float, float]:
    """From the lowest loss to what nine tenths of the later rows need: a steep start, or one job that diverged, would
    hide the rest."""
    later = sorted(
        loss for each in drawn for loss in each.result.losses[len(each.result.losses) // 10 :] if math.isfinite(loss)
    ) or [0.0, 1.0]
    bottom, top = later[0], later[max(0, int(len(later) * 0.9) - 1)]
    space = max(top - bottom, 1e-3)
    return bottom - 0.08 * space, top + 0.25 * space


def heat_map(cells: Grid, ranking: Ranking) -> Figure:
    """Mean final loss for each pair of values: a dot marks the lowest of each row, a frame the lowest of all."""
    from matplotlib.patches import Rectangle

    figure = blank((max(4.2, 1.6 + 1.15 * len(cells.columns)), max(3.0, 1.5 + 0.62 * len(cells.rows))))
    axes = figure.subplots()
    axes.set_facecolor(EMPTY)
    values = [value for line in cells.values for value in line if not math.isnan(value)]
    low, high = min(values), max(max(values), min(values) + chance(ranking.ranked))
    image = axes.imshow(cells.values, cmap="viridis_r", aspect="auto", vmin=low, vmax=high)
    for row, line in enumerate(cells.values):
        lowest = min((value for value in line if not math.isnan(value)), default=math.nan)
        for column, value in enumerate(line):
            dark = not math.isnan(value) and (value - low) / (high - low) > DARK
            text = cell_text(value, cells.num_missing[row][column], is_lowest=value == lowest and len(line) > 1)
            color = "white" if dark else INK
            axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color=color)
            if value == low:
                frame = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=COLORS[3], linewidth=2.2)
                axes.add_patch(frame).set_clip_on(False)
    axes.set_xticks(range(len(cells.columns)), cells.columns)
    axes.set_yticks(range(len(cells.rows)), cells.rows)
    axes.set_xlabel(cells.column_key, color=INK)
    axes.set_ylabel(cells.row_key, color=INK)
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    axes.spines[:].set_visible(False)
    rest = len(ranking.standings) > len(cells.rows) * len(cells.columns)
    title = f"{ranking.basis} loss{', mean over the rest' if rest else ''}"
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    bar = figure.colorbar(image, ax=axes, shrink=0.9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, colors=INK)
    return figure


def chance(ranked: Sequence[Standing]) -> float:
    """How far two losses of this sweep may differ by chance: the least that the colours of a heat map span."""
    noises = [each.noise for each in ranked if each.noise is not None]
    return max(SIGMAS * math.sqrt(2) * statistics.median(noises) if noises else 0.0, LEAST_SPAN)


def cell_text(value: float, num_missing: int, *, is_lowest: bool) -> str:
    """A cell's loss, the mark of the lowest in its row, and how many of its jobs are not in it."""
    missing = f"\n{num_missing} missing" if num_missing else ""
    if math.isnan(value):
        return missing.lstrip()
    return f"{value:.4f}{LOWEST if is_lowest else ''}{missing}"


def one_key(ranking: Ranking, key: str) -> Figure:
    """Final loss over the only number that was swept: a point a job, with how much it wavers."""
    figure = blank((6.4, 4.0))
    axes = figure.subplots()
    points = sorted(
        (as_number(each.result.job.overrides[key]) or 0.0, each.final or 0.0, each.noise or 0.0)
        for each in ranking.ranked
    )
    places, losses, noises = zip(*points, strict=True)
    line = "-" if len(set(places)) == len(places) else ""
    axes.errorbar(
        places, losses, yerr=noises, color=COLORS[0], marker="o", markersize=5, linewidth=1.2, capsize=3, linestyle=line
    )
    axes.set_title("bars: how much the last evaluations waver", loc="left", fontsize=9, color=INK)
    if min(places) > 0 and max(places) > WIDE_RANGE * min(places):
        axes.set_xscale("log")
    axes.set_xlabel(key, color=INK)
    axes.set_ylabel(f"{ranking.basis} loss", color=INK)
    dress(axes)
    return figure


def dress(axes: Axes) -> None:
    axes.grid(color=GRID_GREY, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
