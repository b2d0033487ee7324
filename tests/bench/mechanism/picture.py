"""Draws the result of the mechanism study: loss, gradient norm, second moment and update size around the burst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from harness.core.events import StepRecord
from tests.bench.mechanism.experiment import BURST_AT, NUM_BEFORE, Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID, GREY = "#24292f", "#e6e8eb", "#7d8590"
COLOURS = {None: "#c8322b", 1.0: "#2563a8", 0.5: "#e07b1f"}
SIZE_INCHES, DOTS_PER_INCH = (10.0, 9.0), 130
NUM_SHOWN = 60
"""Steps after the burst."""
WEIGHT_DECAY = 0.1
"""Only this weight decay is drawn; the other one looks the same."""
ROWS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "v_norm": "Adam's second moment",
    "update_ratio": "update / weight",
}
LOGARITHMIC = ("grad_norm", "v_norm")


def draw(burst: Mapping[Cell, Sequence[Sequence[StepRecord]]], out: Path) -> None:
    """Write the picture to `out` (PNG): one column per beta2, one line per clip, thin lines for single seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    betas = sorted({cell.beta2 for cell in burst})
    grid = figure.subplots(len(ROWS), len(betas), sharex=True, sharey="row", squeeze=False)
    for column, beta2 in enumerate(betas):
        for row, name in enumerate(ROWS):
            axes = grid[row][column]
            for cell, seeds in burst.items():
                if cell.beta2 == beta2 and cell.weight_decay == WEIGHT_DECAY:
                    _draw_series(axes, cell, [[getattr(record, name) for record in records] for records in seeds])
            _style_axes(axes, name, is_first=column == 0)
        grid[0][column].set_title(f"beta2 = {beta2:g}", loc="left", fontsize=11, color=INK)
        grid[-1][column].set_xlabel("steps since the burst", color=INK)
    grid[0][0].legend(frameon=False, fontsize=9)
    figure.savefig(out, format="png")


def _draw_series(axes: Axes, cell: Cell, seeds: Sequence[Sequence[float]]) -> None:
    steps = range(-NUM_BEFORE, NUM_SHOWN)
    window = slice(BURST_AT - NUM_BEFORE, BURST_AT + NUM_SHOWN)
    label = "not clipped" if cell.clip_norm is None else f"clip {cell.clip_norm:g}"
    for values in seeds:
        axes.plot(steps, values[window], color=COLOURS[cell.clip_norm], linewidth=0.5, alpha=0.35)
    means = [mean(column) for column in zip(*(values[window] for values in seeds), strict=True)]
    axes.plot(steps, means, color=COLOURS[cell.clip_norm], linewidth=1.6, label=label)


def _style_axes(axes: Axes, name: str, *, is_first: bool) -> None:
    if name in LOGARITHMIC:
        axes.set_yscale("log")
    if is_first:
        axes.set_ylabel(ROWS[name], color=INK)
    axes.axvline(0, color=GREY, linewidth=0.8, linestyle=":")
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
