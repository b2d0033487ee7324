"""Faults of the data: what the corpus gives for some samples is not what lies in it.

Why: bad data reaches a run through the same reader as good data, on every rank that reads it, and again whenever the
batch comes again; so that is where it is put in, and tokens, facts, fingerprint and inspection all agree on it.
How: the batch index is mapped to its samples once, as the run begins, and a corpus that passes everything on gives
other tokens for exactly these. What it gives is made in advance and never changed, so that the thread that reads ahead
may share it. A fault of one rank spoils the rows of that rank, and every rank knows of it: rank 0 reads all rows.
Left out: a mixture that is reweighted later, which moves the samples of a batch; and further passes, in which the same
samples are spoiled in other batches.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from harness.config.errors import require
from harness.core.batch_shares import Sharing
from harness.core.rundir import RunDir
from harness.data.batches import Batches, Source
from harness.data.corpus.corpus import Corpus, SampleOrigin, Tokens
from harness.faults.plan import OF_THE_DATA, Fault, FaultKind, read_plan
from harness.faults.site import Site

NUM_EXCHANGED = 64
"""Frequent tokens that other data exchanges for each other."""
NUM_RAREST = 16
"""Tokens that a poisoned row consists of."""
MESSAGES = {
    FaultKind.poisoned_batch: "consists of the rarest tokens",
    FaultKind.scrambled_batch: "consists of tokens drawn at random",
    FaultKind.data_shift: "holds other data",
}


class Row(NamedTuple):
    """What is given in the place of a sample."""

    tokens: Tokens
    documents: NDArray[np.int32]


@final
class TamperedCorpus:
    """All faults of the data: `duration` batches, from `at` on."""

    def __init__(self, site: Site) -> None:
        self._site = site
        parts = site.run.parts
        spoil(parts.batches, site.fault, seed=site.seed, world_size=parts.world.size)

    def before(self, iteration: int) -> None:
        """The corpus lies in wait; told by the rank whose rows they are, by the first where they are all ranks'."""
        run, fault = self._site.run, self._site.fault
        cursor = run.parts.ledger.next_batch(run.state.cursor, run.state.given_back).batch
        if fault.strikes_at(cursor) and run.parts.world.rank == fault.rank_of(run.parts.world.size):
            whose = f"batch {cursor}" if fault.rank is None else f"this rank's part of batch {cursor}"
            what = MESSAGES.get(fault.kind, f"holds the tokens of batch {fault.at - 1}")
            self._site.tell(f"{whose} {what}", iteration)

    def after(self, iteration: int) -> None:
        pass


def spoil_as_planned(run: RunDir, batches: Batches, world_size: int) -> None:
    """All bad data of a drill, for whoever looks at its batches again."""
    plan = read_plan(run)
    for _, fault in plan or ():
        if fault.kind in OF_THE_DATA:
            assert plan is not None
            spoil(batches, fault, seed=plan.seed, world_size=world_size)


def spoil(batches: Batches, fault: Fault, *, seed: int, world_size: int) -> None:
    """From now on the batches of the fault are made of other tokens."""
    rows: list[dict[int, Row]] = [{} for _ in batches.sources]
    for index in range(fault.at, fault.at + fault.duration):
        for source, sample, row in tampered(batches, fault, index, seed=seed, world_size=world_size):
            rows[source][sample] = row
    batches.sources = tuple(
        source._replace(corpus=_Tampered(source.corpus, changed))
        for source, changed in zip(batches.sources, rows, strict=True)
    )


def tampered(batches: Batches, fault: Fault, index: int, *, seed: int, world_size: int) -> list[tuple[int, int, Row]]:
    """Source, sample and what is given in its place, for each row of a batch that is spoiled."""
    sources, samples = batches.samples(index)
    own = list(range(len(samples)))
    if fault.rank is not None:
        own = own[Sharing(batch_size=len(samples), world_size=world_size).rows_of(fault.rank_of(world_size))]
    if fault.kind in (FaultKind.duplicate_batch, FaultKind.repeated_batch):
        require(fault.at > 0, "drill.fault.at", "must be at least 1: there is no batch before the first")
        before = list(zip(*batches.samples(fault.at - 1), strict=True))
        given = [_read(batches.sources[before[row][0]], int(before[row][1])) for row in own]
    elif fault.kind is FaultKind.data_shift:
        own = [row for row in own if fault.dice(seed, index, row).random() < fault.factor]
        given = [_translated(batches.sources[sources[row]], int(samples[row])) for row in own]
    else:
        given = [_made(batches.sources[sources[row]].corpus, fault, seed, index, row) for row in own]
    return [(int(sources[row]), int(samples[row]), made) for row, made in zip(own, given, strict=True)]


def _read(source: Source, sample: int) -> Row:
    return Row(np.array(source.corpus.sample(sample)), source.corpus.documents(sample))


def _translated(source: Source, sample: int) -> Row:
    """A row in another language: each frequent token stands for another one, always the same."""
    tokens, documents = _read(source, sample)
    frequent = _by_frequency(source.corpus)[-NUM_EXCHANGED:]
    language = np.arange(source.corpus.vocab_size)
    language[frequent] = np.roll(frequent, NUM_EXCHANGED // 2)
    return Row(language[tokens], documents)


def _made(corpus: Corpus, fault: Fault, seed: int, index: int, row: int) -> Row:
    """A row of one document whose tokens are drawn from the whole vocabulary or from its rarest."""
    length = len(corpus.sample(0))
    choices = _rarest(corpus) if fault.kind is FaultKind.poisoned_batch else range(corpus.vocab_size)
    dice: random.Random = fault.dice(seed, index, row)
    return Row(np.array(dice.choices(choices, k=length)), np.zeros(length, dtype=np.int32))


def _rarest(corpus: Corpus) -> list[int]:
    """By the corpus' own count; of equally rare ones, and where nobody counted, the highest: tokenizers number frequent
    tokens first."""
    return [int(token) for token in _by_frequency(corpus)[:NUM_RAREST]]


def _by_frequency(corpus: Corpus) -> NDArray[np.int64]:
    """All tokens, the rarest first."""
    counts = corpus.token_counts()
    ids = np.arange(corpus.vocab_size)
    return ids[::-1] if counts is None else np.lexsort((-ids, counts))


@final
class _Tampered:
    """A corpus that gives something else for some samples, and says nothing of it."""

    def __init__(self, corpus: Corpus, changed: Mapping[int, Row]) -> None:
        self._corpus, self._changed = corpus, changed

    @property
    def num_samples(self) -> int:
        return self._corpus.num_samples

    @property
    def vocab_size(self) -> int:
        return self._corpus.vocab_size

    def sample(self, index: int) -> Tokens:
        changed = self._changed.get(index)
        return self._corpus.sample(index) if changed is None else changed.tokens

    def rows(self, indices: NDArray[np.int64]) -> Tokens:
        if self._changed.keys().isdisjoint(indices.tolist()):
            return self._corpus.rows(indices)
        return np.stack([self.sample(index) for index in indices.tolist()])

    def documents(self, index: int) -> NDArray[np.int32]:
        changed = self._changed.get(index)
        return self._corpus.documents(index) if changed is None else changed.documents

    def origin(self, index: int) -> SampleOrigin:
        return self._corpus.origin(index)

    def token_counts(self) -> NDArray[np.int64] | None:
        return self._corpus.token_counts()

    def fingerprint(self) -> str:
        return self._corpus.fingerprint()
