"""The index: one row for each run, sweeps grouped, names escaped."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from harness.analysis.dashboard.index import (
    RunRow,
    find_runs,
    group_links,
    line_of,
    render,
    run_row,
    sparkline_svg,
    table_of,
)
from harness.analysis.dashboard.story import Story
from tests.analysis.dashboard.logs import BEGUN, long_run, record, write

ROW = RunRow(
    name="first",
    group=".",
    is_sweep=False,
    state="done",
    step=1200,
    num_steps=1200,
    loss=2.5,
    eval_loss=math.nan,
    num_incidents=2,
    incident_steps=17,
    goodput=0.985,
    lost_to="hung rank 1.2%",
    lost_to_recovery=0.0123,
    tokens_per_s=61534.4,
    started="2026-01-02 03:04",
    losses=[4.0, 3.0, 2.0],
    has_page=True,
)


def test_one_row() -> None:
    assert line_of(ROW) == (
        '<tr><td data-value=""><input type="checkbox" class="pick" aria-label="select first" data-path="first"></td>'
        '<td data-value="first"><a href="first/dashboard.html">first</a></td>'
        '<td data-value="done"><span class="state-done">done</span></td>'
        '<td class=n data-value="1200">1,200 of 1,200</td><td class=n data-value="2.5">2.5000</td>'
        '<td data-value=""><svg class="spark" width="120" height="28" viewBox="0 0 120 28" role="img" '
        'aria-label="loss from 4 to 2"><polyline points="0.0,1.0 60.0,14.0 120.0,27.0"/></svg></td>'
        '<td class=n data-value="nan"></td><td class=n data-value="2">2 (17 steps)</td>'
        '<td class=n data-value="0.985"><span title="lost to hung rank 1.2%">98.5%</span></td>'
        '<td class=n data-value="0.0123">1.23%</td><td class=n data-value="61534.4">61,534</td>'
        '<td data-value="2026-01-02 03:04">2026-01-02 03:04</td></tr>'
    )


def test_runs_are_found_and_grouped(tmp_path: Path) -> None:
    long_run(tmp_path / "alone", 60)
    for name in ("lr=1", "lr=2"):
        long_run(tmp_path / "sweep" / name, 20)
    (tmp_path / "sweep" / "sweep.yaml").touch()
    write(tmp_path / "alone" / "checkpoints" / "deep" / "events.jsonl", [record(1, time=BEGUN)])
    rows = []
    for run in find_runs(tmp_path):
        story = Story()
        story.read_more(run)
        rows.append(run_row(run, story, root=tmp_path, now_s=BEGUN))
    assert [(row.name, row.group, row.is_sweep) for row in rows] == [
        ("alone", ".", False),
        ("sweep/lr=1", "sweep", True),
        ("sweep/lr=2", "sweep", True),
    ]
    assert (rows[0].num_incidents, rows[0].step, rows[0].state, rows[0].started) == (3, 60, "done", "2025-06-15 15:06")
    text = render(rows, title="runs")
    assert text.index("<h2>Runs<span") < text.index("<h2>Sweep sweep<span")
    assert 'data-path="lr=1"' in text
    assert text.count('<th aria-sort="ascending">') == 2
    assert "3 runs" in text
    assert "dashboard.html" not in text


def test_a_link_to_a_run_is_a_run_that_is_shown_once(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for path in (runs / "a", runs / "z", tmp_path / "elsewhere" / "b"):
        write(path / "events.jsonl", [record(1, time=BEGUN)])
    for name, target in {
        "m": tmp_path / "elsewhere" / "b",
        "n": tmp_path / "elsewhere" / "b",
        "best": runs / "z",
        "loop": runs,
        "gone": tmp_path / "gone",
    }.items():
        (runs / name).symlink_to(target, target_is_directory=True)
    assert [run.path.name for run in find_runs(runs)] == ["a", "m", "z"]
    assert [run.path for run in find_runs(runs / "m")] == [runs / "m"]


def test_a_sweep_links_its_comparison_report_and_pictures(tmp_path: Path) -> None:
    for name in ("compare.html", "report.md", "report-curves.png", "report-optim.lr.png", "other.png"):
        (tmp_path / name).touch()
    links = group_links(tmp_path)
    assert links == [
        ("compare", "compare.html"),
        ("report", "report.md"),
        ("picture: curves", "report-curves.png"),
        ("picture: optim.lr", "report-optim.lr.png"),
    ]
    (tmp_path / "report.html").touch()
    assert group_links(tmp_path)[1] == ("report", "report.html")
    row = replace(ROW, name="my sweep/a", group="my sweep", is_sweep=True)
    text = table_of("my sweep", True, rows=[row, row], links=links)
    assert '<h2>Sweep my sweep<span class="links"> <a href="my%20sweep/compare.html">compare</a>' in text
    assert '<a href="my%20sweep/report-curves.png">picture: curves</a>' in text
    assert 'data-page="my%20sweep/compare.html"' in text
    assert 'data-path="a"' in text
    assert 'data-page=""' in table_of("my sweep", True, rows=[row, row])
    assert "compare the selected runs" not in table_of("my sweep", True, rows=[row])


def test_names_are_escaped(tmp_path: Path) -> None:
    long_run(tmp_path / '<img src=x onerror="alert(1)">', 20)
    (run,) = find_runs(tmp_path)
    run.dashboard.touch()
    text = render([run_row(run, Story(), root=tmp_path, now_s=BEGUN)], title="<b>runs</b>")
    assert "<img" not in text
    assert "<b>" not in text
    assert 'href="%3Cimg%20src%3Dx%20onerror%3D%22alert%281%29%22%3E/dashboard.html"' in text


def test_directory_may_be_empty_or_a_run_itself(tmp_path: Path) -> None:
    assert "No runs yet." in render([], title="runs")
    (run,) = find_runs(long_run(tmp_path / "first", 20))
    row = run_row(run, Story(), root=run.path, now_s=BEGUN)
    assert "this run" in line_of(row)


def test_sparklines_need_two_values() -> None:
    assert sparkline_svg([1.0]) == ""
    assert sparkline_svg([math.nan, 1.0, math.inf]) == ""
    assert "0.0,1.0 120.0,27.0" in sparkline_svg([2.0, 1.0])
