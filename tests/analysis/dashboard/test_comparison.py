"""The data of the page that compares runs."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.analysis.dashboard.comparison import (
    MOST_COMPARED_ROWS,
    comparison_data,
    config_differences,
    distinct_names,
)
from harness.analysis.dashboard.page import render_comparison
from harness.analysis.dashboard.story import Story
from harness.core.rundir import RunDir
from tests.analysis.dashboard.logs import BEGUN, long_run, write_load, write_setup

EVIL = "<script>alert(1)</script>"


def opened(directory: Path) -> tuple[RunDir, Story]:
    run, story = RunDir(directory), Story()
    story.read_more(run)
    return run, story


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("runs")
    long_run(root / "first", 2400)
    long_run(root / "second", 400, seed=1)
    write_setup(root / "first")
    write_setup(root / "second", num_parameters=31_904, optim={"lr": 1e-3, "beta2": 0.95})
    write_load(root / "second", 40, last=400)
    RunDir(root / "first").dashboard.touch()
    runs = [opened(root / name) for name in ("first", "second")]
    return comparison_data(runs, out=root / "compare.html", now_s=BEGUN)


def row(data: dict[str, Any], label: str) -> dict[str, Any]:
    return next(row for row in data["numbers"] if row["label"] == label)


def column(table: dict[str, Any], name: str, side: str = "low") -> list[float]:
    return [float(x) for x in np.frombuffer(base64.b64decode(table["columns"][name][side]), "<f4")]


def test_final_numbers_are_side_by_side(data: dict[str, Any]) -> None:
    assert row(data, "step")["texts"] == ["2,400 of 2,400", "400 of 400"]
    assert row(data, "parameters")["texts"] == ["124M", "31.9k"]
    assert row(data, "commit")["texts"] == ["0123456789ab with changes"] * 2
    assert row(data, "device")["texts"][0] == "8 x NVIDIA H100 80GB HBM3 (85 GB)"
    losses = row(data, "held-out loss")
    assert losses["better"] == "lower"
    assert losses["texts"] == [f"{loss:.4f}" for loss in losses["numbers"]]
    assert losses["numbers"][0] < losses["numbers"][1]
    assert row(data, "lowest held-out loss")["numbers"][1] <= losses["numbers"][1]
    assert row(data, "rejected updates")["numbers"] == [1.0, 1.0]
    assert row(data, "goodput")["better"] == "higher"
    assert "cost" not in [row["label"] for row in data["numbers"]]


def test_configuration_differences(data: dict[str, Any]) -> None:
    assert data["differences"] == [{"key": "optim.lr", "values": ["0.0003", "0.001"]}]
    differences = config_differences([{"a": {"b": None, "c": 1}, "run": {"name": "x"}}, {"a": {"c": 1}, "d": [True]}])
    assert differences == [
        {"key": "a.b", "values": ["null", "not set"]},
        {"key": "d", "values": ["not set", "[true]"]},
    ]


def test_curves_are_thinned_and_keep_their_extremes(data: dict[str, Any]) -> None:
    first, second = data["runs"]
    steps = first["tables"]["steps"]
    assert steps["num_rows"] == 800 <= MOST_COMPARED_ROWS
    assert max(column(steps, "grad_norm", "high")) > 20
    assert "rank_grad_worst" not in steps["columns"]
    assert column(second["tables"]["steps"], "tokens")[-1] == 400 * 1024
    assert second["tables"]["system"]["num_rows"] == 40
    assert column(second["tables"]["system"], "gpu_power_mean")[0] == 635.0
    assert first["tables"]["system"]["num_rows"] == 0


def test_links_are_relative_to_the_page(data: dict[str, Any]) -> None:
    assert [(run["path"], run["href"]) for run in data["runs"]] == [
        ("first", "first/dashboard.html"),
        ("second", ""),
    ]


def test_names_tell_runs_apart() -> None:
    assert distinct_names([Path("/r/a"), Path("/r/b")]) == ["a", "b"]
    assert distinct_names([Path("/r/x/a"), Path("/r/y/a"), Path("/r/y/b")]) == ["x/a", "y/a", "y/b"]


def test_text_from_files_cannot_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_setup(long_run(tmp_path / name, 20), optim={EVIL: name})
    data = comparison_data([opened(tmp_path / name) for name in "ab"], out=tmp_path / "c.html", now_s=BEGUN, title=EVIL)
    text = render_comparison(data)
    assert data["differences"][0]["key"] == f"optim.{EVIL}"
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;" in text
