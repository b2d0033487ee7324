"""Batches from an object store: the blocks of the next batches are fetched while the step runs."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness.core.object_store import ObjectStore
from harness.data.batches import Batches
from harness.data.corpus import remote_cache
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


def open_remote(directory: Path, *overrides: str, retry_s: float = 120, ahead: int = AHEAD) -> tuple[Batches, Batches]:
    """Training and held-out batches of the files in DIRECTORY/store."""
    cfg = load(
        [
            "data=files",
            f"data.sources.main.paths=['file://{directory}/store/a.bin']",
            "data.sources.main.dtype=uint16",
            f"data.remote.cache_dir={directory}/cache",
            f"data.remote.block_kb={BLOCK // 1024}",
            f"data.remote.ahead_batches={ahead}",
            f"data.remote.retry_s={retry_s}",
            f"train.sequence_length={LENGTH}",
            "train.batch_size=4",
            *overrides,
        ]
    )
    return open_data(cfg, rank=0, world_size=1, device=torch.device("cpu"), ledger=Ledger())


def write_object(directory: Path) -> NDArray[np.uint16]:
    """Write the only object of the store."""
    (directory / "store").mkdir()
    tokens = np.random.default_rng(0).integers(0, 256, 6_000_000).astype(np.uint16)
    tokens.tofile(directory / "store" / "a.bin")
    return tokens


def take_down(directory: Path) -> None:
    """Let requests for the object fail, as those to a store that does not answer."""
    (directory / "store" / "a.bin").rename(directory / "saved.bin")
    (directory / "store" / "a.bin").mkdir()


def bring_up(directory: Path) -> None:
    (directory / "store" / "a.bin").rmdir()
    (directory / "saved.bin").rename(directory / "store" / "a.bin")


def test_blocks_of_the_next_batches_are_fetched_in_advance(tmp_path: Path) -> None:
    tokens = write_object(tmp_path)
    train, held_out = open_remote(tmp_path)
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


@pytest.mark.parametrize("ahead", [0, AHEAD])
def test_closing_does_not_wait_for_a_store_that_is_down(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """The end of a process joins the threads that are joined here."""
    write_object(tmp_path)
    monkeypatch.setattr(remote_cache, "_pool", None)
    train, held_out = open_remote(tmp_path, retry_s=60, ahead=ahead)
    assert train._fetcher is not None
    take_down(tmp_path)
    train._prefetch(50)
    train._fetcher.fetch_after(50)
    while capfd.readouterr().err.count("trying again in") == 0:
        time.sleep(0.01)
    begun_s = time.monotonic()
    train.close()
    held_out.close()
    train._fetcher._thread.shutdown(wait=True)
    assert remote_cache._pool is not None
    remote_cache._pool.shutdown(wait=True)
    remote_cache._pool = None
    assert time.monotonic() - begun_s < 30

    bring_up(tmp_path)
    again, held_out = open_remote(tmp_path, retry_s=60, ahead=ahead)
    take_down(tmp_path)
    threading.Timer(0.2, bring_up, [tmp_path]).start()
    assert again[50].inputs.shape == (4, LENGTH), "a later run of this process has a store that repeats requests"
    again.close()
    held_out.close()


def test_after_close_no_further_batch_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_object(tmp_path)
    train, held_out = open_remote(tmp_path)
    assert train._fetcher is not None
    before, wanted = present(tmp_path / "cache"), blocks_of(train, AHEAD)
    is_reading, may_read = threading.Event(), threading.Event()
    read = ObjectStore.read

    def wait_and_read(store: ObjectStore, path: str, start: int | None = None, end: int | None = None) -> bytes:
        is_reading.set()
        assert may_read.wait(60)
        return read(store, path, start, end)

    monkeypatch.setattr(ObjectStore, "read", wait_and_read)
    train._fetcher.fetch_after(0)
    assert is_reading.wait(60)
    train._fetcher.close()
    may_read.set()
    train._fetcher._thread.shutdown(wait=True)
    assert present(tmp_path / "cache") > before
    assert not wanted <= present(tmp_path / "cache")
    train.close()
    held_out.close()


def test_the_sources_of_a_batch_are_fetched_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_object(tmp_path)
    shutil.copy(tmp_path / "store" / "a.bin", tmp_path / "store" / "b.bin")
    other = f"{{kind: files, paths: ['file://{tmp_path}/store/b.bin'], dtype: uint16}}"
    train, held_out = open_remote(tmp_path, f"+data.sources={{other: {other}}}")
    assert train._fetcher is not None
    is_asked = {"a.bin": threading.Event(), "b.bin": threading.Event()}
    read = ObjectStore.read

    def read_together(store: ObjectStore, path: str, start: int | None = None, end: int | None = None) -> bytes:
        is_asked[path.rpartition("/")[2]].set()
        assert all(event.wait(10) for event in is_asked.values())
        return read(store, path, start, end)

    monkeypatch.setattr(ObjectStore, "read", read_together)
    train._fetcher.fetch_after(0)
    train._fetcher._thread.shutdown(wait=True)
    monkeypatch.setattr(ObjectStore, "read", None)
    assert train[1].inputs.shape == (4, LENGTH), "nothing is left to fetch"
    train._fetcher = None
    train.close()
    held_out.close()
