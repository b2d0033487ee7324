"""One rank's share of a batch, on its device, with what is known about it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from harness.data.facts import BatchFacts

IGNORED = -100
"""The target of a token whose successor belongs to another document, with `data.document_mask`."""


class Batch(NamedTuple):
    inputs: Tensor
    """int64, rows x sequence_length."""
    targets: Tensor
    """The token that follows each input, or IGNORED."""
    sources: Tensor
    """int64, rows: where each comes from, as an index into `Batches.source_names`."""
    documents: Tensor | None
    """int32, rows x sequence_length: which of its row's documents an input belongs to; None: all see each other."""
    facts: BatchFacts | None
    """About this rank's share, also in a micro-batch; None for held-out data."""

    def micro_batches(self, size: int) -> list[Batch]:
        """The rows in their order, `size` at a time."""
        parts = [slice(start, start + size) for start in range(0, len(self.inputs), size)]
        return [
            Batch(
                self.inputs[part],
                self.targets[part],
                self.sources[part],
                None if self.documents is None else self.documents[part],
                self.facts,
            )
            for part in parts
        ]
