"""Ranks the jobs of a sweep by loss, and decides whether the best is better by more than noise.

Why: one of twelve losses is always the lowest; whether the difference is significant depends on the noise.
How: jobs are compared by their final held-out loss, or without evaluations by the mean training loss of the last
twentieth of their rows. Noise is the standard deviation of the last evaluations around a straight line through them. A
job is equal to the best if their difference is within `SIGMAS` times the joint noise.
Left out: variation between seeds, which is often larger than the noise of one run. Sweep over run.seed to measure it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from harness.analysis.sweeps.job_result import JobResult
from harness.analysis.sweeps.sweep_record import as_number, sort_key

NUM_EVALUATIONS, FEWEST_EVALUATIONS = 5, 4
"""Evaluations used to estimate the noise, and the fewest that suffice."""
NUM_BLOCKS = 20
SIGMAS = 2.0


class Basis(StrEnum):
    """The loss that jobs are compared by."""

    held_out = "held-out"
    training = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScore:
    """The losses by which a job is compared with others."""

    result: JobResult
    final: float | None
    """The last loss; None: there is none."""
    best: float | None
    """The lowest loss."""
    noise: float | None
    """Standard deviation of `final`; None: too few evaluations."""

    @property
    def is_ranked(self) -> bool:
        """Whether the job is finished and has a finite loss."""
        return self.result.is_finished and self.final is not None and math.isfinite(self.final)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    basis: Basis
    scores: list[JobScore]
    """The best first; jobs that cannot be compared are last."""

    @property
    def ranked(self) -> list[JobScore]:
        return [score for score in self.scores if score.is_ranked]

    @property
    def equals(self) -> list[JobScore]:
        """The best job, and those that are not significantly worse."""
        best = self.ranked[:1]
        return best + [score for score in self.ranked[1:] if not is_worse(score, best[0])]


def rank(results: Sequence[JobResult]) -> Ranking:
    """All jobs of a sweep, the best first."""
    basis = Basis.held_out if any(result.evaluations for result in results) else Basis.training
    scores = [score_job(result, basis) for result in results]
    return Ranking(basis=basis, scores=sorted(scores, key=rank_key))


def rank_key(score: JobScore) -> tuple[bool, float]:
    loss = math.inf if score.final is None or math.isnan(score.final) else score.final
    return not score.is_ranked, loss


def score_job(result: JobResult, basis: Basis) -> JobScore:
    losses = result.evaluations if basis is Basis.held_out else block_means(result.losses)
    return JobScore(
        result=result,
        final=losses[-1] if losses else None,
        best=min((loss for loss in losses if math.isfinite(loss)), default=None),
        noise=loss_noise(losses),
    )


def block_means(losses: Sequence[float]) -> list[float]:
    """Mean loss of each twentieth of a run, to average over batches; the oldest rows may be left over."""
    length = max(1, len(losses) // NUM_BLOCKS)
    firsts = range(len(losses) % length, len(losses), length)
    return [sum(losses[first : first + length]) / length for first in firsts]


def loss_noise(losses: Sequence[float]) -> float | None:
    """Standard deviation of the last evaluations around a straight line through them."""
    last = np.asarray(losses[-NUM_EVALUATIONS:], dtype=np.float64)
    if len(last) < FEWEST_EVALUATIONS or not np.isfinite(last).all():
        return None
    places = np.arange(len(last)) - (len(last) - 1) / 2
    slope = float(places @ last) / float(places @ places)
    residual = last - last.mean() - slope * places
    return float(np.sqrt(residual @ residual / (len(last) - 2)))


def margin(worse: JobScore, better: JobScore) -> float:
    assert worse.final is not None
    assert better.final is not None
    return worse.final - better.final


def joint_noise(one: JobScore, other: JobScore) -> float | None:
    """Difference of two losses that noise explains; None: not known."""
    if one.noise is None or other.noise is None:
        return None
    return SIGMAS * math.hypot(one.noise, other.noise)


def is_worse(one: JobScore, best: JobScore) -> bool:
    """Whether a loss is above the best by more than noise explains, or above it at all if the noise is not known."""
    return margin(one, best) > (joint_noise(one, best) or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Mean final loss over two keys; NaN if no job has one."""

    row_key: str
    column_key: str
    rows: list[str]
    columns: list[str]
    values: list[list[float]]
    num_missing: list[list[int]]
    """Jobs of a cell that are not in its mean: unfinished, failed or diverged."""


def numeric_keys(scores: Sequence[JobScore]) -> list[str]:
    """Swept keys that have more than one value, all of them numbers."""
    keys = dict.fromkeys(key for score in scores for key in score.result.job.overrides)
    values = {key: {score.result.job.overrides.get(key, "") for score in scores} for key in keys}
    return [key for key in keys if len(values[key]) > 1 and all(as_number(value) is not None for value in values[key])]


def make_grid(scores: Sequence[JobScore], row_key: str, column_key: str) -> Grid:
    """Mean final loss over all other keys, for each pair of values."""
    cells: dict[tuple[str, str], list[JobScore]] = {}
    for score in scores:
        overrides = score.result.job.overrides
        cells.setdefault((overrides[row_key], overrides[column_key]), []).append(score)
    rows = sorted({row for row, _ in cells}, key=sort_key)
    columns = sorted({column for _, column in cells}, key=sort_key)
    table = [[cells.get((row, column), []) for column in columns] for row in rows]
    return Grid(
        row_key=row_key,
        column_key=column_key,
        rows=rows,
        columns=columns,
        values=[[mean_loss(cell) for cell in line] for line in table],
        num_missing=[[sum(not score.is_ranked for score in cell) for cell in line] for line in table],
    )


def mean_loss(cell: Sequence[JobScore]) -> float:
    losses = [score.final for score in cell if score.is_ranked and score.final is not None]
    return sum(losses) / len(losses) if losses else math.nan
