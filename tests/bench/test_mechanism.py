"""Arithmetic of the mechanism study: the effect of the burst is the difference to the clean run."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.events import StepRecord
from harness.faults.fault_plan import FaultKind
from tests.bench.mechanism import grid
from tests.bench.mechanism.experiment import (
    BURST_AT,
    CELLS,
    NUM_AFTER,
    Cell,
    Effect,
    answer_questions,
    burst_plan,
    effects_table,
    measure_effect,
)
from tests.bench.mechanism.picture import draw
from tests.distributed.pool import Pool

pytestmark = pytest.mark.full

NUM_STEPS = BURST_AT + 80


def records(*, gap: float = 0.0, norm: float = 1.0, moment: float = 1.0, update: float = 1.0) -> list[StepRecord]:
    """A run with a falling loss and the given values at the burst."""

    def at(index: int) -> StepRecord:
        is_burst = index == BURST_AT
        return StepRecord(
            time=0.0,
            iteration=index + 1,
            step=index + 1,
            cursor=index,
            tokens=0,
            loss=4.0 - index / NUM_STEPS + (gap if index >= BURST_AT else 0.0),
            grad_norm=norm if is_burst else 1.0,
            lr=1.0,
            tokens_per_s=1.0,
            refused=False,
            stop_requested=False,
            step_time_s=1.0,
            flops_per_s=1.0,
            v_norm=moment if is_burst else 1.0,
            update_ratio=update if is_burst else 1.0,
        )

    return [at(index) for index in range(NUM_STEPS)]


def test_effect_is_the_difference_to_the_clean_run() -> None:
    found = measure_effect(records(gap=0.25, norm=30.0, moment=8.0, update=3.0), records())
    assert (found.grad_factor, found.moment_factor, found.update_factor) == (30.0, 8.0, 3.0)
    assert found.peak_gap == pytest.approx(0.25)
    assert found.damage == pytest.approx(0.25 * NUM_AFTER)
    assert measure_effect(records(), records()).damage == 0.0


def test_runs_with_different_batches_are_not_compared() -> None:
    other = records()
    other[BURST_AT + 3].cursor += 1
    with pytest.raises(AssertionError):
        measure_effect(other, records())


def effect_with(damage: float) -> Effect:
    return Effect(
        burst_loss=9.0,
        grad_factor=30.0,
        moment_factor=2.0,
        update_factor=3.0,
        peak_gap=0.3,
        damage=damage,
        last_gap=0.0,
    )


def test_answers_compare_pairs_that_differ_in_one_setting() -> None:
    """Twice the damage at beta2 0.999, half of it with any clip, nothing from weight decay."""
    effects = {
        cell: [
            effect_with(1.0 * (1 + (cell.beta2 == 0.999)) * (1.0 if cell.clip_norm is None else 0.5)) for _ in range(2)
        ]
        for cell in CELLS
    }
    assert answer_questions(effects) == [
        "beta2 0.999 instead of 0.95, not clipped: mean damage 1.00 -> 2.00 nats, more in 4 of 4 pairs",
        "beta2 0.999 instead of 0.95, clipped: mean damage 0.50 -> 1.00 nats, more in 8 of 8 pairs",
        "clip at 1 instead of none: mean damage 1.50 -> 0.75 nats, more in 0 of 8 pairs",
        "clip at 0.5 instead of 1: mean damage 0.75 -> 0.75 nats, more in 0 of 8 pairs",
        "weight decay 0.01 instead of 0.1: mean damage 1.00 -> 1.00 nats, more in 0 of 12 pairs",
    ]
    row = effects_table(effects).splitlines()[2]
    assert row.startswith("| 0.95 | off | 0.1 | 30.0x (30.0 to 30.0) |")


def test_overrides_and_name_of_a_cell() -> None:
    cell = Cell(0.999, None, 0.1)
    assert cell.overrides == ["optim.beta2=0.999", "optim.clip_norm=null", "optim.weight_decay=0.1"]
    assert cell.name == "beta2=0.999,clip_norm=null,weight_decay=0.1"
    assert len(set(CELLS)) == 12
    (fault,) = burst_plan(0).faults
    assert (fault.kind, fault.at, fault.rank) == (FaultKind.poisoned_batch, BURST_AT, None)


def test_picture_is_drawn(tmp_path: Path) -> None:
    draw({cell: [records(gap=0.1), records(gap=0.2)] for cell in CELLS}, tmp_path / "mechanism.png")
    assert (tmp_path / "mechanism.png").read_bytes().startswith(b"\x89PNG")


def test_burst_run_and_clean_run_differ_only_by_the_burst(ranks: Pool, tmp_path: Path) -> None:
    """Two real runs: bit-identical before the burst; its gradient is large, and the loss rises after it."""
    cell, at = Cell(0.999, None, 0.1), 60
    small: tuple[str, ...] = ("model.dim=32", "model.num_layers=1", "train.batch_size=8", "train.sequence_length=32")
    small = (*small, f"train.num_steps={at + NUM_AFTER + 2}")
    burst_trial, clean_trial = (grid.Trial(tmp_path, cell, 0, has_burst, small, at) for has_burst in (True, False))
    for trial in (burst_trial, clean_trial):
        ranks.run(1, grid.train, trial)
    burst, clean = grid.records(burst_trial), grid.records(clean_trial)
    assert [record.loss for record in burst[:at]] == [record.loss for record in clean[:at]]
    found = measure_effect(burst, clean, at=at)
    assert found.grad_factor > 5
    assert found.update_factor > 1.1
    assert found.damage > 1.0
    grid.run_all([burst_trial, clean_trial])  # both runs are finished: nothing is trained again
    assert grid.records(burst_trial) == burst
