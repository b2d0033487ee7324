"""The tokens of guilty batches, read again through the run's own configuration and ledger.

Why: a record holds a batch's fingerprint and its rarest tokens; a person wants to see what it says, and whether what
the run was shown is what lies on disk.
How: the batch is asked for by its index, as training does. That needs torch, which is loaded only here, and the data,
which may be gone by now: then the batch keeps what its record said, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.analysis.postmortem.evidence import GuiltyBatch, Token
from harness.config import compose
from harness.config.errors import ConfigError
from harness.core.rundir import RunDir

NUM_COMMON, NUM_COUNTS = 12, 2000
NUM_SAMPLES, SAMPLE_CHARACTERS = 3, 160


def reread(run: RunDir, guilty: Sequence[GuiltyBatch]) -> None:
    """Fill in what can be read of each batch."""
    try:
        batches = _open(run)
    except (ConfigError, OSError, ValueError):
        return
    try:
        for batch in guilty:
            if batch.index >= 0:
                _fill(batch, batches)
    except (ConfigError, OSError, ValueError):
        return
    finally:
        batches.close()


def _open(run: RunDir) -> Any:
    cfg = compose.read(run.config)
    import torch

    from harness.data.order.ledger import Ledger
    from harness.data.sources import open_data, read_recorded_data

    ledger = Ledger.load(run.ledger, writer=False) if run.ledger.exists() else Ledger()
    train, held_out = open_data(
        cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=ledger, recorded=read_recorded_data(run)
    )
    held_out.close()
    return train


def _fill(batch: GuiltyBatch, batches: Any) -> None:
    import numpy as np

    from harness.data.batch_view import row_tokenizer, truncate, view_batch

    view = view_batch(batches, batch.index, excluded=False)
    sources, _ = batches.samples(batch.index)
    origins = batches.origins(batch.index)
    tokenizer = row_tokenizer(batches.sources[int(sources[0])].corpus, origins[0])
    batch.reread = view.fingerprint
    tokens, counts = np.unique(batches.rows(batch.index), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    batch.num_counts = counts[order][:NUM_COUNTS].tolist()
    batch.common = [
        Token(token=int(tokens[at]), text=_spell(tokenizer, int(tokens[at])), num_in_batch=int(counts[at]))
        for at in order[:NUM_COMMON].tolist()
    ]
    for rare in batch.rarest:
        rare.text = _spell(tokenizer, rare.token)
    batch.samples = [truncate(" ".join(row.texts), SAMPLE_CHARACTERS) for row in view.rows[:NUM_SAMPLES]]


def _spell(tokenizer: Any, token: int) -> str:
    return "" if tokenizer is None else str(tokenizer.spell(token))
