"""A batch as a person reads it: where its rows come from, what they say, and what is rare in them.

Why: after a spike the first question is what the model was shown.
How: the batch is asked for by its index, as training does, so it is the same one; each row is decoded with the
tokenizer that lies beside its file (PREFIX.tokenizer.json, or tokenizer.json in its directory), as bytes where it is
made of bytes, and is left as token ids where nothing says what they mean. Texts of the rows are quoted, so that no
control character of the data reaches the terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

import numpy as np

from harness.data.batch_facts import RareBatchToken, fingerprint
from harness.data.batches import Batches
from harness.data.corpus.corpora import EmbeddedCorpus
from harness.data.corpus.corpus import Corpus, SampleOrigin, Tokens
from harness.data.corpus.token_windows import FilesCorpus
from harness.data.prepare.prepared_files import CorpusFiles
from harness.data.prepare.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    source: str
    file: str
    first_token: int
    """Position in the file."""
    first_document: int
    last_document: int
    """Inclusive."""
    fingerprint: str
    texts: list[str]
    """Of each document in the row; token ids where no tokenizer is known."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RareTokenView:
    token: int
    text: str
    num_in_batch: int
    num_in_corpus: int | None
    """Where it is known without a scan."""
    rows: list[int]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    batch: int
    excluded: bool
    """Whether the ledger of the run excludes it."""
    fingerprint: str
    entropy_nats: float
    rows_by_source: dict[str, int]
    rarest: list[RareTokenView]
    """The rarest first."""
    rows: list[RowView]


def view_batch(batches: Batches, index: int, *, excluded: bool) -> BatchView:
    """The global batch with that index, the targets of its last tokens included."""
    facts, tokens = batches.facts(index), batches.rows(index)
    places = [(batches.sources[source], int(sample)) for source, sample in zip(*batches.samples(index), strict=True)]
    origins = batches.origins(index)
    tokenizers = [row_tokenizer(source.corpus, origin) for (source, _), origin in zip(places, origins, strict=True)]
    rows = [
        RowView(
            source=source.name,
            file=origin.file,
            first_token=origin.first_token,
            first_document=origin.first_document,
            last_document=origin.last_document,
            fingerprint=f"{fingerprint(row[None]):016x}",
            texts=[decode(tokenizer, piece) for piece in split_documents(row, source.corpus.documents(sample))],
        )
        for row, (source, sample), origin, tokenizer in zip(tokens, places, origins, tokenizers, strict=True)
    ]
    return BatchView(
        batch=index,
        excluded=excluded,
        fingerprint=f"{facts.fingerprint:016x}",
        entropy_nats=facts.entropy_nats,
        rows_by_source=dict(zip(batches.source_names, facts.rows_by_source, strict=True)),
        rarest=[view_rare_token(rare, tokens, tokenizers) for rare in facts.rarest],
        rows=rows,
    )


def view_rare_token(rare: RareBatchToken, tokens: Tokens, tokenizers: list[Tokenizer | None]) -> RareTokenView:
    """A rare token in words, and the rows that hold it."""
    rows = np.flatnonzero((tokens == rare.token).any(axis=1)).tolist()
    tokenizer = tokenizers[rows[0]]
    return RareTokenView(
        token=rare.token,
        text="" if tokenizer is None else tokenizer.spell(rare.token),
        num_in_batch=rare.num_in_batch,
        num_in_corpus=rare.num_in_corpus,
        rows=rows,
    )


def split_documents(row: Tokens, documents: Tokens) -> list[Tokens]:
    """A row cut where a document ends."""
    return np.split(row, np.flatnonzero(np.diff(documents)) + 1)


def decode(tokenizer: Tokenizer | None, tokens: Tokens) -> str:
    return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens.tolist())


def row_tokenizer(corpus: Corpus, origin: SampleOrigin) -> Tokenizer | None:
    """What gives the tokens of a row their meaning, where that is known."""
    match corpus:
        case EmbeddedCorpus():
            return ByteTokenizer()
        case FilesCorpus():
            return tokenizer_beside(Path(origin.file))
        case _:
            return None


@cache
def tokenizer_beside(data: Path) -> Tokenizer | None:
    """The tokenizer that lies beside a file of tokens."""
    files = CorpusFiles(data.with_suffix(""))
    for path in (files.tokenizer, data.with_name("tokenizer.json")):
        if path.is_file():
            return JsonTokenizer(path, special_tokens=False)
    meta = files.read_meta()
    return ByteTokenizer() if meta is not None and meta["options"]["tokenizer"] == {"kind": "bytes"} else None


def render(view: BatchView, *, num_characters: int) -> str:
    """The view as text; of each document at most `num_characters`, or all where that is 0."""
    by_source = ", ".join(f"{name} {count}" for name, count in view.rows_by_source.items())
    lines = [
        f"batch        {view.batch}{', excluded by the ledger' if view.excluded else ''}",
        f"fingerprint  {view.fingerprint}",
        f"entropy      {view.entropy_nats:.3f} nats",
        f"rows         {by_source}",
    ]
    for number, rare in enumerate(view.rarest):
        corpus = "" if rare.num_in_corpus is None else f", {rare.num_in_corpus} in the corpus"
        where = f"{rare.num_in_batch} here{corpus}, in row {', '.join(map(str, rare.rows))}"
        text = f" {rare.text!r}" if rare.text else ""
        lines.append(f"{'' if number else 'rarest':<13}{rare.token}{text}: {where}")
    for number, row in enumerate(view.rows):
        last = f" to {row.last_document}" if row.last_document != row.first_document else ""
        where = f"{row.file}, from token {row.first_token}, document {row.first_document}{last}"
        lines += ["", f"row {number}: {row.source}, {where}, fingerprint {row.fingerprint}"]
        lines += [f"  {truncate(text, num_characters)!r}" for text in row.texts]
    return "\n".join(lines)


def truncate(text: str, num_characters: int) -> str:
    return text if num_characters == 0 or len(text) <= num_characters else text[:num_characters] + "…"
