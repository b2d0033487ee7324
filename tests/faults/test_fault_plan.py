"""Tests of fault plans, strikes, and the interception of the run's parts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.config.errors import ConfigError
from harness.core.event_json import to_json
from harness.core.events import FaultInjected
from harness.core.rundir import RunDir, append_line
from harness.faults.fault_plan import Fault, FaultKind, FaultPlan, read_plan
from harness.faults.gradient import flip
from harness.faults.site import Site, begin_time, earlier_strikes, intercept

FAULT = Fault(kind=FaultKind.nan_grad, at=7, duration=2, rank=-1, layer="blocks.1")


def test_a_fault_strikes_its_iterations_and_ranks() -> None:
    assert [moment for moment in range(20) if FAULT.strikes_at(moment)] == [7, 8]
    assert [rank for rank in range(4) if FAULT.strikes_rank(rank, 4)] == [3]
    everywhere = Fault(kind=FaultKind.lr_spike, at=1)
    assert all(everywhere.strikes_rank(rank, 4) for rank in range(4))
    with pytest.raises(
        ConfigError, match=r"drill\.fault\.rank: must be from -2 to 1, because the run has 2 ranks, got 5"
    ):
        Fault(kind=FaultKind.nan_grad, at=1, rank=5).rank_of(2)


def test_a_fault_planned_by_the_clock_strikes_once_or_for_some_seconds() -> None:
    killed = Fault(kind=FaultKind.kill_rank, at=0, at_s=5.0)
    assert [time_s for time_s in range(9) if killed.strikes_after(time_s, lasted_s=None)] == [5, 6, 7, 8]
    assert not killed.strikes_after(6.0, lasted_s=0.5)
    full = Fault(kind=FaultKind.full_disk, at=0, at_s=5.0, duration_s=2.0)
    assert not full.strikes_after(4.0, lasted_s=None)
    assert full.strikes_after(60.0, lasted_s=None), "its time came while the run started"
    assert full.strikes_after(61.9, lasted_s=1.9)
    assert not full.strikes_after(62.0, lasted_s=2.0)
    with pytest.raises(
        ConfigError, match=r"drill\.fault\.at_s: must be null, or 0 or more with a fault of hung_rank, "
    ):
        Fault(kind=FaultKind.nan_grad, at=0, at_s=5.0)


def test_random_choices_are_a_function_of_seed_moment_and_rank() -> None:
    draws = {key: FAULT.rng(*key).random() for key in [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]}
    assert len(set(draws.values())) == 4
    assert all(FAULT.rng(*key).random() == draw for key, draw in draws.items())


def test_a_plan_survives_a_round_trip(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_plan(run) is None
    plan = FaultPlan(seed=3, faults=[FAULT])
    run.drill.write_text(json.dumps({"plan": plan.as_dict()}))
    assert read_plan(run) == plan
    run.drill.write_text(json.dumps({"plan": {"seed": 3, "faults": [{"kind": "nan_grad", "at": 7}]}}))
    assert read_plan(run) == FaultPlan(seed=3, faults=[Fault(kind=FaultKind.nan_grad, at=7)]), "of an older version"
    for text in ("{}", "nonsense", '{"plan": {"seed": 0, "faults": [{"kind": "earthquake", "at": 1}]}}'):
        run.drill.write_text(text)
        with pytest.raises(ConfigError, match=r"drill\.json: holds no valid fault plan"):
            read_plan(run)


def run_of(tmp_path: Path, rank: int, iteration: int = 0) -> Any:
    """A run with only what a site reads."""
    world = SimpleNamespace(rank=rank, size=2)
    state = SimpleNamespace(iteration=iteration)
    return cast(Any, SimpleNamespace(directory=RunDir(tmp_path), parts=SimpleNamespace(world=world), state=state))


def test_an_iteration_is_struck_once_across_restarts(tmp_path: Path) -> None:
    fault = Fault(kind=FaultKind.nan_grad, at=7, duration=2)
    for rank, iteration in ((0, 7), (1, 7), (0, 8)):
        event = FaultInjected(time=0.0, iteration=iteration, number=1, kind=fault.kind, rank=rank, message="")
        append_line(RunDir(tmp_path).faults, to_json(event))
    first, second = run_of(tmp_path, 0), run_of(tmp_path, 1)
    assert earlier_strikes(first, 1, fault) == {7, 8}
    assert earlier_strikes(second, 1, fault) == {7}
    assert earlier_strikes(second, 0, fault) == frozenset(), "another fault of the plan"
    data = Fault(kind=FaultKind.scrambled_batch, at=7)
    assert earlier_strikes(first, 1, data) == frozenset(), "a bad batch is bad whenever it is read"
    site = Site(run=second, fault=fault, number=1, seed=0, struck=earlier_strikes(second, 1, fault))
    assert [iteration for iteration in range(12) if site.strikes(iteration)] == [8]


def test_a_fault_planned_by_the_clock_strikes_the_next_iteration_once(tmp_path: Path) -> None:
    fault = Fault(kind=FaultKind.tracking_down, at=0, at_s=100.0, rank=0)
    run = run_of(tmp_path, 0, iteration=4)

    def site(begun: float) -> Site:
        return Site(run=run, fault=fault, number=0, seed=0, struck=earlier_strikes(run, 0, fault), begun=begun)

    now = begin_time(run)
    assert now == pytest.approx(time.time(), abs=60), "nothing is logged yet"
    assert not site(now).strikes(5), "it is too early"
    late = site(now - 101.0)
    assert late.strikes(5)
    late.log_strike("now")
    assert not late.strikes(6), "once in this start"
    assert not site(now - 101.0).strikes(6), "and in all later ones"
    append_line(
        run.directory.events, to_json(FaultInjected(time=5.0, iteration=0, number=0, kind="", rank=0, message=""))
    )
    assert begin_time(run) == 5.0, "of the first event, not of this start"


def test_a_strike_is_logged_at_the_current_iteration_by_default(tmp_path: Path) -> None:
    site = Site(run=run_of(tmp_path, 0, iteration=4), fault=FAULT, number=0, seed=0, struck=frozenset())
    site.log_strike("before the fifth")
    site.log_strike("after the fourth", 4)
    assert earlier_strikes(site.run, 0, FAULT) == {4, 5}


def test_an_intercepted_object_behaves_like_the_original() -> None:
    seen: list[Any] = []
    both = intercept(
        intercept([3, 1, 2], "sort", lambda: seen.append("first"), first=True), "append", seen.clear, first=False
    )
    both.sort()
    assert (seen, both[0], len(both)) == (["first"], 1, 3)
    both.append(9)
    assert (seen, both[3]) == ([], 9)


@given(st.lists(st.floats(width=32), min_size=1, max_size=8), st.integers(0, 31), st.data())
def test_flipping_a_bit_twice_restores_the_value(numbers: list[float], bit: int, data: st.DataObject) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    before = tensor.clone().view(torch.int32)
    place = torch.tensor([data.draw(st.integers(0, len(numbers) - 1))])
    flip(tensor, place, bit)
    changed = (tensor.view(torch.int32) ^ before).tolist()
    assert [number.bit_count() if number >= 0 else 1 for number in changed if number] == [1]
    assert changed[int(place)] & 0xFFFFFFFF == 1 << bit
    flip(tensor, place, bit)
    assert torch.equal(tensor.view(torch.int32), before)
