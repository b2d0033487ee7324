"""Corpora in real S3 and GCS servers: fetched in blocks, verified, shared by processes, while a server fails."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from harness.config.data import DataKind, RemoteDataConfig, SourceConfig, SyntheticConfig, TokenDtype
from harness.config.errors import ConfigError, StorageError
from harness.data.corpus.cache_blocks import BLOCKS, DIGEST_BYTES
from harness.data.corpus.corpora import build_corpus
from harness.data.corpus.corpus import SampleShape
from harness.data.corpus.file_probe import list_files, probe
from harness.data.corpus.remote_cache import CachedFile, cached_file, local_path, use_cache
from harness.data.corpus.token_files import expand, open_tokens
from harness.data.corpus.token_windows import FilesCorpus
from tests.data.token_files import write_pair
from tests.forks import forks
from tests.object_stores import BUCKET, StoreServer, ignore_open_connections, server_fixture

pytestmark = [pytest.mark.full, ignore_open_connections]

KEY = "data.sources.main.paths"
BLOCK = 64 * 1024
NUM_TOKENS = 5 * BLOCK // 2 + 1000
PATH = "corpus/a.bin"


def upload_corpus(server: StoreServer, directory: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, NUM_TOKENS).tolist()
    write_pair(directory / "a", [tokens[:1000], tokens[1000:]])
    write_pair(directory / "b", [tokens[:5000]])
    system = server.system()
    for name in ("a.bin", "a.idx", "b.bin", "b.idx"):
        system.put_file(str(directory / name), f"{BUCKET}/corpus/{name}")


server = server_fixture(upload_corpus)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=BLOCK // 1024, retry_s=20))
    return tmp_path / "cache"


def original(server: StoreServer, name: str = "a.bin") -> bytes:
    return bytes(server.system().cat_file(f"{BUCKET}/corpus/{name}"))


def opened(server: StoreServer, path: str = PATH) -> CachedFile:
    cached = cached_file(local_path(server.url(path), key=KEY))
    assert cached is not None
    return cached


def present_blocks(cached: CachedFile) -> list[int]:
    digests = cached.path.with_name(cached.path.name + BLOCKS).read_bytes()
    found = [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]
    return [number for number, digest in enumerate(found) if any(digest)]


def test_a_corpus_equals_the_local_one_and_only_the_blocks_it_needs_are_fetched(
    server: StoreServer, cache: Path
) -> None:
    del cache
    paths = expand([server.url("corpus/*.bin"), server.url("corpus/a")], key=KEY)
    assert [path.name for path in paths] == ["a.bin", "b.bin"]
    assert present_blocks(opened(server)) == []

    source = SourceConfig(kind=DataKind.files, paths=[server.url("corpus/*.bin")])
    (files,) = list_files({"main": source}).values()
    assert files[0][:2] == (server.url(PATH), 2 * NUM_TOKENS)
    spelled = server.url(PATH).replace("s3://", "s3a://").replace("gs://", "gcs://")
    with pytest.raises(ConfigError, match="are the same file"):
        list_files({"main": source, "more": SourceConfig(kind=DataKind.files, paths=[spelled])})
    corpus = build_corpus(
        "main",
        source,
        shape=SampleShape(256, 50_000),
        synthetic=SyntheticConfig(
            num_samples=3, zipf_exponent=1, repeat_probability=0, rare_tokens=0, rare_probability=0
        ),
        seed=0,
    )
    assert isinstance(corpus, FilesCorpus)
    assert corpus.is_remote
    tokens = np.frombuffer(original(server), dtype=np.uint16)
    window = 2 * BLOCK // 2 // 256 - 1  # ends one token after the second block begins
    assert corpus.sample(window).tolist() == tokens[window * 256 :][:257].tolist()
    assert present_blocks(opened(server)) == [1, 2]
    assert corpus.origin(0).file == server.url(PATH)
    assert corpus.documents(3).tolist() == [0] * (1000 - 768) + [1] * (257 - 232)
    for index in range(corpus.num_samples - 19):
        assert corpus.sample(index).tolist() == tokens[index * 256 :][:257].tolist()
    assert present_blocks(opened(server)) == list(range(6))
    assert probe(files[0], key=KEY) == probe(files[0]._replace(path=str(opened(server).path)), key=KEY)


def test_a_damaged_block_and_one_without_content_are_fetched_again(
    server: StoreServer, cache: Path, tmp_path: Path
) -> None:
    del cache
    opened(server).require_all()
    path = opened(server).path
    content = original(server)
    assert path.read_bytes() == content
    with path.open("r+b") as file:
        file.seek(BLOCK + 77)
        file.write(b"\x00\x01\x02")
        file.seek(3 * BLOCK)
        file.write(bytes(BLOCK))
    use_cache(RemoteDataConfig())  # as another process would, that opens the same cache
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=BLOCK // 1024, retry_s=20))
    assert opened(server).path == path
    sent = server.relay.num_bytes
    opened(server).require_all()
    assert path.read_bytes() == content
    assert server.relay.num_bytes > sent
    sent = server.relay.num_bytes
    opened(server).require_all()
    assert server.relay.num_bytes == sent


def test_a_server_that_fails_and_returns_is_survived(
    server: StoreServer, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    del cache
    cached = opened(server)
    server.relay.down()
    threading.Timer(2.0, server.relay.up).start()
    cached.require([(0, 10)])
    assert cached.path.read_bytes()[:BLOCK] == original(server)[:BLOCK]
    assert f"warning: {server.url(PATH)}: " in capfd.readouterr().err


def test_a_server_that_stays_away_is_one_line(server: StoreServer, tmp_path: Path) -> None:
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=BLOCK // 1024, retry_s=1))
    cached = opened(server)
    server.relay.down()
    try:
        with pytest.raises(StorageError, match="the store does not answer") as caught:
            cached.require([(0, 10)])
    finally:
        server.relay.up()
    assert str(caught.value).startswith(f"{server.url(PATH)}: ")
    assert "\n" not in str(caught.value)
    assert present_blocks(cached) == []


def test_a_replaced_object_never_mixes_with_the_old_one(server: StoreServer, cache: Path, tmp_path: Path) -> None:
    del cache
    path = "other/c.bin"
    system = server.system()
    system.pipe_file(f"{BUCKET}/{path}", bytes(2 * BLOCK))
    first = opened(server, path)
    first.require([(0, 1)])
    system.pipe_file(f"{BUCKET}/{path}", b"\x01" * (2 * BLOCK))
    first._checked_s = -1e9  # as after `RECHECK_S` seconds
    with pytest.raises(ConfigError, match=r"other/c\.bin: changed during the run"):
        first.require([(BLOCK, BLOCK + 1)])
    use_cache(RemoteDataConfig())
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=BLOCK // 1024, retry_s=20))
    again = opened(server, path)
    assert again.path != first.path
    again.require_all()
    assert again.path.read_bytes() == b"\x01" * (2 * BLOCK)


def test_an_object_that_is_restored_after_it_was_replaced_is_fetched_again(
    server: StoreServer, cache: Path, tmp_path: Path
) -> None:
    """A block was fetched after the object had been replaced, and before that was noticed: its hash is that of the new
    content."""
    del cache
    path, old = "other/d.bin", bytes(3 * BLOCK)
    system = server.system()
    system.pipe_file(f"{BUCKET}/{path}", old)
    first = opened(server, path)
    first.require([(0, 1)])
    system.pipe_file(f"{BUCKET}/{path}", b"\x01" * len(old))
    first.require([(BLOCK, BLOCK + 1)])
    first._checked_s = -1e9  # as after `RECHECK_S` seconds
    with pytest.raises(ConfigError, match=r"other/d\.bin: changed during the run"):
        first.require([(2 * BLOCK, 2 * BLOCK + 1)])
    system.pipe_file(f"{BUCKET}/{path}", old)
    use_cache(RemoteDataConfig())
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=BLOCK // 1024, retry_s=20))
    again = opened(server, path)
    assert again.path == first.path
    again.require_all()
    assert again.path.read_bytes() == old


def test_missing_objects_are_named(server: StoreServer, cache: Path) -> None:
    del cache
    for given, message in (
        (server.url("corpus/none"), "no such object"),
        (server.url("corpus/*.npy"), r"matches no \.bin or \.npy"),
        (server.url("empty/a.bin"), "has no objects"),
        (f"{server.protocol}://", "must be PROTOCOL://BUCKET/NAME"),
        ("nonsense://a/b.bin", "cannot be opened"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            expand([given], key=KEY)
        assert str(caught.value).startswith(f"{KEY}: ")
        assert "\n" not in str(caught.value)


def _read_all(environment: dict[str, str], url: str, cache: str, barrier: object, results: object) -> None:
    os.environ.update(environment)  # with the keys of the store, which the fork server does not have
    use_cache(RemoteDataConfig(cache_dir=cache, block_kb=BLOCK // 1024, retry_s=20))
    tokens = open_tokens(url, dtype=TokenDtype.auto, key=KEY)
    barrier.wait()  # type: ignore[attr-defined]
    results.put(tokens.read(0, tokens.num_tokens).tobytes())  # type: ignore[attr-defined]


def test_processes_of_one_machine_fetch_each_block_once(server: StoreServer, cache: Path) -> None:
    context = forks()
    barrier, results = context.Barrier(2), context.Queue()
    before = server.count_reads(PATH)
    processes = [
        context.Process(target=_read_all, args=(dict(os.environ), server.url(PATH), str(cache), barrier, results))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    contents = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert server.count_reads(PATH) - before == 6
    content = original(server)
    assert contents == [content, content]
