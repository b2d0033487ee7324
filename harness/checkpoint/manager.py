"""The checkpoint manager: decides when to snapshot, when to save, when a checkpoint is good, and which to delete.

How: all ranks call it at the same iterations with the same arguments, so no communication is needed to agree. A save is
a snapshot that the writer thread writes once the step report of the same iteration has arrived and all that it calls
for is done. The loop waits for it only if the next save is due before the write has finished. Only rank 0 marks and
deletes checkpoints, in a second thread. The loop does not wait for that thread, because the other ranks would wait for
rank 0 in a collective; the next write does. A rollback waits for both threads, in short collectives. A checkpoint is
good once `good_after_steps` clean steps in a row have followed it. A state with non-finite values is never written.
A failed write loses that checkpoint and emits `CheckpointFailed`; training continues and the next save tries again.
Old checkpoints are also deleted before a write, because on a full disk no write succeeds until they are.
A checkpoint that cannot be read is neither tainted nor deleted, and while there is one, no other is deleted.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, final

from harness.checkpoint import catalog, integrity, saver
from harness.checkpoint.catalog import Checkpoint, Health
from harness.checkpoint.integrity import Damaged, OtherVersion
from harness.checkpoint.io_retry import IoRetry, StopCheck
from harness.checkpoint.ring import Ring
from harness.checkpoint.ring_cost import rollback_cost
from harness.checkpoint.slot import Slot
from harness.checkpoint.taint_log import Taint, record_taint
from harness.checkpoint.writer_thread import WriterThread
from harness.config.errors import StorageError
from harness.config.schema import Config
from harness.core.events import CheckpointFailed, CheckpointJudged, CheckpointSaved, Event, ReducedRecord
from harness.core.state import RunState
from harness.distributed.collectives import all_reduce_min, any_rank, gather_results, run_on_rank_zero
from harness.distributed.world import World

POLL_S = 5.0
"""Longest wait for a thread between two collectives."""


class _Origin(NamedTuple):
    """When a checkpoint was taken."""

    iteration: int
    """The iteration whose state it has."""
    time: float
    """When it was written, in seconds since the epoch."""


@final
class CheckpointManager:
    def __init__(
        self, cfg: Config, root: Path, *, ring: Ring, world: World, is_stopping: StopCheck = lambda: False
    ) -> None:
        """`is_stopping` is about this rank alone."""
        self._cfg = cfg.checkpoint
        self._is_stopping = is_stopping
        self.retry_s = cfg.checkpoint.retry_s
        self._rank0_retry_s = min(self.retry_s, cfg.parallel.timeout_s / 2)
        """Longest retry on rank 0 while the other ranks wait in a collective: at most half of the collective
        timeout."""
        self._poll_s = min(POLL_S, cfg.parallel.timeout_s / 4)
        self._plan_cache = saver.SavePlanCache()
        self._origins: dict[str, _Origin] = {}
        """Directory name -> when it was taken, for checkpoints saved or read by this process."""
        self._rollback = rollback_cost(cfg).as_dict()
        self._root = root
        self._ring = ring
        self._world = world
        self._writer: WriterThread[Event] = WriterThread()
        """Saves, on all ranks alike."""
        self._keeper: WriterThread[Event] = WriterThread("checkpoint marks and deletions")
        """Marks and deletes; idle on all ranks but rank 0."""
        self._directory_lock = Lock()
        """Held by a job of either thread: a deletion must not hit a checkpoint that is published meanwhile."""
        self._events: list[Event] = []
        self._on_disk: set[str] = set()
        """Names of the checkpoints that count as saved."""
        self._unverified: set[str] = set()
        """Those of which only the manifest was read. One is verified before it makes a save unnecessary."""
        self._queued: Slot | None = None
        """Snapshot to be written once its step report has arrived and all that the report calls for is done."""
        self._is_queued_on_request = False
        """The clock or an operator asked for that snapshot; if it is dropped, the next update is saved instead."""
        self._save_requested = False
        self._blocked_s = 0.0
        self._interval_s = 60 * (self._cfg.every_minutes or math.inf)
        self._next_save_s = time.monotonic() + self._interval_s
        self._candidates: dict[str, int] = {}
        """Directory name -> iteration, of checkpoints not yet known to be good."""
        self._unmarked: deque[tuple[str, int]] = deque()
        """(name, iteration) of good checkpoints whose health file could not be written; filled by the keeper thread."""
        self._last_unclean = 0
        """The last iteration that was rejected or suspect, or the last one before a resume or a restore."""

    def continue_from(self, name: str, state: RunState) -> None:
        """Register the checkpoint that the run resumes from; the next clean steps may make it good."""
        self._on_disk.add(name)
        self._last_unclean = state.iteration
        if run_on_rank_zero(lambda: catalog.health_of(self._root / name)) in (Health.candidate, Health.unread):
            self._candidates[name] = state.iteration

    def continue_from_snapshot(self, state: RunState) -> list[Damaged]:
        """Register the checkpoints on disk after a resume from memory; the next clean steps may make them good.

        Those with a damaged manifest are quarantined and returned: the run saves their steps again. One whose manifest
        cannot be read, or that another version wrote, is not registered. Other files are not read here: most of these
        checkpoints are never needed.
        """
        self._last_unclean = state.iteration
        readable, damage = run_on_rank_zero(self._check_manifests)
        for name, health in readable:
            self._on_disk.add(name)
            self._unverified.add(name)
            if health in (Health.candidate, Health.unread):
                self._candidates[name] = state.iteration
        return damage

    def continue_after_restore(self, state: RunState) -> None:
        """Count clean steps from here on: those that the restore undid do not make a checkpoint good."""
        self._last_unclean = state.iteration

    def _check_manifests(self) -> tuple[list[tuple[str, Health]], list[Damaged]]:
        """Name and health of the checkpoints that are not tainted and whose manifest can be read, and what was
        quarantined because its manifest is damaged; newest first, on rank 0."""
        readable: list[tuple[str, Health]] = []
        damage: list[Damaged] = []
        for checkpoint in reversed(catalog.list_checkpoints(self._root)):
            if checkpoint.health is Health.tainted:
                continue
            try:
                integrity.read_manifest(checkpoint.path)
                readable.append((checkpoint.name, checkpoint.health))
            except Damaged as error:
                damage.append(error)
                with suppress(OSError):  # without the rename, the save of this step fails and says so
                    catalog.quarantine(checkpoint.path)
            except (StorageError, OtherVersion):
                pass  # it may be intact
        return readable, damage

    def is_due_by_clock(self) -> bool:
        """Whether `every_minutes` have passed; true once per interval, on rank 0 only. The step's all-reduce carries it
        to the other ranks."""
        is_due = self._world.is_first and time.monotonic() >= self._next_save_s
        if is_due:
            self._next_save_s = time.monotonic() + self._interval_s
        return is_due

    def is_due(self, step: int) -> bool:
        """Whether to save the state after this update: `every_steps` divides the step, or a save was requested."""
        return self._save_requested or (self._cfg.every_steps > 0 and step % self._cfg.every_steps == 0)

    def snapshot_if_due(self, state: RunState) -> bool:
        """Snapshot the state after the last update if the ring or a save needs it. Returns True, on all ranks alike, if
        the snapshot will be saved to disk."""
        is_due, is_requested = self.is_due(state.step), self._save_requested
        self._save_requested = is_due and self._queued is not None
        if is_due and self._queued is None:
            self._is_queued_on_request = is_requested
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
        is_busy: bool = False,
        remembered: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Process the reduced record of one step: complete its snapshot, trust older snapshots, mark checkpoints good.

        doubtful_since: first iteration under suspicion; nothing taken since then is trusted or becomes good.
        is_busy: a check or a trial is under way, and what earlier records call for is not done yet. Nothing is trusted:
        a run that is killed now must resume from before these records, or a rejected batch would be lost.
        remembered: returns the sentinel's state, which is saved with the snapshot of this iteration.
        """
        slot = self._ring.find_incomplete(record.iteration)
        if slot is not None:
            slot.complete(step=record.step, refused_in_row=state.refused_in_row, sentinel=remembered())
        if doubtful_since is not None:
            self._ring.distrust(doubtful_since)
        if doubtful_since is not None or (record.refused and not record.is_empty):
            self._last_unclean = record.iteration
        elif not is_busy and not record.refused:  # a batch without a token to predict says nothing about the state
            self._ring.trust(record.iteration)
            self._promote(record.iteration)
        self._save_requested |= record.save_requested

    def write_queued(self) -> None:
        """Start the pending write if the report of its snapshot has arrived. All that the reports so far call for must
        be done, as in `on_step_record`."""
        if self._queued is not None and self._queued.is_complete:
            slot, self._queued = self._queued, None
            self._write(slot)

    def request_save(self) -> None:
        """Save after the next update."""
        self._save_requested = True

    def rollback_targets(self, *, before: float = math.inf, until_step: float = math.inf) -> list[tuple[str, int]]:
        """(name, iteration) of checkpoints to roll back to, newest first; collective. Waits for the current write.

        Without `until_step` only good checkpoints qualify. An operator who names a step also gets candidates, never
        tainted ones. A checkpoint that stays unreadable for `checkpoint.retry_s` seconds is left out.
        """
        self._finish_on_all_ranks()
        return run_on_rank_zero(lambda: self._find_targets(before=before, until_step=until_step))

    def _find_targets(self, *, before: float, until_step: float) -> list[tuple[str, int]]:
        """On rank 0."""
        allowed = {Health.good} if until_step == math.inf else {Health.good, Health.candidate}

        def find(*, strict: bool) -> list[tuple[str, int]]:
            saved = reversed(catalog.list_checkpoints(self._root))
            usable = [
                checkpoint
                for checkpoint in saved
                if checkpoint.step <= until_step and _is_allowed(checkpoint, allowed, strict=strict)
            ]
            found = [(checkpoint.name, self._origin_of(checkpoint.path, strict=strict)) for checkpoint in usable]
            return [(name, each.iteration) for name, each in found if each is not None and each.iteration < before]

        try:
            return self._rank_zero_retry().call(lambda: find(strict=True))
        except StorageError:
            return find(strict=False)

    def taint_since(self, iteration: int, reason: str) -> None:
        """Taint every checkpoint taken after this iteration, before the run rolls back to it.

        The marks are on disk when this returns, so a run killed now does not resume from an abandoned state. Raises
        `OSError` on all ranks if that fails; nothing else has changed then.
        """
        self._finish_on_all_ranks()
        gather_results(lambda: self._taint(iteration, reason) if self._world.is_first else None)

    def discard_after(self, iteration: int) -> None:
        """Drop the pending save, and all snapshots and candidates taken after this iteration, to which the run rolls
        back. A save that was requested is repeated after the next update."""
        self._save_requested |= self._queued is not None and self._is_queued_on_request
        self._queued = None
        self._ring.discard_from(iteration + 1)
        self._candidates = {name: saved for name, saved in self._candidates.items() if saved <= iteration}

    def make_retry(self) -> IoRetry:
        """The retries of a load, in which all ranks make the same attempts. A stop request of any rank ends them."""
        return IoRetry(self.retry_s, is_stopping=lambda: any_rank(self._is_stopping()))

    def _rank_zero_retry(self) -> IoRetry:
        """The retries of rank 0 while the other ranks wait for its result."""
        return IoRetry(self._rank0_retry_s, is_stopping=self._is_stopping)

    def _taint(self, iteration: int, reason: str) -> None:
        """On rank 0. Reads the iteration of every checkpoint before it taints any; `StorageError` if one cannot be
        read.

        The taint log is for their copies in an object store. A copy may be intact although the local checkpoint is
        damaged, so damaged ones count there unless they are known to be older. The time in the log is not before that
        of any checkpoint it covers, also if the clock was set back since or the run has moved to another machine.
        """

        def find() -> dict[Path, _Origin | None]:
            saved = [checkpoint.path for checkpoint in catalog.list_checkpoints(self._root)]
            return {path: self._origin_of(path, strict=True) for path in [*saved, *catalog.list_damaged(self._root)]}

        origins = self._rank_zero_retry().call(find)
        undone = {path: origin for path, origin in origins.items() if origin is None or origin.iteration > iteration}
        for path, origin in undone.items():
            if catalog.is_checkpoint_name(path.name) and origin is not None:
                catalog.mark(path, Health.tainted, reason)
        if undone:
            newest = max(catalog.parse_name(path.name)[1] for path in undone)
            latest_s = max([time.time(), *(origin.time for origin in undone.values() if origin is not None)])
            record_taint(self._root, Taint(iteration, newest, reason, latest_s))

    def _origin_of(self, path: Path, *, strict: bool) -> _Origin | None:
        """When a checkpoint was taken. None if a resume would reject it anyway (damaged manifest, other version) and,
        unless `strict`, if its storage cannot be read."""
        if path.name not in self._origins:
            try:
                manifest = integrity.read_manifest(path)
                self._origins[path.name] = _Origin(manifest.iteration, manifest.time)
            except (Damaged, OtherVersion):
                return None
            except StorageError:
                if strict:
                    raise
                return None
        return self._origins[path.name]

    def drain_events(self) -> Iterator[Event]:
        """Yield the events of saves and health marks since the last call."""
        self._collect_events()
        while self._events:
            yield self._events.pop(0)

    def save_last(self, state: RunState, *, is_done: bool, remembered: Callable[[], dict[str, Any]] = dict) -> bool:
        """Save the last state of the run and wait for the write; False if it failed; collective. All reports must be
        processed, and all that they call for done.

        The last state of a finished run is good if `good_after_steps` clean steps preceded it, because none follow. An
        earlier checkpoint may have been written so slowly that its clean steps had passed: it is good now.
        """
        name = catalog.name_of(state.step, state.generation)
        self.finish_saves()
        if not self._is_saved(state):
            slot = self._snapshot_to_save(state)
            slot.complete(step=state.step, refused_in_row=state.refused_in_row, sentinel=remembered())
            self._write(slot)
            self.finish_saves()
        self._promote(state.iteration)
        num_clean = state.iteration - self._last_unclean
        if is_done and num_clean >= self._cfg.good_after_steps and name in self._candidates:
            self._submit_good_mark(name, f"{num_clean} clean steps led up to the end of the run")
        self._finish_on_all_ranks()
        return name in self._on_disk

    def finish_saves(self) -> None:
        """Start the pending write and wait for it, so that all ranks have the same free slots. All reports must be
        processed, and all that they call for done."""
        self.write_queued()
        self._writer.wait()
        self._collect_events()

    def finish(self) -> None:
        """Wait for the current write, and on rank 0 for marks and deletions.

        A process that exits during a write aborts it, whatever its exit code.
        """
        self._wait()
        self._collect_events()

    def _finish_on_all_ranks(self) -> None:
        """As `finish`, until all ranks are done; collective.

        It calls one short collective after the other, because a disk may take longer than `parallel.timeout_s`.
        """
        while not all_reduce_min(int(self._wait(within_s=self._poll_s))):
            pass
        self._collect_events()

    def _wait(self, within_s: float | None = None) -> bool:
        """Wait for both threads; False if one is not done after `within_s`. A save submits a deletion at its end."""
        return self._writer.wait(within_s) and self._keeper.wait(within_s)

    def close(self) -> None:
        self._writer.close()
        self._keeper.close()

    def _snapshot_to_save(self, state: RunState) -> Slot:
        begun_s = time.monotonic()
        self.finish_saves()
        slot = self._ring.take_snapshot(state)
        slot.is_saving = True
        self._next_save_s = time.monotonic() + self._interval_s
        self._blocked_s = time.monotonic() - begun_s
        return slot

    def _collect_events(self) -> None:
        while self._unmarked:
            name, iteration = self._unmarked.popleft()
            self._candidates[name] = iteration
        for event in [*self._writer.drain_events(), *self._keeper.drain_events()]:
            self._events.append(event)
            if isinstance(event, CheckpointSaved):
                self._on_disk.add(event.directory)
                self._candidates[event.directory] = event.iteration
                self._origins[event.directory] = _Origin(event.iteration, event.time)

    def _write(self, slot: Slot) -> None:
        if self._is_saved(slot.state):
            slot.is_saving = False
            return
        blocked_s = self._blocked_s
        self._writer.submit(lambda: [self._save(slot, blocked_s)])

    def _is_saved(self, state: RunState) -> bool:
        """Whether a checkpoint of this step is on disk, so that no save is needed. Collective if it is unverified.

        All ranks know the same names and share the files to hash. A damaged checkpoint is quarantined. One that cannot
        be read stays as it is and does not count, so the save of this step fails and says so.
        """
        name = catalog.name_of(state.step, state.generation)
        if name in self._unverified:
            self._unverified.remove(name)
            problem = self._find_problem(name)
            if problem is not None:
                self._on_disk.remove(name)
                self._candidates.pop(name, None)
            if isinstance(problem, Damaged):
                self._events.append(
                    CheckpointJudged(
                        time=time.time(),
                        iteration=state.iteration,
                        directory=name,
                        health="damaged",
                        reason=str(problem),
                    )
                )
        return name in self._on_disk

    def _find_problem(self, name: str) -> Damaged | StorageError | OtherVersion | None:
        """Verify a checkpoint as a load does, and quarantine it if it is damaged; the same on all ranks. Collective."""
        path, world = self._root / name, self._world
        try:
            gather_results(lambda: integrity.verify(path, part=world.rank, parts=world.size))
        except Damaged as error:
            if world.is_first:
                with suppress(OSError):  # without the rename, the save of this step fails and says so
                    catalog.quarantine(path)
            return error
        except (StorageError, OtherVersion) as error:
            return error
        return None

    def _save(self, slot: Slot, blocked_s: float) -> Event:
        """Runs in the writer thread, on every rank. It ends on all ranks together, so that none waits for it alone."""
        state, group = slot.state, self._world.background_group
        try:
            if not all(gather_results(lambda: slot.is_finite, group)):
                return _failure_event(state, "weights or moments are not finite")
            gather_results(lambda: self._prune() if self._world.is_first else [], group)  # a full disk may need it
            with self._directory_lock:
                begun_s = time.monotonic()
                written = saver.write(
                    self._root,
                    slot.sharded,
                    state,
                    world=self._world,
                    rollback=self._rollback,
                    plan_cache=self._plan_cache,
                )
        except OSError as error:
            gather_results(lambda: None, group)  # rank 0 has deleted what was written
            return _failure_event(state, " ".join(str(error).split()))
        finally:
            slot.is_saving = False
        if self._world.is_first:
            self._keeper.submit(self._prune)
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
        """Mark every candidate good that enough clean steps have followed."""
        for name, saved in list(self._candidates.items()):
            num_clean = iteration - max(saved, self._last_unclean)
            if num_clean >= self._cfg.good_after_steps:
                self._submit_good_mark(name, f"{num_clean} clean steps followed")

    def _submit_good_mark(self, name: str, reason: str) -> None:
        iteration = self._candidates.pop(name)
        if self._world.is_first:
            self._keeper.submit(lambda: self._mark_good(name, iteration, reason))

    def _mark_good(self, name: str, iteration: int, reason: str) -> list[Event]:
        """Runs in the keeper thread. A checkpoint deleted meanwhile needs no mark; after an I/O error it becomes a
        candidate again."""
        try:
            with self._directory_lock:
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

    def _prune(self) -> list[Event]:
        """Delete checkpoints that retention does not keep. I/O errors are ignored: the next save tries again.

        Runs on rank 0: in the writer thread before a save, in the keeper thread after one and after a good mark. The
        first save of a process comes after its start is accepted: a start that is rejected deletes nothing.
        """
        with self._directory_lock, suppress(StorageError):
            for checkpoint in catalog.select_for_deletion(
                catalog.list_checkpoints(self._root),
                keep=self._cfg.keep,
                keep_every_steps=self._cfg.keep_every_steps,
                keep_behind_steps=self._cfg.keep_behind_steps,
                held=catalog.held_names(self._root, now=time.time()),
            ):
                with suppress(OSError):
                    catalog.delete(checkpoint.path)
        return []


def _is_allowed(checkpoint: Checkpoint, allowed: set[Health], *, strict: bool) -> bool:
    """Whether the checkpoint's health is one of `allowed`; if `strict`, raises `StorageError` if it cannot be read."""
    if checkpoint.health is Health.unread and strict:
        with suppress(OtherVersion):
            return catalog.read_health(checkpoint.path) in allowed
    return checkpoint.health in allowed


def _failure_event(state: RunState, reason: str) -> CheckpointFailed:
    return CheckpointFailed(time=time.time(), iteration=state.iteration, step=state.step, reason=reason)
