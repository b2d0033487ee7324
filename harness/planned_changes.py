"""Planned changes of the data and of the schedule: where they begin, and for how long the gate's bounds are wider.

A data phase that the user configured raises the loss like a bad batch does, but it is known in advance. A window
follows each planned change: a phase of `data.phases`, a larger batch (`train.batch_size_warmup`), another precision
(`precision.phases`), a source switched off by the policy, batches given back (both in the ledger), different data,
another batch size or another base of RoPE after `run.resume=changed`, the batch at which a source reaches files that
were added, that of its next pass over all its files, and the step at which a WSD schedule begins to decay. Windows
follow from config, ledger, cursor and the recorded interventions, which all ranks share, so all ranks widen the bounds
of the same steps, also after a restart within a window. Excluded batches do not count: a window lasts for as many
batches as the run reads, also if a rollback excludes those with which it began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from harness.config.data import may_change_next_batch
from harness.config.optim import SCHEDULE_KEYS, ScheduleKind
from harness.config.schema import Config
from harness.core.events import ChangePlanned, Event, Intervention
from harness.core.state import RunState
from harness.data.order.ledger import Ledger


class Window(NamedTuple):
    """First batch of a window and the one after its last; steps instead of batches if `by_step`."""

    first: int
    end: int
    reason: str
    by_step: bool = False


def windows(cfg: Config, ledger: Ledger, of_files: Iterable[tuple[int, str]] = ()) -> list[Window]:
    """List the windows of all changes in the config, in the ledger and in the files of sources; `of_files` has the
    first batch and the reason of the latter."""
    length, train = cfg.sentinel.planned_batches, cfg.train
    if length == 0:
        return []
    starts = [(phase.from_batch, "a phase of data.phases begins") for phase in cfg.data.phases]
    starts += [
        (batch, f"train.batch_size_warmup raises the batch to {size} sequences")
        for batch, size in train.size_stages()[1:]
    ]
    starts += [(phase.from_batch, f"precision.phases switches to {phase.kind}") for phase in cfg.precision.phases]
    starts += [(entry.from_batch, "the ledger changes the weights of sources") for entry in ledger.reweightings]
    starts += [(entry.from_batch, "batches are given back") for entry in ledger.revocations if not entry.is_repeat]
    starts += of_files
    found = [window_of_batches(first, length, reason, ledger) for first, reason in starts if first > 0]
    if cfg.optim.schedule is ScheduleKind.wsd and cfg.optim.decay_steps:
        knee = train.num_steps - cfg.optim.decay_steps
        found.append(Window(knee, knee + length, "the learning rate begins to decay", by_step=True))
    return found


def window_of_batches(first: int, length: int, reason: str, ledger: Ledger) -> Window:
    """The window of the next `length` batches from `first` on that are not excluded."""
    return Window(first, ledger.next_range(first, length)[1] + 1, reason)


class DataChange(NamedTuple):
    """A resume with other data, another batch size or another base of RoPE."""

    reason: str
    first: int | None
    """First batch of its window, if that was announced; None: no step was taken since."""


REASONS = {
    "data.": "the run was resumed with different data",
    "train.batch_size": "the run was resumed with another batch size",
    "model.rope_theta": "the run was resumed with another model.rope_theta",
}
"""Beginning of the changed config keys -> what the change is."""


def is_data_change(key: str, prefix: str) -> bool:
    """Whether a changed key begins with this prefix of `REASONS` and may change the next batch."""
    return key.startswith(prefix) and (prefix != "data." or may_change_next_batch(key))


def newest_data_change(interventions: Sequence[Intervention], logged: Iterable[Event]) -> DataChange | None:
    """The newest resume with other data, another batch size or another base of RoPE, by the interventions and the log
    of the run."""
    for event in reversed(interventions):
        for prefix, reason in REASONS.items():
            if any(is_data_change(key, prefix) for key in event.changes):
                announced = [
                    later.cursor if later.first is None else later.first
                    for later in logged
                    if isinstance(later, ChangePlanned) and later.iteration > event.iteration and later.reason == reason
                ]
                return DataChange(reason, announced[0] if announced else None)
    return None


def newest_schedule_change(interventions: Iterable[Intervention]) -> int:
    """The iteration after which the newest resume with another learning-rate schedule began; -1: there was none."""
    changed = (event.iteration for event in interventions if any(key in event.changes for key in SCHEDULE_KEYS))
    return max(changed, default=-1)


@final
@dataclass(slots=True)
class PlannedChanges:
    """All windows of a run."""

    cfg: Config
    ledger: Ledger
    changes_of_files: Callable[[], Iterable[tuple[int, str]]] = tuple
    """The batches at which the files of a source change, by the ledger as it is now, and the reasons."""
    known: list[Window] = field(default_factory=list)
    revision: int = -1
    """Revision of the ledger that `known` was computed from."""
    resumed: list[tuple[int, str]] = field(default_factory=list)
    """First batch of the newest resume with other data, and the reason."""
    announced: Window | None = None

    def resume(self, change: DataChange | None, cursor: int) -> None:
        """Open the window of a resume with other data: at this batch, or where an earlier start announced it."""
        if change is not None and self.cfg.sentinel.planned_batches:
            self.resumed = [(cursor if change.first is None else change.first, change.reason)]
            self.revision = -1

    def at(self, cursor: int, state: RunState) -> Window | None:
        """Return the newest window that contains the next step, or None.

        Of two that begin together it is that of the resume, which a later start finds by its announcement.
        """
        if self.ledger.revision != self.revision:
            length = self.cfg.sentinel.planned_batches
            resumed = [window_of_batches(first, length, reason, self.ledger) for first, reason in self.resumed]
            self.known = [*resumed, *windows(self.cfg, self.ledger, self.changes_of_files())]
            self.revision = self.ledger.revision
        places = ((each, state.step if each.by_step else cursor) for each in self.known)
        open_now = [each for each, place in places if each.first <= place < each.end]
        return max(open_now, key=lambda each: each.first, default=None)

    def announce(self, window: Window | None, cursor: int, state: RunState) -> ChangePlanned | None:
        """Return the event for the first step of a window, once."""
        before, self.announced = self.announced, window
        if window is None or (before is not None and (before.first, before.reason) == (window.first, window.reason)):
            return None
        return ChangePlanned(
            time=time.time(),
            iteration=state.iteration + 1,
            step=state.step,
            cursor=cursor,
            until=window.end,
            reason=window.reason,
            first=window.first,
        )
