"""The filter drops what it says, for the reason it says, and nothing else; the report counts every dropped document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as arrow  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from harness.config.errors import ConfigError
from harness.data.corpus.corpora import embedded_documents
from harness.data.prepare.corpus_report import parse_report, render
from harness.data.prepare.document_filter import (
    MIN_CHARS,
    DocumentFilter,
    DropReason,
    share_of_boilerplate,
    share_of_repeated_lines,
    share_of_repeated_phrases,
    share_of_runs,
)
from tests.data.prepare.test_prepare import contents, documents, make

PROSE = " ".join(f"Sentence {n} says that {n * n} is the square of {n}." for n in range(40))
LINES = "\n".join(f"line {n}" for n in range(40))
RUN, VARIED = "=" * 150, "".join(map(chr, range(0x4E00, 0x4E96)))
BAD = {
    DropReason.too_long: PROSE * 1000,
    DropReason.bad_characters: PROSE[:500] + "\N{REPLACEMENT CHARACTER}",
    DropReason.repeated_characters: PROSE[:300] + "=" * 500,
    DropReason.repeated_lines: LINES + "\nSubmit a comment here" * 40,
    DropReason.repeated_phrases: "buy it now and save money " * 40,
    DropReason.boilerplate: "\n".join(f"{n} is {n * n}: Privacy Policy {n * n * n}" for n in range(20)),
}


@pytest.mark.parametrize("reason", BAD)
def test_every_reason_is_found(reason: DropReason) -> None:
    assert DocumentFilter().check(BAD[reason]) is reason


def test_good_documents_are_kept() -> None:
    assert [text for text in embedded_documents() if DocumentFilter().check(text) is not None] == []
    code = "def f(x):\n" + "".join(f"{' ' * 24}return {n}\n" for n in range(40))
    table = "\n".join(f"| {n} | {n + 1} |" for n in range(60)) + "\n" + "-" * 40
    japanese = "".join(chr(0x3042 + n % 80) for n in range(900))
    for text in (PROSE, LINES, code, table, japanese, "", "x" * (MIN_CHARS - 1), "tab\tand\r\nform feed\f"):
        assert DocumentFilter().check(text) is None, text[:40]


def test_shares_are_of_characters() -> None:
    assert share_of_runs("=" * 30 + " " * 50 + "ab" * 15) == 0.5
    assert share_of_runs("=" * 9 + "a") == 0.0
    assert share_of_repeated_lines("aa\n  bbbbbb\n\nbbbbbb\ncc\n") == 6 / 16
    assert share_of_repeated_phrases("a b c d e f a b c d e g") == 5 / 12
    assert share_of_repeated_phrases("a a a a a a a") == 6 / 7, "each word counts once"
    assert share_of_boilerplate("Page not found\nxx") == 14 / 16
    for measure in (share_of_runs, share_of_repeated_lines, share_of_repeated_phrases, share_of_boilerplate):
        assert measure("") == measure(" \n ") == 0.0


@pytest.mark.parametrize(
    ("name", "limit", "text", "reason"),
    [
        ("max_chars", 300, "ab " * 100, DropReason.too_long),
        ("max_bad_chars", 0.01, "ab " * 99 + "\x00\x1f\x9f", DropReason.bad_characters),
        (
            "max_repeated_chars",
            0.5,
            RUN + VARIED,
            DropReason.repeated_characters,
        ),
        ("max_repeated_lines", 0.5, ("x" * 9 + "\n") * 20 + LINES[:163], DropReason.repeated_lines),
    ],
)
def test_a_document_at_the_threshold_is_kept_and_one_above_is_dropped(
    name: str, limit: float, text: str, reason: DropReason
) -> None:
    off: dict[str, Any] = {"max_repeated_chars": 1.0, "max_repeated_lines": 1.0, "max_repeated_phrases": 1.0}
    measures = {
        "max_chars": len,
        "max_bad_chars": lambda text: sum(text.count(char) for char in "\x00\x1f\x9f") / len(text),
        "max_repeated_chars": share_of_runs,
        "max_repeated_lines": share_of_repeated_lines,
    }
    at = measures[name](text)
    below = at - 1 if name == "max_chars" else at * 0.99
    assert DocumentFilter(**off | {name: at}).check(text) is None
    assert DocumentFilter(**off | {name: below}).check(text) is reason
    assert at == pytest.approx(limit, rel=0.1)


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=400))
def test_every_share_is_between_0_and_1(text: str) -> None:
    for measure in (share_of_runs, share_of_repeated_lines, share_of_repeated_phrases, share_of_boilerplate):
        assert 0.0 <= measure(text) <= 1.0


@pytest.mark.parametrize(("name", "value"), [("max_chars", 0), ("max_bad_chars", -0.1), ("max_boilerplate", 1.1)])
def test_an_invalid_threshold_names_its_option(name: str, value: float) -> None:
    thresholds: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=rf"^--{name.replace('_', '-')}: must be"):
        DocumentFilter(**thresholds)


def write_mixed(path: Path) -> list[str]:
    """Good and bad documents in turn, one of them not UTF-8; returns the good ones."""
    good = [f"{PROSE} Number {n}." for n in range(len(BAD) + 1)]
    records = [json.dumps({"text": text}).encode() for pair in zip(good, BAD.values(), strict=False) for text in pair]
    records += [b'{"text": "caf\xe9"}', json.dumps({"text": good[-1]}).encode(), b'{"text": ""}']
    path.write_bytes(b"\n".join(records))
    return good


def test_the_report_counts_what_was_dropped_and_why(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    good = write_mixed(source)
    meta = make([source], tmp_path / "out", shard=5000, document_filter=DocumentFilter())
    assert documents(tmp_path / "out") == [list(text.encode()) for text in good]
    report = parse_report(meta["report"])
    assert report == parse_report(json.loads((tmp_path / "out.meta.json").read_text())["report"])
    assert report.dropped is not None
    sizes = [len(line) for line in source.read_bytes().split(b"\n")]
    places = {reason.in_words(): 2 * n + 1 for n, reason in enumerate(BAD)} | {"invalid UTF-8": 2 * len(BAD)}
    assert [drop.reason for drop in report.dropped] == [reason.in_words() for reason in DropReason]
    for drop in report.dropped:
        place = places[drop.reason]
        assert (drop.documents, drop.bytes) == (1, sizes[place])
        assert [(each.document, each.amount, each.origin) for each in drop.examples] == [
            (place, sizes[place], f"{source}:{place + 1}")
        ]
    text = render(report, {})
    assert f"dropped      7 documents, {sum(sizes[place] for place in places.values()):,} bytes, by the filter" in text
    assert f"             repeated lines: 1 documents, {sizes[7]:,} bytes" in text
    assert f"               input document 7, {sizes[7]:,} bytes, {source}:8" in text
    assert report.empty_documents == 1
    assert meta["options"]["filter"]["max_chars"] == 1_000_000


def test_examples_are_few_and_numbered_across_shards(tmp_path: Path) -> None:
    texts = [PROSE if n % 3 else "=" * 300 for n in range(30)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    report = parse_report(
        make([tmp_path / "in.jsonl"], tmp_path / "out", shard=2000, document_filter=DocumentFilter())["report"]
    )
    assert report.dropped is not None
    (drop,) = report.dropped
    assert drop.documents == 10
    assert [each.document for each in drop.examples] == [0, 3, 6, 9, 12]


def test_the_filter_is_off_by_default_and_part_of_the_identity(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in (PROSE, "=" * 300)))
    plain = make([source], tmp_path / "out")
    assert plain["documents"] == 2
    assert plain["report"]["dropped"] is None
    assert "dropped" not in render(parse_report(plain["report"]), {})
    del plain["report"]["dropped"]
    assert parse_report(plain["report"]).dropped is None, "a report of an earlier version"
    with pytest.raises(ConfigError, match="exists and differs in filter; choose"):
        make([source], tmp_path / "out", document_filter=DocumentFilter())
    make([source], tmp_path / "filtered", document_filter=DocumentFilter())
    with pytest.raises(ConfigError, match="exists and differs in filter; choose"):
        make([source], tmp_path / "filtered")
    with pytest.raises(ConfigError, match="exists and differs in filter; choose"):
        make([source], tmp_path / "filtered", document_filter=DocumentFilter(max_chars=9))


def test_a_filter_that_leaves_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("=" * 300)
    with pytest.raises(ConfigError, match="no document contains a token, 0 are empty and 1 were dropped by the filter"):
        make([tmp_path / "in.txt"], tmp_path / "out", document_filter=DocumentFilter())


@pytest.mark.full
def test_the_output_does_not_depend_on_shards_and_workers(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_mixed(source)
    options: dict[str, Any] = {"bpe_size": 300, "document_filter": DocumentFilter()}
    make([source], tmp_path / "a", workers=1, shard=1 << 20, **options)
    make([source], tmp_path / "b", workers=2, shard=3000, **options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    trained = (tmp_path / "a.tokenizer.json").read_text()
    assert "Privacy" not in trained, "the tokenizer is trained on what is kept"


@pytest.mark.parametrize("kind", [arrow.string(), arrow.dictionary(arrow.int32(), arrow.string())])
def test_invalid_utf8_in_parquet_is_dropped_or_named(tmp_path: Path, kind: Any) -> None:
    raw = arrow.array([PROSE.encode(), b"caf\xe9", None], type=arrow.binary())
    column = arrow.Array.from_buffers(arrow.string(), 3, raw.buffers())
    if arrow.types.is_dictionary(kind):
        column = arrow.DictionaryArray.from_arrays(arrow.array([0, 1, None], type=arrow.int32()), column[:2])
    parquet.write_table(arrow.table({"text": column}), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match=r"in\.parquet, line 2: is not UTF-8"):
        make([tmp_path / "in.parquet"], tmp_path / "out")
    meta = make([tmp_path / "in.parquet"], tmp_path / "out", document_filter=DocumentFilter())
    assert documents(tmp_path / "out") == [list(PROSE.encode())]
    assert [drop["reason"] for drop in meta["report"]["dropped"]] == ["invalid UTF-8"]
