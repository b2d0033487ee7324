"""The mailbox: the only place where numbers come back from the device.

Why: reading a number the device has just begun to compute stops the pipeline; reading one of `lag` steps ago does not.
How: each step's report is copied into a pinned slot behind the step's own work, with an event to say when it is there.
All ranks post every step and read with the same lag, so all of them learn the same thing at the same iteration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

Facts = TypeVar("Facts")


@dataclass(slots=True)
class PostedReport(Generic[Facts]):
    facts: Facts
    """What the host knew when it posted."""
    values: Tensor
    arrived: torch.cuda.Event | None


class Mailbox(Generic[Facts]):
    def __init__(self, *, size: int, lag: int, device: torch.device) -> None:
        self._lag = lag
        self._on_gpu = device.type == "cuda"
        self._slots = [torch.empty(size, pin_memory=self._on_gpu) for _ in range(lag + 1)]
        self._waiting: deque[PostedReport[Facts]] = deque()
        self._posted = 0

    def post(self, facts: Facts, report: Tensor) -> None:
        """Send a report on its way to the host; read before the slot comes round again."""
        assert len(self._waiting) <= self._lag, "read the mailbox before posting again"
        slot = self._slots[self._posted % len(self._slots)]
        slot.copy_(report, non_blocking=True)
        arrived = None
        if self._on_gpu:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._waiting.append(PostedReport(facts, slot, arrived))
        self._posted += 1

    def read(self, *, everything: bool = False) -> Iterator[tuple[Facts, Tensor]]:
        """Reports at least `lag` steps old, oldest first; or everything, waiting for the last one.

        A report is the slot it lies in, in host memory: read it before the next one is posted over it.
        """
        while len(self._waiting) > (0 if everything else self._lag):
            report = self._waiting.popleft()
            if report.arrived is not None:
                report.arrived.synchronize()  # sync: the report of `lag` steps ago, there unless the host is far ahead
            yield report.facts, report.values
