"""When checkpoints are saved, marked good and usable for a rollback, step by step on one rank in this process."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoint import catalog, integrity, manager, saver, store
from harness.checkpoint.catalog import Health, name_of
from harness.checkpoint.manager import CheckpointManager
from harness.checkpoint.ring import Ring
from harness.checkpoint.ring_cost import rollback_cost
from harness.checkpoint.taint_log import read_taints
from harness.core.events import CheckpointFailed, CheckpointJudged, CheckpointSaved, Event, ReducedRecord
from harness.core.state import RunState
from harness.distributed.world import World
from tests.checkpoint.storage import failing
from tests.composed import load

COMPOSED = load(["parallel.device=cpu", "train.num_steps=100", "checkpoint.retry_s=0"])


PATIENCE_S = 10
MANAGERS: list[CheckpointManager] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close every manager, so that no thread outlives its test."""
    yield
    while MANAGERS:
        MANAGERS.pop().close()


class Played:
    """A run without a model: one tensor, filled with the number of the iteration. Reports arrive at once."""

    def __init__(self, root: Path, world: World, *, slots: int = 2, snapshot_every: int = 1, **section: Any) -> None:
        self.cfg = deepcopy(COMPOSED)
        options = {"every_steps": 2, "good_after_steps": 3, "keep": 100, "keep_every_steps": 0} | section
        for name, value in options.items():
            setattr(self.cfg.checkpoint, name, value)
        self.cfg.checkpoint.ring.slots, self.cfg.checkpoint.ring.every_steps = slots, snapshot_every
        self.root, self.state, self.tensor = root, RunState(), torch.zeros(3)
        self.num_refused = 0
        self.ring = Ring({"model.weight": self.tensor}, cfg=self.cfg.checkpoint.ring, world=world)
        self.checkpoints = CheckpointManager(self.cfg, root, ring=self.ring, world=world)
        MANAGERS.append(self.checkpoints)
        self.log: list[Event] = []

    def issue(self) -> bool:
        """One update; returns whether the state after it is saved."""
        self.state.advance(next_cursor=self.state.cursor + 1, tokens=10)
        self.tensor.fill_(self.state.iteration)
        return self.checkpoints.snapshot_if_due(self.state)

    def report(
        self,
        iteration: int,
        *,
        refused: bool = False,
        doubtful_since: int | None = None,
        is_busy: bool = False,
        value: float = 1.0,
        **flags: Any,
    ) -> None:
        self.state.correct_step(refused=refused)
        self.num_refused += refused
        record = ReducedRecord(
            time=0.0,
            iteration=iteration,
            step=iteration - self.num_refused,
            cursor=iteration,
            tokens=self.state.tokens,
            loss=value,
            grad_norm=value,
            lr=0.1,
            refused=refused,
            stop_requested=False,
            **flags,
        )
        self.checkpoints.on_step_record(
            record,
            self.state,
            doubtful_since=doubtful_since,
            is_busy=is_busy,
            remembered=lambda: {"reports": self.state.iteration},
        )
        if not is_busy:
            self.checkpoints.write_queued()

    def step(self, **flags: Any) -> bool:
        is_saved = self.issue()
        self.report(self.state.iteration, **flags)
        self.finish_saves()
        return is_saved

    def finish_saves(self) -> None:
        """Wait for the writer thread and collect its events."""
        self.checkpoints.finish()
        self.log.extend(self.checkpoints.drain_events())

    def steps(self, count: int) -> list[int]:
        """Steps whose state was saved."""
        return [self.state.step for _ in range(count) if self.step()]

    @property
    def saved(self) -> list[int]:
        return [event.step for event in self.log if isinstance(event, CheckpointSaved)]

    @property
    def marks(self) -> list[tuple[str, str]]:
        return [(event.directory, event.reason) for event in self.log if isinstance(event, CheckpointJudged)]

    @property
    def health(self) -> dict[int, Health]:
        return {each.step: each.health for each in catalog.list_checkpoints(self.root)}

    @property
    def in_memory(self) -> list[int]:
        return sorted(slot.state.iteration for slot in self.ring._slots if slot.is_taken)


@pytest.mark.parametrize(
    ("every_steps", "expected"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (2, [2, 4, 6]), (3, [3, 6])]
)
def test_saves_every_every_steps(tmp_path: Path, world: World, every_steps: int, expected: list[int]) -> None:
    run = Played(tmp_path, world, every_steps=every_steps)
    assert run.steps(7) == expected
    assert run.saved == list(run.health) == expected


def test_requested_save_comes_after_the_next_update(tmp_path: Path, world: World) -> None:
    run = Played(tmp_path, world, every_steps=0)
    assert not run.step(save_requested=True)
    assert run.step()
    assert run.steps(2) == []
    run.checkpoints.request_save()
    assert run.steps(3) == [5]
    assert run.saved == [2, 5]


def test_save_waits_for_its_report_and_next_save_waits_for_it(tmp_path: Path, world: World) -> None:
    run = Played(tmp_path, world, every_steps=2)
    assert [run.issue() for _ in range(5)] == [False, True, False, False, False]
    assert run.checkpoints._queued is not None
    assert run.checkpoints._queued.is_saving, "or the ring would write over it"
    for iteration in (1, 2):
        run.report(iteration)
    run.finish_saves()
    assert run.saved == [2], "the one of step 4 was due before the report of step 2"
    assert run.issue(), "and comes as soon as it can"
    for iteration in range(3, 7):
        run.report(iteration)
    run.finish_saves()
    assert run.saved == [2, 6]
    assert not any(slot.is_saving for slot in run.ring._slots)


def test_state_is_neither_trusted_nor_saved_before_all_that_its_record_calls_for_is_done(
    tmp_path: Path, world: World
) -> None:
    run = Played(tmp_path, world, every_steps=2, slots=4)
    for _ in range(3):
        run.issue()
    run.report(1)
    run.report(2, is_busy=True)
    run.report(3, is_busy=True)
    run.finish_saves()
    assert run.saved == []
    assert not any(slot.is_trusted for slot in run.ring._slots)
    run.issue()
    run.report(4)
    run.finish_saves()
    assert run.saved == [2]
    assert store.read_state(tmp_path / name_of(2, 0)).sentinel == {"reports": 3}, "as of its own report"
    assert [slot.state.iteration for slot in run.ring._slots if slot.is_trusted] == [1, 2, 3]


def test_save_that_waits_is_made_before_another_slot_is_needed(tmp_path: Path, world: World) -> None:
    run = Played(tmp_path, world, every_steps=2)
    run.issue()
    run.issue()
    run.report(1)
    run.report(2, is_busy=True)
    run.checkpoints.finish_saves()
    run.finish_saves()
    assert run.saved == [2]
    assert not any(slot.is_saving for slot in run.ring._slots)


@pytest.mark.parametrize(
    ("slots", "snapshot_every", "expected"), [(0, 1, [6]), (2, 1, [5, 6, 7]), (2, 2, [2, 4, 6]), (2, 3, [3, 6])]
)
def test_snapshots_are_taken_between_saves(
    tmp_path: Path, world: World, slots: int, snapshot_every: int, expected: list[int]
) -> None:
    run = Played(tmp_path, world, slots=slots, snapshot_every=snapshot_every, every_steps=6)
    run.steps(7)
    assert run.in_memory == expected


def test_snapshot_is_complete_with_its_report_and_trusted_after_the_next_clean_one(
    tmp_path: Path, world: World
) -> None:
    run = Played(tmp_path, world, every_steps=0)
    run.issue()
    (slot,) = [slot for slot in run.ring._slots if slot.is_taken]
    run.report(1, refused=True)
    assert (slot.is_complete, slot.state.step, slot.state.refused_in_row, slot.state.sentinel) == (
        True,
        0,
        1,
        {"reports": 1},
    )
    run.step()
    assert slot.is_trusted
    run.step(doubtful_since=1)
    assert not slot.is_trusted


@pytest.mark.parametrize(
    ("unclean", "judged_after"),
    [
        ({}, 5),
        ({1: "refused"}, 5),
        ({3: "refused"}, 6),
        ({4: "doubtful"}, 7),
        ({3: "refused", 5: "doubtful"}, 8),
        ({4: "empty"}, 5),
        ({5: "empty"}, 6),
    ],
)
def test_checkpoint_is_good_after_three_clean_steps_in_a_row(
    tmp_path: Path, world: World, unclean: dict[int, str], judged_after: int
) -> None:
    run = Played(tmp_path, world, every_steps=0)
    flags = {
        None: {},
        "refused": {"refused": True},
        "doubtful": {"doubtful_since": 2},
        "empty": {"refused": True, "value": 0.0},  # no token to predict
    }
    for iteration in range(1, judged_after + 1):
        assert run.marks == []
        if iteration == 2:
            run.checkpoints.request_save()
        run.step(**flags[unclean.get(iteration)])  # type: ignore[arg-type]
    (directory,) = [each.name for each in catalog.list_checkpoints(tmp_path)]
    first_clean = max([2, *(each for each, kind in unclean.items() if each > 2 and kind != "empty")])
    assert run.marks == [(directory, f"{judged_after - first_clean} clean steps followed")]
    assert [*run.health.values()] == [Health.good]


def test_saved_event_manifest_and_state(tmp_path: Path, world: World) -> None:
    run = Played(tmp_path, world, every_steps=0)
    run.step(refused=True)
    run.checkpoints.request_save()
    run.step()
    (event,) = run.log
    path = tmp_path / name_of(1, 0)
    manifest = integrity.verify(path)
    assert isinstance(event, CheckpointSaved)
    assert (event.iteration, event.step, event.directory, event.bytes) == (2, 1, path.name, manifest.bytes)
    assert 0 <= event.blocked_s < time.monotonic()
    assert 0 <= event.seconds < time.monotonic()
    assert (manifest.step, manifest.iteration, manifest.tokens) == (1, 2, 20)
    assert manifest.rollback == rollback_cost(run.cfg).as_dict()
    state = store.read_state(path)
    assert (state.step, state.refused_in_row, state.sentinel) == (1, 0, {"reports": 2})
    assert store.read_tensors(path, ["model.weight"])["model.weight"].tolist() == [2.0] * 3
    assert run.checkpoints._plan_cache.plan is not None, "the next save needs no new plan"


def test_same_step_is_not_saved_twice(tmp_path: Path, world: World) -> None:
    run = Played(tmp_path, world, every_steps=1)
    run.steps(2)
    run.step(refused=True)
    assert run.saved == [1, 2]
    assert not any(slot.is_saving for slot in run.ring._slots)


def test_non_finite_state_or_full_disk_emits_an_event_and_the_next_save_works(tmp_path: Path, world: World) -> None:
    run = Played(tmp_path / "root", world, every_steps=1)
    run.tensor.fill_(math.nan)
    run.state.advance(next_cursor=1, tokens=10)
    run.checkpoints.snapshot_if_due(run.state)
    run.report(1)
    run.finish_saves()
    run.root.write_text("a file where the directory should be")
    run.step()
    run.root.unlink()
    run.step()
    assert [type(event) for event in run.log] == [CheckpointFailed, CheckpointFailed, CheckpointSaved]
    failed = [event.reason for event in run.log if isinstance(event, CheckpointFailed)]
    assert failed[0] == "weights or moments are not finite"
    assert "Not a directory" in failed[1]
    assert "\n" not in failed[1]
    assert run.saved == [3]
    assert not any(slot.is_saving for slot in run.ring._slots)


@pytest.mark.parametrize(("good_after", "expected"), [(100, [2, 8]), (3, [4, 6, 8])])
def test_pruning_runs_after_a_save_and_after_a_good_mark(
    tmp_path: Path, world: World, good_after: int, expected: list[int]
) -> None:
    run = Played(tmp_path, world, keep=1, good_after_steps=good_after)
    run.steps(8)
    assert list(run.health) == expected
    run.steps(1)
    assert list(run.health) == ([2, 8] if good_after == 100 else [6, 8]), "6 is good now, and 4 may go"


def test_a_save_that_fails_for_lack_of_space_has_pruned_before(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    Played(tmp_path, world).steps(8)
    run = Played(tmp_path, world, keep=1)
    run.state = RunState(step=8, iteration=8)
    run.checkpoints.continue_from(name_of(8, 0), run.state)
    run.steps(1)
    assert list(run.health) == [2, 4, 6, 8], "a start deletes nothing: it may still be rejected"
    monkeypatch.setattr(saver, "write", write)
    run.steps(1)
    assert run.saved == []
    assert list(run.health) == [4, 6, 8], "the newest good one, the next candidate and the newest one"


def test_next_write_but_not_the_loop_waits_for_a_deletion(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, has_begun, may_end = catalog.delete, threading.Event(), threading.Event()

    def delete_when_allowed(path: Path) -> bool:
        has_begun.set()
        assert may_end.wait(PATIENCE_S)
        return delete(path)

    run = Played(tmp_path, world, every_steps=1, keep=1, good_after_steps=100)
    run.steps(2)
    monkeypatch.setattr(catalog, "delete", delete_when_allowed)
    for iteration in (3, 4):
        assert run.issue()
        run.report(iteration)
        assert has_begun.wait(PATIENCE_S), "after the save of step 3"
        assert not may_end.is_set()
    assert not run.checkpoints._writer.wait(within_s=0.2)
    assert list(run.health) == [1, 2, 3], "the deletion could hit a checkpoint that is published meanwhile"
    may_end.set()
    run.finish_saves()
    assert list(run.health) == [1, 4]


@pytest.mark.parametrize(
    ("num_steps", "is_done", "refused_at", "expected", "reason"),
    [
        (3, True, None, Health.good, "3 clean steps led up to the end of the run"),
        (2, True, None, Health.candidate, ""),
        (3, False, None, Health.candidate, ""),
        (4, True, 1, Health.good, "3 clean steps led up to the end of the run"),
        (4, True, 2, Health.candidate, ""),
    ],
)
def test_the_last_state_of_a_run_is_good_after_clean_steps(
    tmp_path: Path, world: World, num_steps: int, is_done: bool, refused_at: int | None, expected: Health, reason: str
) -> None:
    run = Played(tmp_path, world, every_steps=0)
    for iteration in range(1, num_steps + 1):
        run.step(refused=iteration == refused_at)
    assert run.checkpoints.save_last(run.state, is_done=is_done, remembered=lambda: {"reports": "all"})
    run.finish_saves()
    path = tmp_path / name_of(run.state.step, 0)
    assert (catalog.health_of(path), [each for _, each in run.marks]) == (expected, [reason] if reason else [])
    assert store.read_state(path).sentinel == {"reports": "all"}
    assert run.checkpoints.save_last(run.state, is_done=is_done), "it is on disk already"
    run.finish_saves()
    assert len(run.saved) == 1


def test_failed_last_save_is_reported(tmp_path: Path, world: World) -> None:
    run = Played(tmp_path, world, every_steps=0)
    run.step()
    run.tensor.fill_(math.nan)
    assert not run.checkpoints.save_last(run.state, is_done=True)


def test_resumed_run_marks_its_checkpoint_good(tmp_path: Path, world: World) -> None:
    Played(tmp_path, world).steps(2)
    run = Played(tmp_path, world, every_steps=0)
    run.state = RunState(step=2, iteration=2)
    run.checkpoints.continue_from(name_of(2, 0), run.state)
    assert run.checkpoints.save_last(run.state, is_done=True), "nothing to save"
    assert run.saved == []
    run.steps(2)
    assert run.marks == []
    run.steps(2)
    assert run.marks == [(name_of(2, 0), "3 clean steps followed")]
    again = Played(tmp_path, world, every_steps=0)
    again.checkpoints.continue_from(name_of(2, 0), run.state)
    assert not again.checkpoints._candidates, "it is good"


def test_run_resumed_from_memory_marks_the_checkpoints_on_disk_good(tmp_path: Path, world: World) -> None:
    earlier = Played(tmp_path, world)
    earlier.steps(4)
    catalog.mark(tmp_path / name_of(2, 0), Health.tainted, "a test")
    run = Played(tmp_path, world, every_steps=0)
    run.state = RunState(step=4, iteration=4)
    run.checkpoints.continue_from_snapshot(run.state)
    assert run.checkpoints.save_last(run.state, is_done=False), "it is on disk already"
    assert run.saved == []
    run.steps(4)
    assert run.marks == [(name_of(4, 0), "3 clean steps followed")]


def test_damaged_checkpoint_is_quarantined_after_a_resume_from_memory_and_its_step_is_saved_again(
    tmp_path: Path, world: World
) -> None:
    Played(tmp_path, world, every_steps=1).steps(4)
    for step in (3, 4):
        (tmp_path / name_of(step, 0) / integrity.MANIFEST).write_text("{}")
    run = Played(tmp_path, world)
    run.state = RunState(step=2, iteration=2, cursor=2)
    damage = run.checkpoints.continue_from_snapshot(run.state)
    assert [error.path.parent.name for error in damage] == [name_of(4, 0), name_of(3, 0)]
    assert [path.name for path in catalog.list_damaged(tmp_path)] == [f"{name_of(step, 0)}.damaged" for step in (3, 4)]
    run.steps(2)
    assert run.checkpoints.save_last(run.state, is_done=True)
    assert run.saved == [4]
    assert integrity.verify(tmp_path / name_of(4, 0)).step == 4
    run.steps(1)
    assert name_of(3, 0) not in dict(run.marks)


@pytest.mark.parametrize("is_last", [True, False])
def test_checkpoint_with_a_damaged_shard_does_not_count_as_saved_after_a_resume_from_memory(
    tmp_path: Path, world: World, is_last: bool
) -> None:
    """Its shards are read only if it would make a save unnecessary: at the end, or if a rejected update is repeated."""
    Played(tmp_path, world).steps(4)
    for step in (2, 4):
        (shard,) = (tmp_path / name_of(step, 0)).glob("*.distcp")
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    run = Played(tmp_path, world, slots=0)
    run.state = RunState(step=4, iteration=4, cursor=4)
    with failing(".distcp") as read:
        assert run.checkpoints.continue_from_snapshot(run.state) == []
        assert run.steps(1) == [], "an ordinary resume reads no shard"
        assert read == []
    run.state = RunState(step=4, iteration=5, cursor=5)
    if is_last:
        assert run.checkpoints.save_last(run.state, is_done=False)
        run.finish_saves()
    else:
        run.num_refused = 1
        run.checkpoints.request_save()
        run.step(refused=True)
    assert run.saved == [4]
    assert integrity.verify(tmp_path / name_of(4, 0)).step == 4
    assert [path.name for path in catalog.list_damaged(tmp_path)] == [f"{name_of(4, 0)}.damaged"]
    assert [(name, reason.endswith("(sha256 differs)")) for name, reason in run.marks] == [(name_of(4, 0), True)]


def test_intact_checkpoint_is_hashed_once_after_a_resume_from_memory(tmp_path: Path, world: World) -> None:
    Played(tmp_path, world).steps(4)
    run = Played(tmp_path, world)
    run.state = RunState(step=4, iteration=4)
    run.checkpoints.continue_from_snapshot(run.state)
    with failing(".distcp"):
        assert not run.checkpoints.save_last(run.state, is_done=True), "it cannot be read, and stays as it is"
    assert list(run.health) == [2, 4]
    run.checkpoints.continue_from_snapshot(run.state)
    assert run.checkpoints.save_last(run.state, is_done=True)
    with failing(".distcp"):
        assert run.checkpoints.save_last(run.state, is_done=True), "the result is remembered"
    assert run.saved == []


def test_checkpoint_that_cannot_be_read_does_not_count_as_saved_after_a_resume_from_memory(
    tmp_path: Path, world: World
) -> None:
    Played(tmp_path, world).steps(4)
    run = Played(tmp_path, world)
    run.state = RunState(step=4, iteration=4)
    with failing(f"{name_of(4, 0)}/{integrity.MANIFEST}"):
        assert run.checkpoints.continue_from_snapshot(run.state) == []
    assert list(run.health) == [2, 4], "what cannot be read is not renamed"
    assert not run.checkpoints.save_last(run.state, is_done=True), "the state may be nowhere on disk"


def test_failed_good_mark_is_retried(tmp_path: Path, world: World) -> None:
    run = Played(tmp_path, world, every_steps=0)
    run.checkpoints.request_save()
    run.step()
    obstacle = tmp_path / name_of(1, 0) / catalog.HEALTH
    obstacle.mkdir()
    run.steps(3)
    assert run.marks == []
    obstacle.rmdir()
    run.steps(1)
    assert run.marks == [(name_of(1, 0), "4 clean steps followed")]


@pytest.mark.parametrize("num_steps", [7, 8])
def test_checkpoint_that_is_written_slowly_is_good_at_the_end_of_the_run(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """Its clean steps pass while it is written. A resume counts only those of the checkpoint that it loads."""
    is_released, write = threading.Event(), saver.write

    def write_slowly(*args: Any, **options: Any) -> Any:
        assert is_released.wait(PATIENCE_S)
        return write(*args, **options)

    monkeypatch.setattr(saver, "write", write_slowly)
    run = Played(tmp_path, world, every_steps=5)
    for iteration in range(1, num_steps + 1):
        run.issue()
        run.report(iteration)
    is_released.set()
    assert run.checkpoints.save_last(run.state, is_done=False)
    assert run.health == {5: Health.good if num_steps == 8 else Health.candidate, num_steps: Health.candidate}


def test_checkpoint_deleted_by_hand_gets_no_mark(tmp_path: Path, world: World) -> None:
    run = Played(tmp_path, world)
    run.steps(2)
    assert catalog.delete(tmp_path / name_of(2, 0))
    run.steps(4)
    assert run.marks == []


@pytest.fixture
def five(tmp_path: Path, world: World) -> Played:
    """Checkpoints of steps 2 to 10: two good, one tainted, two candidates."""
    run = Played(tmp_path, world, good_after_steps=100)
    run.steps(10)
    for step, health in ((2, Health.good), (4, Health.good), (6, Health.tainted)):
        catalog.mark(tmp_path / name_of(step, 0), health, "a test")
    return run


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [4, 2]),
        ({"before": 5}, [4, 2]),
        ({"before": 4}, [2]),
        ({"before": 2}, []),
        ({"until_step": 10}, [10, 8, 4, 2]),
        ({"until_step": 8}, [8, 4, 2]),
        ({"until_step": 7}, [4, 2]),
        ({"until_step": 8, "before": 4}, [2]),
    ],
)
def test_rollback_targets(five: Played, options: dict[str, float], expected: list[int]) -> None:
    assert five.checkpoints.rollback_targets(**options) == [(name_of(step, 0), step) for step in expected]


def resumed(run: Played, world: World, **options: Any) -> CheckpointManager:
    """A new manager on the same directory."""
    return Played(run.root, world, **options).checkpoints


def test_unreadable_checkpoint_is_no_rollback_target(five: Played, world: World) -> None:
    for file in (integrity.MANIFEST, catalog.HEALTH):
        with failing(f"{name_of(4, 0)}/{file}") as failed:
            assert resumed(five, world).rollback_targets() == [(name_of(2, 0), 2)]
        assert len(failed) > 1, "asked again before it was left out"
        with failing(f"{name_of(4, 0)}/{file}", times=2 if file == catalog.HEALTH else 1):
            assert resumed(five, world, retry_s=0.01).rollback_targets() == [(name_of(4, 0), 4), (name_of(2, 0), 2)]
    (five.root / name_of(4, 0) / integrity.MANIFEST).write_text("{}")
    assert resumed(five, world).rollback_targets() == [(name_of(2, 0), 2)], "it is damaged"
    (five.root / name_of(2, 0) / catalog.HEALTH).write_text(json.dumps({"health": "archived"}))
    assert resumed(five, world).rollback_targets() == [], "a newer version wrote that"


def test_later_checkpoints_are_tainted(five: Played, world: World) -> None:
    (five.root / name_of(10, 0) / integrity.MANIFEST).write_text("{}")
    checkpoints = resumed(five, world)
    checkpoints.taint_since(4, "a test")
    assert five.health == {
        2: Health.good,
        4: Health.good,
        6: Health.tainted,
        8: Health.tainted,
        10: Health.candidate,
    }, "a damaged manifest is rejected anyway"
    assert json.loads((five.root / name_of(8, 0) / catalog.HEALTH).read_text())["reason"] == "a test"
    assert [taint[:3] for taint in read_taints(five.root)] == [(4, 0, "a test")]


def test_a_damaged_checkpoint_taints_its_copies_in_a_store(five: Played, world: World) -> None:
    """Its copy may be intact. A damaged manifest may be of any iteration; one that can be read tells which."""
    checkpoints = resumed(five, world)
    checkpoints.taint_since(10, "undoes no checkpoint")
    catalog.quarantine(five.root / name_of(8, 0))
    checkpoints.taint_since(9, "undoes the newest one")
    catalog.delete(five.root / name_of(10, 0))
    checkpoints.taint_since(8, "undoes none that is left")
    checkpoints.taint_since(7, "undoes the quarantined one")
    (five.root / name_of(2, 0) / integrity.MANIFEST).write_text("{}")
    resumed(five, world).taint_since(8, "may undo the damaged one")
    assert [taint[0] for taint in read_taints(five.root)] == [9, 7, 8]
    assert five.health == {2: Health.good, 4: Health.good, 6: Health.tainted}


@pytest.mark.parametrize("is_resumed", [False, True])
def test_taint_covers_copies_also_if_the_clock_was_set_back(
    five: Played, world: World, clock: Clock, is_resumed: bool
) -> None:
    manifests = {step: integrity.read_manifest(five.root / name_of(step, 0)) for step in (4, 6, 10)}
    assert all(manifest.time > clock.time() for manifest in manifests.values())
    (resumed(five, world) if is_resumed else five.checkpoints).taint_since(4, "a test")
    (taint,) = read_taints(five.root)
    assert {step: taint.covers(manifest) for step, manifest in manifests.items()} == {4: False, 6: True, 10: True}


def test_discard_after_drops_pending_save_and_later_snapshots(tmp_path: Path, world: World) -> None:
    run = Played(tmp_path, world, every_steps=2)
    run.steps(4)
    run.issue()
    run.issue()
    waiting = run.checkpoints._queued
    assert waiting is not None
    assert run.in_memory == [3, 5, 6]
    run.checkpoints.discard_after(4)
    assert (run.checkpoints._queued, run.in_memory) == (None, [3])
    assert run.checkpoints._candidates == {name_of(2, 0): 2, name_of(4, 0): 4}, "those taken until then may prove good"
    run.checkpoints.discard_after(3)
    assert run.in_memory == [3]
    assert run.checkpoints._candidates == {name_of(2, 0): 2}


def test_undone_steps_do_not_make_a_checkpoint_good(tmp_path: Path, world: World) -> None:
    """Three clean steps must follow; of those after step 4, a rewind at iteration 6 undoes two."""
    run = Played(tmp_path, world)
    run.steps(6)
    assert [name for name, _ in run.marks] == [name_of(2, 0)]
    run.checkpoints.discard_after(4)
    run.state.return_to(RunState(step=4))
    run.checkpoints.continue_after_restore(run.state)
    for step, expected in ((5, []), (6, []), (7, [name_of(4, 0)])):
        run.step()
        assert [name for name, _ in run.marks][1:] == expected, f"after step {step}"


class Clock:
    """A clock that only the test moves."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(manager, "time", clock)
    return clock


def test_clock_is_due_once_per_interval_counted_from_the_last_save(tmp_path: Path, world: World, clock: Clock) -> None:
    run = Played(tmp_path, world, every_steps=0, every_minutes=2.0)
    never = Played(tmp_path, world, every_steps=0, every_minutes=None)

    def is_due(seconds: float) -> bool:
        clock.now_s = 1000.0 + seconds
        assert not never.checkpoints.is_due_by_clock()
        return run.checkpoints.is_due_by_clock()

    asked = [is_due(seconds) for seconds in (0, 119, 120, 121, 239, 240, 241)]
    assert asked == [False, False, True, False, False, True, False]
    clock.now_s = 1300.0
    run.checkpoints.request_save()
    run.step()
    assert [is_due(seconds) for seconds in (360, 419, 420)] == [False, False, True]


@pytest.mark.parametrize(("retry_s", "expected"), [(3.0, 3.0), (5.0, 4.0)])
def test_retry_on_rank_0_is_at_most_half_the_collective_timeout(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, retry_s: float, expected: float
) -> None:
    monkeypatch.setattr(COMPOSED.parallel, "timeout_s", 8.0)
    checkpoints = Played(tmp_path, world, retry_s=retry_s).checkpoints
    assert (checkpoints.retry_s, checkpoints._rank0_retry_s) == (retry_s, expected)
