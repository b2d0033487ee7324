"""Batches by index: computes this rank's share of the global batch and copies it to its device.

Why: the loop asks for `batches[cursor]` and may ask for any index again. The answer must not depend on earlier requests
or on the number of ranks, and computing it must not delay the step.
How: `harness.data.batch_plan` gives source and sample of each row of the global batch, and `harness.core.batch_shares`
gives the rows of each rank, padded if the shares are uneven. One thread prefetches the next `NUM_AHEAD` indices that
the ledger does not exclude, with the facts about them, while the step runs. It only fills memory that the calling
thread has allocated, so that all CUDA calls happen in one thread. A wrong prefetch costs time and never changes a
token. There is no prefetch for a caller that jumps between indices, or that does nothing in between: the two threads
would only compete for the GIL. A rank reads only its own rows, and in every `Share.compare_every`-th batch one row of
another rank.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.config.errors import ConfigError, StorageError, require
from harness.core.batch_shares import Sharing
from harness.core.batch_sizes import BatchSize, BatchSizes
from harness.data.batch import IGNORED, Batch
from harness.data.batch_facts import (
    BatchFacts,
    GlobalFacts,
    RowComparison,
    comparison_stride,
    fingerprint,
    global_facts,
    row_digest,
)
from harness.data.batch_plan import BatchPlan, Ints, Source
from harness.data.block_fetch import BlockFetcher, has_remote_files
from harness.data.corpus.corpus import SampleOrigin, Tokens, digest
from harness.data.order.ledger import Ledger
from harness.data.order.mixture import Mixture, MixtureRecipe
from harness.data.order.stratify import StratifiedOrder, StratifyReport

NUM_AHEAD = 2


class Share(NamedTuple):
    """Which rows of a batch belong to this rank, and the device they go to."""

    rank: int
    world_size: int
    device: torch.device
    micro_batch_size: int | None = None
    """Most rows in one forward pass; None: no limit."""
    compare_every: int = 0
    """Batches between comparisons, in which each rank also reads one row of another rank; 0: never."""


class _Buffers(NamedTuple):
    """Host memory of one batch, pinned if it goes to a GPU."""

    tokens: Tensor
    """Rows x (sequence_length + 1): inputs and targets are views of it, so that one copy to the device does for
    both."""
    sources: Tensor | None
    """None if there is only one source."""
    targets: Tensor | None
    """Separate targets, if some are ignored."""
    documents: Tensor | None


class _HostBatch(NamedTuple):
    buffers: _Buffers
    facts: BatchFacts | None
    is_own: NDArray[np.bool_] | None
    """False for padding rows; None: no row is padding."""


class _RankRows(NamedTuple):
    """How the ranks share the rows of a global batch of one size, and the rows of this rank."""

    sharing: Sharing
    slots: Ints
    """Row of the global batch in each row of this rank's batch."""
    is_own: NDArray[np.bool_] | None
    """False for padding rows; None: no row is padding."""


@final
class Batches:
    """Batches as a pure function of the batch index and the ledger; the next ones are prefetched."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        recipe: MixtureRecipe,
        share: Share,
        ledger: Ledger,
        document_mask: bool = False,
        stratified: StratifiedOrder | None = None,
        with_facts: bool = False,
        fetch_ahead: int | None = None,
    ) -> None:
        """`fetch_ahead` is the number of batches whose blocks are fetched from an object store in advance. Such batches
        own the stores: `close` closes them. None: the batches are read beside others, which own the stores."""
        assert list(recipe.weights) == [source.name for source in sources]
        assert all(source.samples.step == 1 for source in sources), "a corpus is split into contiguous parts"
        assert recipe.batch_size >= share.world_size, "check_world comes first"
        self._sizes = BatchSizes(recipe.sizes or [BatchSize(0, recipe.batch_size)])
        self._rows_by_size: dict[int, _RankRows] = {}
        self.sources = tuple(sources)
        self.source_names = tuple(recipe.weights)
        self._recipe = recipe
        self._ledger = ledger
        self._share = share
        self._document_mask = document_mask
        self._with_facts = with_facts
        self._compare_every = share.compare_every if share.world_size > 1 and with_facts else 0
        self._frequencies = _frequencies(sources) if with_facts and share.rank == 0 else None
        self._num_tokens = len(sources[0].corpus.sample(sources[0].samples.start))
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._prefetched: dict[int, Future[_HostBatch]] = {}
        self._plan = BatchPlan(sources, recipe=recipe, ledger=ledger, stratified=stratified)
        self._fetcher: BlockFetcher | None = None
        if fetch_ahead is not None and any(map(has_remote_files, sources)):
            self._fetcher = BlockFetcher(self.sources, self._plan, self._own_rows, num_ahead=fetch_ahead)
        most = self._sharing(self._sizes.largest).num_slots
        self._only_source = torch.zeros(most, dtype=torch.int64, device=share.device)
        self._last = -1
        self._returned_s = -math.inf
        self.wait_s = 0.0
        """Seconds that the last request took."""
        self._corpus_digest, self._digested_revision, self._plan_digest = "", -1, 0
        self._compute_s = 0.0
        """Seconds that the last batch took to compute."""

    def __getitem__(self, index: int) -> Batch:
        """This rank's share of a batch; an error during its prefetch is raised here."""
        assert index >= 0
        requested_s = time.perf_counter()
        idle_s = requested_s - self._returned_s
        in_order, self._last = index == self._ledger.next_index(self._last + 1), index
        if not self._plan.is_current:
            self._apply_ledger()
        future = self._prefetched.pop(index, None)
        is_started = future is not None and not future.cancel()
        if future and is_started:
            host_batch = future.result()
        else:
            host_batch = self._compute(index, self.mixture, self._allocate(index))
        batch = self._to_device(host_batch)
        if in_order and idle_s > self._compute_s:
            self._prefetch(index)
        if self._fetcher is not None:
            self._fetcher.fetch_after(index)
        self._returned_s = time.perf_counter()
        self.wait_s = self._returned_s - requested_s
        return batch

    def _to_device(self, host_batch: _HostBatch) -> Batch:
        device, buffers = self._share.device, host_batch.buffers
        tokens = buffers.tokens.to(device, non_blocking=True)
        sources = self._only_source[: len(tokens)]
        if buffers.sources is not None:
            sources = buffers.sources.to(device, non_blocking=True)
        targets, documents = tokens[:, 1:], None
        if buffers.targets is not None:
            targets = buffers.targets.to(device, non_blocking=True)
        if buffers.documents is not None:
            documents = buffers.documents.to(device, non_blocking=True)
        return Batch(tokens[:, :-1], targets, sources, documents, host_batch.facts, host_batch.is_own)

    def __len__(self) -> int:
        """Full batches before any source starts its second epoch; larger indices are valid too."""
        return self.first_repeat()[0]

    @property
    def mixture(self) -> Mixture:
        return self._plan.mixture

    def can_reweight(self, from_batch: int, weights: Mapping[str, float]) -> bool:
        """Whether every batch still has a source if the ledger sets these weights from a batch on."""
        return self._plan.can_reweight(from_batch, weights)

    def first_repeat(self) -> tuple[int, Source]:
        """The first batch that contains a repeated sample, and the source of that sample."""
        index, number = self._plan.first_repeat()
        return index, self.sources[number]

    def later_stretches(self) -> list[tuple[int, str]]:
        """The batches at which a source begins with files that were added, or a pass over all its files, by the ledger
        as it is now; and what begins there."""
        if not self._plan.is_current:
            self._apply_ledger()
        return self._plan.later_stretches()

    @property
    def sequence_length(self) -> int:
        """Tokens that a row predicts."""
        return self._num_tokens - 1

    def size(self, index: int) -> int:
        """Rows of the global batch with that index; a run may change its batch size."""
        return self._sizes.at(index)

    def samples(self, index: int) -> tuple[Ints, Ints]:
        """Source number and sample of its corpus, for each row of the global batch."""
        return self._plan.samples(index, self.mixture)

    def redirect(self, index: int, samples: Mapping[tuple[int, int], int]) -> None:
        """Read other samples in one batch (`BatchPlan.redirect`)."""
        self._plan.redirect(index, samples)
        self._apply_ledger()

    def rows(self, index: int) -> Tokens:
        """The global batch, rows x (sequence_length + 1), for inspection."""
        return self._read(*self.samples(index))

    def origins(self, index: int) -> list[SampleOrigin]:
        """Where each row of the global batch comes from."""
        pairs = zip(*self.samples(index), strict=True)
        return [self.sources[source].corpus.origin(int(sample)) for source, sample in pairs]

    def facts(self, index: int) -> GlobalFacts:
        """Facts about the global batch, for inspection."""
        sources, samples = self.samples(index)
        return self._facts(self._read(sources, samples), sources)

    def stratify_report(self) -> StratifyReport | None:
        """What the limit on rare tokens applies to; None: there is no limit."""
        return self._plan.stratify_report()

    def fingerprint(self) -> str:
        """Equal for equal corpora under equal names, as short hexadecimal text."""
        return digest(repr([(source.name, source.corpus.fingerprint()) for source in self.sources]).encode())

    def plan_digest(self) -> int:
        """24-bit digest of corpus, mixture recipe, order and ledger. Equal on all ranks that read the same data."""
        if not self._corpus_digest:
            self._corpus_digest = self.fingerprint()
        if self._ledger.revision != self._digested_revision:
            order = [(source.name, source.samples, source.seed) for source in self.sources]
            entries = [{**asdict(entry), "reason": "", "time": 0} for entry in self._ledger]
            content = repr((self._corpus_digest, order, self._recipe, self._num_tokens, entries))
            self._plan_digest = zlib.crc32(content.encode()) % 2**24
            self._digested_revision = self._ledger.revision
        return self._plan_digest

    def close(self) -> None:
        """End the threads; no batch can be requested afterwards."""
        if self._fetcher is not None:
            self._fetcher.close()  # first: the prefetch thread may wait for the store
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._prefetched.clear()

    def _apply_ledger(self) -> None:
        """Apply new entries of the ledger, and drop prefetched batches, which may have other weights."""
        self._plan.apply_ledger()
        while self._prefetched:
            self._prefetched.popitem()[1].cancel()

    def _prefetch(self, index: int) -> None:
        guesses = [index]
        for _ in range(NUM_AHEAD):
            guesses.append(self._ledger.next_index(guesses[-1] + 1))
        for stale in self._prefetched.keys() - set(guesses):
            self._prefetched.pop(stale).cancel()
        for guess in guesses[1:]:
            if guess not in self._prefetched:
                self._prefetched[guess] = self._worker.submit(self._compute, guess, self.mixture, self._allocate(guess))

    def _own_rows(self, index: int) -> Ints:
        """Row of the global batch in each row of this rank's batch."""
        return self._rank_rows(index).slots

    def _rank_rows(self, index: int) -> _RankRows:
        """How the ranks share a global batch; cached by its size."""
        size, share = self._sizes.at(index), self._share
        if size not in self._rows_by_size:
            message = (
                f"batch {index} has the size of an earlier start, {size} rows for {share.world_size} ranks; use fewer"
            )
            require(size >= share.world_size, "train.batch_size", message)
            sharing = self._sharing(size)
            slots = sharing.slots_of(share.rank)
            is_own = ~np.array(slots.is_padding) if any(slots.is_padding) else None
            self._rows_by_size[size] = _RankRows(sharing, np.array(slots.rows), is_own)
        return self._rows_by_size[size]

    def _sharing(self, size: int) -> Sharing:
        """How the ranks share a global batch of this size; more rows never need fewer slots."""
        share = self._share
        return Sharing(batch_size=size, world_size=share.world_size, micro_batch_size=share.micro_batch_size)

    def _allocate(self, index: int) -> _Buffers:
        part, length = self._rank_rows(index), self._num_tokens - 1
        num_rows = len(part.slots)
        pinned, ignores = self._share.device.type == "cuda", self._document_mask or part.is_own is not None
        return _Buffers(
            torch.empty((num_rows, length + 1), dtype=torch.int64, pin_memory=pinned),
            torch.empty(num_rows, dtype=torch.int64, pin_memory=pinned) if len(self.sources) > 1 else None,
            torch.empty((num_rows, length), dtype=torch.int64, pin_memory=pinned) if ignores else None,
            torch.empty((num_rows, length), dtype=torch.int32, pin_memory=pinned) if self._document_mask else None,
        )

    def _compute(self, index: int, mixture: Mixture, buffers: _Buffers) -> _HostBatch:
        begun_s = time.perf_counter()
        try:
            host_batch = self._fill(index, mixture, buffers)
        except (ConfigError, StorageError) as error:
            error.is_of_one_rank = True
            raise
        self._compute_s = time.perf_counter() - begun_s
        return host_batch

    def _fill(self, index: int, mixture: Mixture, buffers: _Buffers) -> _HostBatch:
        part = self._rank_rows(index)
        own = part.slots
        sources, samples = self._plan.samples(index, mixture)
        rows = buffers.tokens.numpy()  # sync: none, buffers are in host memory
        tokens = self._read(sources[own], samples[own], into=rows)
        if buffers.sources is not None:
            buffers.sources.numpy()[:] = sources[own]  # sync: none
        if buffers.targets is not None:
            targets = buffers.targets.numpy()  # sync: none
            targets[:] = tokens[:, 1:]
            if buffers.documents is not None:
                documents = self._documents(sources[own], samples[own])
                targets[documents[:, 1:] != documents[:, :-1]] = IGNORED
                buffers.documents.numpy()[:] = documents[:, :-1]  # sync: none
            if part.is_own is not None:
                targets[~part.is_own] = IGNORED
                tokens = tokens[part.is_own]
        if not self._with_facts:
            return _HostBatch(buffers, None, part.is_own)
        own_rows = part.sharing.rows_of(self._share.rank)
        facts = self._facts(tokens, sources[own_rows]) if self._share.rank == 0 else None
        return _HostBatch(
            buffers,
            BatchFacts(
                fingerprint=fingerprint(tokens) if facts is None else facts.fingerprint,
                rows_by_source=tuple(np.bincount(sources, minlength=len(self.sources)).tolist()),
                own=facts,
                compared=self._compare(index, tokens, sources, samples),
            ),
            part.is_own,
        )

    def compared_stride(self, index: int) -> int | None:
        """Distance to the rank whose row each rank also reads in this batch; None: no rows are compared."""
        if not self._compare_every or index % self._compare_every:
            return None
        return comparison_stride(index // self._compare_every, self._share.world_size)

    def _compare(self, index: int, tokens: Ints, sources: Ints, samples: Ints) -> RowComparison | None:
        stride = self.compared_stride(index)
        if stride is None:
            return None
        turn = index // self._compare_every
        other = self._rank_rows(index).sharing.rows_of((self._share.rank + stride) % self._share.world_size)
        at = other.start + turn % (other.stop - other.start)
        (row,) = self._read(sources[at : at + 1], samples[at : at + 1])
        return RowComparison(own=row_digest(tokens[turn % len(tokens)]), other=row_digest(row))

    def _read(self, sources: Ints, samples: Ints, into: Ints | None = None) -> Ints:
        rows = np.empty((len(samples), self._num_tokens), dtype=np.int64) if into is None else into
        if len(self.sources) == 1:
            rows[:] = self.sources[0].corpus.rows(samples)
            return rows
        for number, source in enumerate(self.sources):
            here = sources == number
            if here.any():
                rows[here] = source.corpus.rows(samples[here])
        return rows

    def _documents(self, sources: Ints, samples: Ints) -> NDArray[np.int32]:
        pairs = zip(sources.tolist(), samples.tolist(), strict=True)
        return np.stack([self.sources[source].corpus.documents(sample) for source, sample in pairs])

    def _facts(self, rows: Tokens, sources: Ints) -> GlobalFacts:
        return global_facts(rows, sources, num_sources=len(self.sources), frequencies=self._frequencies)


def _frequencies(sources: Sequence[Source]) -> Ints | None:
    """How often each token id occurs in all sources together; None if one source has no counts."""
    counts = [source.corpus.token_counts() for source in sources]
    total = np.zeros(max(source.corpus.vocab_size for source in sources), dtype=np.int64)
    for count in counts:
        if count is None:
            return None
        total[: len(count)] += count
    return total
