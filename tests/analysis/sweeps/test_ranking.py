"""Ranking of jobs, and the noise within which there is no winner."""

from __future__ import annotations

import math
from array import array

import pytest

from harness.analysis.sweeps.job_result import JobResult
from harness.analysis.sweeps.ranking import Basis, block_means, joint_noise, loss_noise, make_grid, numeric_keys, rank
from tests.analysis.sweeps.job_logs import finished, job

FALLING = [4.0, 3.5, 3.0, 2.5, 2.0]


def test_linear_trend_is_not_noise() -> None:
    assert loss_noise(FALLING) == pytest.approx(0.0, abs=1e-12)
    assert loss_noise([9.0, 9.0, *FALLING]) == pytest.approx(0.0, abs=1e-12)
    assert loss_noise([0.0, 1.0, 1.0, 0.0]) == pytest.approx(math.sqrt(0.5))
    assert loss_noise(FALLING[:3]) is None
    assert loss_noise([*FALLING, math.nan]) is None


def test_block_means() -> None:
    assert block_means([1.0, 2.0]) == [1.0, 2.0]
    assert block_means([float(value) for value in range(41)]) == [value + 1.5 for value in range(0, 40, 2)]
    assert block_means([]) == []


def test_jobs_are_ranked_by_final_held_out_loss() -> None:
    worse, better = finished(job(lr="1"), [2.0, 1.5]), finished(job(lr="2"), [1.9, 1.4])
    open_job = JobResult(job=job(lr="3"), num_steps=9, evaluations=[0.1], losses=array("d", [0.1]))
    broken = finished(job(lr="4"), [1.0, math.nan])
    ranking = rank([worse, open_job, broken, better])
    assert ranking.basis is Basis.held_out
    assert [each.result for each in ranking.ranked] == [better, worse]
    assert [each.result for each in ranking.scores[2:]] == [open_job, broken]
    assert (ranking.scores[0].final, ranking.scores[3].best) == (1.4, 1.0)


def test_training_loss_decides_without_evaluations() -> None:
    ranking = rank([finished(job(lr="1"), [], losses=[3.0, 2.0]), finished(job(lr="2"), [], losses=[9.0, 1.0])])
    assert ranking.basis is Basis.training
    assert [each.final for each in ranking.scores] == [1.0, 2.0]


def test_no_winner_within_the_noise() -> None:
    def wavy(final: float) -> list[float]:
        return [final + 0.1, final - 0.1, final + 0.1, final]

    best, near, far = (finished(job(lr=str(place)), wavy(final)) for place, final in enumerate((1.0, 1.1, 2.0)))
    ranking = rank([far, near, best])
    assert [each.result for each in ranking.equals] == [best, near]
    one, other, _ = ranking.scores
    assert one.noise is not None
    assert joint_noise(one, other) == pytest.approx(2 * math.sqrt(2) * one.noise)
    clear = rank([finished(job(lr="1"), FALLING), finished(job(lr="2"), [value + 0.01 for value in FALLING])])
    assert len(clear.equals) == 1
    assert rank([]).equals == []


def test_grid_is_the_mean_over_other_keys() -> None:
    results = [
        finished(job(beta2=beta2, clip_norm=clip_norm, weight_decay=decay), [float(beta2) + float(clip_norm) + extra])
        for beta2 in ("0.95", "0.9")
        for clip_norm in ("10", "2")
        for decay, extra in (("0", 0.0), ("0.1", 1.0))
    ]
    results[0] = JobResult(job=results[0].job, exit_code=3)
    results[2:4] = [JobResult(job=each.job) for each in results[2:4]]
    cells = make_grid(rank(results).scores, "optim.beta2", "optim.clip_norm")
    assert (cells.rows, cells.columns) == (["0.9", "0.95"], ["2", "10"])
    assert cells.values[0] == [pytest.approx(3.4), pytest.approx(11.4)]
    assert math.isnan(cells.values[1][0])
    assert cells.values[1][1] == pytest.approx(11.95)
    assert cells.num_missing == [[0, 0], [2, 1]]


def test_only_varying_numeric_keys_are_drawn() -> None:
    results = [finished(job(lr=lr, clip_norm=clip, eps="1e-8"), [1.0]) for lr in ("1", "2") for clip in ("1", "null")]
    assert numeric_keys(rank(results).scores) == ["optim.lr"]
