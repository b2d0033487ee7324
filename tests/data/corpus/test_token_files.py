"""Token files: found by name or pattern, never scanned, and written atomically."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.conf_files import read_tree
from harness.config.errors import ConfigError, StorageError
from harness.core import transient_io
from harness.data.corpus.file_probe import probe, stat_file
from harness.data.corpus.megatron_index import WRITABLE
from harness.data.corpus.token_files import IndexedWriter, expand
from harness.data.order.ledger import Ledger
from tests.data.token_files import (
    DOCUMENTS,
    KEY,
    check_rejected,
    fresh_directory,
    index_bytes,
    opened,
    write_pair,
)
from tests.stalled import can_stall, unreachable

INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16")


@settings(deadline=None, max_examples=60)
@given(documents=DOCUMENTS, dtype=st.sampled_from(INTEGERS))
def test_round_trip(documents: list[list[int]], dtype: str) -> None:
    with fresh_directory() as directory:
        write_pair(directory / "corpus", documents, dtype)
        file = opened(directory / "corpus")
        flat = [token for document in documents for token in document]
        assert file.dtype == np.dtype(dtype)
        assert (file.num_tokens, file.num_documents) == (len(flat), len(documents))
        assert file.read(0, file.num_tokens).tolist() == flat
        bounds = [file.document(number) for number in range(file.num_documents)]
        assert [flat[first:end] for first, end in bounds] == documents


@pytest.mark.parametrize("dtype", sorted(WRITABLE, key=str), ids=str)
def test_extremes_of_a_dtype_survive(tmp_path: Path, dtype: np.dtype[Any]) -> None:
    tokens = np.array([np.iinfo(dtype).min, 0, np.iinfo(dtype).max], dtype=dtype)
    with IndexedWriter(tmp_path / "corpus", dtype) as writer:
        writer.add(tokens.astype(np.int64))
    read = opened(tmp_path / "corpus.bin").read(0, 3)
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, tokens)


@pytest.mark.parametrize("name", ["corpus", "corpus.bin", "corpus.idx"])
def test_pair_can_be_opened_by_three_names(tmp_path: Path, name: str) -> None:
    write_pair(tmp_path / "corpus", [[1], [2]])
    file = opened(str(tmp_path / name))
    assert file.path == tmp_path / "corpus.bin"
    assert file.num_documents == 2


@pytest.mark.parametrize(("present", "absent"), [(".bin", ".idx"), (".idx", ".bin")])
def test_a_prefix_needs_both_files(tmp_path: Path, present: str, absent: str) -> None:
    write_pair(tmp_path / "corpus", [[1, 2]])
    (tmp_path / f"corpus{absent}").unlink()
    check_rejected(tmp_path / "corpus", "is missing", names=tmp_path / f"corpus{absent}")
    with pytest.raises(ConfigError, match="is missing"):
        expand([str(tmp_path / "corpus")], key=KEY)
    if present == ".idx":
        check_rejected(tmp_path / "corpus.idx", "is missing", names=tmp_path / "corpus.bin")


def test_missing_files_and_directories_are_rejected(tmp_path: Path) -> None:
    check_rejected(tmp_path / "nowhere", "no such file", names=tmp_path / "nowhere")
    check_rejected(tmp_path / "nowhere.bin", "no such file", names=tmp_path / "nowhere.bin")
    check_rejected(tmp_path, "is a directory", names=tmp_path)


def test_a_view_cannot_be_written_to(tmp_path: Path) -> None:
    write_pair(tmp_path / "corpus", [[1, 2]])
    with pytest.raises(ValueError, match="read-only"):
        opened(tmp_path / "corpus").read(0, 2)[0] = 7


def test_file_that_changes_during_a_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(bytes(1 << 16))
    file = opened(path)
    path.write_bytes(bytes(10))
    with pytest.raises(ConfigError, match=rf"^{KEY}: {path}: changed during the run, from 65536 to 10 bytes$"):
        file.read(20_000, 5)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"^{KEY}: {path}: was removed during the run"):
        file.read(0, 1)


@pytest.mark.skipif(not can_stall(), reason="needs root and /dev/fuse")
def test_storage_that_fails_is_no_wrong_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may answer at the next start: exit code 75, not 2, after which no scheduler starts the run again."""
    monkeypatch.setattr(transient_io, "PAUSE_S", 0.0)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "train.bin").write_bytes(bytes(1 << 16))
    mount = tmp_path / "mount"
    mount.symlink_to(tmp_path / "there")
    path = mount / "train.bin"
    file, listed = opened(path), stat_file(path, key=KEY)
    with unreachable(tmp_path / "gone") as gone:
        mount.unlink()
        mount.symlink_to(gone)
        reads: list[tuple[Path, Callable[[], object]]] = [
            (path, lambda: file.read(0, 1)),
            (path, lambda: opened(path)),
            (path, lambda: expand([str(path)], key=KEY)),
            (mount / "*.bin", lambda: expand([f"{mount}/*.bin"], key=KEY)),
            (path, lambda: stat_file(path, key=KEY)),
            (path, lambda: probe(listed, key=KEY)),
            (mount / "ledger.jsonl", lambda: Ledger.load(mount / "ledger.jsonl")),
            (mount / "config.yaml", lambda: read_tree(mount / "config.yaml")),
        ]
        for number, (named, read) in enumerate(reads):
            with pytest.raises(StorageError) as caught:
                read()
            line = f"{named}: cannot be read: Transport endpoint is not connected"
            assert str(caught.value) == line, number
        mount.unlink()
        mount.symlink_to(tmp_path / "there")
    assert file.read(0, 1).tolist() == [0], "after a moment all is well"


def test_opening_does_not_depend_on_the_size(tmp_path: Path) -> None:
    """Two billion tokens in a sparse file; scanning or copying them would need memory_text."""
    num_tokens = 2**31
    for name in ("flat.bin", "corpus.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2 * num_tokens)
    lengths = [2**31 - 1, 1]
    (tmp_path / "corpus.idx").write_bytes(index_bytes(lengths))
    tracemalloc.start()
    for name in ("flat.bin", "corpus"):
        file_of_tokens = opened(tmp_path / name)
        assert file_of_tokens.num_tokens == num_tokens
        assert file_of_tokens.read(num_tokens - 3, 3).tolist() == [0, 0, 0]
        file_of_tokens.fingerprint()
    assert file_of_tokens.document_at(num_tokens - 1) == (1, num_tokens - 1, num_tokens)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_different_files_have_different_fingerprints(tmp_path: Path) -> None:
    contents = {"a": [[1, 2], [3]], "b": [[1], [2, 3]], "c": [[1, 2], [4]], "d": [[1, 2, 3]], "e": [[1, 2], [3], []]}
    for name, documents in contents.items():
        write_pair(tmp_path / name, documents)
    write_pair(tmp_path / "f", contents["a"], "int32")
    write_pair(tmp_path / "again", contents["a"])
    assert len({opened(tmp_path / name).fingerprint() for name in "abcdef"}) == 6
    assert opened(tmp_path / "again").fingerprint() == opened(tmp_path / "a").fingerprint()


def test_expand_sorts_names_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "a", "deep/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_pair(tmp_path / name, [[1, 2]])
    for name in ("z.npy", "a.counts.npy", "a.meta.json", "odd[1].bin"):
        (tmp_path / name).write_bytes(bytes(2))

    def names(*paths: str) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in expand([str(tmp_path / p) for p in paths], key=KEY)]

    assert names("b", "a.idx", "a.bin", "a") == ["a.bin", "b.bin"]
    assert names("*") == ["a.bin", "b.bin", "odd[1].bin", "z.npy"]
    assert names("[ab].*") == ["a.bin", "b.bin"]
    assert names("**/*.idx") == ["a.bin", "b.bin", "deep/c.bin"]
    assert names("odd[1].bin", "z.npy") == ["odd[1].bin", "z.npy"]
    monkeypatch.chdir(tmp_path)
    assert expand(["?.bin"], key=KEY) == [Path("a.bin"), Path("b.bin")]


@pytest.mark.parametrize("pattern", ["*.bin", "nowhere/*", "*.json"])
def test_expand_names_a_pattern_without_files(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "a.meta.json").touch()
    with pytest.raises(ConfigError, match=r"matches no \.bin or \.npy file") as caught:
        expand([str(tmp_path / pattern)], key=KEY)
    assert str(caught.value).startswith(f"{KEY}: {tmp_path / pattern}: ")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("{}/**.bin", "** must be a whole part of the path"),
        ("{}/a**/x.bin", "** must be a whole part of the path"),
        ("file://{}/**.bin", "** must be a whole part of the path"),
        ("~nobody-has-this-name/*.bin", "there is no such home directory"),
        ("{}/" + 300 * "a" + ".bin", "cannot be read (File name too long)"),
        ("{}/" + 300 * "a" + "*.bin", "cannot be read (File name too long)"),
    ],
)
def test_paths_that_mean_nothing_are_one_line(tmp_path: Path, given: str, problem: str) -> None:
    given = given.format(tmp_path)
    with pytest.raises(ConfigError) as caught:
        expand([given], key=KEY)
    assert str(caught.value).startswith(f"{KEY}: {given}: {problem}")


def test_exception_keeps_the_older_pair(tmp_path: Path) -> None:
    write_pair(tmp_path / "corpus", [[1, 2]])

    def fail() -> None:
        with IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
            writer.add(np.array([7, 8, 9]))
            raise RuntimeError("tokenizer fell")

    with pytest.raises(RuntimeError, match="fell"):
        fail()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]
    assert opened(tmp_path / "corpus").read(0, 2).tolist() == [1, 2]


def test_files_get_their_names_only_at_close(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "corpus.v1", np.dtype(np.uint16))
    writer.add(np.array([7, 8, 9]))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.v1.bin.tmp"]
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.v1.bin", "corpus.v1.idx"]
    assert opened(tmp_path / "corpus.v1").read(0, 3).tolist() == [7, 8, 9]


@pytest.mark.parametrize("dtype", ["uint32", "uint64", "float32", ">u2"])
def test_dtypes_that_megatron_cannot_read_are_rejected(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ValueError, match="Megatron has no code for"):
        IndexedWriter(tmp_path / "corpus", np.dtype(dtype))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("token", [-1, 65536])
def test_ids_that_do_not_fit_are_not_wrapped(tmp_path: Path, token: int) -> None:
    with IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
        writer.add(np.array([1, 65535]))
        with pytest.raises(ValueError, match=r"document 1 has ids .* too wide for uint16"):
            writer.add(np.array([1, token]))
    assert opened(tmp_path / "corpus").read(0, 2).tolist() == [1, 65535]
