"""Renders the HTML index of many runs: one table for each sweep or directory, one row for each run.

A directory with an event log is a run, and so is a link to one. Runs directly below a directory with a `sweep.yaml`
belong to that sweep. Each log is read once. The page works without its script, which sorts the tables and opens the
comparison of runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import islice
from pathlib import Path
from typing import final
from urllib.parse import quote

from harness.analysis.dashboard.page import fill_template, policy, resource
from harness.analysis.dashboard.page_data import count_noun, short, state_of, step_of, summarize_incidents
from harness.analysis.dashboard.series import thin
from harness.analysis.dashboard.story import Story
from harness.core.rundir import RunDir
from harness.telemetry.sinks.parent_run import SWEEP_FILE

SPARK_WIDTH, SPARK_HEIGHT = 120, 28
HEADS = (
    *("", "run", "state", "steps", "loss", "loss curve", "held out", "incidents"),
    *("goodput", "lost to recovery", "tokens/s", "started (UTC)"),
)
PICK, CURVE = HEADS[0], HEADS[5]
"""Columns that cannot be sorted by."""
NUMERIC = frozenset({"steps", "loss", "held out", "incidents", "goodput", "lost to recovery", "tokens/s"})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run in the index."""

    name: str
    """Path of the run, relative to the index."""
    group: str
    is_sweep: bool
    state: str
    step: int
    num_steps: int
    loss: float
    eval_loss: float
    num_incidents: int
    incident_steps: int
    """Steps that its incidents cost, as their post-mortems state."""
    goodput: float
    lost_to: str
    """The causes of most of the lost time, with their shares of the wall time."""
    lost_to_recovery: float
    """Share of the wall time."""
    tokens_per_s: float
    """Median over its steps; NaN: it made none."""
    started: str
    """UTC, to the minute."""
    losses: list[float]
    """Highest loss of each of up to `SPARK_WIDTH` groups of steps."""
    has_page: bool


def find_runs(root: Path) -> list[RunDir]:
    """All run directories at or below `root`, sorted by name; directories inside a run and hidden ones are not
    searched. A link to a run counts as a run, unless that run is found without it; no other link is followed."""
    found: list[Path] = []
    linked: list[Path] = []
    for path, folders, files in os.walk(root):
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        if "events.jsonl" in files:
            folders.clear()
            found.append(Path(path))
        links = (link for folder in folders if (link := Path(path, folder)).is_symlink())
        linked += [link for link in links for _, _, names in islice(os.walk(link), 1) if "events.jsonl" in names]
    shown = {path.resolve() for path in found}
    for link in sorted(linked):
        if (run := link.resolve()) not in shown:
            shown.add(run)
            found.append(link)
    return [RunDir(path) for path in sorted(found)]


def run_row(run: RunDir, story: Story, *, root: Path, now_s: float) -> RunRow:
    """The index row of a run."""
    total, last = story.accounts.total(), story.last
    parent = run.path.parent
    losses = thin(story.steps, most=SPARK_WIDTH).highs.get("loss")
    started = datetime.fromtimestamp(story.first_time, UTC).strftime("%Y-%m-%d %H:%M") if story.first_time else ""
    return RunRow(
        name=run.path.relative_to(root).as_posix(),
        group="" if run.path == root else parent.relative_to(root).as_posix(),
        is_sweep=(parent / SWEEP_FILE).exists(),
        state=state_of(story, now_s=now_s)[0],
        step=step_of(story),
        num_steps=story.started.num_steps if story.started else 0,
        loss=float(last.get("loss", math.nan)),
        eval_loss=math.nan if story.eval_loss is None else story.eval_loss,
        num_incidents=len(story.incidents),
        incident_steps=sum(summary.cost.steps for summary in summarize_incidents(run, story).values()),
        goodput=total.of_time,
        lost_to=", ".join(total.main_causes),
        lost_to_recovery=total.lost_to_recovery,
        tokens_per_s=story.median_rate("tokens_per_s"),
        started=started,
        losses=[] if losses is None else losses.tolist(),
        has_page=run.dashboard.exists(),
    )


Link = tuple[str, str]
"""Text, and file name in the directory of the group."""
COMPARISON_PAGE = "compare.html"
SWEEP_FILES = ("report.html", "report.md")
"""Names of a sweep's report, the better one first."""


def group_links(directory: Path) -> list[Link]:
    """Pages and pictures of a directory of runs: the comparison, and report and pictures of a sweep."""
    links = [("compare", COMPARISON_PAGE)] if (directory / COMPARISON_PAGE).exists() else []
    links += [("report", name) for name in SWEEP_FILES if (directory / name).exists()][:1]
    pictures = sorted(directory.glob("report-*.png"))
    return links + [(f"picture: {path.stem.removeprefix('report-')}", path.name) for path in pictures]


def render(
    rows: Sequence[RunRow],
    *,
    title: str,
    lessons: Sequence[str] = (),
    links: Mapping[str, Sequence[Link]] | None = None,
) -> str:
    """The HTML document. `links` are those of each group; the lessons of past incidents come last."""
    groups: dict[tuple[str, bool], list[RunRow]] = {}
    for row in rows:
        groups.setdefault((row.group, row.is_sweep), []).append(row)
    script = resource("index.js")
    links = links or {}
    body = "\n".join(table_of(*group, rows=members, links=links.get(group[0], ())) for group, members in groups.items())
    if lessons:
        items = "\n".join(f"<li>{escape(line.removeprefix('- '))}</li>" for line in lessons)
        body += f"\n<section><h2>Lessons</h2><ul>\n{items}\n</ul></section>"
    count = f"{len(rows)} {'run' if len(rows) == 1 else 'runs'}"
    return fill_template(
        resource("index.html"),
        title=escape(title),
        count=count,
        policy=policy(script, live=False),
        style=resource("page.css"),
        body=body or '<p class="none">No runs yet.</p>',
        script=script,
    )


def table_of(group: str, is_sweep: bool, *, rows: Sequence[RunRow], links: Sequence[Link] = ()) -> str:
    """The table of one sweep, or of the runs in one directory, with its links and the button that compares runs."""
    name = escape(group if group != "." else "")
    heading = f"Sweep {name}" if is_sweep else name or "Runs"
    prefix = "" if group in ("", ".") else f"{group}/"
    listed = "".join(f' <a href="{escape(quote(prefix + file))}">{escape(text)}</a>' for text, file in links)
    page = escape(quote(f"{prefix}{COMPARISON_PAGE}")) if any(file == COMPARISON_PAGE for _, file in links) else ""
    button = f'<button type="button" class="tool compare" data-page="{page}">compare the selected runs</button>'
    tools = f'<p class="tools">{button} <output class="quiet"></output></p>' if len(rows) > 1 else ""
    body = "\n".join(line_of(row) for row in rows)
    heads = "".join(head_of(head) for head in HEADS)
    table = f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table>'
    title = f'<h2>{heading}<span class="links">{listed}</span></h2>'
    return f'<section>{title}{tools}<div class="wide">{table}</div></section>'


def head_of(head: str) -> str:
    """A column's heading; a button sorts by the column."""
    if head == PICK:
        return '<th><span class="unseen">select</span></th>'
    if head == CURVE:
        return f"<th>{head}</th>"
    order = ' aria-sort="ascending"' if head == "run" else ""
    return f'<th{" class=n" if head in NUMERIC else ""}{order}><button type="button">{head}</button></th>'


def line_of(row: RunRow) -> str:
    place = row.name if row.group in ("", ".") else row.name.removeprefix(f"{row.group}/")
    name = escape(place if place != "." else "this run")
    link = f'<a href="{escape(quote(f"{row.name}/dashboard.html"))}">{name}</a>' if row.has_page else name
    pick = f'<input type="checkbox" class="pick" aria-label="select {name}" data-path="{escape(place)}">'
    cells: list[tuple[str, str | float]] = [
        (pick, ""),
        (link, row.name),
        (f'<span class="state-{escape(row.state)}">{escape(row.state)}</span>', row.state),
        (f"{row.step:,} of {row.num_steps:,}", row.step),
        (format_loss(row.loss), row.loss),
        (sparkline_svg(row.losses), ""),
        (format_loss(row.eval_loss), row.eval_loss),
        (incidents_cell(row), row.num_incidents),
        (goodput_cell(row), row.goodput),
        (f"{row.lost_to_recovery:.2%}", row.lost_to_recovery),
        ("" if math.isnan(row.tokens_per_s) else f"{row.tokens_per_s:,.0f}", row.tokens_per_s),
        (escape(row.started), row.started),
    ]
    marked = zip(HEADS, cells, strict=True)
    return "<tr>" + "".join(cell_of(head, text, value) for head, (text, value) in marked) + "</tr>"


def incidents_cell(row: RunRow) -> str:
    return f"{row.num_incidents} ({count_noun(row.incident_steps, 'step')})" if row.num_incidents else "0"


def goodput_cell(row: RunRow) -> str:
    return (
        f'<span title="lost to {escape(row.lost_to)}">{row.goodput:.1%}</span>' if row.lost_to else f"{row.goodput:.1%}"
    )


def cell_of(head: str, text: str, value: str | float) -> str:
    numeric = " class=n" if head in NUMERIC else ""
    return f'<td{numeric} data-value="{escape(str(value))}">{text}</td>'


def format_loss(loss: float) -> str:
    return "" if math.isnan(loss) else short(loss)


def sparkline_svg(values: Sequence[float]) -> str:
    """The loss curve as a small SVG. The top is cut at the highest loss after the first tenth, where the loss falls
    steeply."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return ""
    later = [value for value in values[len(values) // 10 :] if math.isfinite(value)] or known
    least, greatest = min(known), max(later)
    height = SPARK_HEIGHT - 2
    points = [
        f"{index * SPARK_WIDTH / max(1, len(values) - 1):.1f},"
        f"{1 + height * (1 - (min(value, greatest) - least) / ((greatest - least) or 1)):.1f}"
        for index, value in enumerate(values)
        if math.isfinite(value)
    ]
    size = f'width="{SPARK_WIDTH}" height="{SPARK_HEIGHT}" viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}"'
    label = f"loss from {known[0]:.4g} to {known[-1]:.4g}"
    line = f'<polyline points="{" ".join(points)}"/>'
    return f'<svg class="spark" {size} role="img" aria-label="{label}">{line}</svg>'
