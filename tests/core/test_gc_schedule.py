"""While a run trains the gc_schedule comes when it is called, and goes on by itself afterwards."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from harness.core import gc_schedule
from harness.core.gc_schedule import NUM_FIRST, GcSchedule
from tests.core.test_fast_imports import Ring

NUM_NEW = 20_000
"""Objects; by itself it would come for fewer."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_schedule, "EVERY", 5)


def fail_where_it_rests() -> None:
    assert not gc.isenabled()
    raise KeyError


def turned(gc_schedule: GcSchedule, times: int) -> None:
    for _ in range(times):
        gc_schedule.turn()


def test_garbage_waits_for_its_turn() -> None:
    with GcSchedule() as gc_schedule:
        turned(gc_schedule, NUM_FIRST)
        lost = ref(Ring())
        kept = [[number] for number in range(NUM_NEW)]
        assert lost() is not None
        gc_schedule.turn()
        assert lost() is not None
        gc_schedule.turn()
        assert lost() is None
        assert len(kept) == NUM_NEW


def test_what_exists_after_the_first_iterations_is_never_looked_at_again() -> None:
    with GcSchedule() as gc_schedule:
        turned(gc_schedule, NUM_FIRST - 1)
        before, early = gc.get_freeze_count(), Ring()
        gc_schedule.turn()
        frozen = gc.get_freeze_count()
        assert frozen > before
        turned(gc_schedule, 20)
        assert gc.get_freeze_count() <= frozen  # fewer, where some were let go meanwhile
        assert not any(each is early for each in gc.get_objects())


@pytest.mark.parametrize("is_on", [True, False])
def test_it_is_left_as_it_was_found(is_on: bool) -> None:
    if not is_on:
        gc.disable()
    try:
        with pytest.raises(KeyError), GcSchedule():
            fail_where_it_rests()
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
