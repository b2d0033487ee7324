"""Renders the report of a sweep as text, Markdown and JSON; pure functions.

Finished jobs come first, sorted by loss. Unfinished jobs follow, because losses at different steps are not comparable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.analysis.sweeps.job_result import RECOVERIES, JobResult
from harness.analysis.sweeps.ranking import FEWEST_EVALUATIONS, JobScore, Ranking, joint_noise, margin
from harness.analysis.sweeps.spike_score import FEWEST_ROWS, SIGMAS, WINDOW_ROWS
from harness.analysis.sweeps.sweep_record import Sweep
from harness.config.command_line import shell_command
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_HALTED, EXIT_INTERRUPTED
from harness.core.events import ActionKind

ENDINGS = {
    EXIT_DONE: "done",
    1: "crashed",
    EXIT_BAD_CONFIG: "bad config",
    EXIT_HALTED: "halted",
    EXIT_INTERRUPTED: "interrupted",
}
COLUMNS = ("loss", "best", "spikes", "incidents", "rejected", "skip/rew/roll", "tokens/s", "step", "end")


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or the whole key if two have the same last part."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def table_rows(sweep: Sweep, ranking: Ranking) -> list[list[str]]:
    """Cells of the table: the heading, then one row for each job."""
    names = short_names(sweep.keys)
    heading = [*names.values(), *COLUMNS]
    return [heading, *([*swept_values(sweep, score), *result_cells(score)] for score in ranking.scores)]


def swept_values(sweep: Sweep, score: JobScore) -> list[str]:
    return [score.result.job.overrides.get(key, "-") for key in sweep.keys]


def result_cells(score: JobScore) -> list[str]:
    result = score.result
    return [
        loss_text(score.final),
        loss_text(score.best),
        share(result.spikes.share),
        "-" if result.incidents_per_10k is None else f"{result.incidents_per_10k:.3g}",
        str(result.num_refused),
        "/".join(str(result.done[kind]) for kind in RECOVERIES),
        "-" if result.tokens_per_s is None else f"{result.tokens_per_s:,.0f}",
        str(result.step),
        ending(result),
    ]


def loss_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def ending(result: JobResult) -> str:
    """How a job ended, with its exit code; "open" without an end event: it is running, or was killed."""
    if result.exit_code is None:
        return "open" if result.num_steps else "not started"
    state = ENDINGS.get(result.exit_code, "crashed")
    if result.exit_code == EXIT_DONE and not result.is_finished:
        state = f"done of {result.num_steps}"
    return f"{state} ({result.exit_code})"


def results_table(sweep: Sweep, ranking: Ranking) -> str:
    """The table for a terminal, with aligned columns."""
    lines = table_rows(sweep, ranking)
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    num_keys = len(sweep.keys)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < num_keys or place == len(line) - 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def verdict(ranking: Ranking) -> str:
    """The best job and its lead over the next, or why there is no winner."""
    ranked = ranking.ranked
    if not ranked:
        return "No winner: no job is finished with a finite loss."
    best = ranked[0]
    if len(ranked) == 1:
        return f"Only one job is finished: {label(best)}, {ranking.basis} loss {loss_text(best.final)}."
    second = ranked[1]
    best_loss = f"{ranking.basis} loss of {loss_text(best.final)}"
    lead = f"{label(best)} is best with a {best_loss}, {margin(second, best):.4f} below"
    noise = joint_noise(second, best)
    if noise is None:
        return (
            f"{lead} {label(second)}. Not known whether this exceeds the noise: that takes {FEWEST_EVALUATIONS} "
            "evaluations of each job."
        )
    equals = ranking.equals
    if len(equals) == 1:
        return f"{lead} {label(second)}; noise explains {noise:.4f}."
    others = "; ".join(label(score) for score in equals[1:])
    return (
        f"No winner. {label(best)} has the lowest {ranking.basis} loss, {loss_text(best.final)}, but within the noise "
        f"of it {'is' if len(equals) == 2 else 'are'} {others} (the next is {margin(second, best):.4f} above; noise "
        f"explains {noise:.4f})."
    )


def label(score: JobScore) -> str:
    return " ".join(score.result.job.override_list) or score.result.job.name


def problem_lines(ranking: Ranking) -> list[str]:
    """Jobs with an invalid config, each with its error message."""
    return [f"{label(score)}: {score.result.job.problem}" for score in ranking.scores if score.result.job.problem]


NOTES = f"""\
spikes: share of steps whose loss is more than {SIGMAS:g} sigma above the mean of the {WINDOW_ROWS:,} steps before (at
least {FEWEST_ROWS}); incidents: incidents of the sentinel per 10,000 steps; rejected: updates that the gate rejected;
skip/rew/roll: skipped batches, rewinds, rollbacks."""


def render_text(sweep: Sweep, ranking: Ranking, *, best: str) -> str:
    """The whole report for a terminal; `best` is the command that trains the best job."""
    parts = [f"{sweep.name}: {len(sweep.jobs)} jobs by {ranking.basis} loss", results_table(sweep, ranking), NOTES]
    parts += problem_lines(ranking)
    parts.append(verdict(ranking))
    parts += [best] if best else []
    return "\n\n".join(parts) + "\n"


def render_markdown(sweep: Sweep, ranking: Ranking, pictures: Sequence[tuple[str, str]], *, best: str) -> str:
    """The whole report as Markdown; `pictures` are pairs of title and file name."""
    lines = table_rows(sweep, ranking)
    ruler = ["---" if place < len(sweep.keys) else "---:" for place in range(len(lines[0]))]
    grid = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in [lines[0], ruler, *lines[1:]]
    ]
    parts = [f"# Sweep {sweep.name}", verdict(ranking)]
    parts += [f"    {best}"] if best else []
    parts += ["\n".join(grid), f"{NOTES[0].upper()}{NOTES[1:]}"]
    if problems := problem_lines(ranking):
        parts.append("\n".join(["Not started, invalid config:", "", *(f"- {line}" for line in problems)]))
    parts += [f"![{title}]({file})" for title, file in pictures]
    if sweep.words:
        parts.append(f"Command of the sweep:\n\n    {shell_command('harness', 'train', *sweep.words)}")
    return "\n\n".join(parts) + "\n"


def as_json(sweep: Sweep, ranking: Ranking, *, best: str) -> dict[str, Any]:
    """The report as JSON-ready data; non-finite numbers are null."""
    equals = {score.result.job.name for score in ranking.equals}
    return {
        "name": sweep.name,
        "keys": sweep.keys,
        "basis": str(ranking.basis),
        "verdict": verdict(ranking),
        "best": best or None,
        "jobs": [job_as_json(score) | {"best_or_equal": score.result.job.name in equals} for score in ranking.scores],
    }


def job_as_json(score: JobScore) -> dict[str, Any]:
    result = score.result
    return {
        "name": result.job.name,
        "overrides": result.job.overrides,
        "problem": result.job.problem or None,
        "exit_code": result.exit_code,
        "is_finished": result.is_finished,
        "step": result.step,
        "final_loss": finite_or_none(score.final),
        "best_loss": finite_or_none(score.best),
        "noise": finite_or_none(score.noise),
        "spike_score": result.spikes.share,
        "num_spikes": result.spikes.num_spikes,
        "incidents_per_10k": result.incidents_per_10k,
        "num_refused": result.num_refused,
        **{f"num_{kind}s": result.done[ActionKind(kind)] for kind in RECOVERIES},
        "tokens_per_s": finite_or_none(result.tokens_per_s),
    }


def finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
