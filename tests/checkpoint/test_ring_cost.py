"""The cost formula for rollbacks and rewinds against a simulation, step by step."""

from __future__ import annotations

from statistics import mean

import pytest

from harness.checkpoint.ring_cost import RollbackCost, num_buffers, rewind_cost, rollback_cost
from harness.config.schema import Config
from tests import composed

TOKENS = 2048


def config(*overrides: str) -> Config:
    return composed.load(["train.num_steps=100000", f"train.batch_tokens={TOKENS}", *overrides])


def played(*, taken_every: int, clean_reports: int, lag: int, num_steps: int = 400) -> list[int]:
    """Steps lost if a problem is found in the report of each step in turn, once there is a target."""
    losses = []
    for found in range(num_steps // 2, num_steps):
        issued = found + lag
        taken = range(0, issued + 1, taken_every)
        proven = [step for step in taken if step + clean_reports < found]
        losses.append(issued - proven[-1])
    return losses


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize(("every", "good_after"), [(1, 1), (10, 20), (20, 4), (25, 25)])
def test_rollback_cost_matches_a_simulation(every: int, good_after: int, lag: int) -> None:
    overrides = (f"checkpoint.every_steps={every}", f"checkpoint.good_after_steps={good_after}", f"sentinel.lag={lag}")
    cost = rollback_cost(config(*overrides))
    losses = played(taken_every=every, clean_reports=good_after, lag=lag)
    assert cost.steps_at_most == max(losses) == every + good_after + lag
    assert cost.steps_on_average == mean(losses)
    assert cost.tokens_at_most == max(losses) * TOKENS
    assert cost.minutes_at_most is None


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("every", [1, 2, 10])
def test_rewind_cost_matches_a_simulation(every: int, lag: int) -> None:
    cost = rewind_cost(config(f"checkpoint.ring.every_steps={every}", f"sentinel.lag={lag}"))
    losses = played(taken_every=every, clean_reports=1, lag=lag)
    assert cost == RollbackCost(
        steps_at_most=max(losses), steps_on_average=mean(losses), tokens_at_most=max(losses) * TOKENS
    )
    assert max(losses) == every + lag + 1


def test_rewind_cost_is_none_without_a_ring() -> None:
    cfg = config("checkpoint.ring.slots=0")
    assert rewind_cost(cfg) is None
    assert num_buffers(cfg.checkpoint.ring) == 1, "a checkpoint is still saved from a copy in memory"


def test_without_interval_the_whole_run_is_lost() -> None:
    cost = rollback_cost(config("checkpoint.every_steps=0", "train.num_steps=50"))
    assert cost.as_dict() == {
        "steps_at_most": 50,
        "steps_on_average": 25.5,
        "tokens_at_most": 50 * TOKENS,
        "minutes_at_most": None,
        "steps_besides": 0,
    }


def test_loss_is_at_most_the_whole_run() -> None:
    cost = rollback_cost(config("checkpoint.every_steps=100", "train.num_steps=50"))
    assert (cost.steps_at_most, cost.steps_on_average) == (50, 25.5)


def test_clock_only_is_counted_in_minutes() -> None:
    cfg = config("checkpoint.every_steps=0", "checkpoint.every_minutes=10", "sentinel.lag=2")
    assert rollback_cost(cfg).as_dict() == {
        "steps_at_most": None,
        "steps_on_average": None,
        "tokens_at_most": None,
        "minutes_at_most": 10.0,
        "steps_besides": 24,
    }
    cost = rollback_cost(cfg, step_time_s=7.0)
    assert cost.steps_at_most == (86 + 2) + 20 + 2, "600 s are 86 steps of 7 s, and it reaches all ranks 2 steps later"
    assert cost.steps_at_most * 7.0 <= 600 + 7.0 + cost.steps_besides * 7.0


def test_with_steps_and_minutes_the_first_counts() -> None:
    cfg = config("checkpoint.every_steps=100", "checkpoint.every_minutes=10")
    assert rollback_cost(cfg).steps_at_most == 121
    assert rollback_cost(cfg).minutes_at_most == 10.0
    assert rollback_cost(cfg, step_time_s=1.0).steps_at_most == 121
    assert rollback_cost(cfg, step_time_s=60.0).steps_at_most == 11 + 21
