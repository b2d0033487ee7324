"""The data record of a run: changes are found, and a growing corpus shifts no window."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.errors import ConfigError, StorageError
from harness.core.batch_sizes import BatchSize
from harness.data.corpus.corpora import split
from harness.data.corpus.corpus_record import (
    Addition,
    DataRecord,
    FileRecord,
    SourceRecord,
    compare,
    later_stretches,
    next_pass,
    read_record,
    render_record,
    replace_batch_sizes,
)
from harness.data.corpus.file_probe import ListedFile
from harness.data.order.order import Stretch, num_unrepeated, samples_in

FILES = tuple(FileRecord(path=f"/data/{name}.bin", num_bytes=size) for name, size in (("a", 10), ("b", 20), ("c", 30)))


def listed(*names: str, **sizes: int) -> list[ListedFile]:
    all_sizes = {"a": 10, "b": 20, "c": 30} | sizes
    return [ListedFile(f"/data/{name}.bin", all_sizes.get(name, 99), 0) for name in names]


def never_read(file: ListedFile) -> str:
    raise AssertionError(f"{file.path} is read")


def grown_stretches(first: range, additions: list[tuple[int, range]]) -> tuple[Stretch, ...]:
    return (Stretch(0, 0, (first,)), *later_stretches(first, additions))


@settings(deadline=None, max_examples=200)
@given(
    num_first=st.integers(5, 40),
    eval_fraction=st.floats(0.05, 0.5),
    growth=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 30)), max_size=4),
    seed=st.integers(0, 2**40),
)
def test_a_corpus_that_grows_repeats_nothing_early_and_never_trains_on_held_out_windows(
    num_first: int, eval_fraction: float, growth: list[tuple[int, int]], seed: int
) -> None:
    """Adding any number of windows at any turn leaves past samples unchanged and epochs complete."""
    train, held_out = split(num_first, eval_fraction, source="main")
    additions: list[tuple[int, range]] = []
    end, turn = num_first, 0
    for later, num_windows in growth:
        before = grown_stretches(train, additions)
        turn += later
        additions.append((next_pass(before, turn), range(end, end + num_windows)))
        end += num_windows
        seen = np.arange(turn)
        np.testing.assert_array_equal(
            samples_in(seen, before, seed=seed), samples_in(seen, grown_stretches(train, additions), seed=seed)
        )
    stretches = grown_stretches(train, additions)
    assert all(first.from_turn < second.from_turn for first, second in pairwise(stretches))
    num_turns = stretches[-1].from_turn + 2 * stretches[-1].num_samples
    order = samples_in(np.arange(num_turns), stretches, seed=seed)
    assert not set(order.tolist()).intersection(held_out)
    assert set(order.tolist()) == set(train).union(*(windows for _, windows in additions))
    unrepeated = num_unrepeated(stretches)
    assert len(set(order[:unrepeated].tolist())) == unrepeated, "nothing comes twice before that turn"
    assert order[unrepeated] in set(order[:unrepeated].tolist())
    for stretch, following in zip(stretches, [*stretches[1:], None], strict=True):
        stop = num_turns if following is None else following.from_turn
        num_passes, rest = divmod(stop - stretch.from_turn, stretch.num_samples)
        assert rest == 0, "no pass is cut short"
        for number in range(num_passes):
            start = stretch.from_turn + number * stretch.num_samples
            once = order[start : start + stretch.num_samples]
            assert sorted(once.tolist()) == sorted(sample for part in stretch.parts for sample in part)


def test_added_windows_come_before_old_ones_come_again() -> None:
    additions = [(10, range(12, 16))]
    order = samples_in(np.arange(28), grown_stretches(range(10), additions), seed=3)
    assert set(order[:10].tolist()) == set(range(10))
    assert set(order[10:14].tolist()) == set(range(12, 16))
    assert set(order[14:28].tolist()) == {*range(10), *range(12, 16)}


@pytest.mark.parametrize(
    ("now", "changed", "broken"),
    [
        (listed("a", "b", "c"), "", ""),
        (listed("a", "b", "c", "d"), "/data/d.bin was added", ""),
        (listed("0", "a", "b", "c"), "/data/0.bin was added", ""),
        (listed("a", "c"), "/data/b.bin was removed", "/data/b.bin was removed"),
        (listed("a", "b", "c", b=21), "/data/b.bin grew from 20 to 21 bytes", "/data/b.bin grew from 20 to 21 bytes"),
        (listed("a", "b", "c", b=7), "/data/b.bin shrank from 20 to 7 bytes", "/data/b.bin shrank from 20 to 7 bytes"),
        (listed("a", "x", "c", x=20), "/data/b.bin is now /data/x.bin", ""),
    ],
)
def test_changed_files_are_named(now: list[ListedFile], changed: str, broken: str) -> None:
    found = compare(SourceRecord(files=FILES), now, never_read)
    assert (found.changed, found.broken) == (changed, broken)


def test_moved_files_of_one_size_are_told_apart_by_name_and_then_by_content() -> None:
    """A shard that was added later is recorded last, but listed first."""
    contents = {"train-1": "1", "train-2": "2", "extra": "3"}
    files = tuple(FileRecord(path=f"/old/{name}.bin", num_bytes=10, probes=probes) for name, probes in contents.items())

    def moved(*places: str, probe: Callable[[ListedFile], str] = never_read) -> list[str]:
        now = [ListedFile(place, 10, 0) for place in sorted(places)]
        found = compare(SourceRecord(files=files), now, probe)
        assert found.broken == ""
        assert len(found.files) == found.num_added + 3
        return [file.path for file in found.files]

    assert moved("/new/train-1.bin", "/new/train-2.bin", "/new/extra.bin") == [f"/new/{name}.bin" for name in contents]
    assert moved("/old/train-1.bin", "/b/train-2.bin", "/a/extra.bin", "/a/x.bin")[1:] == [
        "/b/train-2.bin",
        "/a/extra.bin",
        "/a/x.bin",
    ]
    renamed = {"/new/0.bin": "2", "/new/1.bin": "3", "/new/2.bin": "1", "/new/3.bin": "4"}
    read = lambda file: renamed[file.path]  # noqa: E731
    assert moved(*renamed, probe=read) == ["/new/2.bin", "/new/0.bin", "/new/1.bin", "/new/3.bin"]
    twice = {"/a/train-1.bin": "9", "/b/train-1.bin": "1", "/c/train-2.bin": "0", "/c/extra.bin": "0"}
    assert moved(*twice, probe=lambda file: twice[file.path]) == [
        "/b/train-1.bin",
        "/c/train-2.bin",
        "/c/extra.bin",
        "/a/train-1.bin",
    ]
    others = [ListedFile(f"/new/{name}.bin", 10, 0) for name in "abcd"]
    found = compare(SourceRecord(files=files), others, lambda file: file.path)
    assert found.broken == "/old/train-1.bin was removed, /old/train-2.bin was removed, /old/extra.bin was removed"


def test_recorded_files_keep_their_order_and_added_ones_follow() -> None:
    found = compare(SourceRecord(files=FILES), listed("0", "a", "b", "c", "d"), never_read)
    assert [Path(file.path).stem for file in found.files] == ["a", "b", "c", "0", "d"]
    assert found.num_added == 2


def test_an_index_that_changed_is_named() -> None:
    files = (FileRecord(path="/data/a.bin", num_bytes=10, index_bytes=50),)
    found = compare(SourceRecord(files=files), [ListedFile("/data/a.bin", 10, 58)], never_read)
    assert found.broken == "/data/a.idx had 50 bytes and has 58"


def test_of_many_files_only_the_first_are_named() -> None:
    found = compare(SourceRecord(files=FILES[:1]), listed("a", "d", "e", "f", "g", "h"), never_read)
    assert found.changed.endswith("/data/f.bin was added, and 2 more")
    assert found.before_after == ["1 file", f"6 files: {found.changed}"]


def test_record_round_trip(tmp_path: Path) -> None:
    source = SourceRecord(files=FILES, additions=(Addition(num_files=1, from_turn=30),))
    record = DataRecord(
        sizes=(BatchSize(0, 8), BatchSize(5, 16)),
        configured=(BatchSize(0, 16),),
        sources={"main": source, "text": SourceRecord(text="f00d")},
    )
    path = tmp_path / "corpus.json"
    path.write_text(render_record(record))
    assert read_record(path) == record
    assert source.num_first == 2
    assert read_record(tmp_path / "none") is None


@pytest.mark.parametrize("damage", [{"version": 2}, {"sources": {"main": {}}}, {"batch_sizes": []}])
def test_unreadable_record_is_rejected_with_its_path(tmp_path: Path, damage: dict[str, object]) -> None:
    path = tmp_path / "corpus.json"
    content = json.loads(render_record(DataRecord(sizes=(BatchSize(0, 8),))))
    path.write_text(json.dumps(content | damage))
    with pytest.raises(ConfigError, match=rf"^{path}: (has version 2, allowed is 1|is not a data record)"):
        read_record(path)


def test_sizes_that_applied_to_no_batch_are_dropped() -> None:
    def replaced(sizes: list[BatchSize], size: int, *, from_batch: int) -> tuple[BatchSize, ...]:
        return replace_batch_sizes(sizes, [BatchSize(0, size)], from_batch=from_batch)

    assert replaced([BatchSize(0, 8)], 16, from_batch=10) == (BatchSize(0, 8), BatchSize(10, 16))
    assert replaced([BatchSize(0, 8), BatchSize(10, 16)], 4, from_batch=10) == (BatchSize(0, 8), BatchSize(10, 4))
    assert replaced([BatchSize(0, 8), BatchSize(10, 16)], 8, from_batch=10) == (BatchSize(0, 8),)
    assert replaced([BatchSize(0, 8)], 16, from_batch=0) == (BatchSize(0, 16),)


def test_stages_of_a_warmup_keep_their_batches() -> None:
    warmup = [BatchSize(0, 4), BatchSize(10, 8), BatchSize(20, 16)]
    assert replace_batch_sizes([BatchSize(0, 2)], warmup, from_batch=15) == (
        BatchSize(0, 2),
        BatchSize(15, 8),
        BatchSize(20, 16),
    )
    assert replace_batch_sizes(warmup, [BatchSize(0, 16)], from_batch=25) == tuple(warmup)
    assert replace_batch_sizes(warmup, warmup, from_batch=12) == tuple(warmup)


def test_io_error_is_not_an_invalid_record(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=rf"^{tmp_path}: cannot be read"):
        read_record(tmp_path)
