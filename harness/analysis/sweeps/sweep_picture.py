"""Draws the pictures of a sweep: loss curves of all jobs, and the final loss over one or two swept keys.

NaN and Inf are gaps; an empty cell of a heat map stays grey.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from harness.analysis.sweeps.ranking import SIGMAS, Basis, Grid, JobScore, Ranking, make_grid, numeric_keys
from harness.analysis.sweeps.sweep_record import Sweep, as_number
from harness.analysis.sweeps.sweep_text import short_names
from harness.telemetry.run_picture import plain_text, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID_GREY, GREY, EMPTY = "#24292f", "#e6e8eb", "#b8bec6", "#f1f2f4"
COLORS = ("#2563a8", "#e07b1f", "#2e8b57", "#c8322b", "#7b52ab", "#0f9bb0", "#a0522d", "#d1479c")
"""Colours of the best jobs, in order; all others are grey."""
SIZE_INCHES, DOTS_PER_INCH = (8.0, 4.7), 150
LONGEST_SERIES = 2000
WIDE_RANGE = 20
"""Values of a key that differ by more than this factor are drawn on a logarithmic axis."""
DARK = 0.55
"""Above this fraction of the colour scale, text is white."""

LONGEST_OF_TWO = 58
"""Longest legend entry, in characters, for a legend with two columns."""
LEAST_SPAN = 1e-6
LOWEST = " \N{BULLET}"
FRAME_KEY, DOT_KEY, EMPTY_KEY = "lowest of all", "lowest of its row", "no finished job"
"""Legend of a heat map."""

Picture = tuple[str, str]
"""Title, and file name in the directory of the report."""


def draw_all(sweep: Sweep, ranking: Ranking, directory: Path, stem: str) -> list[Picture]:
    """Write every picture that has data; returns what was drawn."""
    pictures = []
    names = short_names(sweep.keys)
    if any(score.result.losses for score in ranking.scores):
        title = "loss curves of all jobs"
        save(curves(ranking, sweep.name), directory / f"{stem}-curves.png")
        pictures.append((title, f"{stem}-curves.png"))
    if not ranking.ranked:
        return pictures
    keys = numeric_keys(ranking.scores)
    for row_key, column_key in combinations(keys, 2):
        file = f"{stem}-{row_key}-{column_key}.png"
        save(heat_map(make_grid(ranking.scores, row_key, column_key), ranking), directory / file)
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
    """Smoothed training loss of every job, held-out losses as points; the best jobs in colour."""
    figure = blank(SIZE_INCHES)
    axes = figure.subplots()
    drawn = [score for score in ranking.scores if score.result.losses]
    for place, score in reversed(list(enumerate(drawn))):
        color = COLORS[place] if place < len(COLORS) else GREY
        draw_curve(axes, score, color, front=len(drawn) - place)
    axes.set_ylim(*view(drawn))
    axes.set_title(plain_text(title), loc="left", fontsize=12, fontweight="bold", color=INK)
    lines = "lines: moving average of the training loss"
    points = "; points: held-out loss" if ranking.basis is Basis.held_out else ""
    unfinished = "; dotted: not finished" if any(not score.is_ranked for score in drawn) else ""
    axes.set_title(f"{lines}{points}{unfinished}", loc="right", fontsize=8, color=INK)
    axes.set_xlabel("iteration", color=INK)
    axes.set_ylabel("loss (nats per token)", color=INK)
    handles, names = axes.get_legend_handles_labels()
    handles, names = handles[::-1], names[::-1]
    if len(drawn) > len(COLORS):
        handles = [*handles, *axes.plot([], [], color=GREY)]
        names = [*names, f"{len(drawn) - len(COLORS)} others"]
    columns = 2 if max(map(len, names), default=0) <= LONGEST_OF_TWO else 1
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8, labelcolor=INK)
    style_sweep_axes(axes)
    return figure


def short_label(score: JobScore) -> str:
    """The swept values of a job, with short key names."""
    names = short_names(list(score.result.job.overrides))
    overrides = [f"{names[key]}={value}" for key, value in score.result.job.overrides.items()]
    return f"{' '.join(overrides) or score.result.job.name}{'' if score.is_ranked else ' (not finished)'}"


def draw_curve(axes: Axes, score: JobScore, color: str, *, front: int) -> None:
    result = score.result
    thin = max(1, len(result.losses) // LONGEST_SERIES)
    losses = smooth([loss if math.isfinite(loss) else math.nan for loss in result.losses])
    axes.plot(
        result.iterations[::thin],
        losses[::thin],
        color=color,
        linewidth=1.2,
        linestyle="-" if score.is_ranked else ":",
        label="_" if color == GREY else plain_text(short_label(score)),
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


def view(drawn: Sequence[JobScore]) -> tuple[float, float]:
    """Range of the y axis: from the lowest loss to the 90th percentile after the first tenth of each job, so that a
    steep start or a diverged job does not hide the rest."""
    later = sorted(
        loss for score in drawn for loss in score.result.losses[len(score.result.losses) // 10 :] if math.isfinite(loss)
    ) or [0.0, 1.0]
    bottom, top = later[0], later[max(0, int(len(later) * 0.9) - 1)]
    space = max(top - bottom, 1e-3)
    return bottom - 0.08 * space, top + 0.25 * space


def heat_map(cells: Grid, ranking: Ranking) -> Figure:
    """Mean final loss for each pair of values; a dot marks the lowest of each row, a frame the lowest of all."""
    from matplotlib.patches import Rectangle

    figure = blank((max(4.2, 1.6 + 1.15 * len(cells.columns)), max(3.0, 1.5 + 0.62 * len(cells.rows))))
    axes = figure.subplots()
    axes.set_facecolor(EMPTY)
    values = [value for line in cells.values for value in line if not math.isnan(value)]
    low, high = min(values), max(max(values), min(values) + typical_noise(ranking.ranked))
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
    axes.set_xlabel(plain_text(cells.column_key), color=INK)
    axes.set_ylabel(plain_text(cells.row_key), color=INK)
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    axes.spines[:].set_visible(False)
    rest = len(ranking.scores) > len(cells.rows) * len(cells.columns)
    title = f"{ranking.basis} loss{', mean over the other keys' if rest else ''}"
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    bar = figure.colorbar(image, ax=axes, shrink=0.9)
    bar.set_label(f"{ranking.basis} loss (nats per token)", color=INK, fontsize=8.5)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, colors=INK)
    add_mark_legend(figure, cells)
    return figure


def add_mark_legend(figure: Figure, cells: Grid) -> None:
    """Say below a heat map what frame, dot and empty cell mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    frame = Rectangle((0, 0), 1, 1, fill=False, edgecolor=COLORS[3], linewidth=1.6)
    dot = Line2D([], [], linestyle="", marker="o", markersize=3.5, color=INK)
    keys = {FRAME_KEY: frame, **({DOT_KEY: dot} if len(cells.columns) > 1 else {})}
    keys |= {EMPTY_KEY: Rectangle((0, 0), 1, 1, facecolor=EMPTY, edgecolor=GREY)} if has_empty_cell(cells) else {}
    figure.legend(
        keys.values(),
        keys.keys(),
        loc="outside lower left",
        ncols=len(keys),
        handlelength=1.2,
        columnspacing=1.4,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )


def has_empty_cell(cells: Grid) -> bool:
    return any(math.isnan(value) for line in cells.values for value in line)


def typical_noise(ranked: Sequence[JobScore]) -> float:
    """Difference of two losses that noise explains; the colours of a heat map span at least this."""
    noises = [score.noise for score in ranked if score.noise is not None]
    return max(SIGMAS * math.sqrt(2) * statistics.median(noises) if noises else 0.0, LEAST_SPAN)


def cell_text(value: float, num_missing: int, *, is_lowest: bool) -> str:
    """A cell's loss, the mark of the lowest in its row, and the number of its jobs that are missing."""
    missing = f"\n{num_missing} missing" if num_missing else ""
    if math.isnan(value):
        return missing.lstrip()
    return f"{value:.4f}{LOWEST if is_lowest else ''}{missing}"


def one_key(ranking: Ranking, key: str) -> Figure:
    """Final loss over the only numeric key that was swept: one point for each job, with its noise."""
    figure = blank((6.4, 4.0))
    axes = figure.subplots()
    points = sorted(
        (as_number(score.result.job.overrides[key]) or 0.0, score.final or 0.0, score.noise or 0.0)
        for score in ranking.ranked
    )
    places, losses, noises = zip(*points, strict=True)
    line = "-" if len(set(places)) == len(places) else ""
    axes.errorbar(
        places, losses, yerr=noises, color=COLORS[0], marker="o", markersize=5, linewidth=1.2, capsize=3, linestyle=line
    )
    title = f"{ranking.basis} loss; a bar is the standard deviation of the last evaluations"
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    if min(places) > 0 and max(places) > WIDE_RANGE * min(places):
        axes.set_xscale("log")
    axes.set_xlabel(plain_text(key), color=INK)
    axes.set_ylabel(f"{ranking.basis} loss (nats per token)", color=INK)
    style_sweep_axes(axes)
    return figure


def style_sweep_axes(axes: Axes) -> None:
    axes.grid(color=GRID_GREY, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
