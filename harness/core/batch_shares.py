"""How ranks share the rows of a global batch: index arithmetic, without torch.

Rank r of W takes the rows from floor(r * B / W) to floor((r + 1) * B / W). Shares differ by one row at most, and the
global batch is the same rows in the same order for any number of ranks.
FSDP's collectives need the same number of micro-batches on every rank, and compiled blocks need one shape. So every
rank fills as many slots as the largest share needs. A slot without a row of its own repeats the last row of its
micro-batch with all targets ignored: it adds exactly zero to loss, tokens and gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final


@final
class Slots(NamedTuple):
    """What one rank computes on in a step: its micro-batches, one after the other."""

    rows: list[int]
    """Row of the global batch in each slot."""
    is_padding: list[bool]
    """Whether that row is only repeated here."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    batch_size: int
    """Rows of the global batch; at least as many as ranks."""
    world_size: int
    micro_batch_size: int | None = None
    """The most rows of one forward pass; None: no limit."""

    @property
    def largest_share(self) -> int:
        """Rows of the rank that has most."""
        return -(-self.batch_size // self.world_size)

    @property
    def num_micro_batches(self) -> int:
        """Forward passes of every rank in a step."""
        return -(-self.largest_share // (self.micro_batch_size or self.largest_share))

    @property
    def micro_batch_slots(self) -> int:
        """Rows of one forward pass, padding included; at most `micro_batch_size`."""
        return -(-self.largest_share // self.num_micro_batches)

    @property
    def num_slots(self) -> int:
        """Rows that every rank computes in a step, padding included."""
        return self.num_micro_batches * self.micro_batch_slots

    def rows_of(self, rank: int) -> slice:
        """The rows of the global batch that are a rank's."""
        batch, ranks = self.batch_size, self.world_size
        return slice(rank * batch // ranks, (rank + 1) * batch // ranks)

    def slots_of(self, rank: int) -> Slots:
        """A rank's rows in their order, spread evenly over its micro-batches.

        A micro-batch is padding alone only where `micro_batch_size` is 1 and other ranks have a row more.
        """
        own, size, slots = self.rows_of(rank), self.micro_batch_slots, Slots([], [])
        share = own.stop - own.start
        for number in range(self.num_micro_batches):
            first, end = (own.start + share * each // self.num_micro_batches for each in (number, number + 1))
            last = max(end - 1, own.start)
            slots.rows.extend(min(row, last) for row in range(first, first + size))
            slots.is_padding.extend(row >= end for row in range(first, first + size))
        return slots
