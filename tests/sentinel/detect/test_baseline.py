from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.sentinel.detect.baseline import (
    FIELDS,
    FLOATS,
    State,
    advance,
    beyond,
    expected_log_value,
    gate_bounds,
    initial_state,
    initial_state_late,
    reopen,
    tolerance,
    upper_bound,
)
from tests.sentinel.series import config, losses, norms

CFG = config()


class TensorOps:
    """The arithmetic of the gate on the device."""

    absolute, log, exp = staticmethod(torch.abs), staticmethod(torch.log), staticmethod(torch.exp)

    @staticmethod
    def where(condition: Any, chosen: Any, otherwise: Any) -> Tensor:
        return torch.where(condition, chosen, otherwise)

    @staticmethod
    def choose(condition: Any, chosen: State, otherwise: State) -> State:
        return tuple(torch.where(condition, new, old) for new, old in zip(chosen, otherwise, strict=True))

    @staticmethod
    def minimum(number: Tensor, other: Any) -> Tensor:
        return number.clamp(max=other)

    @staticmethod
    def maximum(number: Tensor, other: Any) -> Tensor:
        return number.clamp(min=other)


TENSORS = TensorOps()


def fold(values: list[float], state: State | None = None) -> State:
    state = initial_state() if state is None else state
    for value in values:
        state = advance(state, value, True, CFG, FLOATS)
    return state


def level(state: State) -> float:
    return math.exp(expected_log_value(state, CFG, FLOATS)[0])


def test_host_and_device_compute_the_same_state() -> None:
    """Up to the last bit of the logarithm, which depends on the math library."""
    values = losses(300)
    values[150:160] = [9.0] * 10
    host, device = initial_state(), torch.tensor(initial_state(), dtype=torch.float64).unbind()
    for place, value in enumerate(values):
        accept = place % 7 != 3
        host = advance(host, value, accept, CFG, FLOATS)
        tensor = torch.tensor(value, dtype=torch.float64)
        device = advance(device, tensor, torch.tensor(accept), CFG, TENSORS)
        assert torch.stack(device).tolist() == pytest.approx(list(host), rel=1e-12, abs=1e-15)
    with_tensors = upper_bound(device, CFG, TENSORS, sigmas=10.0, factor=1.2)
    assert float(with_tensors) == pytest.approx(upper_bound(host, CFG, FLOATS, sigmas=10.0, factor=1.2), rel=1e-12)


def test_the_recursion_never_branches_on_a_value() -> None:
    """A meta tensor has no truth value, so any branch would raise."""
    state = torch.zeros(len(FIELDS), dtype=torch.float64, device="meta").unbind()
    value = torch.zeros((), dtype=torch.float64, device="meta")
    bounds = gate_bounds(state, state, CFG, TENSORS, warming=value)
    refused = beyond(value, value, bounds)
    assert len(advance(state, value, refused, CFG, TENSORS)) == len(FIELDS)
    assert len(reopen(state, value, refused, TENSORS)) == len(FIELDS)


def test_both_signals_can_be_computed_together() -> None:
    pairs = list(zip(losses(50), norms(50), strict=True))
    both = torch.tensor([initial_state(), initial_state()], dtype=torch.float64).unbind(dim=1)
    for pair in pairs:
        both = advance(both, torch.tensor(pair, dtype=torch.float64), torch.tensor([True, True]), CFG, TENSORS)
    assert torch.stack(both)[:, 0].tolist() == pytest.approx(list(fold([loss for loss, _ in pairs])), rel=1e-12)
    assert torch.stack(both)[:, 1].tolist() == pytest.approx(list(fold([norm for _, norm in pairs])), rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -3.0, 1e300])
@pytest.mark.parametrize("rows", [0, 1, 200])
def test_a_rejected_value_does_not_change_the_state(value: float, rows: int) -> None:
    state = fold(losses(rows))
    assert advance(state, value, False, CFG, FLOATS) == state
    tensors = torch.tensor(state, dtype=torch.float64)
    after = advance(tensors.unbind(), torch.tensor(value, dtype=torch.float64), torch.tensor(False), CFG, TENSORS)
    assert torch.equal(torch.stack(after), tensors)


def test_the_level_follows_a_fall_but_not_a_spike() -> None:
    state = fold(losses(1000))
    spiked = fold([6.0] * 20, state)
    assert level(spiked) < 1.05 * level(state)
    fallen = fold([2.4] * 40, state)
    assert fallen[1] < state[1] - 0.1


def test_a_return_to_an_earlier_level_is_expected() -> None:
    state = fold(losses(1500))
    dipped = fold([value * 0.9 for value in losses(1700, seed=3)[1500:]], state)
    assert dipped[1] < state[1] - 0.08
    assert level(dipped) == pytest.approx(level(state), rel=0.03)


def test_heavy_tailed_noise_widens_the_bounds() -> None:
    values = losses(2000)
    assert tolerance(fold(values), CFG, FLOATS) < 1.1
    values[::50] = [value * 1.08 for value in values[::50]]
    assert tolerance(fold(values), CFG, FLOATS) > 1.3


def test_bounds_are_wide_at_first_and_while_the_learning_rate_rises() -> None:
    def width(state: State, warming: float = 0.0) -> float:
        return math.log(upper_bound(state, CFG, FLOATS, sigmas=10.0, factor=1.0, warming=warming) / level(state))

    early, late = fold(losses(10)), fold(losses(500))
    assert width(early) > 5 * width(late)
    assert width(late, warming=1.0) == pytest.approx(CFG.warmup_widening * width(late))


def test_nothing_is_beyond_the_bounds_before_the_first_row() -> None:
    """A state without rows has no level: 1.0 nats or a gradient norm of 1.0 is not the expected value."""
    state, first = initial_state(), 1e6
    tensors = torch.tensor(state, dtype=torch.float64).unbind()
    assert not beyond(first, first, gate_bounds(state, state, CFG, FLOATS))
    assert not beyond(first, first, gate_bounds(tensors, tensors, CFG, TENSORS))
    after = advance(state, first, True, CFG, FLOATS)
    assert beyond(1e3 * first, 1e3 * first, gate_bounds(after, after, CFG, FLOATS))


def rejected_rows(values: list[float], grad_norms: list[float]) -> list[int]:
    """Rows that a gate rejects; only accepted rows enter its state."""
    loss_state, grad_state = initial_state(), initial_state()
    refused = []
    for place, (loss, norm) in enumerate(zip(values, grad_norms, strict=True)):
        bounds = gate_bounds(loss_state, grad_state, CFG, FLOATS)
        accept = math.isfinite(loss) and math.isfinite(norm) and not beyond(loss, norm, bounds)
        loss_state = advance(loss_state, loss, accept, CFG, FLOATS)
        grad_state = advance(grad_state, norm, accept, CFG, FLOATS)
        refused += [] if accept else [place]
    return refused


def test_the_gate_accepts_healthy_training() -> None:
    assert rejected_rows(losses(3000), norms(3000)) == []


def test_one_nan_costs_one_update() -> None:
    values = losses(400)
    values[200] = math.nan
    assert rejected_rows(values, norms(400)) == [200]


def test_a_sustained_jump_is_never_accepted_by_waiting() -> None:
    values = losses(600)
    values[300:] = [2 * value for value in values[300:]]
    assert rejected_rows(values, norms(600)) == list(range(300, 600))


def test_a_huge_gradient_is_rejected_and_a_small_burst_is_not() -> None:
    grad_norms = norms(600)
    grad_norms[300] *= 8
    grad_norms[400] *= 1000
    assert rejected_rows(losses(600), grad_norms) == [400]


def test_the_joint_bounds_of_loss_and_gradient_are_lower() -> None:
    values, grad_norms = losses(600), norms(600)
    values[300] *= 1.12
    grad_norms[400] *= 6
    values[500], grad_norms[500] = 1.12 * values[500], 6 * grad_norms[500]
    assert rejected_rows(values, grad_norms) == [500]


def test_a_row_at_its_bound_is_accepted() -> None:
    bounds = (4.0, 8.0, 3.0, 2.0)
    assert not beyond(4.0, 2.0, bounds)
    assert beyond(4.01, 0.0, bounds)
    assert not beyond(3.0, 8.0, bounds)
    assert beyond(0.0, 8.01, bounds)
    assert beyond(3.01, 2.01, bounds)
    assert not beyond(math.nan, math.nan, bounds)


def test_a_restored_state_guards_from_its_first_row() -> None:
    state = fold(losses(300))
    again = tuple(json.loads(json.dumps(state)))
    assert again == state
    assert gate_bounds(again, again, CFG, FLOATS) == gate_bounds(state, state, CFG, FLOATS)


def test_reopen_sets_a_new_level() -> None:
    state = fold(losses(300))
    raised = reopen(state, 4.0, True, FLOATS)
    assert level(raised) == pytest.approx(4.0)
    assert raised[5] == state[5]
    assert upper_bound(raised, CFG, FLOATS, sigmas=10.0, factor=1.0) > 4.2
    assert reopen(state, math.nan, False, FLOATS) == state


def test_a_log_that_starts_late_has_narrower_bounds() -> None:
    early, late = fold([3.0]), initial_state_late(3.0)
    assert upper_bound(late, CFG, FLOATS, sigmas=10.0, factor=1.0) < upper_bound(
        early, CFG, FLOATS, sigmas=10.0, factor=1.0
    )
