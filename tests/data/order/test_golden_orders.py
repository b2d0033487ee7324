"""Golden values of the data order: with an unchanged corpus, every version of the harness reads these samples.

The values were computed before corpora could grow and batch sizes could change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.data.batches import Batches
from harness.data.order.ledger import Ledger
from harness.data.sources import open_data
from tests.composed import load
from tests.data.token_files import write_pair

NUM_BATCHES = 300


def write_files(directory: Path) -> None:
    """Two flat files and a pair, 6,700 windows of 16 tokens."""
    draw = np.random.default_rng(7)
    for name, count in (("a.bin", 40_001), ("c.bin", 60_001)):
        draw.integers(0, 250, count, dtype=np.uint16).tofile(directory / name)
    write_pair(directory / "b", [draw.integers(0, 250, size).tolist() for size in (5_000, 1, 2_200)])


def overrides(data: str, directory: Path) -> list[str]:
    few = ["train.sequence_length=16", "train.batch_size=8", "run.seed=3", "data.synthetic.num_samples=900"]
    match data:
        case "files":
            return [*few, "data=files", f"data.sources.main.paths=[{directory}/*.bin]"]
        case "stratified":
            limits = ["data.synthetic.rare_tokens=4", "data.synthetic.rare_probability=0.004"]
            limits += ["data.synthetic.zipf_exponent=0", "data.stratify.rare_below=40", "data.stratify.max_per_batch=2"]
            return [*few, "data=synthetic", *limits]
        case "mixture":
            sources = "+data.sources={one: {kind: synthetic, weight: 0.7}, two: {kind: synthetic, weight: 0.3}}"
            phases = "data.phases=[{from_batch: 40, weights: {one: 0.2}}, {from_batch: 90, weights: {two: 0}}]"
            return [*few, "data=base", sources, phases]
    return [*few, "data=synthetic"]


@contextmanager
def opened(data: str, directory: Path) -> Iterator[tuple[Batches, Batches]]:
    write_files(directory)
    ledger = Ledger()
    if data == "mixture":
        ledger.reweight(60, {"one": 0.9}, "tried")
    cfg = load(overrides(data, directory))
    train, held_out = open_data(cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=ledger)
    with closing(train), closing(held_out):
        yield train, held_out


def digest(batches: Batches) -> str:
    """Hash of source and sample of every row."""
    joined = blake2b(digest_size=8)
    for index in range(NUM_BATCHES):
        for part in batches.samples(index):
            joined.update(part.astype("<i8").tobytes())
    return joined.hexdigest()


GOLDEN = {
    "synthetic": ("57d37bd00e617a22", "7727e18c66392473", [421, 628, 727, 197, 275, 445, 4, 233], "75774cafafce32e5"),
    "files": (
        "ea7db4e0f2195a6d",
        "40e28467bc945b0b",
        [1064, 1568, 1529, 1364, 5589, 6137, 2971, 1961],
        "0c9bf605a804d22f",
    ),
    "stratified": ("ba3d1a5301deee5c", "7727e18c66392473", [421, 628, 727, 197, 275, 445, 4, 233], "052cd726e77f601a"),
    "mixture": ("1279998b9ac58151", "e077ab08fceeaacc", [387, 468, 591, 192, 820, 649, 705, 843], "170801f3a2190a12"),
}
"""Digests of the training and the held-out order, batch 250, and the fingerprint of the tokens of batch 17."""


@pytest.mark.parametrize("data", GOLDEN)
def test_samples_and_tokens_are_unchanged(data: str, tmp_path: Path) -> None:
    with opened(data, tmp_path) as (train, held_out):
        tokens = f"{train.facts(17).fingerprint:016x}"
        found = (digest(train), digest(held_out), train.samples(250)[1].tolist(), tokens)
    assert found == GOLDEN[data]
