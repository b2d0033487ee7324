"""Text to corpus: every format, real worker processes, and the same bytes after any interruption."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow  # type: ignore[import-untyped]
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from harness.config.data import TokenDtype
from harness.config.errors import ConfigError
from harness.data.corpus.corpora import embedded_documents
from harness.data.corpus.token_files import open_tokens
from harness.data.prepare import prepare
from harness.data.prepare.corpus_report import parse_report, render
from harness.data.prepare.documents import Reader, find_inputs, is_unicode, kind_of, text_of
from harness.data.prepare.parts import has_part, part_path, part_paths, read_part
from harness.data.prepare.prepare import TokenizeJob, make_part, prepare_corpus, start_tokenizing
from harness.data.prepare.prepared_files import CorpusFiles, Options
from harness.data.prepare.tokenizer import EOD_TOKEN, open_tokenizer, train_bpe
from tests.forks import forks
from tests.full_disk import may_mount, small_disk

ROOT = Path(__file__).parents[3]
TEXTS = ["Hello, world.\n", "", "naïve façade — 東京 🚀", "x" * 300, "Hello, world.\n", f"not the end {EOD_TOKEN} yet"]


def make(
    inputs: Sequence[Path], output: Path, *, workers: int = 1, shard: int = 1000, **options: Any
) -> dict[str, Any]:
    return prepare_corpus(
        inputs,
        output,
        Options(**{"eod_token": EOD_TOKEN, **options}),
        num_workers=workers,
        shard_bytes=shard,
        progress=lambda _stage, _done, _total: None,
    )


def write_jsonl(path: Path, texts: Sequence[str] = TEXTS, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)))
    return path


def documents(prefix: Path) -> list[list[int]]:
    file = open_tokens(prefix, dtype=TokenDtype.auto, key="paths")
    spans = [file.document(number) for number in range(file.num_documents)]
    return [file.read(first, end - first).tolist() for first, end in spans]


def contents(prefix: Path) -> dict[str, Any]:
    """Every file of the output, without the times in the metadata: what must always be the same."""
    out: dict[str, Any] = {
        path.name.removeprefix(prefix.name): path.read_bytes()
        for path in prefix.parent.iterdir()
        if path.name.lstrip(".").startswith(f"{prefix.name}.")
    }
    meta = json.loads(out.pop(".meta.json"))
    del meta["timing"], meta["counts"]
    return out | {"meta": meta}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_bpe(embedded_documents(), vocab_size=400, eod_token=EOD_TOKEN))
    return path


def write_parquet(path: Path) -> None:
    parquet.write_table(arrow.table({"id": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=2)


def lines() -> bytes:
    return "\n\n".join(json.dumps({"text": text}) for text in TEXTS).encode()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("in.jsonl", lambda path: path.write_bytes(lines())),
        ("in.json.gz", lambda path: path.write_bytes(gzip.compress(lines()[:99]) + gzip.compress(lines()[99:]))),
        (
            "in.ndjson.zst",
            lambda path: path.write_bytes(zstandard.compress(lines()[:99]) + zstandard.compress(lines()[99:])),
        ),
        ("in.parquet", write_parquet),
    ],
)
def test_every_format_gives_the_same_documents(name: str, write: Any, tmp_path: Path) -> None:
    write(tmp_path / name)
    meta = make([tmp_path / name], tmp_path / "out")
    assert documents(tmp_path / "out") == [list(text.encode()) for text in TEXTS if text]
    assert meta["report"]["empty_documents"] == 1
    assert meta["vocab_size"] == 256
    assert meta["dtype"] == "uint16"


def test_a_text_file_is_one_document_and_a_directory_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_bytes(b"\xef\xbb\xbfsecond\n\nstill the second\r\n")
    (tmp_path / "in" / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    (tmp_path / "in" / "deep" / "c.txt.zst").write_bytes(zstandard.compress(b"third"))
    (tmp_path / "in" / ".hidden.txt").write_text("no")
    (tmp_path / "in" / "notes.doc").write_text("no")
    output = tmp_path / "in" / "out"
    for _ in range(2):  # the output of the first call in the directory is no input of the second
        meta = make(find_inputs([str(tmp_path / "in")]), output, append_eod=True)
        assert [Path(each["path"]).name for each in meta["inputs"]] == ["a.txt.gz", "b.txt", "c.txt.zst"]
    texts = [b"first", b"second\n\nstill the second\r\n", b"third"]
    assert documents(output) == [[*text, 256] for text in texts]
    assert meta["vocab_size"] == 257


def test_tokens_read_back_as_the_text(tokenizer_file: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", key="content")
    output = tmp_path / "corpus.v1"
    meta = make([source], output, tokenizer=tokenizer_file, append_eod=True, text_key="content")
    tokenizer = open_tokenizer(CorpusFiles(output).tokenizer)
    read = documents(output)
    assert all(document[-1] == meta["eod"] == 0 for document in read)
    assert [tokenizer.decode(document[:-1]) for document in read] == [text for text in TEXTS if text]
    assert all(0 not in document[:-1] for document in read), "a text cannot forge the end of a document"
    counts = np.load(CorpusFiles(output).counts)
    assert counts.tolist() == np.bincount(np.concatenate([np.array(each) for each in read]), minlength=400).tolist()
    assert meta["max_token"] == max(map(max, read))


def test_special_tokens_are_encoded_if_enabled(tokenizer_file: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl")
    make([source], tmp_path / "out", tokenizer=tokenizer_file, special_tokens=True)
    assert documents(tmp_path / "out")[-1].count(0) == 1


def test_a_large_vocabulary_needs_wider_tokens(tmp_path: Path) -> None:
    vocabulary = {chr(0x4E00 + n % 20000) + str(n): n for n in range(70_000)} | {"<unk>": 70_000}
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    meta = make([write_jsonl(tmp_path / "in.jsonl", ["never seen"])], tmp_path / "out", tokenizer=path)
    assert meta["dtype"] == "int32"
    assert documents(tmp_path / "out") == [[70_000]]


@pytest.fixture
def _forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that import nothing. Those of `harness data` are spawned in tests/launch/cli/test_data.py, and below."""
    monkeypatch.setattr(prepare, "get_context", lambda _: forks())


@pytest.mark.full
@pytest.mark.usefixtures("_forked_workers")
def test_output_depends_on_nothing_but_input_and_options(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", embedded_documents()[:20])
    (tmp_path / "more.txt").write_text("more")
    inputs = [source, tmp_path / "more.txt"]
    first = make(inputs, tmp_path / "a", bpe_size=300, append_eod=True, workers=1, shard=1 << 20)
    make(inputs, tmp_path / "b", bpe_size=300, append_eod=True, workers=2, shard=5_000)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert set(contents(tmp_path / "a")) == {".bin", ".idx", ".counts.npy", ".tokenizer.json", "meta"}
    assert first["vocab_size"] == 300
    make(inputs, tmp_path / "c", bpe_size=300, train_fraction=0.5, seed=1)
    make(inputs, tmp_path / "d", bpe_size=300, train_fraction=0.5, seed=2)
    trained = {name: (tmp_path / f"{name}.tokenizer.json").read_bytes() for name in "acd"}
    assert len(set(trained.values())) == 3


def test_the_report_counts_right(tmp_path: Path) -> None:
    texts = ["aaaaaaaaaaaa", "", "bb", "aaaaaaaaaaaa", "c" * 50, "", "bb", "bb", "\xff"]
    meta = make([write_jsonl(tmp_path / "in.jsonl", texts)], tmp_path / "out", shard=16)
    report = parse_report(meta["report"])
    assert (report.documents, report.tokens, report.empty_documents) == (7, 12 * 2 + 6 + 50 + 2, 2)
    assert report.duplicate_documents == 3
    assert [(each.document, each.amount) for each in report.duplicate_examples] == [(1, 3), (0, 2)]
    assert [(each.document, each.amount) for each in report.longest_documents[:3]] == [(3, 50), (0, 12), (2, 12)]
    assert report.longest_documents[0].origin == f"{tmp_path / 'in.jsonl'}:5"
    assert (report.rare_tokens, report.unused_tokens, report.max_token) == (3, 256 - 5, 0xC3)
    assert [(each.token, each.count, each.text) for each in report.rare_examples] == [
        (0xBF, 1, "\\xbf"),
        (0xC3, 1, "\\xc3"),
        (ord("b"), 6, "b"),
    ]
    assert meta["timing"]["tokens_per_s"] > 0
    text = render(report, {"output": "out"})
    for line in ("tokens       82", "rare tokens  3 occur fewer than 10 times", "duplicates   3 documents", "output "):
        assert line in text


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.cli.main", "data", "prepare", *arguments]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 200.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for orphans in /proc")
@pytest.mark.usefixtures("_forked_workers")
def test_killed_run_resumes_and_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", embedded_documents() * 4)
    arguments = [str(source), "--train-bpe", "300", "--append-eod", "--workers", "2", "--shard-bytes", "10000"]
    arguments += ["--train-fraction", "0.1"]
    options: dict[str, Any] = {"bpe_size": 300, "append_eod": True, "train_fraction": 0.1}
    make([source], tmp_path / "whole", **options, shard=1 << 20)
    output = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for num_parts in (3, 40):
        process = subprocess.Popen(command(*arguments, "--output", str(output)), env=environment)
        wait_until(part_path(output, num_parts).exists)
        workers = children_of(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(workers) >= 2
        for pid in workers:
            wait_until(lambda: not is_alive(pid))  # noqa: B023 -- called at once
        assert not CorpusFiles(output).meta.exists()
        assert not CorpusFiles(output).index.exists()
    meta = make([source], output, **options, workers=2, shard=10_000)
    num_new = round(meta["timing"]["tokens_per_s"] * meta["timing"]["seconds"])
    assert 0 < num_new < meta["tokens"] * 0.8
    assert contents(output) == contents(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.usefixtures("_forked_workers")
def test_parts_are_reused_only_for_the_same_input(tokenizer_file: Path, tmp_path: Path) -> None:
    texts = embedded_documents()[:20]
    source = write_jsonl(tmp_path / "in.jsonl", [*texts, "last"])
    with source.open("a") as file:
        file.write("not JSON\n")
    with pytest.raises(ConfigError, match=r"in.jsonl, line 22: is not JSON"):
        make([source], tmp_path / "out", tokenizer=tokenizer_file, workers=2)
    kept = part_paths(tmp_path / "out")
    assert len(kept) >= 10
    part_path(tmp_path / "out", 0).write_bytes(b"damaged")
    write_jsonl(source, [*texts[:15], "changed", *texts[16:], "last"])
    meta = make([source], tmp_path / "out", tokenizer=tokenizer_file, workers=2)
    make([source], tmp_path / "fresh", tokenizer=tokenizer_file)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    assert meta["timing"]["tokens_per_s"] * meta["timing"]["seconds"] < meta["tokens"] / 2
    assert not part_paths(tmp_path / "out")


def test_finished_corpus_is_reused_and_other_options_are_rejected(tokenizer_file: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl")
    made = make([source], tmp_path / "out")
    before = contents(tmp_path / "out")
    os.utime(source)
    assert make([source], tmp_path / "out", workers=2) == made
    with pytest.raises(ConfigError, match=r"out.meta.json: exists and differs in tokenizer, append_eod; choose"):
        make([source], tmp_path / "out", tokenizer=tokenizer_file, append_eod=True)
    write_jsonl(source, ["Something else."])
    with pytest.raises(ConfigError, match=r"out.meta.json: exists and differs in inputs; choose"):
        make([source], tmp_path / "out")
    assert contents(tmp_path / "out") == before
    (tmp_path / "foreign.bin").write_bytes(b"precious")
    with pytest.raises(
        ConfigError, match=r"foreign.bin: exists, and no foreign.meta.json says that .* wrote it; choose another"
    ):
        make([source], tmp_path / "foreign")
    assert (tmp_path / "foreign.bin").read_bytes() == b"precious"
    assert not list(tmp_path.glob("*.part*"))


def test_only_parts_are_deleted(tmp_path: Path) -> None:
    files = CorpusFiles(tmp_path / "out")
    parts = [part_path(files.prefix, number) for number in (0, 123_456)]
    parts.append(parts[0].with_name(f".{parts[0].name}.123.tmp"))
    others = ["out.part-00001.jsonl", "out.part-1.bin", "out.part-1.meta.json", "more-out.part-00001.npz"]
    for name in [*others, *(path.name for path in parts)]:
        (tmp_path / name).touch()
    assert set(part_paths(files.prefix)) == set(parts)
    files.clean()
    assert {path.name for path in tmp_path.iterdir()} == set(others)


def test_a_lock_file_that_its_holder_has_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, lock = CorpusFiles(tmp_path / "out"), fcntl.flock

    def lock_late(file: Any, operation: int) -> None:
        """The holder before ends between the opening and the locking of the file; a third process makes a new one."""
        (tmp_path / ".out.lock").unlink()
        (tmp_path / ".out.lock").touch()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with pytest.raises(ConfigError, match="is being written by another process"), files.lock():
        pass
    assert (tmp_path / ".out.lock").exists(), "that of the other process"


def tokenize_job(output: Path, source: Path) -> TokenizeJob:
    return start_tokenizing(CorpusFiles(output), [source], Options(eod_token=EOD_TOKEN), lambda *_: None)


def test_a_document_that_no_index_can_hold_is_named_by_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "LONGEST_DOCUMENT", 10)
    source = write_jsonl(tmp_path / "in.jsonl", ["short", "ten tokens", "eleven byte"])
    (shard,) = Reader([source], text_key="text").shards(1000)
    message = "has 11 tokens; an index holds documents of at most 10, so split it"
    assert make_part(shard, tokenize_job(tmp_path / "out", source), "key") == f"{source}, line 3: {message}"
    assert not part_paths(tmp_path / "out")


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_part_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["many " * 20_000])
    (shard,) = Reader([source], text_key="text").shards(1000)
    with small_disk(tmp_path / "disk", num_bytes=1 << 16) as disk:
        job = tokenize_job(disk / "out", source)
        with pytest.raises(OSError, match="No space left"):
            make_part(shard, job, "key")
        assert not part_paths(disk / "out")


def test_a_damaged_part_is_removed(tmp_path: Path) -> None:
    source, path = write_jsonl(tmp_path / "in.jsonl"), part_path(tmp_path / "out", 0)
    (shard,) = Reader([source], text_key="text").shards(1000)
    make_part(shard, tokenize_job(tmp_path / "out", source), "key")
    whole = path.read_bytes()
    place = whole.index(np.array(list(b"Hello"), dtype=np.uint16).tobytes())
    path.write_bytes(whole[:place] + b"J" + whole[place + 1 :])
    assert has_part(path, "key")
    with pytest.raises(ConfigError, match=rf"^{path}: was damaged and is removed; rerun the same command"):
        read_part(path)
    assert not path.exists()


def broken(path: Path) -> None:
    source = gzip.compress(lines()) if path.suffix == ".gz" else zstandard.compress(lines())
    path.write_bytes(source[:-9])


@pytest.mark.full
@pytest.mark.usefixtures("_forked_workers")
@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        (
            "x.jsonl",
            lambda p: p.write_text('{"text": "a"}\n\n{"body": "b"}\n'),
            "x.jsonl, line 3: has no key 'text' but",
        ),
        ("x.jsonl", lambda p: p.write_text('{"text": "a"}\n{"text": \n'), "x.jsonl, line 2: is not JSON: "),
        ("x.jsonl", lambda p: p.write_text('["text"]'), "x.jsonl, line 1: must be a JSON object, got list"),
        ("x.jsonl", lambda p: p.write_text('{"text": 3}'), "x.jsonl, line 1: key 'text' must be a string, got int"),
        ("x.jsonl", lambda p: p.write_bytes(b'{"text": "\xff"}'), "x.jsonl, line 1: is not JSON: "),
        ("x.txt", lambda p: p.write_bytes(b"abc\xff"), "x.txt: is not UTF-8: invalid start byte at byte 3"),
        ("x.jsonl.gz", broken, "x.jsonl.gz: is damaged or truncated gzip data"),
        ("x.jsonl.zst", broken, "x.jsonl.zst: is truncated zstandard data"),
        ("x.jsonl.gz", lambda p: p.write_text("plain"), "x.jsonl.gz: is damaged or truncated gzip data"),
        ("x.jsonl.zst", lambda p: p.write_text("plain text"), "x.jsonl.zst: is not zstandard data"),
        ("x.parquet", lambda p: p.write_text("plain"), "x.parquet: cannot be read as Parquet: "),
        (
            "x.parquet",
            lambda p: parquet.write_table(arrow.table({"a": ["b"]}), p),
            "x.parquet: has no column 'text' but a",
        ),
        (
            "x.parquet",
            lambda p: parquet.write_table(arrow.table({"text": [1]}), p),
            "must be a string column, got int64",
        ),
        ("x.jsonl", lambda p: p.write_text('{"text": ""}\n'), "x.jsonl: no document contains a token, 1 are empty"),
        ("x.jsonl", lambda p: p.write_text(""), "x.jsonl: no document contains a token, 0 are empty"),
    ],
)
@pytest.mark.parametrize("bpe_size", [None, 300])
def test_invalid_input_is_named_and_leaves_nothing(
    name: str, write: Any, message: str, bpe_size: int | None, tmp_path: Path
) -> None:
    write(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        make([tmp_path / name], tmp_path / "out", bpe_size=bpe_size)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_invalid_options_are_named_before_anything_is_written(tokenizer_file: Path, tmp_path: Path) -> None:
    source, output = write_jsonl(tmp_path / "in.jsonl"), tmp_path / "new" / "out"
    nothing = tmp_path / "nothing.json"
    nothing.write_text("{}")
    for options, message in (
        ({"tokenizer": tmp_path / "missing.json"}, "missing.json: cannot be read: No such file"),
        ({"tokenizer": nothing}, "nothing.json: is not a tokenizer.json: "),
        (
            {"tokenizer": tokenizer_file, "append_eod": True, "eod_token": "</s>"},
            "--eod-token: .* has no token </s>; its",
        ),
        ({"append_eod": True, "eod_token": "</s>"}, "--eod-token: must be <.endoftext.> if tokens are bytes"),
        ({"bpe_size": 256}, "--train-bpe: must be at least 257"),
        ({"train_fraction": 0.0}, "--train-fraction: must be above 0 and at most 1, got 0.0"),
        ({"tokenizer": tmp_path / "new" / "out.tokenizer.json"}, "--tokenizer: .* is where --output writes its copy"),
    ):
        with pytest.raises(ConfigError, match=message):
            make([source], output, **options)
    with pytest.raises(ConfigError, match=r"nowhere.txt: no such file"):
        find_inputs(["nowhere.txt"])
    with pytest.raises(ConfigError, match=r"test_prepare.py: has an unknown ending; allowed are .txt, .jsonl"):
        find_inputs([__file__])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: contains no file that ends in .txt"):
        find_inputs([str(tmp_path / "empty")])
    assert not output.parent.exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.b.jsonl.gz", ".jsonl"), ("a.TXT", ".txt"), ("a.parquet", ".parquet"), ("a.parquet.gz", ""), ("gz", "")],
)
def test_kind_is_the_ending_below_the_compression(name: str, kind: str) -> None:
    assert kind_of(Path(name)) == kind


@settings(deadline=None, max_examples=30)
@given(texts=st.lists(st.text(st.characters(codec=None), max_size=40), max_size=30), num_bytes=st.integers(1, 300))
def test_shards_contain_every_record_once_and_texts_are_unicode(
    texts: list[str], num_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("texts") / "in.jsonl", texts)
    reader = Reader([path], text_key="text")
    shards = list(reader.shards(num_bytes))
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert all(sum(len(each.payload) for each in shard.records) >= num_bytes for shard in shards[:-1])
    records = [record for shard in shards for record in shard.records]
    assert [record.line for record in records] == list(range(1, len(texts) + 1))
    for record, text in zip(records, texts, strict=True):
        read = text_of(record, path, "text")
        assert is_unicode(read)
        assert (
            read == text
            if is_unicode(text)
            else read == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        )
    assert reader.position_bytes == reader.num_bytes == path.stat().st_size


def test_zstandard_with_a_long_window_is_read(tmp_path: Path) -> None:
    """As of `zstd --long=28`; 27 is what the library allows by default."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(packer.compress(b'{"text": "first"}\n') + packer.flush())
    assert [record.payload for record in Reader([path], text_key="text")] == [b'{"text": "first"}']


def test_two_columns_of_the_same_name_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(arrow.table([arrow.array(["a"])] * 2, names=["text", "text"]), path)
    with pytest.raises(ConfigError, match=rf"^{path}: has 2 columns 'text'; it needs one$"):
        list(Reader([path], text_key="text"))
