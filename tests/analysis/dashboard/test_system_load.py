"""Samples of all machines as one table of a page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from harness.analysis.dashboard import system_load
from harness.analysis.dashboard.page_data import facts_of, page_data, revision_of
from harness.analysis.dashboard.story import Story
from harness.analysis.dashboard.system_load import SystemLoad, load_values
from harness.analysis.dashboard.terminal_view import frame
from harness.core.events import SystemSampled
from harness.core.rundir import RunDir
from tests.analysis.dashboard.logs import BEGUN, long_run, write_load


def sample(**facts: object) -> SystemSampled:
    values = {"time": BEGUN, "iteration": 1, "rank": 0, "host": "a", "every_s": 10.0, "cpu_load": 0.5}
    return SystemSampled(**(values | facts))  # type: ignore[arg-type]


def test_values_of_one_interval() -> None:
    """Mean and extreme over all GPUs and machines; what no machine measured is a gap."""
    names = system_load.COLUMNS
    first = sample(gpu_utilization=[0.9, None], gpu_memory_bytes=[10, 30], host_memory_bytes=7, cpu_load=0.2)
    second = sample(gpu_utilization=[0.5], gpu_memory_bytes=[50], gpu_temperature_c=[60.0, 80.0], host_memory_bytes=9)
    values = dict(zip(names, load_values([first, second]), strict=True))
    assert values["gpu_utilization_mean"] == pytest.approx(0.7)
    assert values["gpu_utilization_least"] == 0.5
    assert (values["gpu_memory_mean"], values["gpu_memory_most"]) == (30, 50)
    assert (values["gpu_temperature_mean"], values["gpu_temperature_most"]) == (70, 80)
    assert values["host_memory_most"] == 9
    assert (values["cpu_load_mean"], values["cpu_load_most"]) == (0.35, 0.5)
    assert math.isnan(values["gpu_power_mean"])
    assert math.isnan(values["process_memory_most"])


def test_machines_share_rows_and_iterations_never_fall(tmp_path: Path) -> None:
    run, load = RunDir(tmp_path), SystemLoad()
    assert load.read_more(run) is False
    write_load(tmp_path, 20, last=400)
    write_load(tmp_path, 20, last=400, rank=8)
    assert load.read_more(run) is True
    assert load.read_more(run) is False
    assert len(load.table) == 20
    assert list(load.table.iterations) == sorted(load.table.iterations)
    assert load.note == ""
    write_load(tmp_path, 21, last=400)
    assert load.read_more(run) is True


def test_of_many_machines_some_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_load, "MOST_MACHINES", 2)
    for rank in range(0, 40, 8):
        write_load(tmp_path, 3, last=30, rank=rank)
    load = SystemLoad()
    load.read_more(RunDir(tmp_path))
    assert load.note == "2 of 5 machines"
    assert [name for name, *_ in load.stamp] == ["rank-00000.jsonl", "rank-00016.jsonl"]


def test_the_page_and_the_terminal_show_the_load(tmp_path: Path) -> None:
    run, story = RunDir(long_run(tmp_path, 60)), Story()
    story.read_more(run)
    before = revision_of(run, story, now_s=BEGUN)
    assert page_data(run, story, now_s=BEGUN)["system"]["num_rows"] == 0
    write_load(tmp_path, 10, last=60)
    assert story.read_more(run) is True
    assert revision_of(run, story, now_s=BEGUN) != before
    assert page_data(run, story, now_s=BEGUN)["system"]["num_rows"] == 10
    assert facts_of(run, story, now_s=BEGUN)["machines"] == ""
    assert not any("CPU load" in line.text for line in frame("a", story, [], now_s=BEGUN, width=130)), "it has ended"
    story.ended = None
    texts = [line.text for line in frame("a", story, [], now_s=BEGUN, width=130)]
    gpus, host = "GPU 94%  GPU memory 63.5 GB  635 W  67 °C", "host memory 201 GB of 1 TB  CPU load 58% of the cores"
    assert f"{gpus}  {host}" in texts
