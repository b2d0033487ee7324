"""One rank's share of a batch as tensors on its device, with the facts about it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from harness.data.batch_facts import BatchFacts

IGNORED = -100
"""The target of a token that is not predicted: its successor belongs to another document (`data.document_mask`), or
the row is padding, which counts on another rank or in another micro-batch."""


class Batch(NamedTuple):
    inputs: Tensor
    """int64, rows x sequence_length."""
    targets: Tensor
    """The token that follows each input, or IGNORED."""
    sources: Tensor
    """int64, rows: source of each row, as an index into `Batches.source_names`."""
    documents: Tensor | None
    """int32, rows x sequence_length: number of the document in the row that an input belongs to; None: no mask."""
    facts: BatchFacts | None
    """About this rank's whole share, also in a micro-batch; None for held-out data."""
    is_own: NDArray[np.bool_] | None = None
    """False for padding rows; None: no row is padding."""

    @property
    def is_padding(self) -> bool:
        """Whether all rows are padding."""
        return self.is_own is not None and not self.is_own.any()

    def has_targets(self) -> bool:
        """Whether a token is predicted. Waits for the device."""
        return bool((self.targets != IGNORED).any())  # sync: only at a start, and offline

    def micro_batches(self, most: int | None) -> list[Batch]:
        """Split the rows, in order, into as few equal parts as `most` rows per part allow; None: one part."""
        num_rows = len(self.inputs)
        size = -(-num_rows // -(-num_rows // (most or num_rows)))
        parts = [slice(start, start + size) for start in range(0, num_rows, size)]
        return [
            Batch(
                self.inputs[part],
                self.targets[part],
                self.sources[part],
                None if self.documents is None else self.documents[part],
                self.facts,
                None if self.is_own is None else self.is_own[part],
            )
            for part in parts
        ]
