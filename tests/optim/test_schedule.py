"""Learning-rate schedule tables at known steps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from harness.config.errors import ConfigError
from harness.config.optim import OptimConfig, ScheduleKind
from harness.optim import schedule
from harness.optim.schedule import schedule_factor, schedule_table
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
    assert multipliers[WARMUP:81].tolist() == [1.0] * 71
    assert multipliers[90] == pytest.approx(0.55)
    assert multipliers[100] == pytest.approx(0.1)


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert schedule_table(optim(ScheduleKind.cosine, "optim.warmup_steps=0"), num_steps=NUM_STEPS)[0] == 1.0


@pytest.mark.parametrize("kind", list(ScheduleKind))
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_the_table_does_not_depend_on_its_pieces(
    kind: ScheduleKind, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = optim(kind, *(["optim.decay_steps=20"] if kind is ScheduleKind.wsd else []))
    whole = schedule_table(cfg, num_steps=NUM_STEPS).tolist()
    monkeypatch.setattr(schedule, "PIECE", piece)
    assert schedule_table(cfg, num_steps=NUM_STEPS).tolist() == whole
    assert [schedule_factor(cfg, step=step, num_steps=NUM_STEPS) for step in range(NUM_STEPS + 1)] == whole


def test_cosines_are_those_of_the_c_library() -> None:
    """A resumed run must find the same bits as before, and numpy's own cosine depends on the processor."""
    table = schedule_table(optim(ScheduleKind.cosine), num_steps=NUM_STEPS)
    for step in range(WARMUP, NUM_STEPS + 1):
        done = (step - WARMUP) / (NUM_STEPS - WARMUP)
        assert table[step] == 0.1 + (1 - 0.1) * 0.5 * (1 + math.cos(math.pi * done))


def test_more_steps_than_a_table_can_have_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"train\.num_steps: must be at most 100,000,000, got 1,000,000,000,000"):
        load(["train.num_steps=1000000000000"])
