"""The held-out check: the loss of the current weights on a few fixed held-out rows, forward only, on all ranks.

These rows tell damaged weights from different data (`harness.sentinel.policy.held_out_level`). They are the first rows
of the held-out order, the same in every run of the same data. How many depends on the number of ranks and on the
micro-batch, so each measurement has a hash of them. Each rank keeps its share on its device. One forward pass and one
all-reduce give the loss. At the start of the run and with each snapshot for a checkpoint, the loss is copied to the
host like a step report and read with a later report. Only a check during an incident waits for it.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from harness.config.errors import require
from harness.config.schema import Config
from harness.core.events import HeldOutMeasured
from harness.core.state import RunState
from harness.data.batch import Batch
from harness.data.batches import Batches, Share
from harness.data.order.ledger import Ledger
from harness.data.sources import held_out_recipe
from harness.distributed.collectives import gather_results
from harness.distributed.world import World

NO_TARGETS = (
    "gives held-out rows without a token to predict: with data.document_mask each of their tokens is a document of its "
    "own; set more, or look at the end of the data and at data.eod_token"
)


@final
@dataclass(slots=True)
class Waiting:
    """A measurement that is being copied to the host."""

    iteration: int
    step: int
    sums: Tensor
    arrived: torch.cuda.Event | None


@final
@dataclass(slots=True)
class HeldOut:
    rows: list[Batch]
    """This rank's share, in micro-batches of the training size; empty if `sentinel.held_out_rows` is 0."""
    content: str = ""
    """Hash of the rows of all ranks."""
    waiting: deque[Waiting] = field(default_factory=deque)
    """Oldest first. Each is read with the next report behind it, and at most one follows each step."""

    def send(self, sums: Tensor, state: RunState) -> None:
        """Start a copy of the reduced sums (loss, tokens) to the host."""
        on_gpu = sums.device.type == "cuda"
        here = torch.empty(2, dtype=sums.dtype, pin_memory=on_gpu)
        here.copy_(sums, non_blocking=True)
        arrived = None
        if on_gpu:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self.waiting.append(Waiting(state.iteration, state.step, here, arrived))

    def receive(self, iteration: int) -> HeldOutMeasured | None:
        """Return, once, the oldest measurement that was issued before this iteration. The copy has arrived."""
        if not self.waiting or self.waiting[0].iteration >= iteration:
            return None
        waiting = self.waiting.popleft()
        if waiting.arrived is not None:
            waiting.arrived.synchronize()  # sync: older than a report that has arrived
        loss_sum, tokens = waiting.sums.tolist()  # sync: none, the copy is in host memory
        return HeldOutMeasured(
            time=time.time(),
            iteration=waiting.iteration,
            step=waiting.step,
            loss=loss_sum / tokens,
            rows=self.content,
        )

    def forget(self) -> None:
        """Drop the pending measurements, because their weights were replaced by a restore."""
        self.waiting.clear()


def open_held_out(cfg: Config, held_out: Batches, *, world: World) -> HeldOut:
    """Load this rank's share of the fixed rows onto its device. Rejects held-out rows without a token to predict."""
    if cfg.eval.every_steps:
        require_targets(held_out, min(cfg.eval.num_batches, len(held_out)), "eval.num_batches", cfg=cfg)
    if cfg.sentinel.held_out_rows == 0:
        return HeldOut([])
    micro = cfg.train.micro_batch_size or max(1, cfg.train.batch_size // world.num_data_ranks)
    at_once = micro * world.num_data_ranks
    num_rows = -(-cfg.sentinel.held_out_rows // at_once) * at_once
    fixed = Batches(
        held_out.sources,
        recipe=held_out_recipe(cfg, batch_size=num_rows),
        share=Share(world.data_rank, world.num_data_ranks, world.device),
        ledger=Ledger(),
        document_mask=cfg.data.document_mask,
    )
    try:
        require_targets(fixed, 1, "sentinel.held_out_rows", cfg=cfg)
        batch = fixed[0]
        return HeldOut(batch.micro_batches(micro), content=combine_hashes(gather_results(lambda: hash_rows(batch))))
    finally:
        fixed.close()


def hash_rows(batch: Batch) -> list[int]:
    """A hash of each row and of what is predicted in it."""
    pairs = zip(batch.inputs.cpu().numpy(), batch.targets.cpu().numpy(), strict=True)  # sync: only at a start
    return [zlib.crc32(targets.tobytes(), zlib.crc32(inputs.tobytes())) for inputs, targets in pairs]


def combine_hashes(hashes_by_rank: Iterable[list[int]]) -> str:
    """One hash of the rows of all ranks, whatever rank has which."""
    rows = sorted({row for of_rank in hashes_by_rank for row in of_rank})
    return f"{zlib.crc32(repr(rows).encode()):08x}"


def require_targets(batches: Batches, num_batches: int, key: str, *, cfg: Config) -> None:
    """Reject batches in which no rank has a token to predict: their mean loss would be 0 / 0. Collective.

    Reads them up to the first one that has. Only a document mask ignores all targets of a row.
    """
    if not cfg.data.document_mask:
        return

    def has_targets(index: int) -> bool:
        return any(gather_results(lambda: batches[index].has_targets()))

    require(any(map(has_targets, range(num_batches))), key, NO_TARGETS)
