"""Learning-rate schedule tables at known steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from harness.config.optim import OptimConfig, ScheduleKind
from harness.optim.schedule import schedule_table
from tests.composed import load

NUM_STEPS, WARMUP = 100, 10


def optim(kind: ScheduleKind, *overrides: str) -> OptimConfig:
    base = [f"optim.schedule={kind}", f"optim.warmup_steps={WARMUP}", f"train.num_steps={NUM_STEPS}"]
    return load([*base, "optim.min_lr_fraction=0.1", *overrides]).optim


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_every_schedule_warms_up_linearly_to_the_peak(kind: ScheduleKind) -> None:
    multipliers = schedule_table(optim(kind), num_steps=NUM_STEPS)
    assert len(multipliers) == NUM_STEPS + 1
    assert multipliers[:WARMUP] == pytest.approx([(step + 1) / WARMUP for step in range(WARMUP)])
    assert multipliers[WARMUP] == pytest.approx(1.0)
    assert max(multipliers) == pytest.approx(1.0)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(multipliers[WARMUP:]))


def test_final_values() -> None:
    ends = {kind: schedule_table(optim(kind), num_steps=NUM_STEPS)[-1] for kind in ScheduleKind}
    assert ends[ScheduleKind.constant] == 1.0
    assert ends[ScheduleKind.cosine] == pytest.approx(0.1)
    assert ends[ScheduleKind.linear] == pytest.approx(0.1)
    assert ends[ScheduleKind.inverse_sqrt] == pytest.approx((WARMUP / NUM_STEPS) ** 0.5)


def test_halfway_values() -> None:
    middle = WARMUP + (NUM_STEPS - WARMUP) // 2
    assert schedule_table(optim(ScheduleKind.cosine), num_steps=NUM_STEPS)[middle] == pytest.approx(0.55)
    assert schedule_table(optim(ScheduleKind.linear), num_steps=NUM_STEPS)[middle] == pytest.approx(0.55)


def test_wsd_is_constant_until_the_decay() -> None:
    multipliers = schedule_table(optim(ScheduleKind.wsd, "optim.decay_steps=20"), num_steps=NUM_STEPS)
    assert multipliers[WARMUP:81] == [1.0] * 71
    assert multipliers[90] == pytest.approx(0.55)
    assert multipliers[100] == pytest.approx(0.1)


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert schedule_table(optim(ScheduleKind.cosine, "optim.warmup_steps=0"), num_steps=NUM_STEPS)[0] == 1.0
