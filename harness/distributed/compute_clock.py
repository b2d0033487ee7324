"""Measures device time of the loss head, a part of the step without communication, and without a host sync.

Why: on CUDA the host only launches kernels. Host time does not show that one GPU is throttled, because every rank waits
for the slowest one in the next collective. Kernel time between two events on the compute stream does show it.
How: the region runs from the last norm of the model to the end of the loss: the head's GEMMs and the cross entropy,
with their gradients. All its weights belong to FSDP's root module, which is gathered before the first block, so no
kernel in it waits for another rank. Events are recorded each step and read once the device has passed them.
Left out: CPU ranks, whose host time is the right measure; and kernels outside the region, which run at the same clock
rate and memory bandwidth.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, final

import torch
from torch import nn

MAX_PENDING = 256
"""Event pairs that may be unread; if the host runs further ahead, the oldest are dropped."""


class _Region(NamedTuple):
    step: int
    begin: torch.cuda.Event
    end: torch.cuda.Event


@final
class ComputeClock:
    """Sums the region's device time over the micro-batches of a step."""

    def __init__(self, first: nn.Module, *, device: torch.device) -> None:
        """`first`: the first module of the region."""
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
        self._begun = _record_event()

    def end(self) -> None:
        """Call after the forward pass of a micro-batch was launched."""
        if self._begun is not None:
            self._pending.append(_Region(self._step, self._begun, _record_event()))
            self._begun = None

    def discard_step(self) -> None:
        """Forget the forward passes of the current step, which do not belong to it."""
        self._begun = None
        while self._pending and self._pending[-1].step == self._step:
            self._pending.pop()

    def finish_step(self) -> float:
        """End a step; return the seconds of the newest step whose events are all read, 0 if there is none."""
        self._step += 1
        while self._pending and self._pending[0].end.query():  # type: ignore[no-untyped-call]
            step, begin, end = self._pending.popleft()
            if step != self._sum_step:
                self._sum_s, self._sum_step = 0.0, step
            self._sum_s += begin.elapsed_time(end) / 1000
            if not self._pending or self._pending[0].step != step:
                self._seconds = self._sum_s
        return self._seconds


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
