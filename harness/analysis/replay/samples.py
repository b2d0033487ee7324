"""Measures loss and gradient norm of each sample of a batch.

Each rank runs its rows through the model one at a time, all ranks in step, and records the loss of the row and the norm
of its own gradient before the reduction. No parameter is updated.
With context parallelism the ranks of a group share a row, and its gradient is the sum of theirs. Then one group at a
time has a row with targets, and the norm is that of the reduced gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from harness.build import Parts
from harness.data.batch import IGNORED, Batch
from harness.data.batch_view import view_batch
from harness.distributed.collectives import all_reduce_sum, gather_results
from harness.distributed.shards import local
from harness.distributed.torch_private.foreach import foreach_norm

LONGEST_TEXT = 160


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGradient:
    """Loss and gradient norm of one row of a global batch."""

    row: int
    loss: float
    """Mean over its tokens."""
    grad_norm: float
    """Norm of the gradient of `loss`."""
    source: str
    file: str
    first_document: int
    last_document: int
    text: str


def measure_samples(parts: Parts, index: int) -> list[SampleGradient]:
    """All rows of a batch in order; the same list on every rank."""
    measure = _measure_own if parts.world.context == 1 else _measure_shared
    own = measure(parts, parts.batches[index])
    measured = [pair for of_rank in gather_results(lambda: own)[:: parts.world.context] for pair in of_rank]
    view = view_batch(parts.batches, index, excluded=False)
    return [
        SampleGradient(
            row=number,
            loss=loss,
            grad_norm=norm,
            source=row.source,
            file=row.file,
            first_document=row.first_document,
            last_document=row.last_document,
            text=" ".join(row.texts)[:LONGEST_TEXT],
        )
        for number, ((loss, norm), row) in enumerate(zip(measured, view.rows, strict=True))
    ]


def _measure_own(parts: Parts, batch: Batch) -> list[tuple[float, float]]:
    """Loss and gradient norm of each row of this rank. Padding rows are computed to keep ranks in step, but dropped."""
    pairs = []
    for row in batch.micro_batches(1):
        parts.update.clear_gradients()
        parts.comm_stats.take_square_sum()
        tokens = (row.targets >= 0).sum().clamp(min=1)
        mask = parts.model.mask_documents(row.documents)
        output = parts.model(row.inputs, row.targets, seed=1.0 / tokens.to(torch.float32), mask=mask)
        output.objective.backward()
        square = parts.comm_stats.take_square_sum() if parts.comm_stats.measures_gradients else _own_square(parts)
        if not row.is_padding:
            pairs.append((float(output.row_losses.sum() / tokens), float(square.sqrt())))
    parts.update.clear_gradients()
    return pairs


def _measure_shared(parts: Parts, batch: Batch) -> list[tuple[float, float]]:
    """Loss and gradient norm of each row of this rank's context group."""
    pairs, world = [], parts.world
    for row in batch.micro_batches(1):
        for data_rank in range(world.num_data_ranks):
            is_own = data_rank == world.data_rank
            targets = row.targets if is_own else torch.full_like(row.targets, IGNORED)
            counted = (targets != IGNORED).sum() if world.context_rank == 0 else targets.new_zeros(())
            tokens = all_reduce_sum(counted).clamp(min=1)
            parts.update.clear_gradients()
            mask = parts.model.mask_documents(row.documents)
            output = parts.model(row.inputs, targets, seed=1.0 / tokens.to(torch.float32), mask=mask)
            output.objective.backward()
            square = all_reduce_sum(_own_square(parts)) / world.replicate
            loss = all_reduce_sum(output.row_losses.sum().detach()) / tokens
            if is_own and not row.is_padding:
                pairs.append((float(loss), float(square.sqrt())))
    parts.comm_stats.take_square_sum()
    parts.update.clear_gradients()
    return pairs


def _own_square(parts: Parts) -> torch.Tensor:
    """Squared norm of this rank's stored gradients: its shard of the sum, or all with world_size 1."""
    gradients = [local(p.grad) for p in parts.update.parameters.values() if p.grad is not None]
    norms = foreach_norm(gradients, 2, dtype=torch.float32)
    return torch.stack(norms).square().sum()
