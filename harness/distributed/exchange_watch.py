"""What a rank puts into the exchanges of its context group: the first one that is not finite, or differs.

Why: with context parallelism the ranks of a group exchange keys, values and their gradients in every layer. A NaN or a
wrong number of one rank reaches the others in the next exchange, and then all of them have bad losses and gradients.
How: before each exchange the largest magnitude of what this rank sends is kept on the device. All ranks of a group
enter their exchanges in the same order, and an exchange spreads only what was sent before it. So among the ranks of a
group the source is the one that first sent something bad; ranks that did so in the same exchange are independent
sources. The number of that exchange travels in the slot of the rank (`harness.sentinel.device.slots`). For a
micro-batch that is computed twice (`harness.recomputation`) the bits of what was sent are compared in the same way.
Nothing waits for the device. A rank reads what it sends once more, which takes far less time than attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from harness.distributed.bit_digests import Computation, digest_bits
from harness.distributed.collectives import receive_from_distance


@final
class ExchangeWatch:
    """The exchanges of one step, numbered from 1 in their order. Empty without context parallelism."""

    def __init__(self) -> None:
        self._amaxes: list[Tensor] | None = None
        """Largest magnitude that was sent in each exchange of the step; None: outside a step."""
        self._digests: dict[Computation, list[Tensor]] = {computation: [] for computation in Computation}
        """Digest of what was sent in each exchange of a micro-batch that is computed twice."""
        self._recorded: Computation | None = None

    def start(self) -> None:
        """Begin a step."""
        self._amaxes = []

    @contextmanager
    def recording(self, computation: Computation) -> Iterator[None]:
        """Digest the exchanges of one micro-batch."""
        self._digests[computation], self._recorded = [], computation
        try:
            yield
        finally:
            self._recorded = None

    def observe(self, sent: Tensor) -> None:
        """Add what this rank is about to send."""
        if self._amaxes is not None:
            self._amaxes.append(torch.linalg.vector_norm(sent, ord=math.inf))
        if self._recorded is not None:
            self._digests[self._recorded].append(digest_bits(sent))

    def take_first_nonfinite(self) -> Tensor | None:
        """End the step: the number of the first exchange in which this rank sent NaN or Inf, 0: in none; None: there
        was no exchange."""
        amaxes, self._amaxes = self._amaxes, None
        return first_true(~torch.isfinite(torch.stack(amaxes))) if amaxes else None

    def first_difference(self, distance: int) -> Tensor | None:
        """The number of the first exchange in which the two computations sent different bits, 0: in none; None: there
        was no exchange. Collective unless both are this rank's (`harness.recomputation`)."""
        of_step, again = (self._digests[computation] for computation in (Computation.step, Computation.again))
        if not of_step:
            return None
        sent = torch.stack(of_step)
        return first_true((receive_from_distance(sent, distance) if distance else sent) != torch.stack(again))


def first_true(is_bad: Tensor) -> Tensor:
    """1 + the first place [n] that is true; 0 if there is none. float32."""
    places = torch.arange(1, len(is_bad) + 1, device=is_bad.device)
    first = torch.where(is_bad, places, len(is_bad) + 1).min()
    return torch.where(is_bad.any(), first, 0).to(torch.float32)
