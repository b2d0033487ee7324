"""The report of a sweep as text: a table, a verdict, the line to paste, a page of Markdown. Pure: data in, text out.

Jobs that are finished come first, by their loss; the rest stands below them, because a loss at another step compares
with nothing.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from harness.analysis.sweeps.job_result import ANSWERS, Result
from harness.analysis.sweeps.ranking import FEWEST_MARKS, Ranking, Standing, joint_noise, margin
from harness.analysis.sweeps.spike_score import FEWEST_ROWS, SIGMAS, WINDOW_ROWS
from harness.analysis.sweeps.sweep_record import Sweep
from harness.config.errors import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_HALTED, EXIT_INTERRUPTED
from harness.core.events import ActionKind

ENDINGS = {
    EXIT_DONE: "done",
    1: "crashed",
    EXIT_BAD_CONFIG: "bad config",
    EXIT_HALTED: "halted",
    EXIT_INTERRUPTED: "interrupted",
}
COLUMNS = ("loss", "best", "spikes", "incidents", "refused", "skip/rew/roll", "tokens/s", "step", "end")


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or all of it where two end alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def rows(sweep: Sweep, ranking: Ranking) -> list[list[str]]:
    """The table with its heading; a line a job."""
    names = short_names(sweep.keys)
    heading = [*names.values(), *COLUMNS]
    return [heading, *([*values(sweep, each), *cells(each)] for each in ranking.standings)]


def values(sweep: Sweep, each: Standing) -> list[str]:
    return [each.result.job.overrides.get(key, "-") for key in sweep.keys]


def cells(each: Standing) -> list[str]:
    result = each.result
    return [
        number(each.final),
        number(each.best),
        share(result.spikes.share),
        "-" if result.incidents_per_10k is None else f"{result.incidents_per_10k:.3g}",
        str(result.num_refused),
        "/".join(str(result.done[kind]) for kind in ANSWERS),
        "-" if result.tokens_per_s is None else f"{result.tokens_per_s:,.0f}",
        str(result.step),
        ending(result),
    ]


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def ending(result: Result) -> str:
    """How a job ended, with its exit code; one without a last word is open: not begun, going on, or dead."""
    if result.exit_code is None:
        return "open" if result.num_steps else "not begun"
    word = ENDINGS.get(result.exit_code, "crashed")
    if result.exit_code == EXIT_DONE and not result.is_finished:
        word = f"done of {result.num_steps}"
    return f"{word} ({result.exit_code})"


def table(sweep: Sweep, ranking: Ranking) -> str:
    """For a terminal: columns aligned."""
    lines = rows(sweep, ranking)
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    num_words = len(sweep.keys)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < num_words or place == len(line) - 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def verdict(ranking: Ranking) -> str:
    """Who won, or why nobody did."""
    ranked = ranking.ranked
    if not ranked:
        return "No job is finished with a finite loss: there is nothing to choose from."
    best = ranked[0]
    if len(ranked) == 1:
        return f"Only one job is finished: {label(best)}, {ranking.basis} loss {number(best.final)}."
    second = ranked[1]
    lead = (
        f"{label(best)} is best with a {ranking.basis} loss of {number(best.final)}, {margin(second, best):.4f} below"
    )
    noise = joint_noise(second, best)
    if noise is None:
        return (
            f"{lead} {label(second)}. Whether that is more than chance cannot be said: it takes {FEWEST_MARKS} "
            "evaluations of each."
        )
    equals = ranking.equals
    if len(equals) == 1:
        return f"{lead} {label(second)}; chance alone explains {noise:.4f}."
    others = "; ".join(label(each) for each in equals[1:])
    return (
        f"No winner. {label(best)} has the lowest {ranking.basis} loss, {number(best.final)}, but the losses waver: "
        f"within chance of it {'lies' if len(equals) == 2 else 'lie'} {others} (next {margin(second, best):.4f} above, "
        f"chance explains {noise:.4f})."
    )


def label(each: Standing) -> str:
    return " ".join(each.result.job.words) or each.result.job.name


def command(sweep: Sweep, each: Standing) -> str:
    """What to type to train once more as this job did."""
    return shlex.join(["harness", "train", *sweep.fixed, *each.result.job.words])


def problems(ranking: Ranking) -> list[str]:
    """The jobs that were refused, each with its reason."""
    return [f"{label(each)}: {each.result.job.problem}" for each in ranking.standings if each.result.job.problem]


NOTES = f"""\
spikes: share of steps whose loss is more than {SIGMAS:g} sigma above the mean of the {WINDOW_ROWS:,} steps before, once
there are {FEWEST_ROWS}; incidents: cases that the sentinel opened, in 10,000 steps; refused: updates that the gate did
not apply; skip/rew/roll: batches skipped, rewinds, rollbacks."""


def text(sweep: Sweep, ranking: Ranking) -> str:
    """All of it for a terminal."""
    parts = [f"{sweep.name}: {len(sweep.jobs)} jobs by {ranking.basis} loss", table(sweep, ranking), NOTES]
    parts += problems(ranking)
    parts.append(verdict(ranking))
    parts += [command(sweep, each) for each in ranking.ranked[:1]]
    return "\n\n".join(parts) + "\n"


def markdown(sweep: Sweep, ranking: Ranking, pictures: Sequence[tuple[str, str]]) -> str:
    """A page with the table and the pictures: (title, file beside the page)."""
    lines = rows(sweep, ranking)
    ruler = ["---" if place < len(sweep.keys) else "---:" for place in range(len(lines[0]))]
    grid = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in [lines[0], ruler, *lines[1:]]
    ]
    parts = [f"# Sweep {sweep.name}", verdict(ranking)]
    parts += [f"    {command(sweep, each)}" for each in ranking.ranked[:1]]
    parts += ["\n".join(grid), f"{NOTES[0].upper()}{NOTES[1:]}"]
    if wrong := problems(ranking):
        parts.append("\n".join(["Never started:", "", *(f"- {line}" for line in wrong)]))
    parts += [f"![{title}]({file})" for title, file in pictures]
    if sweep.words:
        parts.append(f"Swept with:\n\n    {shlex.join(['harness', 'train', *sweep.words])}")
    return "\n\n".join(parts) + "\n"


def as_json(sweep: Sweep, ranking: Ranking) -> dict[str, Any]:
    """Plain data; a number that is not finite is null."""
    equals = {each.result.job.name for each in ranking.equals}
    return {
        "name": sweep.name,
        "keys": sweep.keys,
        "basis": str(ranking.basis),
        "verdict": verdict(ranking),
        "best": next((command(sweep, each) for each in ranking.ranked), None),
        "jobs": [job_as_json(each) | {"best_or_equal": each.result.job.name in equals} for each in ranking.standings],
    }


def job_as_json(each: Standing) -> dict[str, Any]:
    result = each.result
    return {
        "name": result.job.name,
        "overrides": result.job.overrides,
        "problem": result.job.problem or None,
        "exit_code": result.exit_code,
        "is_finished": result.is_finished,
        "step": result.step,
        "final_loss": finite(each.final),
        "best_loss": finite(each.best),
        "noise": finite(each.noise),
        "spike_score": result.spikes.share,
        "num_spikes": result.spikes.num_spikes,
        "incidents_per_10k": result.incidents_per_10k,
        "num_refused": result.num_refused,
        **{f"num_{kind}s": result.done[ActionKind(kind)] for kind in ANSWERS},
        "tokens_per_s": finite(result.tokens_per_s),
    }


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
