"""The loss of a checkpoint on held-out data, in one process and without FSDP.

The rows are the first of the held-out order, which is the same for all runs of the same data, so that losses compare.
The model computes in the precision of the run on a GPU (fp8 runs in bf16), and in fp32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from harness.analysis.sampling import load_model
from harness.config.errors import require
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.data.batch import Batch
from harness.data.batches import Batches, Share
from harness.data.order.ledger import Ledger
from harness.data.sources import held_out_recipe, open_sources, read_recorded_data
from harness.held_out import NO_TARGETS


def read_held_out_rows(cfg: Config, run: RunDir, *, num_rows: int, device: torch.device) -> list[Batch]:
    """The first held-out rows of a run, in micro-batches; `ConfigError` if the data is not there."""
    _, sources = open_sources(cfg, read_recorded_data(run).record)
    batches = Batches(
        sources,
        recipe=held_out_recipe(cfg, batch_size=num_rows),
        share=Share(0, 1, device),
        ledger=Ledger(),
        document_mask=cfg.data.document_mask,
    )
    with closing(batches):
        batch = batches[0]
        require(batch.has_targets(), "--eval-rows", NO_TARGETS)
        return batch.micro_batches(cfg.train.micro_batch_size or 1)


@torch.no_grad()
def measure_loss(checkpoint: Path, cfg: Config, rows: Sequence[Batch], *, device: torch.device) -> float:
    """The mean loss per token of the weights of a checkpoint."""
    model = load_model(checkpoint, cfg, device=device)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for part in rows:
        output = model(part.inputs, part.targets, mask=model.mask_documents(part.documents))
        sums += torch.stack([output.row_losses.sum(), output.row_tokens.sum()])
    loss, tokens = sums.tolist()
    return float(loss / tokens)
