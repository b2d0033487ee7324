"""Tests of the picture of a run, also of empty, short and non-finite logs."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from harness.core.events import EvalRecord, Event, RunStarted, StepRecord
from harness.telemetry.event_log import EventLog
from harness.telemetry.run_picture import Curves, collect, draw, run_figure, smooth

MakeStep = Callable[..., StepRecord]
RED = (0xC8, 0x32, 0x2B)
ORANGE = (0xE0, 0x7B, 0x1F)
BLUE = (0x25, 0x63, 0xA8)


def picture_of(events: list[Event], directory: Path) -> np.ndarray:
    log = EventLog(directory / "events.jsonl")
    for event in events:
        log.write(event)
    log.close()
    out = directory / "loss.png"
    draw(directory / "events.jsonl", out)
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []
    return (matplotlib.image.imread(out)[:, :, :3] * 255).round().astype(int)


def num_pixels(image: np.ndarray, color: tuple[int, int, int]) -> int:
    return int((np.abs(image - np.array(color)).max(axis=-1) <= 8).sum())


def test_the_picture_shows_loss_evaluations_and_rejected_updates(tmp_path: Path, make_step: MakeStep) -> None:
    events: list[Event] = [make_step(iteration) for iteration in range(30)]
    events[12] = make_step(12, loss=math.nan, grad_norm=math.inf, refused=True)
    events.append(EvalRecord(time=0.0, iteration=29, step=30, loss=5.3, tokens=8))
    image = picture_of(events, tmp_path)
    assert image.shape == (705, 1200, 3)
    assert num_pixels(image, BLUE) > 500
    assert num_pixels(image, ORANGE) > 50
    assert num_pixels(image, RED) > 50


def test_a_falling_loss_is_drawn_falling(tmp_path: Path, make_step: MakeStep) -> None:
    image = picture_of([make_step(iteration) for iteration in range(30)], tmp_path)
    rows, columns = np.nonzero(np.abs(image[:400] - np.array(BLUE)).max(axis=-1) <= 8)
    rows, columns = rows[rows > 100], columns[rows > 100]
    assert rows[columns.argmax()] > rows[columns.argmin()] + 100


def test_without_rejected_updates_nothing_is_red(tmp_path: Path, make_step: MakeStep) -> None:
    assert num_pixels(picture_of([make_step(0), make_step(1)], tmp_path), RED) == 0


@pytest.mark.parametrize("num_steps", [0, 1])
def test_the_shortest_runs_have_a_picture(tmp_path: Path, make_step: MakeStep, num_steps: int) -> None:
    image = picture_of([make_step(iteration) for iteration in range(num_steps)], tmp_path)
    assert image.std() > 5


def test_a_run_of_nothing_but_nan_has_a_picture(tmp_path: Path, make_step: MakeStep) -> None:
    events: list[Event] = [make_step(i, loss=math.nan, grad_norm=math.nan, lr=math.nan) for i in range(5)]
    assert picture_of(events, tmp_path).std() > 5


def test_gradient_norms_of_all_sizes_are_drawn(tmp_path: Path, make_step: MakeStep) -> None:
    events: list[Event] = [make_step(i, grad_norm=10.0 ** (i - 4) if i else 0.0) for i in range(9)]
    assert num_pixels(picture_of(events, tmp_path), BLUE) > 500


@pytest.mark.parametrize("name", ["cost$5_$10", "$a_b^c$", r"a\$b_$", "caf\udce9"])
def test_a_name_is_no_formula(name: str) -> None:
    """Matplotlib fails when it draws a formula that is none."""
    figure = run_figure(Curves(), title=name)
    figure.savefig(io.BytesIO())
    assert figure.get_suptitle().replace(r"\$", "$") == name.replace("\udce9", "?")


def test_a_missing_log_gives_an_empty_picture(tmp_path: Path) -> None:
    draw(tmp_path / "events.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_the_series_of_a_log(tmp_path: Path, make_step: MakeStep, started: RunStarted) -> None:
    resumed = RunStarted(time=0.0, iteration=1, world_size=2, num_steps=9, step=1, resumed_from="step-1")
    empty = make_step(2, loss=0.0, grad_norm=0.0, refused=True)
    picture_of([started, make_step(0, loss=math.inf, refused=True), resumed, make_step(1, loss=3.0), empty], tmp_path)
    curves = collect(tmp_path / "events.jsonl")
    assert curves.iterations == [0, 1, 2]
    assert [math.isnan(loss) for loss in curves.losses] == [True, False, True]
    assert math.isnan(curves.grad_norms[2]), "a batch without a token to predict"
    assert curves.losses[1] == 3.0
    assert (curves.refused, curves.resumed) == ([0, 2], [1])


def test_every_line_of_the_loss_is_in_the_legend_above_the_axes() -> None:
    curves = Curves(
        iterations=[1, 2, 3],
        losses=[3.0, 2.0, 1.0],
        grad_norms=[1.0] * 3,
        rates=[1e-3] * 3,
        refused=[2],
        resumed=[1, 2],
    )
    curves.eval_iterations, curves.eval_losses = [3], [1.5]
    figure = run_figure(curves, title="tiny")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "each step",
        "smoothed",
        "held out",
        "resumed",
        "rejected",
    ]
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1
    assert axes.get_ylabel() == "loss (nats per token)"


def test_smoothing_keeps_a_constant_and_ignores_gaps() -> None:
    assert smooth([2.0, math.nan, 2.0, 2.0]) == [2.0] * 4
    assert smooth([]) == []
    assert math.isnan(smooth([math.nan])[0])
    noisy = [float(index % 2) for index in range(600)]
    assert max(smooth(noisy)[20:]) - min(smooth(noisy)[20:]) < 0.2
