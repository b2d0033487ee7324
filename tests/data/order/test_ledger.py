"""The ledger agrees with a plain set of excluded indices; its file survives crashes and errors name the line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.errors import ConfigError
from harness.data.order.ledger import VERSION, Exclusion, Ledger, NextBatch, Reweighting, return_points

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=12)


def _assert_equals_set(ledger: Ledger, excluded: set[int]) -> None:
    for index in range(80):
        assert ledger.is_excluded(index) == (index in excluded)
        expected = next(later for later in range(index, 100) if later not in excluded)
        assert ledger.next_index(index) == expected
    seen = [index for index in range(100) if index not in excluded]
    assert [ledger.nth(consumed) for consumed in range(len(seen))] == seen


@settings(deadline=None)
@given(ranges=RANGES)
def test_agrees_with_a_set(ranges: list[tuple[int, int]]) -> None:
    ledger, excluded = Ledger(), set[int]()
    for first, last in ranges:
        ledger.exclude(first, last, "test")
        excluded |= set(range(first, last + 1))
        _assert_equals_set(ledger, excluded)
    assert [(entry.first, entry.last) for entry in ledger if isinstance(entry, Exclusion)] == ranges


def test_an_exclusion_that_is_tried_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.load(path)
    ledger.exclude(3, 5, "bad")
    ledger.give_back([[4, 4]], 8, "good")
    before = [ledger.next_batch(cursor) for cursor in range(20)]
    text = path.read_text()
    with ledger.trying_exclusion(4, 11):
        assert ledger.next_batch(7) == NextBatch(12, 13, 0)
        assert ledger.is_excluded(4)
        assert path.read_text() == text
    assert [ledger.next_batch(cursor) for cursor in range(20)] == before
    assert len(ledger) == 2


@settings(deadline=None)
@given(ranges=RANGES)
def test_the_order_of_exclusions_does_not_matter(ranges: list[tuple[int, int]]) -> None:
    forward, backward = Ledger(), Ledger()
    for first, last in ranges:
        forward.exclude(first, last, "test")
    for first, last in reversed(ranges):
        backward.exclude(first, last, "test")
    assert [forward.next_index(index) for index in range(80)] == [backward.next_index(index) for index in range(80)]


@settings(deadline=None, max_examples=30)
@given(ranges=RANGES)
def test_file_round_trip(ranges: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        written = Ledger.load(path)
        for number, (first, last) in enumerate(ranges):
            written.exclude(first, last, f"incident {number} ünïcode\nand a newline")
        read = Ledger.load(path)
        assert read.entries == written.entries
        _assert_equals_set(read, {index for first, last in ranges for index in range(first, last + 1)})


def test_missing_file_is_an_empty_ledger(tmp_path: Path) -> None:
    ledger = Ledger.load(tmp_path / "ledger.jsonl")
    assert len(ledger) == 0
    assert ledger.next_index(5) == 5
    assert not (tmp_path / "ledger.jsonl").exists()


def test_line_has_version_time_range_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger.load(path).exclude(3, 5, "loss spike")
    (line,) = path.read_text().splitlines()
    data = json.loads(line)
    assert data.pop("time") > 1.7e9
    assert data == {"version": VERSION, "first": 3, "last": 5, "reason": "loss spike"}


def test_weights_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.load(path)
    ledger.reweight(40, {"web": 0, "books": 2.5}, "web is poisoned")
    ledger.exclude(3, 5, "loss spike")
    ledger.reweight(0, {"books": 1}, "back")
    data = json.loads(path.read_text().splitlines()[0])
    assert data.pop("time") > 1.7e9
    weights = {"web": 0.0, "books": 2.5}
    expected = {"kind": "weights", "from_batch": 40, "weights": weights, "reason": "web is poisoned"}
    assert data == {"version": VERSION} | expected
    read = Ledger.load(path)
    assert read.entries == ledger.entries
    assert [entry.from_batch for entry in read.reweightings] == [40, 0]
    assert isinstance(read.entries[0], Reweighting)
    assert read.next_index(3) == 6


@pytest.mark.parametrize(
    ("from_batch", "weights"),
    [
        (-1, {"a": 1.0}),
        (0, {}),
        (0, {"a": -0.1}),
        (0, {"a": float("nan")}),
        (0, {"a": float("inf")}),
        (0, {"a": "1"}),
        (0, {"a": 1.0, "b": -1.0}),
    ],
)
def test_invalid_weights_are_rejected(tmp_path: Path, from_batch: int, weights: dict[str, Any]) -> None:
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(ValueError, match="weights of 0 or more"):
        Ledger.load(path).reweight(from_batch, weights, "nonsense")
    assert not path.exists()


def test_only_the_writer_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger.load(path).exclude(1, 1, "first")
    before = path.read_bytes()
    reader = Ledger.load(path, writer=False)
    reader.exclude(2, 2, "second")
    assert reader.next_index(1) == 3
    assert path.read_bytes() == before


def test_two_writers_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    one, other = Ledger.load(path), Ledger.load(path)
    one.exclude(1, 2, "one")
    other.exclude(3, 4, "other")
    one.exclude(10, 10, "one again")
    both = Ledger.load(path)
    assert [entry.reason for entry in both] == ["one", "other", "one again"]
    assert both.next_index(1) == 5


def test_truncated_last_line_keeps_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.load(path)
    ledger.exclude(1, 2, "kept")
    kept = len(path.read_bytes())
    ledger.exclude(7, 7, "cut")
    content = path.read_bytes()
    for length in range(kept, len(content) - 1):
        path.write_bytes(content[:length])
        resumed = Ledger.load(path)
        assert [entry.reason for entry in resumed] == ["kept"]
        resumed.exclude(9, 9, "after")
        assert [entry.reason for entry in Ledger.load(path)] == ["kept", "after"]


def test_last_line_without_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger.load(path).exclude(1, 2, "edited by hand")
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    resumed = Ledger.load(path)
    assert resumed.next_index(1) == 3
    resumed.exclude(9, 9, "after")
    assert [entry.reason for entry in Ledger.load(path)] == ["edited by hand", "after"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", "not an entry"),
        (b"", "not an entry"),
        (b"\xff\xfe", "not an entry"),
        (b"[1, 2]", "0 <= first <= last"),
        (b'{"version": 1, "first": 5, "last": 4, "reason": "x", "time": 1}', "0 <= first <= last"),
        (b'{"version": 1, "first": "5", "last": 6, "reason": "x", "time": 1}', "0 <= first <= last"),
        (b'{"version": 99, "first": 5, "last": 6, "reason": "x", "time": 1}', "version 99, allowed is 1"),
        (b'{"first": 5, "last": 6, "reason": "x", "time": 1}', "needs version"),
        (b'{"version": 1, "first": -1, "last": 6, "reason": "x", "time": 1}', "needs 0 <= first <= last"),
        (
            b'{"version": 1, "kind": "weights", "from_batch": -1, "weights": {"a": 1}, "reason": "x", "time": 1}',
            "of 0 or more",
        ),
        (
            b'{"version": 2, "kind": "revoke", "batches": [[3, 5]], "from_batch": 5, "reason": "x", "time": 1}',
            "needs ranges",
        ),
        (
            b'{"version": 1, "kind": "revoke", "batches": [[3, 5]], "from_batch": 6, "reason": "x", "time": 1}',
            "kind 'revoke' needs version 2",
        ),
        (
            b'{"version": 1, "kind": "weights", "from_batch": 5, "weights": {}, "reason": "x", "time": 1}',
            "of 0 or more",
        ),
        (
            b'{"version": 1, "kind": "weights", "from_batch": 5, "weights": {"a": -1}, "reason": "", "time": 1}',
            "of 0 or",
        ),
        (b'{"version": 1, "kind": "weights", "from_batch": 5, "reason": "x", "time": 1}', "kind 'weights' must"),
        (b'{"version": 1, "kind": "swap", "first": 5, "last": 6, "reason": "x", "time": 1}', "kind 'swap' must"),
    ],
)
def test_a_corrupt_line_is_named(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.load(path)
    ledger.exclude(1, 1, "before")
    path.write_bytes(path.read_bytes() + line + b"\n")
    ledger.exclude(2, 2, "after")
    with pytest.raises(ConfigError, match=complaint) as caught:
        Ledger.load(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        Ledger.load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_a_failed_write_excludes_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "missing" / "ledger.jsonl")
    with pytest.raises(OSError, match="No such file"):
        ledger.exclude(1, 1, "nowhere to write")
    assert not ledger.is_excluded(1)
    assert ledger.entries == []


@pytest.mark.parametrize(("first", "last"), [(-1, 3), (4, 3)])
def test_invalid_range_is_rejected(tmp_path: Path, first: int, last: int) -> None:
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(ValueError, match=f"got {first} .. {last}"):
        Ledger.load(path).exclude(first, last, "nonsense")
    assert not path.exists()


def test_lookup_is_fast_with_many_exclusions() -> None:
    """O(log exclusions) and independent of the range lengths: a linear search would take minutes."""
    ledger = Ledger()
    for number in range(20_000):
        ledger._add(Exclusion(first=number * 10**9, last=number * 10**9 + 10**8, reason="long", time=0.0))
    for number in range(20_000):
        assert ledger.next_index(number * 10**9 + 7) == number * 10**9 + 10**8 + 1
        seen_before = number * (10**9 - 10**8 - 1)
        assert ledger.nth(seen_before) == number * 10**9 + 10**8 + 1
        assert number == 0 or ledger.nth(seen_before - 1) == number * 10**9 - 1


def walk(ledger: Ledger, num: int, cursor: int = 0, given_back: int = 0) -> list[int]:
    """The next batches of a run at this cursor."""
    seen = []
    for _ in range(num):
        place = ledger.next_batch(cursor, given_back)
        seen.append(place.batch)
        cursor, given_back = place.cursor, place.given_back
    return seen


class TestGivingBack:
    def test_given_back_batches_are_consumed_before_from_batch(self) -> None:
        ledger = Ledger()
        ledger.exclude(3, 3, "rejected")
        ledger.exclude(5, 5, "rejected")
        ledger.give_back([[3, 3], [5, 6]], 7, "the data changed")
        assert walk(ledger, 9) == [0, 1, 2, 4, 3, 5, 6, 7, 8], "one that starts with the final ledger"
        assert walk(ledger, 4, cursor=7) == [3, 5, 6, 7], "the run that wrote it continues"
        assert walk(ledger, 2, cursor=7, given_back=3) == [7, 8], "and from a snapshot behind them"
        assert ledger.num_excluded == 0
        assert not any(ledger.is_excluded(batch) for batch in range(10))
        assert [entry.from_batch for entry in ledger.revocations] == [7]

    def test_next_batch_has_the_position_of_the_run(self) -> None:
        ledger = Ledger()
        ledger.give_back([[0, 1]], 2, "the data changed")
        assert (ledger.next_batch(0), ledger.next_batch(0).position) == (NextBatch(0, 2, 1), 2)
        assert (ledger.next_batch(2, 2), ledger.next_batch(2, 2).position) == (NextBatch(2, 3, 0), 2)

    def test_later_entry_wins_and_positions_are_stable(self) -> None:
        ledger = Ledger()
        ledger.give_back([[3, 5]], 6, "the data changed")
        assert walk(ledger, 1, cursor=6, given_back=1) == [4]
        ledger.exclude(4, 4, "rejected again")
        assert walk(ledger, 2, cursor=6, given_back=1) == [5, 6], "a snapshot after the first of them counts as before"
        assert ledger.is_excluded(4)
        ledger.give_back([[4, 5]], 6, "the data changed again")
        assert walk(ledger, 8) == [0, 1, 2, 3, 4, 5, 6, 7]
        assert ledger.num_excluded == 0

    def test_revocation_round_trip_and_old_ledgers_still_load(self, tmp_path: Path) -> None:
        path = tmp_path / "ledger.jsonl"
        path.write_text('{"version": 1, "first": 2, "last": 4, "reason": "before", "time": 1.0}\n')
        ledger = Ledger.load(path)
        ledger.give_back([[2, 3]], 6, "the data changed")
        assert walk(Ledger.load(path), 7) == walk(ledger, 7) == [0, 1, 5, 2, 3, 6, 7]
        line = json.loads(path.read_text().splitlines()[1])
        assert (line["version"], line["kind"]) == (2, "revoke"), "an older version stops at it: version 2, allowed is 1"

    @pytest.mark.parametrize(
        "batches",
        [
            [],
            ((1, 2),),
            [3],
            [[3, 2]],
            [[5, 6]],
            [[-1, 2]],
            [[1, 2, 3]],
            [[1, 2], 3],
            [[1, 2], [5, 6]],
            [[1, 2.0]],
            [[True, 2]],
        ],
    )
    def test_only_past_ranges_can_be_given_back(self, batches: Any) -> None:
        with pytest.raises(ValueError, match="batches before 6"):
            Ledger().give_back(batches, 6, "")

    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 3)), max_size=8))
    def test_every_batch_is_consumed_once_or_excluded(self, entries: list[tuple[bool, int, int]]) -> None:
        ledger = Ledger()
        for is_exclusion, first, length in entries:
            if is_exclusion:
                ledger.exclude(first, first + length, "")
            else:
                ledger.give_back([[first, first + length]], first + length + 1 + length, "")
        seen = [batch for batch in walk(ledger, 100) if batch < 50]
        assert len(seen) == len(set(seen))
        assert sorted(seen) == [batch for batch in range(50) if not ledger.is_excluded(batch)]
        assert ledger.num_excluded == 50 - len(seen)


def _consume_all(ledger: Ledger, end: int) -> list[int]:
    """The batches that a run with this ledger consumes, up to batch `end`."""
    consumed, cursor, given_back = list[int](), 0, 0
    while (place := ledger.next_batch(cursor, given_back)).position < end:
        consumed.append(place.batch)
        cursor, given_back = place.cursor, place.given_back
    return consumed


OPERATIONS = st.tuples(st.booleans(), st.integers(-15, 25), st.integers(0, 8), st.integers(0, 6))
"""Exclude or re-include; first batch relative to the place of the run; length; steps before it."""


@settings(deadline=None, max_examples=200)
@given(operations=st.lists(OPERATIONS, max_size=15))
def test_skips_and_returns_at_any_time_read_each_batch_at_most_once(
    operations: list[tuple[bool, int, int, int]],
) -> None:
    """The rules of operator commands: only batches that were not read are excluded, only excluded ones re-included."""
    ledger, cursor, given_back, consumed, excluded = Ledger(), 0, 0, list[int](), set[int]()
    for is_skip, offset, length, num_steps in operations:
        for _ in range(num_steps):
            place = ledger.next_batch(cursor, given_back)
            consumed.append(place.batch)
            cursor, given_back = place.cursor, place.given_back
        first = max(0, cursor + offset)
        span = range(first, first + length + 1)
        was_read = sum(batch in consumed for batch in span)
        assert ledger.num_consumed(span[0], span[-1], cursor, given_back) == was_read
        found = [batch for start, end in ledger.excluded_ranges(span[0], span[-1]) for batch in range(start, end + 1)]
        assert found == sorted(excluded.intersection(span))
        if is_skip and not was_read:
            ledger.exclude(span[0], span[-1], "by an operator")
            excluded |= set(span)
        elif not is_skip:
            ranges = [[start, end] for start, end in ledger.excluded_ranges(span[0], span[-1])]
            ahead_before = ledger.next_batch(cursor, given_back).batch
            for batches, from_batch in return_points(ranges, cursor):
                ledger.give_back(batches, from_batch, "by an operator")
            passed = sorted(batch for batch in excluded.intersection(span) if batch < cursor)
            excluded -= set(span)
            if passed and given_back == 0 and ahead_before >= cursor:
                assert ledger.next_batch(cursor, given_back).batch == passed[0], "a batch that was passed comes next"
    twin = _consume_all(ledger, 200)
    assert twin[: len(consumed)] == consumed, "a run that starts with the final ledger reads the same"
    assert sorted(twin) == [batch for batch in range(200) if batch not in excluded]
    assert [batch for batch in range(200) if ledger.is_excluded(batch)] == sorted(excluded)
    assert ledger.num_excluded == len(excluded)


def test_a_re_included_batch_ahead_is_read_in_its_place() -> None:
    ledger = Ledger()
    ledger.exclude(3, 8, "by an operator")
    for batches, from_batch in return_points([[2, 5]], 4):
        ledger.give_back(batches, from_batch, "by an operator")
    assert return_points([[2, 5]], 4) == [([[2, 3]], 4), ([[4, 5]], 6)]
    assert _consume_all(ledger, 11) == [0, 1, 2, 3, 4, 5, 9, 10]


@settings(deadline=None)
@given(ranges=RANGES, cursor=st.integers(0, 60), count=st.integers(1, 10))
def test_the_next_range_holds_as_many_unexcluded_batches(
    ranges: list[tuple[int, int]], cursor: int, count: int
) -> None:
    ledger = Ledger()
    for first, last in ranges:
        ledger.exclude(first, last, "test")
    first, last = ledger.next_range(cursor, count)
    unexcluded = [batch for batch in range(cursor, last + 1) if not ledger.is_excluded(batch)]
    assert (len(unexcluded), unexcluded[0], unexcluded[-1]) == (count, first, last)
