"""Planned changes of the data and of the schedule: where they begin, and for how long the gate's bounds are wider.

Why: a phase that the user asked for raises the loss like a bad batch does. It is known in advance, so nothing needs to
be found out the hard way.
How: a window follows each change: a phase of `data.phases`, a swap and batches given back (both in the ledger), other
data after `run.resume=changed`, and the step at which a WSD schedule begins to decay. All of that is configuration,
ledger and cursor, which all ranks share, so all ranks widen the same steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple, final

from harness.config.optim import ScheduleKind
from harness.config.schema import Config
from harness.core.events import ChangePlanned
from harness.core.state import RunState
from harness.data.order.ledger import Ledger


class Window(NamedTuple):
    """The first batch (or step, where `by_step`) of a window, and the one after its last."""

    first: int
    end: int
    reason: str
    by_step: bool = False


def windows(cfg: Config, ledger: Ledger) -> list[Window]:
    """The window of every change that the configuration and the ledger know of."""
    length, train = cfg.sentinel.planned_batches, cfg.train
    if length == 0:
        return []
    starts = [(phase.from_batch, "a phase of data.phases begins") for phase in cfg.data.phases]
    starts += [(entry.from_batch, "the ledger changes the weights of sources") for entry in ledger.reweightings]
    starts += [(entry.from_batch, "batches are given back") for entry in ledger.revocations]
    found = [Window(first, first + length, reason) for first, reason in starts if first > 0]
    if cfg.optim.schedule is ScheduleKind.wsd and cfg.optim.decay_steps:
        knee = train.num_steps - cfg.optim.decay_steps
        found.append(Window(knee, knee + length, "the learning rate begins to decay", by_step=True))
    return found


@final
@dataclass(slots=True)
class Planned:
    cfg: Config
    ledger: Ledger
    known: list[Window] = field(default_factory=list)
    num_entries: int = -1
    """Of the ledger, when `known` was made of it."""
    resumed: list[Window] = field(default_factory=list)
    told: Window | None = None

    def resume_with_other_data(self, cursor: int) -> None:
        """The run goes on from this batch with other data."""
        if self.cfg.sentinel.planned_batches:
            end = cursor + self.cfg.sentinel.planned_batches
            self.resumed.append(Window(cursor, end, "the run was resumed with other data"))

    def at(self, cursor: int, state: RunState) -> Window | None:
        """The newest window that the next step lies in."""
        if len(self.ledger) != self.num_entries:
            self.known, self.num_entries = windows(self.cfg, self.ledger), len(self.ledger)
        places = ((each, state.step if each.by_step else cursor) for each in (*self.known, *self.resumed))
        open_now = [each for each, place in places if each.first <= place < each.end]
        return max(open_now, key=lambda each: each.first, default=None)

    def announce(self, window: Window | None, cursor: int, state: RunState) -> ChangePlanned | None:
        """What to tell as a window begins, once."""
        is_new = window is not None and window != self.told
        self.told = window
        if window is None or not is_new:
            return None
        return ChangePlanned(
            time=time.time(),
            iteration=state.iteration + 1,
            step=state.step,
            cursor=cursor,
            until=window.end,
            reason=window.reason,
        )
