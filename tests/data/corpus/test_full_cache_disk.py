"""The cache of remote corpora on a disk that becomes full: one line, and never a block without all its content."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from harness.config.data import MIN_CACHE_BLOCKS, RemoteDataConfig, TokenDtype
from harness.config.errors import StorageError
from harness.data.corpus.corpus import SampleShape
from harness.data.corpus.remote_cache import cached_file, local_path, use_cache
from harness.data.corpus.token_files import IndexedWriter, open_tokens
from harness.data.corpus.token_windows import FilesCorpus
from tests.full_disk import fill, may_mount, small_disk

pytest.importorskip("fsspec")

KEY = "data.sources.main.paths"
BLOCK = 64 * 1024
LENGTH = 1024
HASHES_PER_PAGE = 4096 // 32


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let this process write no file beyond this size. A write that crosses it is cut short, as on a disk that becomes
    full, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_block_that_was_written_in_part_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    tokens = np.random.default_rng(0).integers(1, 60_000, 3 * BLOCK // 2).astype(np.uint16)
    with IndexedWriter(tmp_path / "store" / "a", np.dtype(np.uint16)) as writer:
        writer.add(tokens)
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=BLOCK // 1024, retry_s=0))
    file = open_tokens(f"file://{tmp_path}/store/a.bin", dtype=TokenDtype.auto, key=KEY)
    corpus = FilesCorpus([file], shape=SampleShape(LENGTH, 60_000), key=KEY)
    sample = (BLOCK + BLOCK // 2) // 2 // LENGTH
    with (
        largest_file(BLOCK + BLOCK // 2),
        pytest.raises(StorageError, match=r"/a\.bin: the cache of file:.*/a\.bin cannot be used: ") as caught,
    ):
        corpus.sample(sample)
    assert "\n" not in str(caught.value)
    assert corpus.sample(sample).tolist() == tokens[sample * LENGTH :][: LENGTH + 1].tolist(), "with room again"


def test_a_corpus_that_could_not_be_written_leaves_no_file(tmp_path: Path) -> None:
    with (
        largest_file(1000),
        pytest.raises(OSError, match="too large"),
        IndexedWriter(tmp_path / "a", np.dtype(np.uint16)) as writer,
    ):
        writer.add(np.zeros(1000, dtype=np.uint16))  # buffered until the end
    assert list(tmp_path.iterdir()) == []


def require_on_a_full_disk(url: str, cache: Path) -> None:
    """In a process of its own: fetch the first block, fill the disk, and ask for a block whose hash is in another page
    of the file of hashes."""
    use_cache(RemoteDataConfig(cache_dir=str(cache), block_kb=BLOCK // 1024, retry_s=0))
    cached = cached_file(local_path(url, key=KEY))
    assert cached is not None
    cached.require([(0, 1)])
    fill(cache)
    start = (HASHES_PER_PAGE + 1) * BLOCK
    try:
        cached.require([(start, start + 1)])
    except StorageError as error:
        print(error)


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_full_tmpfs_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with (tmp_path / "store" / "a.bin").open("wb") as file:
        file.truncate(2 * HASHES_PER_PAGE * BLOCK)
    url = f"file://{tmp_path}/store/a.bin"
    with small_disk(tmp_path / "cache") as cache:
        call = f"require_on_a_full_disk({url!r}, Path({str(cache)!r}))"
        code = f"from pathlib import Path; from {__name__} import require_on_a_full_disk; {call}"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"/a.bin: the cache of {url} cannot be used: No space left on device\n")


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_start_on_a_full_disk_is_one_line_and_a_limit_makes_room_first(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    for name in "ab":
        (tmp_path / "store" / f"{name}.bin").write_bytes(b"\x01" * (32 * BLOCK))

    def require_blocks(name: str, num_blocks: int, *, cache: Path, cache_gb: float | None = None) -> None:
        use_cache(RemoteDataConfig())  # as in another process
        use_cache(RemoteDataConfig(cache_dir=str(cache), block_kb=BLOCK // 1024, cache_gb=cache_gb, retry_s=0))
        cached = cached_file(local_path(f"file://{tmp_path}/store/{name}.bin", key=KEY))
        assert cached is not None
        cached.require([(0, num_blocks * BLOCK)])

    with small_disk(tmp_path / "cache", num_bytes=4 << 20) as cache:
        require_blocks("a", 32, cache=cache)
        fill(cache)
        require_blocks("a", 32, cache=cache)
        with pytest.raises(StorageError, match=r"the cache of file:.*/b\.bin cannot be used: No space left") as caught:
            require_blocks("b", 1, cache=cache)
        assert "\n" not in str(caught.value)
        assert [path.read_text() for path in cache.rglob("source.txt")] == [f"file://{tmp_path}/store/a.bin\n{BLOCK}\n"]
        require_blocks("b", 4, cache=cache, cache_gb=MIN_CACHE_BLOCKS * BLOCK / 2**30)
