"""Spoiled batches: the right samples and no others, alike for whoever reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from harness.config.compose import load
from harness.config.errors import ConfigError
from harness.data.batches import Batches
from harness.data.order.ledger import Ledger
from harness.data.sources import open_data
from harness.faults.data import NUM_RAREST, TamperedCorpus
from harness.faults.plan import Fault, FaultKind
from harness.faults.site import Site

TINY = ("train.sequence_length=32", "train.batch_size=8")
AT = 5


def batches_of(*overrides: str, rank: int = 0, world_size: int = 2) -> Batches:
    cfg = load([*TINY, *overrides])
    return open_data(cfg, rank=rank, world_size=world_size, device=torch.device("cpu"), ledger=Ledger())[0]


def spoiled(fault: Fault, *overrides: str, rank: int = 0, seed: int = 0) -> Batches:
    """What a rank of two reads once the fault is in place; of the run, only what the fault looks at."""
    batches = batches_of(*overrides, rank=rank)
    parts = SimpleNamespace(batches=batches, world=SimpleNamespace(rank=rank, size=2))
    run = cast(Any, SimpleNamespace(parts=parts))
    TamperedCorpus(Site(run=run, fault=fault, number=0, seed=seed, struck=frozenset()))
    return batches


KINDS = [
    FaultKind.poisoned_batch,
    FaultKind.scrambled_batch,
    FaultKind.duplicate_batch,
    FaultKind.repeated_batch,
    FaultKind.data_shift,
]


@pytest.mark.parametrize("data", ["embedded", "synthetic", "mixture"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_batches_of_the_fault_are_spoiled_and_no_others(kind: FaultKind, data: str) -> None:
    clean = batches_of(f"data={data}")
    broken = spoiled(Fault(kind=kind, at=AT, duration=2), f"data={data}")
    differ = [index for index in range(12) if (clean.rows(index) != broken.rows(index)).any()]
    assert differ == [AT, AT + 1]


def test_poison_is_the_rarest_there_is() -> None:
    rows = spoiled(Fault(kind=FaultKind.poisoned_batch, at=AT)).rows(AT)
    counts = batches_of().sources[0].corpus.token_counts()
    assert counts is not None
    assert set(np.unique(rows)) <= set(np.lexsort((-np.arange(256), counts))[:NUM_RAREST])
    uncounted = spoiled(Fault(kind=FaultKind.poisoned_batch, at=AT), "data=synthetic").rows(AT)
    assert uncounted.min() >= 256 - NUM_RAREST, "tokenizers number frequent tokens first"


def test_a_batch_that_comes_again_has_the_fingerprint_of_the_first() -> None:
    broken = spoiled(Fault(kind=FaultKind.repeated_batch, at=AT, duration=3))
    prints = [broken.facts(index).fingerprint for index in range(AT - 1, AT + 4)]
    assert len(set(prints[:4])) == 1
    assert prints[4] != prints[0]
    with pytest.raises(ConfigError, match=r"drill\.fault\.at: must be at least 1"):
        spoiled(Fault(kind=FaultKind.duplicate_batch, at=0))


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    fault = Fault(kind=FaultKind.scrambled_batch, at=AT)
    assert (spoiled(fault).rows(AT) == spoiled(fault).rows(AT)).all()
    assert (spoiled(fault).rows(AT) != spoiled(fault, seed=1).rows(AT)).any()


def test_the_rows_of_one_rank_are_spoiled_and_all_ranks_know() -> None:
    fault = Fault(kind=FaultKind.scrambled_batch, at=AT, rank=1)
    clean, first, second = batches_of(), spoiled(fault), spoiled(fault, rank=1)
    same = (clean.rows(AT) == first.rows(AT)).all(axis=1)
    assert same.tolist() == [True] * 4 + [False] * 4
    parts = [batches[AT].facts for batches in (first, second)]
    assert sum(part.fingerprint for part in parts if part) % 2**64 == first.facts(AT).fingerprint
    assert (second[AT].inputs.numpy() == first.rows(AT)[4:, :-1]).all()


@pytest.mark.parametrize("mask", ["true", "false"])
def test_reading_ahead_gives_what_reading_at_random_gives(mask: str) -> None:
    words = f"data.document_mask={mask}"
    fault = Fault(kind=FaultKind.duplicate_batch, at=AT)
    broken, again = spoiled(fault, words), spoiled(fault, words)
    for index in range(12):
        batch, alone = broken[index], again[(index * 5) % 12]
        torch.mm(torch.ones(200, 200), torch.ones(200, 200))  # time for the thread, as a step would give it
        assert (batch.inputs.numpy() == again.rows(index)[:4, :-1]).all()
        assert (alone.inputs.numpy() == broken.rows((index * 5) % 12)[:4, :-1]).all()
    broken.close()
    again.close()


def test_documents_come_with_their_tokens() -> None:
    clean, broken = batches_of(), spoiled(Fault(kind=FaultKind.duplicate_batch, at=AT))
    (_, samples), (_, before) = clean.samples(AT), clean.samples(AT - 1)
    for sample, given in zip(samples.tolist(), before.tolist(), strict=True):
        assert (broken.sources[0].corpus.documents(sample) == clean.sources[0].corpus.documents(given)).all()
        assert broken.sources[0].corpus.origin(sample) == clean.sources[0].corpus.origin(sample)
    assert broken.fingerprint() == clean.fingerprint(), "nobody tells on the corpus"
