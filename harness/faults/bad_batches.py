"""Injects bad data: some batches read samples with other tokens.

Why: real bad data reaches a run through the same reader as good data, on every rank that reads it, and again whenever
the batch is read again. The fault is therefore in the corpus, and tokens, facts, fingerprint and inspection agree on
it.
How: at the start of the run the corpus is extended by the bad samples, and the batches of the fault read these instead
of their own. They are computed in advance and never change, so the read-ahead thread can share them. The same samples
in another epoch are good: a corpus may be smaller than the run. A fault of one rank changes the rows of that rank, but
on every rank: rank 0 reads all rows. With context parallelism it changes the part of each row that the rank computes.
A mixture that is reweighted later moves the samples of a batch, and with them
the bad ones disappear, as a bad file does whose source is switched off.
"""

from __future__ import annotations

import random
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from harness.config.errors import require
from harness.core.batch_shares import Sharing
from harness.core.rundir import RunDir
from harness.data.batch_plan import Source
from harness.data.batches import Batches
from harness.data.corpus.corpus import Corpus, SampleOrigin, Tokens
from harness.distributed.context import ContextSplit
from harness.faults.fault_plan import DATA_FAULTS, Fault, FaultKind, read_plan
from harness.faults.site import Site

NUM_EXCHANGED = 64
"""Frequent tokens that `data_shift` permutes."""
NUM_RAREST = 16
"""Number of rarest tokens that poisoned rows are drawn from."""
MESSAGES = {
    FaultKind.poisoned_batch: "consists of the rarest tokens",
    FaultKind.scrambled_batch: "consists of tokens drawn at random",
    FaultKind.data_shift: "holds other data",
}


class Row(NamedTuple):
    """The replacement of a sample."""

    tokens: Tokens
    documents: NDArray[np.int32]


class BadSample(NamedTuple):
    """A replacement and the sample that it replaces."""

    sample: int
    row: Row


@final
class TamperedCorpus:
    """All data faults: changes `duration` batches from index `at` on."""

    def __init__(self, site: Site) -> None:
        self._site = site
        parts = site.run.parts
        corrupt_batches(
            parts.batches,
            site.fault,
            seed=site.seed,
            world_size=parts.world.size,
            context=parts.world.context,
        )

    def before(self, iteration: int) -> None:
        """Log the strike, on the rank that owns the rows; on rank 0 if the rows of all ranks are bad."""
        run, fault = self._site.run, self._site.fault
        cursor = run.parts.ledger.next_batch(run.state.cursor, run.state.given_back).batch
        if fault.strikes_at(cursor) and run.parts.world.rank == fault.rank_of(run.parts.world.size):
            subject = f"batch {cursor}" if fault.rank is None else f"this rank's part of batch {cursor}"
            change = MESSAGES.get(fault.kind, f"holds the tokens of batch {fault.at - 1}")
            self._site.log_strike(f"{subject} {change}", iteration)

    def after(self, iteration: int) -> None:
        pass


def corrupt_planned_batches(run: RunDir, batches: Batches, world_size: int, *, context: int = 1) -> None:
    """Apply all data faults of a drill, for tools that read its batches again."""
    plan = read_plan(run)
    for _, fault in plan or ():
        if fault.kind in DATA_FAULTS:
            assert plan is not None
            corrupt_batches(batches, fault, seed=plan.seed, world_size=world_size, context=context)


def corrupt_batches(batches: Batches, fault: Fault, *, seed: int, world_size: int, context: int = 1) -> None:
    """Let the batches of the fault have other tokens from now on. `context`: ranks that share their sequences."""
    corpora = [_ExtendedCorpus(source.corpus) for source in batches.sources]
    redirected: dict[int, dict[tuple[int, int], int]] = {}
    for index in range(fault.at, fault.at + fault.duration):
        bad_rows = changed_rows(batches, fault, index, seed=seed, world_size=world_size, context=context)
        for source, sample, row in bad_rows:
            own = corpora[source].own_sample(sample)
            redirected.setdefault(index, {})[source, own] = corpora[source].add(own, row)
    batches.sources = tuple(
        source._replace(corpus=corpus) for source, corpus in zip(batches.sources, corpora, strict=True)
    )
    for index, samples in redirected.items():
        batches.redirect(index, samples)


def changed_rows(
    batches: Batches, fault: Fault, index: int, *, seed: int, world_size: int, context: int = 1
) -> list[tuple[int, int, Row]]:
    """Source, sample and replacement of each bad row of a batch."""
    sources, samples = batches.samples(index)
    own = list(range(len(samples)))
    if fault.rank is not None:
        shares = Sharing(batch_size=len(samples), world_size=world_size // context)
        own = own[shares.rows_of(fault.rank_of(world_size) // context)]
    if fault.kind in (FaultKind.duplicate_batch, FaultKind.repeated_batch):
        require(fault.at > 0, "drill.fault.at", f"must be at least 1 for {fault.kind}, which repeats the batch before")
        before = list(zip(*batches.samples(fault.at - 1), strict=True))
        sizes = f"batch {index} has {len(samples)} sequences and batch {fault.at - 1}, which it repeats, {len(before)}"
        require(len(samples) == len(before), "drill.fault.at", f"{sizes}; choose a place where the size stays the same")
        given = [_read(batches.sources[before[row][0]], int(before[row][1])) for row in own]
    elif fault.kind is FaultKind.data_shift:
        own = [row for row in own if fault.rng(seed, index, row).random() < fault.factor]
        given = [_permute_tokens(batches.sources[sources[row]], int(samples[row])) for row in own]
    else:
        given = [_draw_row(batches.sources[sources[row]].corpus, fault, seed, index, row) for row in own]
    if fault.rank is not None and context > 1:
        split = ContextSplit(context, fault.rank_of(world_size) % context)
        originals = [_read(batches.sources[sources[row]], int(samples[row])) for row in own]
        given = [_keep_other_parts(old, new, split) for old, new in zip(originals, given, strict=True)]
    return [(int(sources[row]), int(samples[row]), new) for row, new in zip(own, given, strict=True)]


def _keep_other_parts(old: Row, new: Row, split: ContextSplit) -> Row:
    """A row that is bad only where one rank of a context group computes it. The last token is a target only."""
    places = split.positions(len(old.tokens) - 1, torch.device("cpu")).numpy()
    tokens = np.array(old.tokens)
    tokens[places] = new.tokens[places]
    return Row(tokens, old.documents)


def _read(source: Source, sample: int) -> Row:
    return Row(np.array(source.corpus.sample(sample)), source.corpus.documents(sample))


def _permute_tokens(source: Source, sample: int) -> Row:
    """The row with its frequent tokens permuted, always by the same permutation."""
    tokens, documents = _read(source, sample)
    frequent = _by_frequency(source.corpus)[-NUM_EXCHANGED:]
    permutation = np.arange(source.corpus.vocab_size)
    permutation[frequent] = np.roll(frequent, NUM_EXCHANGED // 2)
    return Row(permutation[tokens], documents)


def _draw_row(corpus: Corpus, fault: Fault, seed: int, index: int, row: int) -> Row:
    """A row of one document, with tokens drawn from the whole vocabulary or from its rarest tokens."""
    length = len(corpus.sample(0))
    choices = _rarest(corpus) if fault.kind is FaultKind.poisoned_batch else range(corpus.vocab_size)
    rng: random.Random = fault.rng(seed, index, row)
    return Row(np.array(rng.choices(choices, k=length)), np.zeros(length, dtype=np.int32))


def _rarest(corpus: Corpus) -> list[int]:
    """The rarest tokens by the counts of the corpus. Ties, and a corpus without counts, take the highest ids:
    tokenizers number frequent tokens first."""
    return [int(token) for token in _by_frequency(corpus)[:NUM_RAREST]]


def _by_frequency(corpus: Corpus) -> NDArray[np.int64]:
    """All tokens, the rarest first."""
    counts = corpus.token_counts()
    ids = np.arange(corpus.vocab_size)
    return ids[::-1] if counts is None else np.lexsort((-ids, counts))


@final
class _ExtendedCorpus:
    """A corpus with bad samples after its own; its size, fingerprint and counts are those of the original."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus, self._bad = corpus, list[BadSample]()
        if isinstance(corpus, _ExtendedCorpus):
            self._corpus, self._bad = corpus._corpus, [*corpus._bad]

    def add(self, sample: int, row: Row) -> int:
        """Add the replacement of a sample; returns its number."""
        self._bad.append(BadSample(sample, row))
        return self.num_samples + len(self._bad) - 1

    def own_sample(self, index: int) -> int:
        """The sample of the original corpus that a bad one replaces; a good one itself."""
        bad = self._bad_sample(index)
        return index if bad is None else bad.sample

    @property
    def num_samples(self) -> int:
        return self._corpus.num_samples

    @property
    def vocab_size(self) -> int:
        return self._corpus.vocab_size

    def sample(self, index: int) -> Tokens:
        bad = self._bad_sample(index)
        return self._corpus.sample(index) if bad is None else bad.row.tokens

    def rows(self, indices: NDArray[np.int64]) -> Tokens:
        if (indices < self.num_samples).all():
            return self._corpus.rows(indices)
        return np.stack([self.sample(index) for index in indices.tolist()])

    def documents(self, index: int) -> NDArray[np.int32]:
        bad = self._bad_sample(index)
        return self._corpus.documents(index) if bad is None else bad.row.documents

    def origin(self, index: int) -> SampleOrigin:
        return self._corpus.origin(self.own_sample(index))

    def token_counts(self) -> NDArray[np.int64] | None:
        return self._corpus.token_counts()

    def fingerprint(self) -> str:
        return self._corpus.fingerprint()

    def _bad_sample(self, index: int) -> BadSample | None:
        return None if index < self.num_samples else self._bad[index - self.num_samples]
