"""The mailbox: the device-to-host copy of step reports, read `lag` steps later.

Why: reading a value that the device has just begun to compute stalls the pipeline; reading one of `lag` steps ago does
not.
How: each report is copied to a pinned slot on the stream of the step, followed by a CUDA event. All ranks post every
step and read with the same lag, so all ranks read the same reports at the same iteration.
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
    """Host-side facts of the step at posting time."""
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
        """Start the copy of a report to the host. It must be read before its slot is used again."""
        assert len(self._waiting) <= self._lag, "read the mailbox before posting again"
        slot = self._slots[self._posted % len(self._slots)]
        slot.copy_(report, non_blocking=True)
        arrived = None
        if self._on_gpu:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._waiting.append(PostedReport(facts, slot, arrived))
        self._posted += 1

    def put_back(self, facts: Facts, values: Tensor) -> None:
        """Let a report that was read be read again, behind those that wait. `values` must not be a slot."""
        self._waiting.append(PostedReport(facts, values, None))

    def read(self, *, everything: bool = False) -> Iterator[tuple[Facts, Tensor]]:
        """Yield reports that are at least `lag` steps old, oldest first; with `everything`, all, waiting for the last.

        The tensor is the pinned slot itself: use it before the next post overwrites it.
        """
        while len(self._waiting) > (0 if everything else self._lag):
            report = self._waiting.popleft()
            if report.arrived is not None:
                report.arrived.synchronize()  # sync: a report of `lag` steps ago, complete unless the host is far ahead
            yield report.facts, report.values
