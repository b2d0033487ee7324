"""Batches are a pure function of the index: of no rank count, no history, no thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch

from harness.compose import load
from harness.config import ConfigError
from harness.data.batches import HELD_OUT_SEED, Batch, Batches, open_data
from harness.data.corpora import Corpus, EmbeddedCorpus, Tokens

CPU = torch.device("cpu")


class CountingCorpus:
    """Sample i is i * 10, i * 10 + 1, ...; it notes who asked, and breaks where it is told to."""

    vocab_size = 10_000

    def __init__(self, num_samples: int = 40, broken: frozenset[int] = frozenset()) -> None:
        self.num_samples = num_samples
        self.broken = broken
        self.askers: dict[int, list[str]] = {}

    def sample(self, index: int) -> Tokens:
        self.askers.setdefault(index, []).append(threading.current_thread().name)
        if index in self.broken:
            raise OSError(f"sample {index} cannot be read")
        return np.arange(index * 10, index * 10 + 5, dtype=np.int32)

    def fingerprint(self) -> str:
        return "counting"


@contextmanager
def _batches(corpus: Corpus, *, rank: int = 0, world_size: int = 1, batch_size: int = 4) -> Iterator[Batches]:
    samples = range(corpus.num_samples)
    batches = Batches(corpus, samples, batch_size=batch_size, seed=5, rank=rank, world_size=world_size, device=CPU)
    with closing(batches):
        yield batches


def _equal(batch: Batch, rows: Tokens) -> bool:
    return np.array_equal(batch.inputs.numpy(), rows[:, :-1]) and np.array_equal(batch.targets.numpy(), rows[:, 1:])


def test_a_batch_is_rows_and_the_tokens_that_follow() -> None:
    with _batches(EmbeddedCorpus(64)) as batches:
        batch = batches[3]
        assert batch.inputs.shape == batch.targets.shape == (4, 64)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.inputs.is_contiguous()
        assert batch.targets.is_contiguous()
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        assert _equal(batch, batches.rows(3))
        expected = [batches.corpus.sample(int(sample)) for sample in batches.sample_ids(3)]
        np.testing.assert_array_equal(batches.rows(3), np.stack(expected))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("data", ["embedded", "synthetic"])
def test_any_number_of_ranks_sees_the_same_global_batches(world_size: int, data: str) -> None:
    cfg = load([f"data={data}", "train.sequence_length=64", "train.batch_size=8"])
    alone = open_data(cfg, rank=0, world_size=1, device=CPU)
    ranks = [open_data(cfg, rank=rank, world_size=world_size, device=CPU) for rank in range(world_size)]
    for part in (0, 1):
        for index in (0, 1, 2, 7, 1000):
            shares = [rank[part][index] for rank in ranks]
            assert all(len(share.inputs) == 8 // world_size for share in shares)
            assert torch.equal(torch.cat([share.inputs for share in shares]), alone[part][index].inputs)
            assert torch.equal(torch.cat([share.targets for share in shares]), alone[part][index].targets)
    for pair in (alone, *ranks):
        for batches in pair:
            batches.close()


def test_a_change_of_ranks_in_mid_run_goes_on_with_the_same_batches() -> None:
    corpus = CountingCorpus()
    seen = []
    for world_size, indices in ((1, range(3)), (4, range(3, 6)), (2, range(6, 9))):
        for index in indices:
            rows = []
            for rank in range(world_size):
                with _batches(corpus, rank=rank, world_size=world_size) as batches:
                    rows.append(batches[index].inputs)
            seen.append(torch.cat(rows))
    with _batches(corpus) as batches:
        assert all(torch.equal(batches[index].inputs, tokens) for index, tokens in enumerate(seen))


def test_train_and_held_out_share_no_token_of_the_text() -> None:
    cfg = load(["train.sequence_length=64"])
    train, held_out = open_data(cfg, rank=0, world_size=1, device=CPU)
    with closing(train), closing(held_out):
        num_train_batches = len(train.samples) // 8
        trained = np.concatenate([train.sample_ids(index) for index in range(num_train_batches)])
        judged = np.concatenate([held_out.sample_ids(index) for index in range(len(held_out))])
        assert (trained.max() + 1) * 64 < judged.min() * 64, "the last target of training lies before the first input"
        assert len(set(trained.tolist())) == len(trained)
        assert len(set(judged.tolist())) == len(judged)


def test_held_out_order_is_the_same_for_every_run_seed() -> None:
    pairs = [open_data(load([f"run.seed={seed}"]), rank=0, world_size=1, device=CPU) for seed in (0, 1)]
    assert not np.array_equal(pairs[0][0].sample_ids(0), pairs[1][0].sample_ids(0))
    np.testing.assert_array_equal(pairs[0][1].sample_ids(0), pairs[1][1].sample_ids(0))
    assert HELD_OUT_SEED > 2**63 - 1
    for batches in (*pairs[0], *pairs[1]):
        batches.close()


def test_micro_batches_are_the_rows_in_order() -> None:
    with _batches(CountingCorpus(), batch_size=6) as batches:
        batch = batches[0]
        parts = batch.micro_batches(2)
        assert [part.inputs.shape for part in parts] == [(2, 4)] * 3
        assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)


def test_what_was_made_ahead_equals_what_is_made_on_demand() -> None:
    """In order, repeated, backwards, and far off: each kind of guess comes true or fails once."""
    with _batches(CountingCorpus()) as batches:
        for index in (0, 1, 2, 3, 3, 2, 9, 10, 12, 11, 0, 1):
            assert _equal(batches[index], batches.rows(index)), index


def test_a_batch_handed_out_never_changes() -> None:
    with _batches(CountingCorpus()) as batches:
        first = batches[0]
        for index in range(1, 6):
            batches[index]
        assert _equal(first, batches.rows(0))


def test_the_next_batch_is_made_by_the_thread() -> None:
    corpus = CountingCorpus(num_samples=1000)
    with _batches(corpus) as batches:
        for index in range(5):
            batches[index]
        main = threading.current_thread().name
        for index in range(1, 5):
            askers = [asker for sample in batches.sample_ids(index) for asker in corpus.askers[int(sample)]]
            assert main not in askers, index
            assert len(askers) == 4, "each sample is read once"


def test_what_breaks_ahead_is_raised_when_asked_for() -> None:
    with _batches(CountingCorpus()) as batches:
        broken = int(batches.sample_ids(2)[1])
    with _batches(CountingCorpus(broken=frozenset({broken}))) as batches:
        assert _equal(batches[0], batches.rows(0))
        assert _equal(batches[1], batches.rows(1))
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


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.sequence_length=1000000"], r"train\.sequence_length: must be at most \d+"),
        (["train.batch_size=5000"], r"train\.batch_size: must be at most the \d+ sequences"),
        (["data.eval_fraction=0.002"], r"data\.eval_fraction: holds out \d sequences, less than one batch of 8"),
        (["data.kind=synthetic", "data.synthetic.rare_probability=0.1"], r"data\.synthetic\.rare_tokens: must"),
        (["data.kind=synthetic", "data.synthetic.rare_tokens=255"], r"data\.synthetic\.rare_tokens: must leave"),
        (["data.kind=synthetic", "data.synthetic.num_samples=2"], r"data\.synthetic\.num_samples: must"),
        (["data.eval_fraction=0.99999"], r"data\.eval_fraction: must leave 2"),
    ],
)
def test_too_small_a_corpus_names_the_key(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}") as caught:
        open_data(load(overrides), rank=0, world_size=1, device=CPU)
    assert "\n" not in str(caught.value)


def test_without_evaluation_little_held_out_data_is_no_reason_to_stop() -> None:
    cfg = load(["eval.every_steps=0", "data.eval_fraction=0.002"])
    for batches in open_data(cfg, rank=0, world_size=1, device=CPU):
        batches.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_tokens_are_the_same_and_nothing_waits() -> None:
    device = torch.device("cuda", 0)
    corpus = EmbeddedCorpus(64)
    batches = Batches(corpus, range(100), batch_size=4, seed=5, rank=0, world_size=1, device=device)
    with closing(batches):
        torch.cuda.set_sync_debug_mode("error")
        try:
            handed_out = [batches[index] for index in range(20)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(batch.inputs.device == device for batch in handed_out)
        for index, batch in enumerate(handed_out):
            assert _equal(Batch(batch.inputs.cpu(), batch.targets.cpu()), batches.rows(index))
