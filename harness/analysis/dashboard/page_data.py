"""Builds the JSON data of a run's dashboard from its story and run directory.

The data is text, numbers and lists; the page only lays it out. `page_data` adds the columns of the panels. Files in
`incidents/NNN/` are linked if they exist.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from harness.analysis.dashboard.goodput import MEANINGS, Account, Goodput
from harness.analysis.dashboard.incidents import IncidentStory, TakenAction
from harness.analysis.dashboard.loss_causes import CAUSE_MEANINGS
from harness.analysis.dashboard.run_setup import config_tree, setup_facts, value_at
from harness.analysis.dashboard.series import ColumnTable, pack_table, thin
from harness.analysis.dashboard.story import BlamedBatch, Story
from harness.analysis.markdown_html import to_html
from harness.analysis.postmortem.evidence import Cost, IncidentNumbers
from harness.analysis.postmortem.gather import IncidentSummary
from harness.analysis.postmortem.report.incident_text import (
    cost_in_steps,
    cost_text,
    kind_names,
    loss_path,
    recovery_text,
    resumption_text,
)
from harness.config.errors import EXIT_DONE, EXIT_HALTED, EXIT_INTERRUPTED
from harness.core.events import TOKEN_LOSS_EDGES
from harness.core.rundir import RunDir

SILENT_AFTER_S, SILENT_AFTER_STEPS = 60.0, 20
SILENT_AFTER_SAMPLES = 3
"""Intervals without a sample of the machine after which a paused run counts as silent: it logs no events."""
STATES = {EXIT_DONE: "done", EXIT_HALTED: "halted", EXIT_INTERRUPTED: "stopped"}
EVIDENCE = ("postmortem.html", "postmortem.md", "evidence.json")
MOST_NAMED = 20
"""At most this many ranks, layers or batches of an incident are listed."""
NOT_DRAWN = ("rank_grad_who", "rank_time_who", "tokens")
"""Columns of the steps that no panel of the page draws."""
NOTE = (
    "Time lost to recovery: rejected and undone steps, restores, and blocking saves. Detection, the gate and in-memory "
    "snapshots run inside every step; the log does not measure them separately, so their cost is part of the steps."
)


def page_data(
    run: RunDir, story: Story, *, now_s: float, live: bool = False, out: Path | None = None
) -> dict[str, Any]:
    """All data of a page; `out` is its file if it is not in the run directory."""
    facts = facts_of(run, story, now_s=now_s, prefix="" if out is None else link_prefix(run, out))
    return {"live": live, "facts": facts, "setup": setup_facts(run)} | tables(story, first={})


def tables(story: Story, *, first: dict[str, int]) -> dict[str, Any]:
    """The rows of each table from `first` on; the load of the machines whole, because its older rows change."""
    chosen = {"steps": story.steps, "probes": story.probes, "evals": story.evals, "tasks": story.tasks}
    grown = {name: table_data(table, first.get(name, 0)) for name, table in chosen.items()}
    return grown | {"system": table_data(story.system.table, 0)}


def table_data(table: ColumnTable, first: int) -> dict[str, Any]:
    thinned = thin(table, first=min(first, len(table)))
    for name in NOT_DRAWN:
        thinned.lows.pop(name, None)
    return pack_table(thinned) | {"total": len(table)}


def link_prefix(run: RunDir, out: Path) -> str:
    """What links to files of the run begin with on a page in another directory."""
    path = os.path.relpath(run.path.resolve(), out.resolve().parent)
    return "" if path == "." else f"{quote(path)}/"


def facts_of(run: RunDir, story: Story, *, now_s: float, prefix: str = "") -> dict[str, Any]:
    """State of the run, its incidents, its goodput and the marks of its timeline; links begin with `prefix`."""
    goodput = story.accounts.total()
    summaries = summarize_incidents(run, story)
    incidents = [
        incident_facts(run, incident, summaries.get(number), state=story.incidents.state_of(number), prefix=prefix)
        for number, incident in story.incidents.by_number.items()
    ]
    num_open = story.incidents.num_open
    return {
        "log": log_identity(story),
        "revision": revision_of(run, story, now_s=now_s),
        "run": run_facts(run, story, goodput, now_s=now_s),
        "goodput": goodput_facts(goodput),
        "incidents": incidents,
        "incidents_more": f"{num_open} open" if num_open else "",
        "marks": [
            {"kind": mark.kind, "iteration": mark.iteration, "time": mark.time, "text": mark.text}
            | ({"incident": mark.incident} if mark.incident else {})
            for mark in story.all_marks()
        ],
        "guilty": [guilty_facts(batch) for batch in story.guilty.values()],
        "who": {name: worst_rank(story.steps, name) for name in ("rank_grad_who", "rank_time_who")},
        "edges": list(TOKEN_LOSS_EDGES),
        "machines": story.system.note,
        "load": str(story.system.revision),
    }


def summarize_incidents(run: RunDir, story: Story) -> dict[int, IncidentSummary]:
    """Numbers and cost of each incident of a run."""
    return story.incidents.summaries(run, last=int(story.last.get("iteration", 0)))


def revision_of(run: RunDir, story: Story, *, now_s: float) -> str:
    """A string that changes whenever the facts change; cheap to compute."""
    written = sum(
        (run.path / incident_folder(number) / "postmortem.md").exists() for number in story.incidents.by_number
    )
    state = state_of(story, now_s=now_s)[0]
    return f"{log_identity(story)}-{story.num_lines}-{written}-{story.system.revision}-{state}"


def log_identity(story: Story) -> str:
    """A string that stays the same while the log only grows; rows of another log do not continue the tables."""
    return f"{story.first_time}-{story.num_replaced}"


def incident_folder(number: int) -> str:
    """Folder of an incident, relative to its run."""
    return f"incidents/{number:03d}"


def run_facts(run: RunDir, story: Story, goodput: Goodput, *, now_s: float) -> dict[str, Any]:
    state, more = state_of(story, now_s=now_s)
    last, started = story.last, story.started
    world_size = started.world_size if started else 0
    return {
        "name": run.path.resolve().name,
        "state": state,
        "state_more": more,
        "reason": story.ended.reason if story.ended else "",
        "step": step_of(story),
        "num_steps": started.num_steps if started else 0,
        "tokens": goodput.tokens_kept,
        "loss": short(last.get("loss")),
        "eval_loss": None if story.eval_loss is None else short(story.eval_loss),
        "tokens_per_s": last.get("tokens_per_s", 0.0),
        "mfu": last.get("mfu"),
        "eta_s": eta_s(story),
        "started": story.first_time or 0.0,
        "num_starts": story.num_starts,
        "world_size": world_size,
        "unread": unread(story),
        "cost": money_spent(run, story, goodput),
    }


def money_spent(run: RunDir, story: Story, goodput: Goodput) -> float | None:
    """The price of the GPUs that the starts of a run held, those of its spare machines included; None: no price."""
    config, started = config_tree(run), story.started
    price = value_at(config, "cluster", "price_per_gpu_hour")
    if not isinstance(price, float | int):
        return None
    ranks_per_machine = max(map(len, started.machines.values()), default=0) if started else 0
    spare_s = (value_at(config, "launch", "spares") or 0) * ranks_per_machine * goodput.held_s
    ranks_per_gpu = value_at(config, "launch", "ranks_per_gpu") or 1
    return float(price * (goodput.rank_s + spare_s) / ranks_per_gpu / 3600)


def unread(story: Story) -> str:
    """What part of the log is not on the page; empty if nothing is missing."""
    lost = f"{count_noun(story.num_lines_lost, 'line')} of the log not readable" if story.num_lines_lost else ""
    shown = f"{len(story.steps):,} of {len(story.steps) + story.num_left_out:,} steps shown, including all extremes"
    return "; ".join(part for part in (shown if story.num_left_out else "", lost) if part)


def step_of(story: Story) -> int:
    """Current step: of the last step record, or of the last start if there is none."""
    if not story.last:
        return story.started.step if story.started else 0
    return int(story.last["step"])


def state_of(story: Story, *, now_s: float) -> tuple[str, str]:
    """State of the run in one word, and an explanation."""
    if story.ended is not None:
        code = story.ended.exit_code
        return STATES.get(code, "crashed"), f"exit code {code}"
    if story.started is None:
        return "silent", "its log is empty"
    silent_s = now_s - story.last_time
    if story.accounts.is_paused:
        sample = story.system.latest
        if sample is None or now_s - sample.time <= max(SILENT_AFTER_S, SILENT_AFTER_SAMPLES * sample.every_s):
            return "paused", "by an operator"
        return "silent", f"paused, and no sample of its machine for {spell_seconds(now_s - sample.time)}"
    if silent_s > max(SILENT_AFTER_S, SILENT_AFTER_STEPS * float(story.last.get("step_time_s", 0.0))):
        return "silent", f"no event for {spell_seconds(silent_s)}"
    return "running", ""


def eta_s(story: Story) -> float | None:
    """Seconds to the last step at the current throughput; None if the run has ended or has no throughput yet."""
    tokens_per_s, started = story.last.get("tokens_per_s", 0.0), story.started
    if story.ended is not None or started is None or not tokens_per_s:
        return None
    num_left = max(0, started.num_steps - step_of(story))
    if story.schedule is not None:
        return story.schedule.tokens_ahead(int(story.last["cursor"]) + 1, num_left) / float(tokens_per_s)
    batch_tokens = story.accounts.batch_tokens
    return num_left * batch_tokens / float(tokens_per_s) if batch_tokens else None


def goodput_facts(goodput: Goodput) -> dict[str, Any]:
    steps = {
        Account.kept: goodput.num_kept,
        Account.refused: goodput.num_refused,
        Account.undone: goodput.num_undone,
    }
    wall_s = goodput.wall_s
    return {
        "of_time": goodput.of_time,
        "of_tokens": goodput.of_tokens,
        "lost": goodput.lost_to_recovery,
        "lost_more": f"{count_noun(goodput.num_refused + goodput.num_undone, 'step')} rejected or undone",
        "wall_s": wall_s,
        "accounts": [
            {
                "account": account,
                "label": MEANINGS[account][0],
                "meaning": MEANINGS[account][1],
                "seconds": seconds,
                "share": seconds / wall_s if wall_s else 0.0,
                "steps": steps.get(account),
            }
            for account, seconds in goodput.seconds.items()
        ],
        "causes": cause_facts(goodput),
        "lost_s": goodput.lost_s,
        "sums": [
            [goodput.of_time, "goodput: share of the wall time in kept steps"],
            [goodput.lost_to_recovery, "of the wall time lost to recovery: rejected and undone steps, restores, saves"],
            [goodput.of_tokens, f"of {goodput.tokens_consumed:,} consumed tokens are in kept steps"],
        ],
        "note": NOTE,
    }


def cause_facts(goodput: Goodput) -> list[dict[str, Any]]:
    """The time outside kept steps by cause, the largest first."""
    return [
        {
            "cause": cause,
            "meaning": CAUSE_MEANINGS[cause],
            "seconds": cost.seconds,
            "share": cost.seconds / goodput.wall_s if goodput.wall_s else 0.0,
            "times": cost.times,
            "steps": cost.steps,
        }
        for cause, cost in goodput.lost.items()
    ]


def incident_facts(
    run: RunDir, story: IncidentStory, summary: IncidentSummary | None, *, state: str, prefix: str
) -> dict[str, Any]:
    """One incident; losses and cost are those of its post-mortem."""
    cost, numbers = (Cost(), IncidentNumbers()) if summary is None else (summary.cost, summary.numbers)
    folder = incident_folder(story.number)
    text = read_text(run.path / folder / "postmortem.md")
    names = [name for name in EVIDENCE if (run.path / folder / name).exists()]
    return {
        "number": story.number,
        "kinds": kind_names(story.kinds),
        "onset": story.onset if numbers.onset is None else numbers.onset,
        "last": story.last,
        "time": story.time,
        "verdict": state,
        "spike_type": story.spike_type,
        "answer": ", then ".join(dict.fromkeys(taken.kind for taken in story.actions)) or "no action",
        "ranks": first_names(story.ranks),
        "groups": first_names(story.groups),
        "cursors": first_names(story.cursors),
        "losses": loss_path(numbers),
        "recovery": recovery_text(numbers),
        "resumed": resumption_text(numbers),
        "cost_steps": cost_in_steps(cost),
        "cost": cost_text(cost),
        "findings": [[f"{found.iteration:,}", f"{found.kind}: {found.message}"] for found in story.findings],
        "actions": [[f"{taken.iteration:,}", taken.kind, taken.reason, outcome_text(taken)] for taken in story.actions],
        "links": [[name, f"{prefix}{folder}/{name}"] for name in names],
        "postmortem": to_html(text, folder=f"{prefix}{folder}") if text else "",
    }


def outcome_text(taken: TakenAction) -> str:
    """The outcome of an action as text."""
    if taken.succeeded is None:
        return "not known yet"
    if not taken.succeeded:
        return "failed: no state to restore"
    first, last = taken.exclude or (None, None)
    excluded = f"batch {first}" if first == last else f"batches {first} to {last}"
    excluded = f"{excluded} excluded" if taken.exclude else ""
    lost = f"{count_noun(taken.steps_lost, 'step')} lost, {taken.seconds:.2f} s"
    restored = f"restored {taken.target}, {lost}" if taken.target else ""
    return "; ".join(part for part in (restored, excluded) if part) or "done"


def guilty_facts(batch: BlamedBatch) -> dict[str, Any]:
    rarest = [
        f"{token} ({times}, {'not known' if often is None else f'{often:,}'})" for token, times, often in batch.rarest
    ]
    return {
        "cursor": batch.cursor,
        "iteration": batch.iteration,
        "loss": short(batch.loss),
        "why": batch.why,
        "rarest": ", ".join(rarest),
        "rows": ", ".join(f"{name} {count}" for name, count in batch.rows.items()),
    }


def worst_rank(steps: ColumnTable, name: str) -> str:
    """The rank that was most often the farthest from the median."""
    ranks = steps.column(name)
    known = ranks[~np.isnan(ranks)].astype(np.int64)
    if not len(known):
        return ""
    counts = np.bincount(known)
    rank = int(counts.argmax())
    return f"most often rank {rank} ({counts[rank] / len(known):.0%} of the steps)"


def first_names(items: set[int] | set[str]) -> list[str]:
    """The first `MOST_NAMED` items as text, and how many more there are."""
    texts = [str(item) for item in sorted(items)]
    return texts if len(texts) <= MOST_NAMED else [*texts[:MOST_NAMED], f"and {len(texts) - MOST_NAMED} more"]


def count_noun(number: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def short(value: Any) -> str:
    """A loss with four decimal places; "none yet" if there is none."""
    if value is None:
        return "none yet"
    number = float(value)
    return f"{number:.4f}" if math.isfinite(number) else str(number)


def spell_seconds(seconds: float) -> str:
    """A duration in its two largest units: 3 d 4 h, 4 h 5 min, 5 min, 12 s."""
    minutes = int(seconds) // 60
    hours, days = minutes // 60, minutes // 1440
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
