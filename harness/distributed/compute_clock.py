"""Device time of a part of the forward pass that contains no communication, read without a sync.

Why: on CUDA the host only launches kernels. Its clock does not show that one GPU is throttled, because every rank waits
for the slowest one in the next collective. Kernel time between two events on the compute stream does show it.
How: the region runs from the last norm of the model to the end of the loss: the head's GEMMs and the cross entropy,
with their gradients. All its weights belong to FSDP's root module, which is gathered before the first block, so no
kernel in it waits for another rank. Events are recorded each step and read once the device has passed them.
Left out: CPU ranks, where the host computes and its own clock is the right one; and kernels outside the region, which
run on the same clocks and the same memory.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, final

import torch
from torch import nn

MAX_PENDING = 256
"""Pairs of events that may wait to be read; a host that runs further ahead drops the oldest."""


class _Region(NamedTuple):
    step: int
    begin: torch.cuda.Event
    end: torch.cuda.Event


@final
class ComputeClock:
    """Sums the region over the micro-batches of a step; `seconds` is that of the newest step that is known whole."""

    def __init__(self, first: nn.Module, *, device: torch.device) -> None:
        """`first`: the module that the region begins with."""
        self._is_on = device.type == "cuda"
        self._step = 0
        self._begun: torch.cuda.Event | None = None
        self._pending: deque[_Region] = deque(maxlen=MAX_PENDING)
        self._sum_s = 0.0
        self._sum_step = 0
        self._seconds = 0.0
        if self._is_on:
            first.register_forward_pre_hook(self._begin)

    def _begin(self, *_: Any) -> None:
        self._begun = _recorded()

    def end(self) -> None:
        """The forward pass of a micro-batch was issued."""
        if self._begun is not None:
            self._pending.append(_Region(self._step, self._begun, _recorded()))
            self._begun = None

    def finish_step(self) -> float:
        """Ends a step; returns the seconds of the newest step whose regions are all read, 0 where there is none."""
        self._step += 1
        while self._pending and self._pending[0].end.query():  # type: ignore[no-untyped-call]
            step, begin, end = self._pending.popleft()
            if step != self._sum_step:
                self._sum_s, self._sum_step = 0.0, step
            self._sum_s += begin.elapsed_time(end) / 1000
            if not self._pending or self._pending[0].step != step:
                self._seconds = self._sum_s
        return self._seconds


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
