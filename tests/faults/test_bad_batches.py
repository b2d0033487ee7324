"""Tests of data faults: exactly the right samples change, equally for every reader."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from harness.config.errors import ConfigError
from harness.data.batches import Batches
from harness.data.order.ledger import Ledger
from harness.data.sources import open_data
from harness.faults.bad_batches import NUM_RAREST, TamperedCorpus, corrupt_batches
from harness.faults.fault_plan import Fault, FaultKind
from harness.faults.site import Site
from tests.composed import load

TINY = ("train.sequence_length=32", "train.batch_size=8")
AT = 5


def batches_of(*overrides: str, rank: int = 0, world_size: int = 2) -> Batches:
    cfg = load([*TINY, *overrides])
    return open_data(cfg, rank=rank, world_size=world_size, device=torch.device("cpu"), ledger=Ledger())[0]


def corrupted(fault: Fault, *overrides: str, rank: int = 0, seed: int = 0) -> Batches:
    """The batches of one of two ranks with the fault installed; the run has only what the fault needs."""
    batches = batches_of(*overrides, rank=rank)
    parts = SimpleNamespace(batches=batches, world=SimpleNamespace(rank=rank, size=2, context=1))
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
def test_only_the_batches_of_the_fault_change(kind: FaultKind, data: str) -> None:
    clean = batches_of(f"data={data}")
    broken = corrupted(Fault(kind=kind, at=AT, duration=2), f"data={data}")
    differ = [index for index in range(12) if (clean.rows(index) != broken.rows(index)).any()]
    assert differ == [AT, AT + 1]


@pytest.mark.parametrize("rank", [2, -1])
def test_a_fault_of_a_rank_changes_its_part_of_shared_sequences(rank: int) -> None:
    """Ranks 2 and 3 share the last four rows: rank 2 has the first and the last quarter of each."""
    clean, broken = (batches_of(rank=0, world_size=1) for _ in range(2))
    fault = Fault(kind=FaultKind.poisoned_batch, at=AT, rank=rank)
    corrupt_batches(broken, fault, seed=0, world_size=4, context=2)
    differs = clean.rows(AT) != broken.rows(AT)
    assert not differs[:4].any()
    middle, outer = differs[4:, 8:24], np.concatenate([differs[4:, :8], differs[4:, 24:]], axis=1)
    bad, good = (outer, middle) if rank == 2 else (middle, outer)
    assert bad.mean() > 0.8
    assert not good.any()


def test_poisoned_rows_consist_of_the_rarest_tokens() -> None:
    rows = corrupted(Fault(kind=FaultKind.poisoned_batch, at=AT)).rows(AT)
    counts = batches_of().sources[0].corpus.token_counts()
    assert counts is not None
    assert set(np.unique(rows)) <= set(np.lexsort((-np.arange(256), counts))[:NUM_RAREST])
    uncounted = corrupted(Fault(kind=FaultKind.poisoned_batch, at=AT), "data=synthetic").rows(AT)
    assert uncounted.min() >= 256 - NUM_RAREST, "tokenizers number frequent tokens first"


def test_a_repeated_batch_has_the_fingerprint_of_the_first() -> None:
    broken = corrupted(Fault(kind=FaultKind.repeated_batch, at=AT, duration=3))
    prints = [broken.facts(index).fingerprint for index in range(AT - 1, AT + 4)]
    assert len(set(prints[:4])) == 1
    assert prints[4] != prints[0]
    with pytest.raises(ConfigError, match=r"drill\.fault\.at: must be at least 1"):
        corrupted(Fault(kind=FaultKind.duplicate_batch, at=0))


@pytest.mark.parametrize(("at", "duration", "larger"), [(AT, 1, AT), (AT - 1, 2, AT)])
def test_a_batch_repeats_only_one_of_its_size(at: int, duration: int, larger: int) -> None:
    warmup = f"train.batch_size_warmup=[{{until_batch: {AT}, batch_size: 4}}]"
    line = f"drill.fault.at: batch {larger} has 8 sequences and batch {at - 1}, which it repeats, 4; choose a place "
    with pytest.raises(ConfigError, match=re.escape(line)):
        corrupted(Fault(kind=FaultKind.repeated_batch, at=at, duration=duration), warmup)
    corrupted(Fault(kind=FaultKind.repeated_batch, at=AT + 1, duration=3), warmup)


def test_drawn_tokens_depend_only_on_the_seed() -> None:
    fault = Fault(kind=FaultKind.scrambled_batch, at=AT)
    assert (corrupted(fault).rows(AT) == corrupted(fault).rows(AT)).all()
    assert (corrupted(fault).rows(AT) != corrupted(fault, seed=1).rows(AT)).any()


def test_a_fault_of_one_rank_changes_its_rows_on_every_rank() -> None:
    fault = Fault(kind=FaultKind.scrambled_batch, at=AT, rank=1)
    clean, first, second = batches_of(), corrupted(fault), corrupted(fault, rank=1)
    same = (clean.rows(AT) == first.rows(AT)).all(axis=1)
    assert same.tolist() == [True] * 4 + [False] * 4
    parts = [batches[AT].facts for batches in (first, second)]
    assert sum(part.fingerprint for part in parts if part) % 2**64 == first.facts(AT).fingerprint
    assert (second[AT].inputs.numpy() == first.rows(AT)[4:, :-1]).all()


@pytest.mark.parametrize("mask", ["true", "false"])
def test_read_ahead_and_random_access_agree(mask: str) -> None:
    override = f"data.document_mask={mask}"
    fault = Fault(kind=FaultKind.duplicate_batch, at=AT)
    broken, again = corrupted(fault, override), corrupted(fault, override)
    for index in range(12):
        batch, random_batch = broken[index], again[(index * 5) % 12]
        torch.mm(torch.ones(200, 200), torch.ones(200, 200))  # gives the read-ahead thread time, like a step
        assert (batch.inputs.numpy() == again.rows(index)[:4, :-1]).all()
        assert (random_batch.inputs.numpy() == broken.rows((index * 5) % 12)[:4, :-1]).all()
    broken.close()
    again.close()


def test_document_ids_follow_their_tokens() -> None:
    clean, broken = batches_of(), corrupted(Fault(kind=FaultKind.duplicate_batch, at=AT))
    (_, samples), (_, before) = broken.samples(AT), clean.samples(AT - 1)
    for sample, given in zip(samples.tolist(), before.tolist(), strict=True):
        assert (broken.sources[0].corpus.documents(sample) == clean.sources[0].corpus.documents(given)).all()
    assert broken.origins(AT) == clean.origins(AT), "a bad row says where the row that it replaces comes from"
    assert broken.fingerprint() == clean.fingerprint(), "the fingerprint does not reveal the fault"


def test_samples_are_good_in_every_other_epoch() -> None:
    small = ("data=synthetic", "data.synthetic.num_samples=50", "data.eval_fraction=0.2")  # five batches an epoch
    clean, broken = batches_of(*small), corrupted(Fault(kind=FaultKind.scrambled_batch, at=7, duration=2), *small)
    differ = [index for index in range(30) if (clean.rows(index) != broken.rows(index)).any()]
    assert differ == [7, 8]


def test_two_faults_may_overlap() -> None:
    batches = corrupted(Fault(kind=FaultKind.scrambled_batch, at=AT, duration=2))
    scrambled = batches.rows(AT)
    corrupt_batches(batches, Fault(kind=FaultKind.duplicate_batch, at=AT + 1), seed=0, world_size=2)
    assert (batches.rows(AT) == scrambled).all()
    assert (batches.rows(AT + 1) == scrambled).all(), "the later fault wins"
    assert batches.origins(AT + 1) == batches_of().origins(AT + 1)
