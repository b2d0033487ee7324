"""Sums of squares that FSDP2's copy of the gradients into the reduce-scatter input computes on the way.

Why: measuring each rank's gradient before the reduction in a pass of its own reads every gradient once more.
How: the reduce-scatter requests the sums of the next copy into a buffer (`request_sums`). Only the Triton kernel can
answer (`torch_private.chunk_cat`); torch's own copy does not, so the request stays unanswered, and the reduce-scatter
measures the buffer itself.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor


@final
@dataclass(slots=True)
class CopySums:
    """Partial sums of squares of all gradients that were copied since they were last taken; on the device.

    All copies of a step add to the same places, one per program of the kernel. That is safe because they run on one
    stream, the one of the backward pass.
    """

    _values: Tensor | None = None

    def reserve(self, count: int, device: torch.device) -> Tensor:
        """At least `count` partial sums, with what was added so far. They grow in the first micro-batch only."""
        if self._values is None or len(self._values) < count:
            grown = torch.zeros(count, dtype=torch.float32, device=device)
            if self._values is not None:
                grown[: len(self._values)] = self._values
            self._values = grown
        return self._values

    def take(self) -> Tensor | None:
        """The sum, which starts again at zero; None if nothing was ever copied."""
        if self._values is None:
            return None
        taken = self._values.sum()
        self._values.zero_()
        return taken


@final
@dataclass(slots=True, eq=False)
class SumRequest:
    """A request to add the squares of the gradients that are copied into a buffer to `sums`."""

    buffer: weakref.ref[Tensor]
    sums: CopySums
    is_answered: bool = field(default=False)


_REQUESTS: list[SumRequest] = []
"""The last request, until the next copy. Reductions of one process follow each other, so there is at most one."""


def request_sums(buffer: Tensor, sums: CopySums) -> SumRequest:
    """Request the sums of the next copy, if it is into this buffer."""
    _REQUESTS[:] = [SumRequest(weakref.ref(buffer), sums)]
    return _REQUESTS[0]


def take_request(out: Tensor) -> SumRequest | None:
    """The request for a copy into `out`, a view of the buffer; None if there is none."""
    requests = _REQUESTS.copy()
    _REQUESTS.clear()
    for request in requests:
        buffer = request.buffer()
        if buffer is not None and buffer.data_ptr() == out.data_ptr():
            return request
    return None
