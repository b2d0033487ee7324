"""Splits the rows of a global batch over the ranks: index arithmetic, without torch.

Rank r of W takes rows floor(r * B / W) to floor((r + 1) * B / W). Shares differ by at most one row. The global batch is
the same rows in the same order for any number of ranks.
FSDP's collectives need the same number of micro-batches on every rank, and compiled blocks need one shape. Every rank
therefore fills as many slots as the largest share needs. A padding slot repeats the last row of its micro-batch with
all targets ignored: it adds exactly zero to loss, token count and gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final


@final
class Slots(NamedTuple):
    """The rows that one rank computes in a step: its micro-batches, one after the other."""

    rows: list[int]
    """Row of the global batch in each slot."""
    is_padding: list[bool]
    """Whether the slot is padding, which repeats a row."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The split of one global batch over the ranks."""

    batch_size: int
    """Rows of the global batch; at least one per rank."""
    world_size: int
    micro_batch_size: int | None = None
    """Maximum rows of one forward pass; None: no limit."""

    @property
    def largest_share(self) -> int:
        """Rows of the rank with the most rows."""
        return -(-self.batch_size // self.world_size)

    @property
    def num_micro_batches(self) -> int:
        """Forward passes per rank and step."""
        return -(-self.largest_share // (self.micro_batch_size or self.largest_share))

    @property
    def micro_batch_slots(self) -> int:
        """Rows of one forward pass, padding included; at most `micro_batch_size`."""
        return -(-self.largest_share // self.num_micro_batches)

    @property
    def num_slots(self) -> int:
        """Rows per rank and step, padding included."""
        return self.num_micro_batches * self.micro_batch_slots

    def rows_of(self, rank: int) -> slice:
        """The rows of the global batch that belong to a rank."""
        batch, ranks = self.batch_size, self.world_size
        return slice(rank * batch // ranks, (rank + 1) * batch // ranks)

    def slots_of(self, rank: int) -> Slots:
        """The rows of a rank in order, spread evenly over its micro-batches.

        A micro-batch consists of padding only if `micro_batch_size` is 1 and other ranks have one row more.
        """
        own, size, slots = self.rows_of(rank), self.micro_batch_slots, Slots([], [])
        share = own.stop - own.start
        for number in range(self.num_micro_batches):
            first, end = (own.start + share * edge // self.num_micro_batches for edge in (number, number + 1))
            last = max(end - 1, own.start)
            slots.rows.extend(min(row, last) for row in range(first, first + size))
            slots.is_padding.extend(row >= end for row in range(first, first + size))
        return slots
