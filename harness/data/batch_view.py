"""Renders a batch for people (`harness data inspect`): origin and text of each row, and its rare tokens.

Why: after a spike the first question is what the model was trained on.
How: the batch is read by its index, as in training, so it is the same one. Each row is decoded with the tokenizer
beside its file (PREFIX.tokenizer.json, or tokenizer.json in its directory), as bytes if its tokens are bytes, and shown
as token ids otherwise. Texts are quoted, so that no control character of the data reaches the terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

import numpy as np

from harness.config.errors import ConfigError
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
    """Position of the row's first token in the file."""
    first_document: int
    last_document: int
    """Inclusive."""
    fingerprint: str
    texts: list[str]
    """Text of each document in the row; token ids if no tokenizer is known."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RareTokenView:
    token: int
    text: str
    num_in_batch: int
    num_in_corpus: int | None
    """None: not known without a scan."""
    rows: list[int]
    """Rows of the batch that contain it."""


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
    """Rarest first."""
    rows: list[RowView]
    stratify: str = ""
    """What `data.stratify` limits; empty: it is off."""


def view_batch(batches: Batches, index: int, *, excluded: bool) -> BatchView:
    """The global batch with that index, including the targets of its last tokens."""
    facts, tokens, limited = batches.facts(index), batches.rows(index), batches.stratify_report()
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
        stratify="" if limited is None else limited.in_words(),
    )


def view_rare_token(rare: RareBatchToken, tokens: Tokens, tokenizers: list[Tokenizer | None]) -> RareTokenView:
    """The text of a rare token, and the rows that contain it."""
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
    """Split a row at document boundaries."""
    return np.split(row, np.flatnonzero(np.diff(documents)) + 1)


def decode(tokenizer: Tokenizer | None, tokens: Tokens) -> str:
    return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens.tolist())


def row_tokenizer(corpus: Corpus, origin: SampleOrigin) -> Tokenizer | None:
    """The tokenizer of a row, if one is known."""
    match corpus:
        case EmbeddedCorpus():
            return ByteTokenizer()
        case FilesCorpus():
            return tokenizer_beside(corpus.path_of(origin.file))
        case _:
            return None


@cache
def tokenizer_beside(data: Path) -> Tokenizer | None:
    """The tokenizer stored beside a token file; None if there is none, or if another program made the file."""
    files = CorpusFiles(data.with_suffix(""))
    for path in (files.tokenizer, data.with_name("tokenizer.json")):
        if path.is_file():
            return JsonTokenizer(path, special_tokens=False)
    try:
        meta = files.read_meta()
    except ConfigError:  # training needs only the tokens and max_token of a report
        return None
    return ByteTokenizer() if meta is not None and meta["options"]["tokenizer"] == {"kind": "bytes"} else None


def render(view: BatchView, *, num_characters: int) -> str:
    """Render the view as text, with at most `num_characters` per document; 0: all."""
    by_source = ", ".join(f"{name} {count}" for name, count in view.rows_by_source.items())
    lines = [
        f"batch        {view.batch}{', excluded by the ledger' if view.excluded else ''}",
        f"fingerprint  {view.fingerprint}",
        f"entropy      {view.entropy_nats:.3f} nats",
        f"rows         {by_source}",
        *([f"stratify     {view.stratify}"] if view.stratify else []),
    ]
    for number, rare in enumerate(view.rarest):
        corpus = "" if rare.num_in_corpus is None else f", {rare.num_in_corpus} in the corpus"
        where = f"{rare.num_in_batch} here{corpus}, in row {', '.join(map(str, rare.rows))}"
        text = f" {quote_token(rare.text)}" if rare.text else ""
        lines.append(f"{'' if number else 'rarest':<13}{rare.token}{text}: {where}")
    for number, row in enumerate(view.rows):
        last = f" to {row.last_document}" if row.last_document != row.first_document else ""
        where = f"{row.file}, from token {row.first_token}, document {row.first_document}{last}"
        lines += ["", f"row {number}: {row.source}, {where}, fingerprint {row.fingerprint}"]
        lines += [f"  {truncate(text, num_characters)!r}" for text in row.texts]
    return "\n".join(lines)


def quote_token(text: str) -> str:
    """A token in quotes. A byte is spelled \\x98 already; its backslash is not escaped again."""
    return f"'{text}'" if "\\" in text and text.isprintable() else repr(text)


def truncate(text: str, num_characters: int) -> str:
    return text if num_characters == 0 or len(text) <= num_characters else text[:num_characters] + "…"
