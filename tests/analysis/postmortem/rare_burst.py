"""Writes a corpus in which one batch holds a rare token four times, of six in the whole corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from harness import train
from harness.config.schema import Config
from harness.data.order.ledger import Ledger
from harness.data.sources import open_data
from tests import composed

VOCAB, RARE = 64, 63
NUM_SAMPLES = 4000
BURST_BATCH, NUM_IN_BURST = 76, 4
OTHER_BATCHES = (180, 200)
"""Batches that hold the token once."""


def write_corpus(path: Path, *, sequence_length: int) -> None:
    """Text without the rare token: each token follows from the one before it."""
    _save(path, (np.arange(NUM_SAMPLES * sequence_length + 1) % RARE).astype("<u2"))


def add_rare_token(path: Path, cfg: Config) -> None:
    """Write the rare token into sequences of the chosen batches, as the run will order them."""
    tokens = np.fromfile(path, dtype="<u2")
    length = cfg.train.sequence_length
    batches, held_out = open_data(cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=Ledger(), recorded=None)
    places = [(BURST_BATCH, row) for row in range(NUM_IN_BURST)] + [(batch, 0) for batch in OTHER_BATCHES]
    for batch, row in places:
        _, samples = batches.samples(batch)
        tokens[int(samples[row]) * length + length // 2] = RARE
    batches.close()
    held_out.close()
    _save(path, tokens)


def train_preset(*overrides: str) -> int:
    """A whole run on this rank; returns its exit code."""
    return train.run_worker(composed.load(overrides))


def _save(path: Path, tokens: NDArray[np.uint16]) -> None:
    tokens.tofile(path)
    np.save(path.with_suffix(".counts.npy"), np.bincount(tokens, minlength=VOCAB))
