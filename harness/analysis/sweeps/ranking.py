"""Which job of a sweep is the best, and whether that can be told at all.

Why: the lowest of twelve losses is always somebody's; whether it means anything depends on how much a loss wavers.
How: jobs are compared by their held-out loss at the end, or, where nothing was held out, by the mean training loss of
the last twentieth of their rows. How much it wavers is what the last evaluations leave over a straight line through
them. A job whose distance to the best is within `SIGMAS` of that, for both together, is its equal.
Left out: what another seed would change. It is often more than a run wavers by itself; sweep over run.seed to see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from harness.analysis.sweeps.job_result import Result
from harness.analysis.sweeps.sweep_record import as_number, sort_key

NUM_MARKS, FEWEST_MARKS = 5, 4
"""Evaluations that say how much a loss wavers: the last so many, and how few will do."""
NUM_BLOCKS = 20
SIGMAS = 2.0


class Basis(StrEnum):
    """What jobs are compared by."""

    held_out = "held-out"
    training = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A job and what it is compared by."""

    result: Result
    final: float | None
    """The loss at its end; None: it has none."""
    best: float | None
    """The lowest it ever had."""
    noise: float | None
    """Standard deviation of `final`; None: too few evaluations to tell."""

    @property
    def is_ranked(self) -> bool:
        """Only a job that is finished, with a finite loss, can be compared with others."""
        return self.result.is_finished and self.final is not None and math.isfinite(self.final)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    basis: Basis
    standings: list[Standing]
    """The best first, then what cannot be compared."""

    @property
    def ranked(self) -> list[Standing]:
        return [each for each in self.standings if each.is_ranked]

    @property
    def equals(self) -> list[Standing]:
        """The best, and those that cannot be told from it."""
        best = self.ranked[:1]
        return best + [each for each in self.ranked[1:] if not is_worse(each, best[0])]


def rank(results: Sequence[Result]) -> Ranking:
    """All jobs of a sweep in order."""
    basis = Basis.held_out if any(result.evaluations for result in results) else Basis.training
    standings = [standing(result, basis) for result in results]
    return Ranking(basis=basis, standings=sorted(standings, key=order))


def order(each: Standing) -> tuple[bool, float]:
    loss = math.inf if each.final is None or math.isnan(each.final) else each.final
    return not each.is_ranked, loss


def standing(result: Result, basis: Basis) -> Standing:
    marks = result.evaluations if basis is Basis.held_out else block_means(result.losses)
    return Standing(
        result=result,
        final=marks[-1] if marks else None,
        best=min((mark for mark in marks if math.isfinite(mark)), default=None),
        noise=wavering(marks),
    )


def block_means(losses: Sequence[float]) -> list[float]:
    """The mean of each twentieth of a run, so that single batches do not decide; the oldest rows may be left over."""
    length = max(1, len(losses) // NUM_BLOCKS)
    firsts = range(len(losses) % length, len(losses), length)
    return [sum(losses[first : first + length]) / length for first in firsts]


def wavering(marks: Sequence[float]) -> float | None:
    """The standard deviation of the last evaluations around a straight line through them."""
    last = np.asarray(marks[-NUM_MARKS:], dtype=np.float64)
    if len(last) < FEWEST_MARKS or not np.isfinite(last).all():
        return None
    places = np.arange(len(last)) - (len(last) - 1) / 2
    slope = float(places @ last) / float(places @ places)
    left_over = last - last.mean() - slope * places
    return float(np.sqrt(left_over @ left_over / (len(last) - 2)))


def margin(worse: Standing, better: Standing) -> float:
    assert worse.final is not None
    assert better.final is not None
    return worse.final - better.final


def joint_noise(one: Standing, other: Standing) -> float | None:
    """What the difference of two losses may be by chance; None: not known."""
    if one.noise is None or other.noise is None:
        return None
    return SIGMAS * math.hypot(one.noise, other.noise)


def is_worse(one: Standing, best: Standing) -> bool:
    """Whether a loss is above the best by more than chance; where chance is not known, whether it is above at all."""
    return margin(one, best) > (joint_noise(one, best) or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Mean final loss over two keys; NaN where no job has one."""

    row_key: str
    column_key: str
    rows: list[str]
    columns: list[str]
    values: list[list[float]]
    num_missing: list[list[int]]
    """Jobs of a cell that are not in its mean: unfinished, failed, or diverged."""


def numeric_keys(standings: Sequence[Standing]) -> list[str]:
    """Swept keys that have more than one value, all of them numbers."""
    keys = dict.fromkeys(key for each in standings for key in each.result.job.overrides)
    values = {key: {each.result.job.overrides.get(key, "") for each in standings} for key in keys}
    return [key for key in keys if len(values[key]) > 1 and all(as_number(value) is not None for value in values[key])]


def grid(standings: Sequence[Standing], row_key: str, column_key: str) -> Grid:
    """The mean over all other keys, for each pair of values."""
    cells: dict[tuple[str, str], list[Standing]] = {}
    for each in standings:
        overrides = each.result.job.overrides
        cells.setdefault((overrides[row_key], overrides[column_key]), []).append(each)
    rows = sorted({row for row, _ in cells}, key=sort_key)
    columns = sorted({column for _, column in cells}, key=sort_key)
    table = [[cells.get((row, column), []) for column in columns] for row in rows]
    return Grid(
        row_key=row_key,
        column_key=column_key,
        rows=rows,
        columns=columns,
        values=[[mean_loss(cell) for cell in line] for line in table],
        num_missing=[[sum(not each.is_ranked for each in cell) for cell in line] for line in table],
    )


def mean_loss(cell: Sequence[Standing]) -> float:
    losses = [each.final for each in cell if each.is_ranked and each.final is not None]
    return sum(losses) / len(losses) if losses else math.nan
