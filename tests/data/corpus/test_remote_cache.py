"""Corpora in a real S3 server: fetched in blocks, verified, shared by processes, through failures of the server."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
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
from tests.s3_server import BUCKET, S3Server, s3_server

# Clients of S3 close their connections when the interpreter ends.
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

KEY = "data.sources.main.paths"
BLOCK = 64 * 1024
NUM_TOKENS = 5 * BLOCK // 2 + 1000
URL = f"s3://{BUCKET}/corpus/a.bin"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    directory = tmp_path_factory.mktemp("s3")
    with s3_server(directory) as server:
        tokens = np.random.default_rng(0).integers(0, 50_000, NUM_TOKENS).tolist()
        write_pair(directory / "a", [tokens[:1000], tokens[1000:]])
        write_pair(directory / "b", [tokens[:5000]])
        system = server.system()
        for name in ("a.bin", "a.idx", "b.bin", "b.idx"):
            system.put_file(str(directory / name), f"{BUCKET}/corpus/{name}")
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=BLOCK // 1024, retry_s=20))
    return tmp_path / "cache"


def original(server: S3Server, name: str = "a.bin") -> bytes:
    return bytes(server.system().cat_file(f"{BUCKET}/corpus/{name}"))


def opened(url: str = URL) -> CachedFile:
    cached = cached_file(local_path(url, key=KEY))
    assert cached is not None
    return cached


def present_blocks(cached: CachedFile) -> list[int]:
    digests = cached.path.with_name(cached.path.name + BLOCKS).read_bytes()
    found = [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]
    return [number for number, digest in enumerate(found) if any(digest)]


def test_a_corpus_equals_the_local_one_and_only_the_blocks_it_needs_are_fetched(server: S3Server, cache: Path) -> None:
    del cache
    paths = expand([f"s3://{BUCKET}/corpus/*.bin", f"s3://{BUCKET}/corpus/a"], key=KEY)
    assert [path.name for path in paths] == ["a.bin", "b.bin"]
    assert present_blocks(opened()) == []

    source = SourceConfig(kind=DataKind.files, paths=[f"s3://{BUCKET}/corpus/*.bin"])
    (files,) = list_files({"main": source}).values()
    assert files[0][:2] == (URL, 2 * NUM_TOKENS)
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
    assert present_blocks(opened()) == [1, 2]
    assert corpus.origin(0).file == URL
    assert corpus.documents(3).tolist() == [0] * (1000 - 768) + [1] * (257 - 232)
    for index in range(corpus.num_samples - 19):
        assert corpus.sample(index).tolist() == tokens[index * 256 :][:257].tolist()
    assert present_blocks(opened()) == list(range(6))
    assert probe(files[0], key=KEY) == probe(files[0]._replace(path=str(opened().path)), key=KEY)


def test_a_damaged_block_and_one_without_content_are_fetched_again(
    server: S3Server, cache: Path, tmp_path: Path
) -> None:
    del cache
    opened().require_all()
    path = opened().path
    content = original(server)
    assert path.read_bytes() == content
    with path.open("r+b") as file:
        file.seek(BLOCK + 77)
        file.write(b"\x00\x01\x02")
        file.seek(3 * BLOCK)
        file.write(bytes(BLOCK))
    use_cache(RemoteDataConfig())  # as another process would, that opens the same cache
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=BLOCK // 1024, retry_s=20))
    assert opened().path == path
    sent = server.relay.num_bytes
    opened().require_all()
    assert path.read_bytes() == content
    assert server.relay.num_bytes > sent
    sent = server.relay.num_bytes
    opened().require_all()
    assert server.relay.num_bytes == sent


def test_a_server_that_fails_and_returns_is_survived(
    server: S3Server, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    del cache
    cached = opened()
    server.relay.down()
    threading.Timer(2.0, server.relay.up).start()
    cached.require([(0, 10)])
    assert cached.path.read_bytes()[:BLOCK] == original(server)[:BLOCK]
    assert f"warning: {URL}: " in capfd.readouterr().err


def test_a_server_that_stays_away_is_one_line(server: S3Server, tmp_path: Path) -> None:
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=BLOCK // 1024, retry_s=1))
    cached = opened()
    server.relay.down()
    try:
        with pytest.raises(StorageError, match="the store does not answer") as caught:
            cached.require([(0, 10)])
    finally:
        server.relay.up()
    assert str(caught.value).startswith(f"{URL}: ")
    assert "\n" not in str(caught.value)
    assert present_blocks(cached) == []


def test_a_replaced_object_never_mixes_with_the_old_one(server: S3Server, cache: Path, tmp_path: Path) -> None:
    del cache
    url = f"s3://{BUCKET}/other/c.bin"
    system = server.system()
    system.pipe_file(url.removeprefix("s3://"), bytes(2 * BLOCK))
    first = opened(url)
    first.require([(0, 1)])
    system.pipe_file(url.removeprefix("s3://"), b"\x01" * (2 * BLOCK))
    first._checked_s = -1e9  # as after `RECHECK_S` seconds
    with pytest.raises(ConfigError, match=r"other/c\.bin: changed during the run"):
        first.require([(BLOCK, BLOCK + 1)])
    use_cache(RemoteDataConfig())
    use_cache(RemoteDataConfig(cache_dir=str(tmp_path / "cache"), block_kb=BLOCK // 1024, retry_s=20))
    again = opened(url)
    assert again.path != first.path
    again.require_all()
    assert again.path.read_bytes() == b"\x01" * (2 * BLOCK)


def test_missing_objects_are_named(server: S3Server, cache: Path) -> None:
    del server, cache
    for given, message in (
        (f"s3://{BUCKET}/corpus/none", "no such object"),
        (f"s3://{BUCKET}/corpus/*.npy", r"matches no \.bin or \.npy"),
        (f"s3://{BUCKET}/empty/a.bin", "has no objects"),
        ("s3://", "must be PROTOCOL://BUCKET/NAME"),
        ("nonsense://a/b.bin", "cannot be opened"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            expand([given], key=KEY)
        assert str(caught.value).startswith(f"{KEY}: ")
        assert "\n" not in str(caught.value)


def _read_all(cache: str, barrier: object, results: object) -> None:
    use_cache(RemoteDataConfig(cache_dir=cache, block_kb=BLOCK // 1024, retry_s=20))
    tokens = open_tokens(URL, dtype=TokenDtype.auto, key=KEY)
    barrier.wait()  # type: ignore[attr-defined]
    results.put(tokens.read(0, tokens.num_tokens).tobytes())  # type: ignore[attr-defined]


def test_processes_of_one_machine_fetch_each_block_once(server: S3Server, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    before = server.count_requests("GET /bucket/corpus/a.bin")
    processes = [context.Process(target=_read_all, args=(str(cache), barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    contents = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert server.count_requests("GET /bucket/corpus/a.bin") - before == 6
    content = original(server)
    assert contents == [content, content]
