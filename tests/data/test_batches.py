"""Batches are a pure function of the index, whatever the number of ranks, the history and the threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness.data.batch import IGNORED, Batch
from harness.data.batch_facts import comparison_stride, fingerprint
from harness.data.batch_plan import Source
from harness.data.batches import Batches, Share
from harness.data.corpus.corpora import EmbeddedCorpus
from harness.data.corpus.corpus import Corpus, SampleOrigin, Tokens
from harness.data.order.ledger import Ledger
from harness.data.order.mixture import Change, MixtureRecipe

CPU = torch.device("cpu")
WEIGHTS = {"a": 2.0, "b": 1.0, "c": 0.4}
CHANGES = (Change(4, {"b": 3.0}), Change(9, {"a": 0.0}))


class CountingCorpus:
    """Sample i is first + i * 10, first + i * 10 + 1, ...; records the reading threads and raises on `broken` samples.

    A document ends after i modulo 5 tokens.
    """

    vocab_size = 100_000

    def __init__(self, num_samples: int = 40, broken: frozenset[int] = frozenset(), first: int = 0) -> None:
        self.num_samples = num_samples
        self.broken = broken
        self.first = first
        self.readers: dict[int, list[str]] = {}

    def sample(self, index: int) -> Tokens:
        self.readers.setdefault(index, []).append(threading.current_thread().name)
        if index in self.broken:
            raise OSError(f"sample {index} cannot be read")
        return self.first + np.arange(index * 10, index * 10 + 5, dtype=np.int32)

    def rows(self, indices: NDArray[np.int64]) -> Tokens:
        return np.stack([self.sample(index) for index in indices.tolist()])

    def documents(self, index: int) -> NDArray[np.int32]:
        return (np.arange(5) >= (index % 5 or 5)).astype(np.int32)

    def origin(self, index: int) -> SampleOrigin:
        return SampleOrigin(f"counting from {self.first}", index * 10, index, index)

    def token_counts(self) -> NDArray[np.int64]:
        return np.full(self.vocab_size, 7)

    def fingerprint(self) -> str:
        return f"counting from {self.first}"


def _work(batches: Batches) -> None:
    """Simulates a step: long enough for the prefetch to finish."""
    wait(batches._prefetched.values())
    time.sleep(0.001)


@contextmanager
def _batches(
    corpus: Corpus,
    *,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int = 4,
    ledger: Ledger | None = None,
    document_mask: bool = False,
    micro_batch_size: int | None = None,
) -> Iterator[Batches]:
    batches = Batches(
        [Source("main", corpus, range(corpus.num_samples), 5)],
        recipe=MixtureRecipe(weights={"main": 1.0}, changes=(), batch_size=batch_size, seed=5),
        share=Share(rank, world_size, CPU, micro_batch_size),
        ledger=Ledger() if ledger is None else ledger,
        document_mask=document_mask,
        with_facts=True,
    )
    with closing(batches):
        yield batches


@contextmanager
def _mixed(
    ledger: Ledger | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    weights: Mapping[str, float] = WEIGHTS,
    changes: Sequence[Change] = CHANGES,
    sizes: Sequence[int] = (30, 20, 11),
) -> Iterator[Batches]:
    """Three sources of different sizes, whose tokens identify their source."""
    sources = [
        Source(name, CountingCorpus(size, first=10_000 * number), range(size), number)
        for number, (name, size) in enumerate(zip(weights, sizes, strict=True))
    ]
    batches = Batches(
        sources,
        recipe=MixtureRecipe(weights=weights, changes=changes, batch_size=8, seed=3),
        share=Share(rank, world_size, CPU),
        ledger=Ledger() if ledger is None else ledger,
        document_mask=True,
        with_facts=True,
    )
    with closing(batches):
        yield batches


def _equal(batch: Batch, rows: Tokens) -> bool:
    return np.array_equal(batch.inputs.numpy(), rows[:, :-1]) and np.array_equal(batch.targets.numpy(), rows[:, 1:])


def test_batch_has_inputs_and_shifted_targets() -> None:
    with _batches(EmbeddedCorpus(64)) as batches:
        batch = batches[3]
        assert batch.inputs.shape == batch.targets.shape == (4, 64)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        assert _equal(batch, batches.rows(3))
        sources, samples = batches.samples(3)
        expected = [batches.sources[0].corpus.sample(int(sample)) for sample in samples]
        np.testing.assert_array_equal(batches.rows(3), np.stack(expected))
        assert not sources.any()
        assert not batch.sources.numpy().any()
        assert batch.documents is None


def _token_by_token(batch: Batch) -> list[torch.Tensor]:
    assert batch.documents is not None
    return [batch.inputs, batch.targets, batch.sources, batch.documents]


def test_any_or_changing_number_of_ranks_sees_the_same_batches() -> None:
    """A mixture with phases and exclusions: 1, then 4, then 2 ranks continue exactly where one rank would be."""
    ledger = Ledger()
    ledger.exclude(2, 3, "test")
    ledger.exclude(8, 8, "test")
    indices = [ledger.nth(consumed) for consumed in range(15)]
    assert indices == [0, 1, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    with _mixed(ledger) as single_rank:
        expected = [single_rank[index] for index in indices]
    for plan in ((1,) * 15, (2,) * 15, (4,) * 15, (1,) * 5 + (4,) * 5 + (2,) * 5):
        for index, batch, world_size in zip(indices, expected, plan, strict=True):
            shares = []
            for rank in range(world_size):
                with _mixed(ledger, rank=rank, world_size=world_size) as batches:
                    shares.append(batches[index])
            assert all(len(share.inputs) == 8 // world_size for share in shares)
            for parts, full in zip(
                zip(*map(_token_by_token, shares), strict=True), _token_by_token(batch), strict=True
            ):
                assert torch.equal(torch.cat(parts), full)
            fingerprints = [share.facts.fingerprint for share in shares if share.facts is not None]
            assert batch.facts is not None
            assert sum(fingerprints) % 2**64 == batch.facts.fingerprint
            all_facts = [share.facts for share in shares if share.facts]
            assert all(facts.rows_by_source == batch.facts.rows_by_source for facts in all_facts)
            assert [facts.own is None for facts in all_facts] == [rank > 0 for rank in range(world_size)]


def test_rows_come_from_their_stated_source() -> None:
    with _mixed() as batches:
        assert batches.source_names == ("a", "b", "c")
        for index in range(12):
            batch = batches[index]
            np.testing.assert_array_equal(batch.inputs[:, 0] // 10_000, batch.sources)
            assert [origin.file for origin in batches.origins(index)] == [
                f"counting from {10_000 * source}" for source in batch.sources.tolist()
            ]
            assert batch.facts is not None
            assert batch.facts.own == batches.facts(index), "with world_size 1 the rows of the rank are the batch"
            assert batch.facts.rows_by_source == tuple(np.bincount(batch.sources, minlength=3))


def test_each_source_reads_its_samples_exactly_once_per_epoch() -> None:
    """Also while the weights change: 40 batches take source b through many epochs."""
    with _mixed() as batches:
        taken: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for index in range(40):
            sources, samples = batches.samples(index)
            turns = batches.mixture.batch(index)[1]
            for row in np.argsort(turns, kind="stable"):
                taken[int(sources[row])].append(int(samples[row]))
        for source, size in enumerate((30, 20, 11)):
            assert len(taken[source]) >= size
            for first in range(0, len(taken[source]) - size + 1, size):
                assert sorted(taken[source][first : first + size]) == list(range(size))


def test_len_ends_before_the_first_repeated_sample() -> None:
    with _mixed(changes=()) as batches:
        index, source = batches.first_repeat()
        assert index == len(batches) > 0
        taken = np.zeros(3, dtype=np.int64)
        for earlier in range(index):
            taken += np.bincount(batches.samples(earlier)[0], minlength=3)
        assert (taken <= [30, 20, 11]).all()
        taken += np.bincount(batches.samples(index)[0], minlength=3)
        assert (taken > [30, 20, 11]).tolist() == [source.name == name for name in batches.source_names]


def test_weights_from_the_ledger_equal_a_configured_phase() -> None:
    """Written before or during the run: from its batch on the mixture is the same, before it unchanged."""
    poisoned = Change(6, {"b": 0.0})
    with _mixed(changes=[poisoned]) as batches:
        planned = [batches[index] for index in range(12)]
    before = Ledger()
    before.reweight(6, {"b": 0.0}, "poisoned")
    during = Ledger()
    with _mixed(before, changes=()) as known, _mixed(during, changes=()) as learning:
        for index in range(12):
            if index == 5:
                during.reweight(6, {"b": 0.0}, "poisoned")
            for one, other, third in zip(
                *map(_token_by_token, (planned[index], known[index], learning[index])), strict=True
            ):
                assert torch.equal(one, other)
                assert torch.equal(one, third)
            assert index < 6 or 1 not in known[index].sources


def test_weights_take_effect_after_an_exclusion_that_was_only_tried() -> None:
    """A trial reads batches with one more entry in the ledger; the next entry that is written is another one."""
    known = Ledger()
    known.reweight(2, {"a": 0.0}, "poisoned")
    tried = Ledger()
    with _mixed(known, changes=()) as expected, _mixed(tried, changes=()) as batches:
        with tried.trying_exclusion(5, 6):
            assert batches[1].facts is not None
            batches.plan_digest()
        tried.reweight(2, {"a": 0.0}, "poisoned")
        assert torch.equal(batches[2].inputs, expected[2].inputs)
        assert batches.plan_digest() == expected.plan_digest()


def test_prefetched_batches_are_recomputed_after_a_weight_change() -> None:
    ledger = Ledger()
    with _mixed(ledger, changes=()) as batches:
        batches[0]
        batches[1]
        ledger.reweight(2, {"a": 0.0, "c": 0.0}, "only b is left")
        assert batches[2].sources.tolist() == [1] * 8


def test_prefetch_follows_the_ledger() -> None:
    ledger = Ledger()
    ledger.exclude(2, 6, "test")
    corpus = CountingCorpus(num_samples=1000)
    with _batches(corpus, ledger=ledger) as batches:
        batches[0]
        _work(batches)
        batches[1]
        _work(batches)
        batch = batches[7]
        assert _equal(batch, batches.rows(7))
        main = threading.current_thread().name
        readers = [corpus.readers[int(sample)][0] for sample in batches.samples(7)[1]]
        assert main not in readers
        skipped = {int(sample) for index in (3, 4) for sample in batches.samples(index)[1]}
        assert not skipped & corpus.readers.keys(), "excluded batches are not read"


def test_no_target_across_documents() -> None:
    with _batches(CountingCorpus(), document_mask=True) as batches, _batches(CountingCorpus()) as plain:
        for index in range(10):
            batch, full = batches[index], plain[index]
            assert batch.documents is not None
            assert batch.documents.dtype == torch.int32
            assert torch.equal(batch.inputs, full.inputs)
            for row, sample in enumerate(batches.samples(index)[1]):
                documents = CountingCorpus().documents(int(sample))
                assert batch.documents[row].tolist() == documents[:-1].tolist()
                ends = documents[1:] != documents[:-1]
                assert batch.targets[row].tolist() == np.where(ends, IGNORED, full.targets[row]).tolist()
                assert ends.sum() == (int(sample) % 5 != 0)


def test_facts_come_with_the_batch() -> None:
    with _batches(CountingCorpus()) as batches:
        facts = batches[3].facts
        assert facts is not None
        assert facts.own is not None
        assert facts.fingerprint == facts.own.fingerprint == fingerprint(batches.rows(3))
        assert facts.own.rarest[0].num_in_corpus == 7
        assert facts.rows_by_source == facts.own.rows_by_source == (4,)
        assert facts.compared is None, "no other rank to compare with"


def _rank_of(world_size: int, rank: int, corpus: CountingCorpus, *, ledger: Ledger | None = None) -> Batches:
    return Batches(
        [Source("main", corpus, range(corpus.num_samples), 5)],
        recipe=MixtureRecipe(weights={"main": 1.0}, changes=(), batch_size=2 * world_size, seed=5),
        share=Share(rank, world_size, CPU, compare_every=10),
        ledger=Ledger() if ledger is None else ledger,
        with_facts=True,
    )


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_rank_reads_its_own_rows_and_sometimes_one_of_another_rank(rank: int) -> None:
    corpus = CountingCorpus(num_samples=1000)
    with closing(_rank_of(8, rank, corpus)) as batches:
        corpus.readers.clear()
        batches[3]
        assert len(corpus.readers) == 2, "rank 0 too"
        corpus.readers.clear()
        batches[10]
        assert len(corpus.readers) == 3


@pytest.mark.parametrize("index", [0, 10, 20, 30])
def test_compared_row_has_the_same_digest_on_both_ranks(index: int) -> None:
    ranks = [_rank_of(5, rank, CountingCorpus(num_samples=1000)) for rank in range(5)]
    compared = [each.compared for each in (batches[index].facts for batches in ranks) if each is not None]
    stride = ranks[0].compared_stride(index)
    assert stride is not None
    for rank, pair in enumerate(compared):
        owner = compared[(rank + stride) % 5]
        assert pair is not None
        assert owner is not None
        assert pair.other == owner.own != pair.own
    assert ranks[0].compared_stride(index + 1) is None
    for batches in ranks:
        batches.close()


def test_stride_never_pairs_two_ranks_only_with_each_other() -> None:
    for world_size in range(2, 40):
        strides = {comparison_stride(turn, world_size) for turn in range(20)}
        assert strides, world_size
        assert all(0 < stride < world_size for stride in strides)
        assert world_size == 2 or all(2 * stride != world_size for stride in strides)


def test_plan_digest_covers_corpus_and_ledger_but_not_time_and_reason() -> None:
    def plan(corpus: CountingCorpus, *exclusions: tuple[int, str]) -> int:
        ledger = Ledger()
        with closing(_rank_of(2, 0, corpus, ledger=ledger)) as batches:
            batches.plan_digest()
            for index, reason in exclusions:
                ledger.exclude(index, index, reason)
            return batches.plan_digest()

    plain = plan(CountingCorpus())
    assert plain == plan(CountingCorpus())
    assert plan(CountingCorpus(), (4, "a")) == plan(CountingCorpus(), (4, "b"))
    others = {plan(CountingCorpus(first=7)), plan(CountingCorpus(), (4, "a")), plan(CountingCorpus(), (5, "a"))}
    assert len({plain, *others}) == 4


def test_fingerprint_covers_all_sources() -> None:
    with _mixed() as one, _mixed() as same, _mixed(weights={"a": 1, "b": 1, "x": 1}) as other:
        assert one.fingerprint() == same.fingerprint() != other.fingerprint()


def test_micro_batches_are_the_rows_in_order() -> None:
    with _batches(CountingCorpus(), batch_size=6) as batches:
        batch = batches[0]
        parts = batch.micro_batches(2)
        assert [part.inputs.shape for part in parts] == [(2, 4)] * 3
        assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
    with _mixed() as batches:
        batch = batches[0]
        parts = batch.micro_batches(4)
        for pieces, full in zip(zip(*map(_token_by_token, parts), strict=True), _token_by_token(batch), strict=True):
            assert torch.equal(torch.cat(pieces), full)
        assert all(part.facts is batch.facts for part in parts)


def test_prefetched_batches_equal_batches_on_demand() -> None:
    """In order, repeated, backwards, and far away: each kind of prefetch hits or misses once."""
    with _batches(CountingCorpus()) as batches:
        for index in (0, 1, 2, 3, 3, 2, 9, 10, 12, 11, 0, 1):
            assert _equal(batches[index], batches.rows(index)), index


def test_returned_batch_never_changes() -> None:
    with _batches(CountingCorpus()) as batches:
        first = batches[0]
        for index in range(1, 6):
            batches[index]
        assert _equal(first, batches.rows(0))


def test_next_batch_is_prefetched_by_the_thread() -> None:
    corpus = CountingCorpus(num_samples=1000)
    with _batches(corpus) as batches:
        for index in range(5):
            batches[index]
            _work(batches)
        main = threading.current_thread().name
        for index in range(1, 5):
            readers = [asker for sample in batches.samples(index)[1] for asker in corpus.readers[int(sample)]]
            assert main not in readers, index
            assert len(readers) == 4, "each sample is read once"


class SlowCorpus(CountingCorpus):
    """Takes a while to read the rows of a batch."""

    READ_S = 0.05

    def rows(self, indices: NDArray[np.int64]) -> Tokens:
        time.sleep(self.READ_S)
        return super().rows(indices)


def test_the_wait_for_a_batch_is_measured() -> None:
    """It is the time of the request, not of the read: a prefetched batch costs no wait."""
    with _batches(SlowCorpus(num_samples=1000)) as batches:
        batches[0]
        assert batches.wait_s >= SlowCorpus.READ_S
        time.sleep(3 * batches.wait_s)
        batches[1]
        _work(batches)
        batches[2]
        assert 0 < batches.wait_s < SlowCorpus.READ_S


def test_no_prefetch_for_random_access() -> None:
    corpus = CountingCorpus(num_samples=1000)
    with _batches(corpus) as batches:
        for index in (50, 10, 30):
            assert _equal(batches[index], batches.rows(index))
            _work(batches)
        assert {asker for readers in corpus.readers.values() for asker in readers} == {threading.current_thread().name}


def test_prefetch_error_is_raised_when_the_batch_is_requested() -> None:
    with _batches(CountingCorpus()) as batches:
        broken = int(batches.samples(2)[1][1])
    with _batches(CountingCorpus(broken=frozenset({broken}))) as batches:
        assert _equal(batches[0], batches.rows(0))
        _work(batches)
        assert _equal(batches[1], batches.rows(1))
        _work(batches)
        for _ in range(2):
            with pytest.raises(OSError, match=f"sample {broken} cannot be read"):
                batches[2]
        assert _equal(batches[3], batches.rows(3))


def test_close_ends_the_thread() -> None:
    before = set(threading.enumerate())
    with _batches(CountingCorpus()) as batches:
        batches[0]
        (worker,) = (thread for thread in set(threading.enumerate()) - before if thread.name.startswith("batches"))
    assert not worker.is_alive()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_batches_are_equal_and_cause_no_host_sync() -> None:
    device = torch.device("cuda", 0)
    corpus = EmbeddedCorpus(64)
    batches = Batches(
        [Source("main", corpus, range(100), 5)],
        recipe=MixtureRecipe(weights={"main": 1.0}, changes=(), batch_size=4, seed=5),
        share=Share(0, 1, device),
        ledger=Ledger(),
        document_mask=True,
        with_facts=True,
    )
    with closing(batches):
        torch.cuda.set_sync_debug_mode("error")
        try:
            handed_out = [batches[index] for index in range(20)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for index, batch in enumerate(handed_out):
            assert all(part.device == device for part in _token_by_token(batch))
            np.testing.assert_array_equal(batch.inputs.cpu().numpy(), batches.rows(index)[:, :-1])


@pytest.mark.parametrize(("micro", "document_mask"), [(None, False), (2, True), (1, False)])
def test_uneven_shares_have_the_same_rows_and_padding_is_ignored(micro: int | None, document_mask: bool) -> None:
    shared: list[Batch] = []
    for rank in range(3):
        with _batches(
            CountingCorpus(),
            rank=rank,
            world_size=3,
            batch_size=8,
            document_mask=document_mask,
            micro_batch_size=micro,
        ) as batches:
            shared.append(batches[3])
    with _batches(CountingCorpus(), batch_size=8, document_mask=document_mask) as single_rank:
        full, rows = single_rank[3], single_rank.rows(3)
    assert len({batch.inputs.shape for batch in shared}) == 1, "the same shape on every rank"
    own = [np.ones(len(batch.inputs), dtype=bool) if batch.is_own is None else batch.is_own for batch in shared]
    assert [int(each.sum()) for each in own] == [2, 3, 3]
    for name in ("inputs", "targets", "sources", *(["documents"] if document_mask else [])):
        parts = [getattr(batch, name)[torch.from_numpy(each)] for batch, each in zip(shared, own, strict=True)]
        assert torch.equal(torch.cat(parts), getattr(full, name)), name
    for batch, each in zip(shared, own, strict=True):
        assert (batch.targets[torch.from_numpy(~each)] == IGNORED).all()
        assert batch.facts is not None
    total = sum(batch.facts.fingerprint for batch in shared if batch.facts is not None)
    assert total % 2**64 == fingerprint(rows), "fingerprints of the ranks add up, without padding"
    passes = [batch.micro_batches(micro) for batch in shared]
    assert len({len(each) for each in passes}) == 1, "as many micro-batches on every rank"
    assert [part.is_padding for part in passes[0]] == ([True, False, False] if micro == 1 else [False] * len(passes[0]))


def test_one_rank_pads_micro_batches_that_do_not_divide_its_batch() -> None:
    with _batches(CountingCorpus(), batch_size=8, micro_batch_size=3) as batches:
        parts = batches[0].micro_batches(3)
    assert [part.inputs.shape for part in parts] == [(3, 4)] * 3
    assert [part.sources.shape for part in parts] == [(3,)] * 3
    assert [int((part.targets != IGNORED).any(dim=1).sum()) for part in parts] == [2, 3, 3]
