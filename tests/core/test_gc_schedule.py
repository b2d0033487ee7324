"""Tests of `GcSchedule`: garbage is collected only at due iterations, and automatically again afterwards."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from harness.core import gc_schedule
from harness.core.gc_schedule import NUM_FIRST, GcSchedule
from tests.core.test_fast_imports import Ring

NUM_NEW = 20_000
"""New objects; automatic collection starts at fewer."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_schedule, "EVERY", 5)


def fail_with_collection_off() -> None:
    assert not gc.isenabled()
    raise KeyError


def end_iterations(gc_schedule: GcSchedule, times: int) -> None:
    for _ in range(times):
        gc_schedule.end_iteration()


def test_garbage_is_collected_only_at_due_iterations() -> None:
    with GcSchedule() as gc_schedule:
        end_iterations(gc_schedule, NUM_FIRST)
        lost = ref(Ring())
        kept = [[number] for number in range(NUM_NEW)]
        assert lost() is not None
        gc_schedule.end_iteration()
        assert lost() is not None
        gc_schedule.end_iteration()
        assert lost() is None
        assert len(kept) == NUM_NEW


def test_objects_of_the_first_iterations_are_frozen() -> None:
    with GcSchedule() as gc_schedule:
        end_iterations(gc_schedule, NUM_FIRST - 1)
        before, early = gc.get_freeze_count(), Ring()
        gc_schedule.end_iteration()
        frozen = gc.get_freeze_count()
        assert frozen > before
        end_iterations(gc_schedule, 20)
        assert gc.get_freeze_count() <= frozen  # fewer if some were freed meanwhile
        assert not any(tracked is early for tracked in gc.get_objects())


@pytest.mark.parametrize("is_on", [True, False])
def test_the_previous_setting_is_restored(is_on: bool) -> None:
    if not is_on:
        gc.disable()
    try:
        with pytest.raises(KeyError), GcSchedule():
            fail_with_collection_off()
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
