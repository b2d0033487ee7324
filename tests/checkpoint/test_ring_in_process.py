"""Rewind targets, the choice of the next slot, and the memory limit of the ring, on one rank in this process."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checkpoint import ring
from harness.checkpoint.ring import Ring
from harness.checkpoint.slot import Slot
from harness.config.checkpoint import RingConfig
from harness.config.errors import ConfigError
from harness.core.state import RunState
from harness.distributed.world import World
from tests.composed import load

RING = load(["parallel.device=cpu"]).checkpoint.ring


def config(slots: int, memory_gb: float | None = None) -> RingConfig:
    return replace(deepcopy(RING), slots=slots, memory_gb=memory_gb)


class Bench:
    """A ring over one tensor of one rank, whose values identify the snapshot."""

    def __init__(self, world: World, *, slots: int) -> None:
        self.world = world
        self.tensor: Tensor = torch.zeros(3)
        self.ring = Ring({"tensor": self.tensor}, cfg=config(slots), world=world)

    def take(self, iteration: int, *, complete: bool = True) -> None:
        self.tensor.fill_(iteration)
        self.ring.take_snapshot(RunState(iteration=iteration, step=iteration))
        if complete:
            self.complete(iteration)

    def complete(self, iteration: int, *, step: int | None = None) -> None:
        slot = self.ring.find_incomplete(iteration)
        assert slot is not None
        slot.complete(step=iteration if step is None else step, refused_in_row=0)

    def target(self, before: int = 10**9) -> int | None:
        slot = self.ring.agree_on_target(before=before)
        return None if slot is None else slot.state.iteration

    def held(self, iteration: int) -> Slot:
        slot = self.ring.agree_on_target(before=iteration + 1)
        assert slot is not None
        return slot

    @property
    def taken(self) -> list[int]:
        return sorted(slot.state.iteration for slot in self.ring._slots if slot.is_taken)


def test_targets_follow_trust_and_distrust(world: World) -> None:
    bench = Bench(world, slots=3)
    bench.take(10)
    assert bench.target() is None, "no step was reported yet"
    bench.ring.trust(10)
    assert bench.target() is None, "no step was computed from it yet"
    bench.ring.trust(11)
    assert bench.target() == 10
    bench.take(20, complete=False)
    bench.ring.trust(21)
    assert bench.target() == 10, "its own step has not reported yet"
    bench.complete(20, step=19)
    bench.ring.trust(22)
    assert bench.target() == 20
    assert bench.target(before=20) == 10
    bench.ring.distrust(20)
    assert bench.target() == 10
    bench.ring.trust(23)
    assert bench.target() == 20, "the suspicion was unfounded"
    bench.ring.discard_from(20)
    bench.ring.trust(24)
    assert (bench.target(), bench.taken) == (10, [10])
    state = bench.ring.restore(bench.held(10))
    assert (state.iteration, bench.tensor.tolist()) == (10, [10.0] * 3)


def test_initial_state_is_a_target_too(world: World) -> None:
    bench = Bench(world, slots=2)
    bench.take(0)
    bench.take(1)
    assert bench.taken == [0, 1], "it is not written over while a slot is empty"
    bench.ring.trust(1)
    assert bench.target() == 0


def test_newest_target_is_not_overwritten(world: World) -> None:
    """Any number of untrusted snapshots never overwrites the newest trusted one."""
    for slots in (2, 3):
        bench = Bench(world, slots=slots)
        bench.take(1)
        bench.take(2)
        bench.ring.trust(3)
        for iteration in range(10, 30):
            bench.take(iteration)
            assert bench.target() == 2
        assert bench.taken == [2, *range(30 - slots, 30)], "the oldest of the others is overwritten first"
        bench.ring.restore(bench.held(2))
        assert bench.tensor.tolist() == [2.0] * 3


def test_ring_of_one_slot_is_always_overwritten(world: World) -> None:
    bench = Bench(world, slots=0)
    for iteration in (1, 2):
        bench.take(iteration)
        bench.ring.trust(iteration + 1)
    assert bench.taken == [2]


def test_slot_being_saved_is_not_overwritten(world: World) -> None:
    bench = Bench(world, slots=2)
    bench.tensor.fill_(7)
    slot = bench.ring.take_snapshot(RunState(iteration=7))
    slot.is_saving = True
    for iteration in range(8, 30):
        bench.take(iteration)
        bench.ring.trust(iteration + 1)
    assert slot.tensors["tensor"].tolist() == slot.sharded["tensor"].tolist() == [7.0] * 3
    bench.ring.discard_from(7)
    assert not slot.is_saving


def test_non_finite_snapshot_is_no_target(world: World) -> None:
    bench = Bench(world, slots=3)
    bench.take(1)
    for iteration, value in ((2, math.nan), (3, math.inf), (4, -math.inf)):
        bench.tensor.fill_(iteration)
        bench.tensor[1] = value
        bench.ring.take_snapshot(RunState(iteration=iteration))
        bench.complete(iteration)
        bench.ring.trust(10)
        assert bench.target() == 1
    bench.take(5)
    bench.ring.trust(10)
    assert bench.target() == 5


def test_only_floating_point_tensors_are_checked_for_finiteness(world: World) -> None:
    tensors = {"step": torch.tensor(7), "empty": torch.zeros(0), "weight": torch.ones(2), "bad": torch.ones(2)}
    held = Ring(tensors, cfg=config(2), world=world)
    assert held.take_snapshot(RunState(iteration=1)).is_finite
    tensors["bad"][0] = math.nan
    slot = held.take_snapshot(RunState(iteration=2))
    assert not slot.is_finite
    slot.tensors["bad"].fill_(1.0)
    assert not slot.is_finite, "looked at once"


def test_snapshot_keeps_its_moment_and_is_completed_by_its_report(world: World) -> None:
    bench = Bench(world, slots=2)
    state = RunState(iteration=3, step=3, cursor=4)
    slot = bench.ring.take_snapshot(state)
    state.advance(next_cursor=9, tokens=1)
    assert bench.ring.find_incomplete(2) is None
    assert bench.ring.find_incomplete(3) is slot
    slot.complete(step=2, refused_in_row=1, sentinel={"seen": 3})
    assert bench.ring.find_incomplete(3) is None
    assert slot.state == RunState(iteration=3, step=2, cursor=4, refused_in_row=1, sentinel={"seen": 3})
    slot.complete(step=2, refused_in_row=0)
    assert slot.state.sentinel == {}
    bench.ring.trust(4)
    slot.begin(RunState(iteration=5))
    assert (slot.is_taken, slot.is_complete, slot.is_trusted) == (True, False, False)
    bench.ring.trust(9)
    assert not slot.is_trusted


class Event:
    """A device-to-host copy in progress, and how often it was waited for."""

    num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


def test_reading_a_snapshot_waits_for_its_copy(world: World) -> None:
    bench = Bench(world, slots=2)
    slot = bench.ring.take_snapshot(RunState(iteration=1))
    event: Any = Event()
    slot.copied = event
    assert slot.is_finite
    assert event.num_waits == 1
    slot.complete(step=1, refused_in_row=0)
    bench.ring.restore(slot)
    assert event.num_waits == 2
    bench.ring.close()
    assert event.num_waits == 3


@pytest.mark.parametrize(
    ("free_bytes", "memory_gb", "slots", "problem"),
    [
        (1536, None, 2, ""),
        (1535, None, 2, "need 3 x 2.56e-07 GB on a machine with 2 ranks, 7.68e-07 GB of host memory; allowed are "),
        (1, 768e-9, 2, ""),
        (10**12, 767e-9, 2, "allowed are 7.67e-07 GB, enough for checkpoint.ring.slots=0"),
        (10**12, 768e-9, 3, "allowed are 7.68e-07 GB, enough for checkpoint.ring.slots=2"),
        (10**12, 512e-9, 3, "enough for checkpoint.ring.slots=0"),
        (10**12, 255e-9, 0, "allowed are 2.55e-07 GB, not enough for one"),
        (1535, None, 3, "allowed are 7.67e-07 GB (half of the free memory), enough for checkpoint.ring.slots=0"),
    ],
)
def test_all_ranks_of_a_machine_and_all_slots_must_fit(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    memory_gb: float | None,
    slots: int,
    problem: str,
) -> None:
    """Two ranks with 128 bytes each: one snapshot needs 256."""
    assert world.size == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(ring, "free_bytes", lambda: free_bytes)
    if not problem:
        ring.check_budget(128, cfg=config(slots, memory_gb))
        return
    with pytest.raises(ConfigError) as caught:
        ring.check_budget(128, cfg=config(slots, memory_gb))
    assert problem in str(caught.value)


def test_machine_with_least_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines: one has 4 ranks, the other little memory."""
    monkeypatch.setattr(ring, "gather_results", lambda _: [(400, 4, 10**9), (100, 1, 799)])
    with pytest.raises(ConfigError, match="on a machine with 4 ranks"):
        ring.check_budget(100, cfg=config(0))


def test_ring_that_does_not_fit_is_rejected_before_allocation(world: World) -> None:
    with pytest.raises(ConfigError, match=r"1 x 1\.28e-07 GB"):
        Ring({"a": torch.zeros(1), "b": torch.zeros(1)}, cfg=config(0, 127e-9), world=world)
