"""Batches from an object store: the blocks of the next batches are fetched while the step runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from harness.data.batches import Batches
from harness.data.corpus.cache_blocks import BLOCKS, DIGEST_BYTES
from harness.data.order.ledger import Ledger
from harness.data.sources import open_data
from tests.composed import load

BLOCK = 64 * 1024
LENGTH = 256
AHEAD = 4


def blocks_of(batches: Batches, index: int) -> set[int]:
    """Blocks of the file that this rank's rows of a batch need."""
    _, samples = batches.samples(index)
    ranges = [(2 * LENGTH * int(sample), 2 * LENGTH * (int(sample) + 1) + 2) for sample in samples]
    return {block for start, end in ranges for block in range(start // BLOCK, -(-end // BLOCK))}


def present(cache: Path) -> set[int]:
    (digests,) = cache.glob(f"*/a.bin{BLOCKS}")
    content = digests.read_bytes()
    hashes = [content[start : start + DIGEST_BYTES] for start in range(0, len(content), DIGEST_BYTES)]
    return {number for number, each in enumerate(hashes) if any(each)}


def test_blocks_of_the_next_batches_are_fetched_in_advance(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    tokens = np.random.default_rng(0).integers(0, 256, 6_000_000).astype(np.uint16)
    tokens.tofile(tmp_path / "store" / "a.bin")
    cfg = load(
        [
            "data=files",
            f"data.sources.main.paths=['file://{tmp_path}/store/a.bin']",
            "data.sources.main.dtype=uint16",
            f"data.remote.cache_dir={tmp_path}/cache",
            f"data.remote.block_kb={BLOCK // 1024}",
            f"data.remote.ahead_batches={AHEAD}",
            f"train.sequence_length={LENGTH}",
            "train.batch_size=4",
        ]
    )
    train, held_out = open_data(cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=Ledger())
    assert train._fetcher is not None
    before = present(tmp_path / "cache")
    wanted = [blocks_of(train, index) for index in range(AHEAD + 1)]
    assert not wanted[AHEAD] <= before, "opening the corpus reads only probes"
    batch = train[0]
    train._fetcher._thread.shutdown(wait=True)
    assert present(tmp_path / "cache") == before | set().union(*wanted)
    assert batch.inputs.tolist() == train.rows(0)[:, :-1].tolist()
    starts = train.samples(0)[1] * LENGTH
    assert train.rows(0).tolist() == [tokens[start : start + LENGTH + 1].tolist() for start in starts.tolist()]
    train._fetcher = None
    train.close()
    held_out.close()
