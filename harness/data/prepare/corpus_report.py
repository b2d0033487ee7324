"""Statistics of a prepared corpus: the report that `harness data prepare` prints and stores beside it.

Why: rare tokens, duplicates and giant documents are known causes of trouble in training, and cheapest to see early.
How: `CorpusCounter` takes the parts in order, so the report is a function of the output only.
Left out: near-duplicates; only equal texts count as duplicates, by a 64-bit hash.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from harness.data.prepare.document_filter import DropReason
from harness.data.prepare.parts import CorpusPart

RARE_BELOW = 10
NUM_EXAMPLES = 8
NUM_LONGEST = 5
WIDEST_EXAMPLE = 24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RareCorpusToken:
    token: int
    count: int
    text: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDocument:
    """A document that the report names."""

    document: int
    """Its number in the output."""
    amount: int
    """Tokens of a long document, or number of copies of a repeated one."""
    origin: str
    """Input file and line it came from."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedDocuments:
    """The documents that the filter dropped for one reason."""

    reason: str
    documents: int
    bytes: int
    """Size of their records in the input, as it was read."""
    examples: list[NamedDocument]
    """The first ones, by their number in the input, with their bytes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    documents: int
    tokens: int
    empty_documents: int
    """Documents without tokens; they are not in the output."""
    vocab_size: int
    max_token: int
    unused_tokens: int
    """Ids of the vocabulary that never occur."""
    rare_tokens: int
    """Ids that occur fewer than `RARE_BELOW` times, but at least once."""
    rare_examples: list[RareCorpusToken]
    longest_documents: list[NamedDocument]
    duplicate_documents: int
    """Documents whose text equals that of an earlier one."""
    duplicate_examples: list[NamedDocument]
    """The first document of each of the most repeated texts."""
    dropped: list[DroppedDocuments] | None = None
    """What the filter dropped, by reason; None: there was no filter."""


@final
@dataclass(slots=True)
class DropCount:
    """Running count of the documents dropped for one reason."""

    documents: int = 0
    bytes: int = 0
    examples: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(number in the input, bytes, file, line) of the first ones."""


@final
@dataclass(slots=True)
class CorpusCounter:
    """Accumulates the statistics of a corpus, part by part."""

    vocab_size: int
    drops: dict[DropReason, DropCount] | None = None
    """By reason; None: there is no filter."""
    num_documents: int = 0
    num_empty: int = 0
    num_read: int = 0
    """Documents of the input so far."""
    counts: NDArray[np.int64] = field(init=False)
    """Occurrences of each token."""
    _longest: list[tuple[int, int]] = field(default_factory=list)
    _hashes: list[NDArray[np.uint64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.vocab_size, dtype=np.int64)

    def add(self, part: CorpusPart) -> None:
        self.counts += np.bincount(part.tokens, minlength=self.vocab_size)
        order = np.argsort(-part.lengths, kind="stable")[:NUM_LONGEST]
        found = [(int(part.lengths[place]), -(self.num_documents + int(place))) for place in order]
        self._longest = heapq.nlargest(NUM_LONGEST, self._longest + found)
        self._hashes.append(part.hashes)
        self.num_documents += len(part.lengths)
        self.num_empty += part.num_empty
        for reason, place, file, line, num_bytes in part.dropped.tolist():
            assert self.drops is not None
            drop = self.drops.setdefault(DropReason(reason), DropCount())
            drop.documents += 1
            drop.bytes += num_bytes
            if len(drop.examples) < NUM_LONGEST:
                drop.examples.append((self.num_read + place, num_bytes, file, line))
        self.num_read += part.num_read

    def report(
        self,
        spell_token: Callable[[int], str],
        origin: Callable[[int], str],
        input_place: Callable[[int, int], str],
    ) -> Report:
        """Build the report; `origin` maps a document of the output to its input file and line, `input_place` names a
        line of an input file."""
        occurring = np.flatnonzero(self.counts)
        rare = np.flatnonzero((self.counts > 0) & (self.counts < RARE_BELOW))
        rarest = rare[np.argsort(self.counts[rare], kind="stable")][:NUM_EXAMPLES].tolist()
        num_duplicates, repeated = self._duplicates()
        longest = [(-number, num_tokens) for num_tokens, number in self._longest]
        return Report(
            documents=self.num_documents,
            tokens=int(self.counts.sum()),
            empty_documents=self.num_empty,
            vocab_size=self.vocab_size,
            max_token=int(occurring[-1]),
            unused_tokens=self.vocab_size - len(occurring),
            rare_tokens=len(rare),
            rare_examples=[
                RareCorpusToken(token=id_, count=int(self.counts[id_]), text=spell_token(id_)) for id_ in rarest
            ],
            longest_documents=[
                NamedDocument(document=number, amount=amount, origin=origin(number)) for number, amount in longest
            ],
            duplicate_documents=num_duplicates,
            duplicate_examples=[
                NamedDocument(document=number, amount=amount, origin=origin(number)) for number, amount in repeated
            ],
            dropped=None if self.drops is None else [*self._dropped(self.drops, input_place)],
        )

    @staticmethod
    def _dropped(
        drops: dict[DropReason, DropCount], input_place: Callable[[int, int], str]
    ) -> Iterator[DroppedDocuments]:
        for reason, drop in sorted(drops.items()):
            examples = [
                NamedDocument(document=number, amount=num_bytes, origin=input_place(file, line))
                for number, num_bytes, file, line in drop.examples
            ]
            yield DroppedDocuments(
                reason=reason.in_words(), documents=drop.documents, bytes=drop.bytes, examples=examples
            )

    def _duplicates(self) -> tuple[int, list[tuple[int, int]]]:
        """Number of duplicates, and (first document, copies) of the most repeated texts."""
        _, firsts, copies = np.unique(np.concatenate(self._hashes), return_index=True, return_counts=True)
        several = np.flatnonzero(copies > 1)
        order = several[np.lexsort((firsts[several], -copies[several]))][:NUM_LONGEST]
        return self.num_documents - len(copies), [(int(firsts[place]), int(copies[place])) for place in order]


def parse_report(report: dict[str, Any]) -> Report:
    """Parse a stored report, also one of an earlier version."""
    dropped = report.get("dropped")
    lists = {
        "rare_examples": [RareCorpusToken(**token) for token in report["rare_examples"]],
        "longest_documents": [NamedDocument(**document) for document in report["longest_documents"]],
        "duplicate_examples": [NamedDocument(**document) for document in report["duplicate_examples"]],
        "dropped": None if dropped is None else [_parse_drop(drop) for drop in dropped],
    }
    return Report(**report | lists)


def _parse_drop(drop: dict[str, Any]) -> DroppedDocuments:
    return DroppedDocuments(**drop | {"examples": [NamedDocument(**document) for document in drop["examples"]]})


def render(report: Report, facts: dict[str, str]) -> str:
    """Render the report as text; `facts` become lines at the end."""
    mean = report.tokens / report.documents
    rare = [f"{token.token} {spell(token.text)}, {times(token.count)}" for token in report.rare_examples]
    rows = {
        "documents": [f"{report.documents:,} of {mean:,.1f} tokens on average"],
        "tokens": [f"{report.tokens:,}"],
        "empty": [f"{report.empty_documents:,} documents, left out"],
        "vocabulary": [f"{report.vocab_size:,} tokens, {report.unused_tokens:,} of them never used"],
        "rare tokens": [f"{report.rare_tokens:,} occur fewer than {RARE_BELOW} times", *rare],
        "longest": [f"{document.amount:,} tokens: {_place(document)}" for document in report.longest_documents],
        "duplicates": [
            f"{report.duplicate_documents:,} documents equal an earlier one",
            *(f"{times(document.amount)}: {_place(document)}" for document in report.duplicate_examples),
        ],
        **({} if report.dropped is None else {"dropped": _describe_drops(report.dropped)}),
        **{name: [fact] for name, fact in facts.items()},
    }
    width = max(map(len, rows))
    lines = [("" if number else name, text) for name, texts in rows.items() for number, text in enumerate(texts)]
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)


def _describe_drops(dropped: list[DroppedDocuments]) -> list[str]:
    """The total, then each reason, each with its first documents by their number in the input."""
    num_documents, num_bytes = sum(drop.documents for drop in dropped), sum(drop.bytes for drop in dropped)
    lines = [f"{num_documents:,} documents, {num_bytes:,} bytes, by the filter"]
    for drop in dropped:
        lines.append(f"{drop.reason}: {drop.documents:,} documents, {drop.bytes:,} bytes")
        lines += [f"  input document {each.document}, {each.amount:,} bytes, {each.origin}" for each in drop.examples]
    return lines


def spell(text: str) -> str:
    """Quote a text as one short line."""
    return repr(text if len(text) <= WIDEST_EXAMPLE else text[: WIDEST_EXAMPLE - 1] + "…")


def times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _place(document: NamedDocument) -> str:
    return f"document {document.document}, {document.origin}"
