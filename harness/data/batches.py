"""Batches by index: each rank's share of the global batch, on its device.

Why: the loop asks for `batches[cursor]` and may ask for any index again; the answer must not depend on what was asked
before or on how many ranks there are, and making it must not delay the step.
How: the order gives the sample ids of the global batch, and rank r of W takes the r-th of W equal parts of its rows.
One thread makes the next `NUM_AHEAD` indices while the step runs; it only fills memory that the asking thread has
allocated, so that everything CUDA happens in one thread. A wrong guess costs time, never a different token.
Left out: guessing across the ledger's gaps; the first batch after a skip is made on demand.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.config import Config, require
from harness.data.corpora import Corpus, Tokens, build_corpus, split
from harness.data.order import sample_ids

NUM_AHEAD = 2

HELD_OUT_SEED = 2**63
"""The order of held-out data: one above every `run.seed`, and the same for all, so that runs are judged alike."""


class Batch(NamedTuple):
    inputs: Tensor
    """int64, rows x sequence_length."""
    targets: Tensor
    """The token that follows each input."""

    def micro_batches(self, size: int) -> list[Batch]:
        """The rows in their order, `size` at a time."""
        starts = range(0, len(self.inputs), size)
        return [Batch(self.inputs[start : start + size], self.targets[start : start + size]) for start in starts]


def open_data(cfg: Config, *, rank: int, world_size: int, device: torch.device) -> tuple[Batches, Batches]:
    """What this rank trains on and what it is judged by."""
    train, seed = cfg.train, cfg.run.seed
    vocab_size, sequence_length = cfg.model.vocab_size, train.sequence_length
    corpus = build_corpus(cfg.data, vocab_size=vocab_size, sequence_length=sequence_length, seed=seed)
    train_samples, held_out_samples = split(corpus.num_samples, cfg.data.eval_fraction)
    message = f"must be at most the {len(train_samples)} sequences there are to train on, got {train.batch_size}"
    require(train.batch_size <= len(train_samples), "train.batch_size", message)
    if cfg.eval.every_steps > 0:
        message = f"holds out {len(held_out_samples)} sequences, less than one batch of {train.batch_size}"
        require(train.batch_size <= len(held_out_samples), "data.eval_fraction", message)

    def batches(samples: range, order_seed: int) -> Batches:
        size = train.batch_size
        return Batches(
            corpus, samples, batch_size=size, seed=order_seed, rank=rank, world_size=world_size, device=device
        )

    return batches(train_samples, seed), batches(held_out_samples, HELD_OUT_SEED)


@final
class Batches:
    """A pure function of the batch index, with the next ones made in advance."""

    def __init__(
        self,
        corpus: Corpus,
        samples: range,
        *,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        assert samples.step == 1, "a corpus is split into contiguous parts"
        assert samples.stop <= corpus.num_samples
        assert batch_size % world_size == 0, "check_world comes first"
        assert 0 <= rank < world_size
        share = batch_size // world_size
        self.corpus = corpus
        self.samples = samples
        self._batch_size = batch_size
        self._seed = seed
        self._own_rows = slice(rank * share, (rank + 1) * share)
        self._device = device
        self._sequence_length = len(corpus.sample(samples.start)) - 1
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: dict[int, Future[Tensor]] = {}

    def __getitem__(self, index: int) -> Batch:
        """This rank's share; what went wrong while it was made in advance is raised here."""
        assert index >= 0
        made = self._ahead.pop(index, None)
        self._look_ahead(index)
        tokens = self._fill(index, self._allocate()) if made is None else made.result()
        inputs, targets = tokens.to(self._device, non_blocking=True)
        return Batch(inputs, targets)

    def sample_ids(self, index: int) -> NDArray[np.int64]:
        """Which samples of the corpus the global batch holds, row by row."""
        size, num_samples = self._batch_size, len(self.samples)
        return self.samples.start + sample_ids(index, batch_size=size, num_samples=num_samples, seed=self._seed)

    def rows(self, index: int) -> Tokens:
        """The global batch, rows x (sequence_length + 1), for inspection."""
        return np.stack([self.corpus.sample(int(sample)) for sample in self.sample_ids(index)])

    def __len__(self) -> int:
        """Whole batches in one pass over the samples; an index may go beyond, into the next pass."""
        return len(self.samples) // self._batch_size

    def close(self) -> None:
        """End the thread; no batch can be asked for afterwards."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _look_ahead(self, index: int) -> None:
        guesses = range(index + 1, index + 1 + NUM_AHEAD)
        for stale in self._ahead.keys() - set(guesses):
            self._ahead.pop(stale).cancel()
        for guess in guesses:
            if guess not in self._ahead:
                self._ahead[guess] = self._worker.submit(self._fill, guess, self._allocate())

    def _allocate(self) -> Tensor:
        """Inputs and targets as one block, so that one copy brings both to the device."""
        num_rows = self._own_rows.stop - self._own_rows.start
        shape = (2, num_rows, self._sequence_length)
        return torch.empty(shape, dtype=torch.int64, pin_memory=self._device.type == "cuda")

    def _fill(self, index: int, block: Tensor) -> Tensor:
        inputs, targets = block.numpy()
        for row, sample in enumerate(self.sample_ids(index)[self._own_rows]):
            tokens = self.corpus.sample(int(sample))
            inputs[row], targets[row] = tokens[:-1], tokens[1:]
        return block
