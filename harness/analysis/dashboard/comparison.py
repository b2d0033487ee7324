"""Builds the JSON data of the page that compares runs: curves, final numbers and configuration differences.

Every run is thinned to `MOST_COMPARED_ROWS` groups of steps with the extremes of each, so that a page of many runs
stays small.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.analysis.dashboard.goodput import Goodput
from harness.analysis.dashboard.page_data import (
    money_spent,
    short,
    spell_seconds,
    state_of,
    step_of,
    summarize_incidents,
)
from harness.analysis.dashboard.run_setup import (
    NOT_MARKED,
    SHORT_COMMIT,
    config_tree,
    count_text,
    gpu_text,
    latest_start,
    manifest_tree,
    yaml_text,
)
from harness.analysis.dashboard.series import ColumnTable, pack_table, thin
from harness.analysis.dashboard.story import Story
from harness.config.compose import flat
from harness.core.rundir import RunDir

MOST_COMPARED_ROWS = 1000
DRAWN = frozenset(
    {"loss", "grad_norm", "lr", "param_norm", "update_ratio", "loss_scale", "tokens_per_s", "mfu", "memory_bytes"}
    | {"loader_wait_s", "tokens", "refused", "gpu_utilization_mean", "gpu_memory_most", "gpu_power_mean"}
    | {"gpu_temperature_most", "host_memory_most", "cpu_load_mean"}
)
"""Columns that the page draws."""
LOWER, HIGHER = "lower", "higher"


class ComparedRun(NamedTuple):
    run: RunDir
    story: Story
    name: str
    """Distinct among the compared runs."""


def comparison_data(
    runs: Sequence[tuple[RunDir, Story]], *, out: Path, now_s: float, title: str = ""
) -> dict[str, Any]:
    """All data of the page `out`; links on it are relative to its directory."""
    names = distinct_names([run.path.resolve() for run, _ in runs])
    compared = [ComparedRun(run, story, name) for (run, story), name in zip(runs, names, strict=True)]
    return {
        "title": title or " and ".join(names if len(names) < 4 else [*names[:2], f"{len(names) - 2} more"]),
        "runs": [run_data(one, out=out, now_s=now_s) for one in compared],
        "numbers": final_numbers(compared, now_s=now_s),
        "differences": config_differences([config_tree(one.run) for one in compared]),
    }


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many parts as it takes to tell them apart."""
    depth = 1
    longest = max((len(path.parts) for path in paths), default=1)
    while depth < longest and len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def run_data(compared: ComparedRun, *, out: Path, now_s: float) -> dict[str, Any]:
    run, story, name = compared
    folder = out.resolve().parent
    tables = {"steps": story.steps, "probes": story.probes, "evals": story.evals, "system": story.system.table}
    return {
        "name": name,
        "path": os.path.relpath(run.path.resolve(), folder),
        "href": os.path.relpath(run.dashboard.resolve(), folder) if run.dashboard.exists() else "",
        "state": state_of(story, now_s=now_s)[0],
        "started": story.first_time or 0.0,
        "tables": {table: compared_table(columns) for table, columns in tables.items()},
    }


def compared_table(table: ColumnTable) -> dict[str, Any]:
    """The columns that the page draws, thinned."""
    thinned = thin(table, most=MOST_COMPARED_ROWS)
    for column in list(thinned.lows):
        if column not in DRAWN:
            del thinned.lows[column]
    return pack_table(thinned) | {"total": len(table)}


def final_numbers(compared: Sequence[ComparedRun], *, now_s: float) -> list[dict[str, Any]]:
    """Rows of the table of final numbers: a label, a text for each run, and the numbers that tell which is better."""
    goodputs = [one.story.accounts.total() for one in compared]
    starts = [latest_start(manifest_tree(one.run)) for one in compared]
    rows = [
        text_row("state", [state_of(one.story, now_s=now_s)[0] for one in compared]),
        text_row("step", [steps_text(one.story) for one in compared]),
        text_row("tokens", [f"{goodput.tokens_kept:,}" for goodput in goodputs]),
        number_row("loss of the last step", [last_value(one.story, "loss") for one in compared], short, LOWER),
        number_row("held-out loss", [number_or_nan(one.story.eval_loss) for one in compared], short, LOWER),
        number_row("lowest held-out loss", [lowest_held_out(one.story) for one in compared], short, LOWER),
        number_row("tokens per second", [one.story.median_rate("tokens_per_s") for one in compared], thousands, HIGHER),
        number_row("MFU", [one.story.median_rate("mfu") for one in compared], percent_text, HIGHER),
        number_row("goodput", [goodput.of_time for goodput in goodputs], percent_text, HIGHER),
        number_row("time lost to recovery", [goodput.lost_to_recovery for goodput in goodputs], percent_text, LOWER),
        text_row("wall time", [spell_seconds(goodput.wall_s) for goodput in goodputs]),
        number_row("incidents", [float(len(one.story.incidents)) for one in compared], thousands, LOWER),
        number_row("steps that incidents cost", [incident_steps(one) for one in compared], thousands, LOWER),
        number_row("rejected updates", [float(goodput.num_refused) for goodput in goodputs], thousands, LOWER),
        text_row("cost", [price_text(one, total) for one, total in zip(compared, goodputs, strict=True)]),
        text_row("parameters", [run_size_text(one.run) for one in compared]),
        text_row("ranks", [str(one.story.started.world_size) if one.story.started else "" for one in compared]),
        text_row("device", [device_text(start) for start in starts]),
        text_row("commit", [commit_text(start) for start in starts]),
    ]
    return [row for row in rows if any(row["texts"])]


def text_row(label: str, texts: Sequence[str]) -> dict[str, Any]:
    return {"label": label, "texts": list(texts)}


def number_row(
    label: str, numbers: Sequence[float], render_number: Callable[[float], str], better: str
) -> dict[str, Any]:
    """A row whose lower or higher number is better; a number that is missing or not finite has no place."""
    texts = ["" if math.isnan(number) else render_number(number) for number in numbers]
    known = [number if math.isfinite(number) else None for number in numbers]
    return {"label": label, "texts": texts, "numbers": known, "better": better}


def number_or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)


def last_value(story: Story, name: str) -> float:
    return number_or_nan(story.last.get(name))


def lowest_held_out(story: Story) -> float:
    losses = story.evals.column("loss")
    finite = losses[np.isfinite(losses)]
    return float(finite.min()) if len(finite) else math.nan


def incident_steps(compared: ComparedRun) -> float:
    return float(sum(summary.cost.steps for summary in summarize_incidents(compared.run, compared.story).values()))


def steps_text(story: Story) -> str:
    return f"{step_of(story):,} of {story.started.num_steps:,}" if story.started else ""


def price_text(compared: ComparedRun, goodput: Goodput) -> str:
    """What the run has cost; empty if the configuration has no price."""
    money = money_spent(compared.run, compared.story, goodput)
    return "" if money is None else f"{money:,.2f}"


def run_size_text(run: RunDir) -> str:
    size = manifest_tree(run).get("num_parameters")
    return count_text(size) if isinstance(size, int) else ""


def device_text(start: dict[str, Any]) -> str:
    machine = start.get("hardware") or {}
    return gpu_text(machine.get("gpus") or []) or str(machine.get("cpu") or "")


def commit_text(start: dict[str, Any]) -> str:
    return str(start.get("commit") or "")[:SHORT_COMMIT] + (" with changes" if start.get("diff") else "")


def thousands(number: float) -> str:
    return f"{number:,.0f}"


def percent_text(share: float) -> str:
    return f"{share:.2%}"


def config_differences(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keys whose values differ, with the value of each run as text."""
    settings = [flat(config) for config in configs]
    keys = dict.fromkeys(key for config in settings for key in config if key not in NOT_MARKED)
    rows = [
        {"key": key, "values": [yaml_text(config[key]) if key in config else "not set" for config in settings]}
        for key in keys
    ]
    return [row for row in rows if len(set(row["values"])) > 1]
