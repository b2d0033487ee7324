"""The limit of the cache of remote data, with real files, real locks and real processes that are killed."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config.data import MIN_CACHE_BLOCKS, RemoteDataConfig, TokenDtype
from harness.config.errors import ConfigError
from harness.data.corpus import cache_blocks, remote_cache
from harness.data.corpus.cache_blocks import BLOCKS, DIGEST_BYTES
from harness.data.corpus.cache_eviction import SCAN_S, evict, occupied_bytes
from harness.data.corpus.remote_cache import CachedFile, cached_file, local_path, use_cache
from harness.data.corpus.token_files import open_tokens

pytest.importorskip("fsspec")

KEY = "data.sources.main.paths"
BLOCK = 64 * 1024
NUM_BLOCKS = 40
LIMIT_BLOCKS = MIN_CACHE_BLOCKS
LIMIT_GB = LIMIT_BLOCKS * BLOCK / 2**30


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A directory as an object store, with one object of 40 different blocks, the last of them half full."""
    (tmp_path / "store").mkdir()
    tokens = np.random.default_rng(0).integers(1, 2**16, NUM_BLOCKS * BLOCK // 2 - BLOCK // 4).astype(np.uint16)
    tokens.tofile(tmp_path / "store" / "a.bin")
    return tmp_path / "store"


def use(cache: Path, *, cache_gb: float | None = LIMIT_GB) -> None:
    use_cache(RemoteDataConfig())  # the files that are open are closed, as in another process
    use_cache(RemoteDataConfig(cache_dir=str(cache), block_kb=BLOCK // 1024, cache_gb=cache_gb, retry_s=5))


def opened(store: Path, name: str = "a.bin") -> CachedFile:
    cached = cached_file(local_path(f"file://{store}/{name}", key=KEY))
    assert cached is not None
    return cached


def block_range(block: int) -> list[tuple[int, int]]:
    return [(block * BLOCK, block * BLOCK + 10)]


def present(cached: CachedFile) -> list[int]:
    digests = cached.path.with_name(cached.path.name + BLOCKS).read_bytes()
    hashes = [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]
    return [number for number, each in enumerate(hashes) if any(each)]


def read_block(cached: CachedFile, block: int) -> bytes:
    """A block as a reader sees it, who keeps it from being freed."""
    with cached.holding(block_range(block)):
        return cached.path.read_bytes()[block * BLOCK : (block + 1) * BLOCK]


def test_the_least_recently_used_blocks_go_first_and_are_fetched_again(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_cache, "MARK_S", 0.0)
    use(tmp_path / "cache")
    cached, original = opened(store), (store / "a.bin").read_bytes()
    for block in range(12):
        cached.require(block_range(block))
    read_block(cached, 0)  # the oldest one is used again
    for block in range(12, 18):
        assert read_block(cached, block) == original[block * BLOCK :][:BLOCK]
        assert occupied_bytes(tmp_path / "cache") <= LIMIT_BLOCKS * BLOCK
    left = present(cached)
    assert 0 in left
    gone = sorted(set(range(18)) - set(left))
    assert gone == list(range(1, 1 + len(gone))), "those that were used longest ago"
    assert cached.path.read_bytes()[BLOCK : 2 * BLOCK] == bytes(BLOCK), "its space was given back"
    for block in range(NUM_BLOCKS):
        assert read_block(cached, block) == original[block * BLOCK :][:BLOCK]
    assert occupied_bytes(tmp_path / "cache") <= LIMIT_BLOCKS * BLOCK


def test_without_a_limit_nothing_is_freed(store: Path, tmp_path: Path) -> None:
    use(tmp_path / "cache", cache_gb=None)
    cached = opened(store)
    cached.require_all()
    assert present(cached) == list(range(NUM_BLOCKS))


def test_a_process_that_finds_all_its_blocks_frees_others_too(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is too large, because another process was killed before it could evict, does not stay so."""
    use(tmp_path / "cache", cache_gb=None)
    opened(store).require_all()
    use(tmp_path / "cache")
    cached = opened(store)
    read_block(cached, 5)
    assert occupied_bytes(tmp_path / "cache") <= LIMIT_BLOCKS * BLOCK
    assert 5 in present(cached)
    later_s = time.monotonic() + SCAN_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    for block in range(NUM_BLOCKS):  # as a process without a limit would
        on_used = cached._on_used
        cached._on_used = None
        read_block(cached, block)
        cached._on_used = on_used
    assert len(present(cached)) == NUM_BLOCKS
    read_block(cached, 7)
    assert len(present(cached)) <= LIMIT_BLOCKS


def test_another_run_frees_blocks_of_the_same_cache_except_those_in_use(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    use(tmp_path / "cache", cache_gb=None)
    cached, original = opened(store), (store / "a.bin").read_bytes()
    cached.require_all()
    with ExitStack() as held:
        for block in (0, 3, NUM_BLOCKS - 1):
            held.enter_context(cached.holding(block_range(block)))
        evict(tmp_path / "cache", 0)
        assert present(cached) == [0, 3, NUM_BLOCKS - 1]
        assert cached.path.read_bytes()[3 * BLOCK : 4 * BLOCK] == original[3 * BLOCK : 4 * BLOCK]
    evict(tmp_path / "cache", 0)
    assert present(cached) == []
    assert cached.path.stat().st_blocks == 0
    cached.require(block_range(5))
    assert present(cached) == [5], "a verified block that was freed is fetched again"
    assert capfd.readouterr().err == ""


def test_more_blocks_in_use_than_the_limit_are_kept_and_reported_once(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    use(tmp_path / "cache")
    cached, original = opened(store), (store / "a.bin").read_bytes()
    with cached.holding([(0, 20 * BLOCK)]):
        for block in range(20, 24):
            read_block(cached, block)
        assert cached.path.read_bytes()[: 20 * BLOCK] == original[: 20 * BLOCK]
        assert present(cached)[:20] == list(range(20))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: data.remote.cache_gb: 1,3")
    assert line.endswith("/cache are in use or cannot be freed")
    read_block(cached, 30)
    assert occupied_bytes(tmp_path / "cache") <= LIMIT_BLOCKS * BLOCK


def test_companions_and_blocks_of_other_sizes_are_treated_as_they_are(store: Path, tmp_path: Path) -> None:
    (store / "a.idx").write_bytes(b"\x07" * (3 * BLOCK))
    use(tmp_path / "cache", cache_gb=None)
    small = opened(store)
    small.require_all()
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=2 * BLOCK // 1024, retry_s=5))
    large = opened(store)
    assert large.path != small.path
    large.require_all()
    evict(tmp_path / "cache", 0)
    assert present(small) == present(large) == []
    for cached in (small, large):
        assert cached.path.with_suffix(".idx").read_bytes() == b"\x07" * (3 * BLOCK)


def test_what_a_killed_fetch_has_left_is_freed(store: Path, tmp_path: Path) -> None:
    use(tmp_path / "cache", cache_gb=None)
    cached = opened(store)
    cached.require(block_range(2))
    with cached.path.open("r+b") as file:  # content without a hash, as between the two writes of a fetch
        file.seek(7 * BLOCK)
        file.write(b"\x01" * (BLOCK // 2))
    evict(tmp_path / "cache", int(1.25 * BLOCK) + 8192)
    assert present(cached) == [2]
    assert cached.path.read_bytes()[7 * BLOCK : 8 * BLOCK] == bytes(BLOCK)


def test_files_that_cannot_be_read_or_belong_to_others_are_left_alone(store: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in ("lost+found", "of-others"):
        (cache / name).mkdir(parents=True)
        (cache / name / "large.bin").write_bytes(b"\x01" * (64 * BLOCK))
    (cache / "lost+found").chmod(0)
    for name in "bcd":
        shutil.copy(store / "a.bin", store / f"{name}.bin")
    use(cache, cache_gb=None)
    gone, damaged, whole = (opened(store, name) for name in ("b.bin", "c.bin", "d.bin"))
    for cached in (gone, damaged, whole):
        cached.require_all()
    gone.path.unlink()  # by hand, to make room; its hashes stay
    damaged.path.with_name(damaged.path.name + BLOCKS).unlink()
    damaged.path.with_name(damaged.path.name + BLOCKS).mkdir()
    assert occupied_bytes(cache) < 3 * NUM_BLOCKS * BLOCK
    use(cache)
    cached, original = opened(store), (store / "a.bin").read_bytes()
    for block in range(NUM_BLOCKS):
        assert read_block(cached, block) == original[block * BLOCK :][:BLOCK]
    assert present(whole) == [], "what can be freed is freed"
    (cache / "lost+found").chmod(0o700)


def test_a_limit_below_some_blocks_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^data\.remote\.cache_gb: must hold at least 16 blocks of .* \(0.015625\)"):
        RemoteDataConfig(block_kb=1024, cache_gb=0.001)


def test_a_file_system_without_holes_is_one_line(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_blocks, "can_free_ranges", lambda _: False)
    use(tmp_path / "cache")
    with pytest.raises(
        ConfigError, match=r"^data\.remote\.cache_gb: the file system of .* cannot free parts of a file"
    ):
        opened(store)
    use(tmp_path / "cache", cache_gb=None)
    opened(store)


def _read_at_random(store: str, cache: str, seed: int, num_reads: int, results: Any) -> None:
    """Read windows at random and compare each with the object, in a process with a limited cache."""
    use(Path(cache))
    original = np.fromfile(Path(store) / "a.bin", dtype=np.uint16)
    tokens = open_tokens(f"file://{store}/a.bin", dtype=TokenDtype.uint16, key=KEY)
    random = np.random.default_rng(seed)
    for number in range(num_reads):
        count = int(random.integers(1, 2 * BLOCK))
        first = int(random.integers(0, tokens.num_tokens - count))
        if not np.array_equal(tokens.read(first, count), original[first : first + count]):
            results.put(f"read {number} of {count} tokens from {first} differs")
            return
    results.put("")


@pytest.mark.full
def test_processes_that_share_a_small_cache_read_what_the_store_has_also_when_others_are_killed(
    store: Path, tmp_path: Path
) -> None:
    """Three readers and evictors at once; two more are killed again and again, in fetches, reads and evictions."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.data.corpus.test_cache_eviction"])
    results, ignored = context.Queue(), context.Queue()

    def start(seed: int, num_reads: int, queue: Any) -> Any:
        arguments = (str(store), str(tmp_path / "cache"), seed, num_reads, queue)
        process = context.Process(target=_read_at_random, args=arguments)
        process.start()
        return process

    readers = [start(seed, 400, results) for seed in range(3)]
    num_killed = 0
    for seed in range(100, 112):
        victim = start(seed, 10**9, ignored)
        time.sleep(0.4)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        num_killed += victim.exitcode == -signal.SIGKILL
    assert [results.get(timeout=300) for _ in readers] == [""] * 3
    for reader in readers:
        reader.join()
    assert num_killed == 12
    use(tmp_path / "cache")
    cached, original = opened(store), (store / "a.bin").read_bytes()
    for block in range(NUM_BLOCKS):
        assert read_block(cached, block) == original[block * BLOCK :][:BLOCK]
    assert occupied_bytes(tmp_path / "cache") <= LIMIT_BLOCKS * BLOCK
    assert 0 < len(present(cached)) <= LIMIT_BLOCKS
