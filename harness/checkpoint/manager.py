"""The keeper: when a snapshot is taken, when one goes to disk, how healthy what lies there is, and what may go.

How: all ranks call it at the same iterations and do the same, so the ring and the files agree without a word. A save is
a snapshot that the clerk writes once its report has come back; the loop never waits for it, unless the next one is due
before it is done. Rank 0 alone judges and deletes: a checkpoint is good once `good_after_steps` clean steps in a row
have followed it, and what is not finite is not written at all.
A disk that refuses costs that checkpoint and an event; training goes on and the next one tries again.
What cannot be read is neither tainted nor deleted, and nothing else is because of it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from harness.checkpoint import catalog, integrity, store
from harness.checkpoint.catalog import Checkpoint, Health
from harness.checkpoint.integrity import Damaged, OtherVersion
from harness.checkpoint.io_retry import IoRetry
from harness.checkpoint.ring import Ring, Slot
from harness.checkpoint.ring_cost import rollback_cost
from harness.checkpoint.writer_thread import WriterThread
from harness.config.errors import StorageError
from harness.config.schema import Config
from harness.core.events import CheckpointFailed, CheckpointJudged, CheckpointSaved, Event, ReducedRecord
from harness.core.state import RunState
from harness.distributed.collectives import from_first, together
from harness.distributed.world import World


@final
class CheckpointManager:
    def __init__(self, cfg: Config, root: Path, *, ring: Ring, world: World) -> None:
        self._cfg = cfg.checkpoint
        self.retry_s = cfg.checkpoint.retry_s
        self._rank0_retry_s = min(self.retry_s, cfg.parallel.timeout_s / 2)
        """For how long rank 0 may retry while the others wait for it in a collective."""
        self._plan_cache = store.SavePlanCache()
        self._iterations: dict[str, int] = {}
        """Directory -> the iteration it was taken after, of those that were saved or read in this process."""
        self._rollback = rollback_cost(cfg).as_dict()
        self._root = root
        self._ring = ring
        self._world = world
        self._writer: WriterThread[Event] = WriterThread()
        self._events: list[Event] = []
        self._on_disk: set[str] = set()
        self._queued: Slot | None = None
        """Waits for its report before it can be written."""
        self._save_requested = False
        self._blocked_s = 0.0
        self._interval_s = 60 * (self._cfg.every_minutes or math.inf)
        self._next_save_s = time.monotonic() + self._interval_s
        self._candidates: dict[str, int] = {}
        """Directory -> the iteration it was taken after."""
        self._unmarked: deque[tuple[str, int]] = deque()
        """Those that proved good and could not be marked; filled in the clerk's thread."""
        self._last_unclean = 0
        """The last iteration that was not clean, or where the run began."""

    def continue_from(self, name: str, state: RunState) -> None:
        """The run goes on from this checkpoint, which its next clean steps may prove good."""
        self._on_disk.add(name)
        self._last_unclean = state.iteration
        if from_first(lambda: catalog.health_of(self._root / name)) in (Health.candidate, Health.unread):
            self._candidates[name] = state.iteration

    def is_due_by_clock(self) -> bool:
        """Whether the clock asks for a checkpoint, once each time; on rank 0 alone, whose word the others hear."""
        is_due = self._world.is_first and time.monotonic() >= self._next_save_s
        if is_due:
            self._next_save_s = time.monotonic() + self._interval_s
        return is_due

    def is_due(self, step: int) -> bool:
        """Whether the state after this update is to be saved: by the count of steps, or because somebody asked."""
        return self._save_requested or (self._cfg.every_steps > 0 and step % self._cfg.every_steps == 0)

    def snapshot_if_due(self, state: RunState) -> bool:
        """Snapshot the state that the last update left, for the ring, for the disk, or for both; True where it goes to
        disk, on all ranks alike."""
        is_due = self.is_due(state.step)
        self._save_requested = is_due and self._queued is not None
        if is_due and self._queued is None:
            self._queued = self._snapshot_to_save(state)
            return True
        if self._cfg.ring.slots and state.iteration % self._cfg.ring.every_steps == 0:
            self._ring.take_snapshot(state)
        return False

    def on_step_record(
        self,
        record: ReducedRecord,
        state: RunState,
        *,
        doubtful_since: int | None = None,
        remembered: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """What a report says: its snapshot is whole, those before it can be trusted, a checkpoint has proved good.

        While something is under suspicion, nothing that was taken since it began is trusted or good.
        """
        slot = self._ring.find_incomplete(record.iteration)
        if slot is not None:
            slot.complete(step=record.step, refused_in_row=state.refused_in_row, sentinel=remembered())
        if doubtful_since is not None:
            self._ring.distrust(doubtful_since)
        if record.refused or doubtful_since is not None:
            self._last_unclean = record.iteration
        else:
            self._ring.trust(record.iteration)
            self._promote(record.iteration)
        if slot is not None and slot is self._queued:
            self._queued = None
            self._write(slot)
        self._save_requested |= record.save_requested

    def request_save(self) -> None:
        """Save after the next update."""
        self._save_requested = True

    def rollback_targets(self, *, before: float = math.inf, until_step: float = math.inf) -> list[tuple[str, int]]:
        """Checkpoints to go back to and the iteration each was taken after, newest first; on rank 0. Those from before
        an iteration must be good; a person who names a step may have candidates too, but nothing tainted.

        What storage does not tell of within `checkpoint.retry_s` is left out.
        """
        self._finish_writing()
        allowed = {Health.good} if until_step == math.inf else {Health.good, Health.candidate}

        def find(*, strict: bool) -> list[tuple[str, int]]:
            saved = reversed(catalog.list_checkpoints(self._root))
            near = [each for each in saved if each.step <= until_step and _is_allowed(each, allowed, strict=strict)]
            found = [(each.name, self._iteration_of(each, strict=strict)) for each in near]
            return [(name, taken) for name, taken in found if taken is not None and taken < before]

        try:
            return IoRetry(self._rank0_retry_s).call(lambda: find(strict=True))
        except StorageError:
            return find(strict=False)

    def taint_since(self, iteration: int, reason: str) -> None:
        """The run is about to go on from the state after this iteration: what was saved since is tainted.

        On disk before it returns: a run that is killed now must not resume from what it leaves. `OSError` on all ranks
        where that fails; nothing else has changed then.
        """
        self._finish_writing()
        together(lambda: self._taint(iteration, reason) if self._world.is_first else None)

    def discard_after(self, iteration: int) -> None:
        """The run goes on from the state after this iteration: what waits, and what was taken since, is dropped."""
        self._queued = None
        self._ring.discard_from(iteration + 1)
        self._last_unclean = max(self._last_unclean, iteration)
        self._candidates = {name: taken for name, taken in self._candidates.items() if taken <= iteration}

    def _taint(self, iteration: int, reason: str) -> None:
        """On rank 0. Nothing is tainted before it is known of every checkpoint when it was taken; `StorageError` where
        that cannot be read."""

        def find() -> list[Checkpoint]:
            known = [(each, self._iteration_of(each, strict=True)) for each in catalog.list_checkpoints(self._root)]
            return [each for each, taken in known if taken is not None and taken > iteration]

        for checkpoint in IoRetry(self._rank0_retry_s).call(find):
            catalog.mark(checkpoint.path, Health.tainted, reason)

    def _iteration_of(self, checkpoint: Checkpoint, *, strict: bool) -> int | None:
        """After which iteration it was taken. None for one that a resume refuses by itself: its manifest is damaged, or
        another version wrote it; and, unless `strict`, for one that storage does not tell of."""
        if checkpoint.name not in self._iterations:
            try:
                self._iterations[checkpoint.name] = integrity.read_manifest(checkpoint.path).iteration
            except (Damaged, OtherVersion):
                return None
            except StorageError:
                if strict:
                    raise
                return None
        return self._iterations[checkpoint.name]

    def drain_events(self) -> Iterator[Event]:
        """What has become of earlier saves."""
        self._collect_events()
        while self._events:
            yield self._events.pop(0)

    def save_last(self, state: RunState, *, is_done: bool, remembered: Callable[[], dict[str, Any]] = dict) -> bool:
        """Save where the run leaves, every report heard, and wait for it; False where that failed.

        The state a finished run ends with is good when clean steps led up to it, because none will follow.
        """
        assert self._queued is None, "every report was heard"
        name = catalog.name_of(state.step, state.generation)
        self._finish_writing()
        if name not in self._on_disk:
            slot = self._snapshot_to_save(state)
            slot.complete(step=state.step, refused_in_row=state.refused_in_row, sentinel=remembered())
            self._write(slot)
            self._finish_writing()
        num_clean = state.iteration - self._last_unclean
        if is_done and num_clean >= self._cfg.good_after_steps and name in self._candidates:
            self._submit_good_mark(name, f"{num_clean} clean steps led up to the end of the run")
            self._finish_writing()
        return name in self._on_disk

    def finish(self) -> None:
        """Wait for what is being written: one that ends in the middle of it is aborted, whatever its exit code."""
        self._finish_writing()

    def close(self) -> None:
        self._writer.close()

    def _snapshot_to_save(self, state: RunState) -> Slot:
        begun_s = time.monotonic()
        self._finish_writing()
        slot = self._ring.take_snapshot(state)
        slot.is_saving = True
        self._next_save_s = time.monotonic() + self._interval_s
        self._blocked_s = time.monotonic() - begun_s
        return slot

    def _finish_writing(self) -> None:
        self._writer.wait()
        self._collect_events()

    def _collect_events(self) -> None:
        while self._unmarked:
            name, taken = self._unmarked.popleft()
            self._candidates[name] = taken
        for event in self._writer.drain_events():
            self._events.append(event)
            if isinstance(event, CheckpointSaved):
                self._on_disk.add(event.directory)
                self._candidates[event.directory] = event.iteration
                self._iterations[event.directory] = event.iteration

    def _write(self, slot: Slot) -> None:
        if catalog.name_of(slot.state.step, slot.state.generation) in self._on_disk:
            slot.is_saving = False
            return
        blocked_s = self._blocked_s
        self._writer.submit(lambda: [self._save(slot, blocked_s)])

    def _save(self, slot: Slot, blocked_s: float) -> Event:
        """In the clerk's thread, on every rank."""
        begun_s, state = time.monotonic(), slot.state
        try:
            if not all(together(lambda: slot.is_finite, self._world.aside)):
                return _failed(state, "weights or moments are not finite")
            written = store.write(
                self._root, slot.whole, state, world=self._world, rollback=self._rollback, plan_cache=self._plan_cache
            )
        except OSError as error:
            return _failed(state, " ".join(str(error).split()))
        finally:
            slot.is_saving = False
        self._prune()
        return CheckpointSaved(
            time=time.time(),
            iteration=state.iteration,
            step=state.step,
            directory=written.path.name,
            seconds=time.monotonic() - begun_s,
            blocked_s=blocked_s,
            bytes=written.bytes,
        )

    def _promote(self, iteration: int) -> None:
        for name, taken in list(self._candidates.items()):
            num_clean = iteration - max(taken, self._last_unclean)
            if num_clean >= self._cfg.good_after_steps:
                self._submit_good_mark(name, f"{num_clean} clean steps followed")

    def _submit_good_mark(self, name: str, reason: str) -> None:
        iteration = self._candidates.pop(name)
        if self._world.is_first:
            self._writer.submit(lambda: self._mark_good(name, iteration, reason))

    def _mark_good(self, name: str, iteration: int, reason: str) -> list[Event]:
        """In the clerk's thread; what has been dropped meanwhile needs no mark, what a full disk refused is tried
        again."""
        try:
            catalog.mark(self._root / name, Health.good, reason)
        except FileNotFoundError:
            return []
        except OSError:
            self._unmarked.append((name, iteration))
            return []
        self._prune()
        return [
            CheckpointJudged(time=time.time(), iteration=iteration, directory=name, health=Health.good, reason=reason)
        ]

    def _prune(self) -> None:
        """In the clerk's thread; what cannot be read or deleted today may be tomorrow."""
        if not self._world.is_first:
            return
        keep, every = self._cfg.keep, self._cfg.keep_every_steps
        with suppress(StorageError):
            for checkpoint in catalog.select_for_deletion(
                catalog.list_checkpoints(self._root), keep=keep, keep_every_steps=every
            ):
                with suppress(OSError):
                    catalog.delete(checkpoint.path)


def _is_allowed(checkpoint: Checkpoint, allowed: set[Health], *, strict: bool) -> bool:
    """Whether its health is one of these; `StorageError` where that is not known, if `strict`."""
    if checkpoint.health is Health.unread and strict:
        with suppress(OtherVersion):
            return catalog.read_health(checkpoint.path) in allowed
    return checkpoint.health in allowed


def _failed(state: RunState, reason: str) -> CheckpointFailed:
    return CheckpointFailed(time=time.time(), iteration=state.iteration, step=state.step, reason=reason)
