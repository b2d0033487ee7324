"""Finds rare tokens and the samples that contain them, and keeps the result in an index file.

Why: `harness.data.order.stratify` needs it at every start on every rank, and a scan reads all data twice.
How: a token is rare if all sources together contain it fewer times than a threshold. Rank 0 scans once and writes
`rare-tokens.npz`; its key identifies the data and the threshold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from harness.data.corpus.corpus import Corpus, Tokens

Ints = NDArray[np.int64]

SCAN_SAMPLES = 256


class ScannedSource(NamedTuple):
    """The samples of a source that are scanned."""

    corpus: Corpus
    samples: range


class RareTokens(NamedTuple):
    """(sample, rare token, count) of one source as three arrays; sorted by sample, one entry per pair."""

    samples: Ints
    tokens: Ints
    counts: Ints


def find_rare(sources: Sequence[ScannedSource], *, below: int) -> list[RareTokens]:
    """Scan sources for tokens with fewer than `below` occurrences in all of them; sample numbers count from the first
    one of each source."""
    vocab_size = max(source.corpus.vocab_size for source in sources)
    frequencies = np.zeros(vocab_size, dtype=np.int64)
    for source in sources:
        for _, rows in _scan(source):
            frequencies += np.bincount(rows[:, :-1].ravel(), minlength=vocab_size)
    return [_find_in(source, frequencies < below) for source in sources]


def _find_in(source: ScannedSource, is_rare: NDArray[np.bool_]) -> RareTokens:
    vocab_size = len(is_rare)
    pairs, counts = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for first, rows in _scan(source):
        row, column = np.nonzero(is_rare[rows])
        held = (first + row) * vocab_size + rows[row, column]
        for found, part in zip((pairs, counts), np.unique(held, return_counts=True), strict=True):
            found.append(part)
    return RareTokens(*np.divmod(np.concatenate(pairs), vocab_size), np.concatenate(counts))


def rare_tokens(sources: Sequence[ScannedSource], *, below: int, index: Path | None = None) -> list[RareTokens]:
    """The result of `find_rare`, read from the index file if that was made for the same data."""
    found = None if index is None else read_rare_index(index, rare_index_key(sources, below=below))
    return find_rare(sources, below=below) if found is None else found


def rare_index_key(sources: Sequence[ScannedSource], *, below: int) -> str:
    """Identifies the data and the threshold that the rare tokens depend on."""
    named = [
        f"{corpus.fingerprint()} {corpus.vocab_size} {samples.start}..{samples.stop}" for corpus, samples in sources
    ]
    return f"{' + '.join(named)} below {below}"


def read_rare_index(path: Path, key: str) -> list[RareTokens] | None:
    """Read an index file; None if it does not exist, is broken, or was made for other data."""
    try:
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            if str(file["key"]) != key:
                return None
            found = RareTokens(*(file[name] for name in RareTokens._fields))
            ends = file["ends"] if "ends" in file else [len(found.samples)]  # earlier versions: one source
            return [RareTokens(*parts) for parts in zip(*(np.split(part, ends[:-1]) for part in found), strict=True)]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, RuntimeError):  # RuntimeError: of a zip header
        return None


def write_rare_index(path: Path, sources: Sequence[ScannedSource], *, below: int) -> None:
    """Scan the data and write the index file, unless it is up to date."""
    key = rare_index_key(sources, below=below)
    if read_rare_index(path, key) is not None:
        return
    found = find_rare(sources, below=below)
    joined = RareTokens(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
    ends = np.cumsum([len(rare.samples) for rare in found])
    scratch = path.with_name(f".{path.name}.tmp")
    with scratch.open("wb") as file:
        np.savez(file, key=np.array(key), ends=ends, **joined._asdict())
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def _scan(source: ScannedSource) -> Iterator[tuple[int, Tokens]]:
    """Yield all samples in chunks, each with the number of its first sample; int64, because numpy counts no uint64."""
    corpus, samples = source
    for first in range(0, len(samples), SCAN_SAMPLES):
        chunk = [corpus.sample(sample) for sample in samples[first : first + SCAN_SAMPLES]]
        yield first, np.stack(chunk, dtype=np.int64)
