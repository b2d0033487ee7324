"""The row that the others are compared with: built once for a model, kept, and timed beside every round of every other.

Why: a GPU drifts by a percent while it warms up, which is as much as what is compared; two that are timed one after the
other within seconds share the drift.
How: its weights and moments stay on the device, its activations do not. What it needs for itself is measured before
anything else is there, and what it holds is not counted in the others' peaks. Between rows all compiled graphs are
dropped, for torch.compile keeps only so many of one piece of code, and rows share code; the reference compiles again
before the next one, from inductor's cache and outside the clock. It always gets new batches: a model that knows them by
heart has other numbers, and a GPU's clock depends on its numbers. After a step that failed halfway it is built anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from harness.rundir import RunDir
from tests.bench.clock import (
    LEAD_STEPS,
    SETTLING_STEPS,
    WARMUP_STEPS,
    Block,
    held_bytes,
    in_turns,
    let_go,
    nothing,
    timed,
)
from tests.bench.gpu.peer import Job, Loop, Peer, batches_of, breaks
from tests.bench.gpu.setting import Setting
from tests.bench.gpu.table import Row

READY_STEPS = 2
"""The first compiles, the second runs what was compiled."""


@final
@dataclass(slots=True)
class Reference:
    peer: Peer
    job: Job
    setting: Setting
    run: RunDir
    rounds: list[Block] = field(default_factory=list)
    """All that it was timed for."""
    peak_bytes: int = 0
    """Of its own, with nobody beside it."""
    note: str = ""
    is_whole: bool = False
    """Started, and not stopped in the middle of a step."""
    _loop: Loop | None = None
    _losses: list[Tensor] = field(default_factory=list)
    _held: ExitStack = field(default_factory=ExitStack)
    _num_batches: int = 0
    """Laid out so far."""

    def make_ready(self) -> None:
        """Start it, or compile it again; its next round can be timed."""
        if self.is_whole:
            self.feed(READY_STEPS)
            self.step(READY_STEPS)
        else:
            self.close()
            let_go()
            self.start()
        torch._dynamo.utils.counters.clear()

    def start(self) -> None:
        device = self.job.world.device
        held = held_bytes(device)
        self._loop = Loop(self._held.enter_context(self.peer.start(self.job)), [], self._losses)
        self.feed(WARMUP_STEPS + LEAD_STEPS + READY_STEPS)
        self.step(WARMUP_STEPS)
        self.peak_bytes = timed(self.step, READY_STEPS, device).without(held).peak_bytes
        self.note = breaks()

    def feed(self, num_steps: int) -> None:
        """Lay out new batches: for these steps, and for all turns with a row."""
        assert self._loop is not None
        count = num_steps + SETTLING_STEPS + self.setting.rounds * (LEAD_STEPS + self.setting.steps)
        self._loop.batches[:] = batches_of(self.job, self.run, range(self._num_batches, self._num_batches + count))
        self._num_batches += count

    def step(self, num_steps: int, begin: Callable[[], None] = nothing) -> None:
        """What takes turns."""
        assert self._loop is not None
        self.is_whole = False
        self._loop.run(num_steps, begin)
        self.is_whole = True

    def race_alone(self) -> None:
        """The rounds of a row, with nobody to take turns with."""
        setting = self.setting
        taken = in_turns((self.step,), rounds=setting.rounds, num_steps=setting.steps, device=self.job.world.device)
        self.learn(block for (block,) in taken)

    def learn(self, blocks: Iterable[Block]) -> None:
        """Rounds beside a row, whose memory is not its own."""
        self.rounds += [block._replace(peak_bytes=self.peak_bytes) for block in blocks]

    def close(self) -> None:
        self._loop, self.is_whole = None, False
        self._held.close()

    @property
    def row(self) -> Row:
        """Its last loss is that of the step which is the last of other rows."""
        last = min(len(self._losses), self.setting.num_steps) - 1
        losses = (float(self._losses[0]), float(self._losses[last])) if self.rounds else None
        return Row(name=self.peer.name, rounds=tuple(self.rounds), losses=losses, note=self.note)
