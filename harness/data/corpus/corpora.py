"""The corpora of a run: token files, English text shipped with the package, and synthetic tokens.

Why: a first run and every test need data without a download; a study of loss spikes needs data whose tail of rare
tokens can be set.
How: the embedded text is cut into windows that share one token; `split` therefore leaves one window between training
and held-out data. A synthetic sample uses counter-based random numbers (Philox keyed by seed and index), so that no
sample depends on another. Its successor rule follows one cycle through the bulk of the vocabulary, so the n-th
successor is a table lookup and a whole sample is vector arithmetic. Files: see `harness.data.corpus.token_windows`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from harness.config.data import DataKind, SourceConfig, SyntheticConfig
from harness.config.errors import require
from harness.data.corpus.corpus import MIN_SAMPLES, Corpus, SampleOrigin, SampleShape, Tokens, digest
from harness.data.corpus.corpus_record import FileRecord
from harness.data.corpus.remote_cache import local_paths
from harness.data.corpus.token_files import expand, open_tokens
from harness.data.corpus.token_windows import FilesCorpus
from harness.data.order.order import permute_many

EMBEDDED = Path(__file__).with_name("embedded.json.gz")
"""A JSON list of texts; embedded.NOTICE beside it states its origin and licence."""

DRAW_BITS = 32
DRAW_RANGE = 1 << DRAW_BITS
"""Probabilities of synthetic data are multiples of 1 / DRAW_RANGE."""

CYCLE_EPOCH = 2**63
"""Epoch number that selects the successor rule; no sample order reaches it."""


def build_corpus(
    name: str,
    source: SourceConfig,
    *,
    shape: SampleShape,
    synthetic: SyntheticConfig,
    seed: int,
    files: Sequence[FileRecord] | None = None,
    eod_token: int | None = None,
) -> Corpus:
    """Open the corpus of a source; all its token ids are below the vocabulary size.

    `files` are the files recorded by the run, whose sizes must not have changed; None: the files that exist now.
    `eod_token` ends each document of a file without an index; None: such a file is one document.
    """
    length, vocab_size = shape
    match source.kind:
        case DataKind.embedded:
            return EmbeddedCorpus(length)
        case DataKind.synthetic:
            return SyntheticCorpus(synthetic, vocab_size=vocab_size, sequence_length=length, seed=seed)
        case DataKind.files:
            key = f"data.sources.{name}.paths"
            paths = (
                expand(source.paths, key=key) if files is None else local_paths([file.path for file in files], key=key)
            )
            opened = [open_tokens(path, dtype=source.dtype, key=key, num_files=len(paths)) for path in paths]
            for file, record in zip(opened, files or [], strict=False):
                message = f"{file.name}: had {record.num_bytes} bytes when the run recorded it, now {file.num_bytes}"
                require(file.num_bytes == record.num_bytes, key, message)
            return FilesCorpus(opened, shape=shape, key=key, eod_token=eod_token)


def split(num_samples: int, eval_fraction: float, *, source: str) -> tuple[range, range]:
    """Training samples and held-out samples: the tail, one window apart, so that the two share no token."""
    num_held_out = max(1, round(num_samples * eval_fraction))
    num_train = num_samples - num_held_out - 1
    message = f"must leave 2 of the {num_samples} sequences of {source}, but {eval_fraction} holds out {num_held_out}"
    require(num_train >= 1, "data.eval_fraction", message)
    return range(num_train), range(num_samples - num_held_out, num_samples)


@final
class EmbeddedCorpus:
    """Python's reference topics, shipped with the package, one token per byte, in windows of `sequence_length`."""

    vocab_size = 256

    def __init__(self, sequence_length: int) -> None:
        topics = [f"{document}\n\n".encode() for document in embedded_documents()]
        self._text = b"".join(topics)
        self._starts = np.cumsum([0, *map(len, topics[:-1])])
        self._sequence_length = sequence_length
        self.num_samples = (len(self._text) - 1) // sequence_length
        longest = (len(self._text) - 1) // MIN_SAMPLES
        message = f"must be at most {longest} for the {len(self._text)} bytes of kind=embedded, got {sequence_length}"
        require(sequence_length <= longest, "train.sequence_length", message)
        self._tokens: NDArray[np.uint8] = np.frombuffer(self._text, dtype=np.uint8)

    def sample(self, index: int) -> Tokens:
        assert 0 <= index < self.num_samples
        first = index * self._sequence_length
        return self._tokens[first : first + self._sequence_length + 1]

    def rows(self, indices: NDArray[np.int64]) -> Tokens:
        return np.stack([self.sample(index) for index in indices.tolist()])

    def documents(self, index: int) -> NDArray[np.int32]:
        """Each topic is one document."""
        topics = self._topics_at(index * self._sequence_length + np.arange(self._sequence_length + 1))
        numbers: NDArray[np.int32] = topics - topics[0]
        return numbers

    def origin(self, index: int) -> SampleOrigin:
        first = index * self._sequence_length
        return SampleOrigin(
            "pydoc_data.topics", first, *map(int, self._topics_at([first, first + self._sequence_length]))
        )

    def token_counts(self) -> NDArray[np.int64]:
        return np.bincount(self._tokens, minlength=self.vocab_size)

    def fingerprint(self) -> str:
        return digest(self._text, self._sequence_length)

    def _topics_at(self, positions: NDArray[np.int64] | list[int]) -> NDArray[np.int32]:
        return (np.searchsorted(self._starts, positions, side="right") - 1).astype(np.int32)


@final
class SyntheticCorpus:
    """Zipf-distributed tokens, often followed by a fixed successor, with a tail of tokens of configurable rarity.

    The bulk is `vocab_size - rare_tokens` ids. Id k starts a run of successors with a probability proportional to
    `(k + 1) ** -exponent`; each run continues with `repeat_probability`. Last, positions are replaced by tail tokens
    with `rare_probability`.
    """

    def __init__(self, cfg: SyntheticConfig, *, vocab_size: int, sequence_length: int, seed: int) -> None:
        self._cfg = cfg
        self._seed = seed
        self._num_tokens = sequence_length + 1
        self.num_samples = cfg.num_samples
        self.vocab_size = vocab_size
        self._num_bulk = vocab_size - cfg.rare_tokens
        self._bounds = _zipf_bounds(self._num_bulk, cfg.zipf_exponent)
        self._cycle = permute_many(np.arange(self._num_bulk), self._num_bulk, (seed, CYCLE_EPOCH)).astype(np.int32)
        self._place = np.argsort(self._cycle).astype(np.int32)

    def sample(self, index: int) -> Tokens:
        assert 0 <= index < self.num_samples
        token_draw, repeat_draw, rare_draw, tail_draw = self._draws(index)
        runs_on = repeat_draw < _threshold(self._cfg.repeat_probability)
        runs_on[0] = False
        position = np.arange(self._num_tokens)
        run_start = np.maximum.accumulate(np.where(runs_on, 0, position))
        starts = np.searchsorted(self._bounds, token_draw[~runs_on], side="right")
        place = self._place[starts][np.cumsum(~runs_on) - 1] + (position - run_start)
        tokens: NDArray[np.int32] = self._cycle[place % self._num_bulk]
        if self._cfg.rare_probability > 0:
            is_rare = np.flatnonzero(rare_draw < _threshold(self._cfg.rare_probability))
            tokens[is_rare] = self._num_bulk + (tail_draw[is_rare] * self._cfg.rare_tokens >> DRAW_BITS)
        return tokens

    def rows(self, indices: NDArray[np.int64]) -> Tokens:
        return np.stack([self.sample(index) for index in indices.tolist()])

    def documents(self, index: int) -> NDArray[np.int32]:  # noqa: ARG002 -- every sample is one document
        return np.zeros(self._num_tokens, dtype=np.int32)

    def origin(self, index: int) -> SampleOrigin:
        return SampleOrigin("synthetic", index * self._num_tokens, index, index)

    def token_counts(self) -> NDArray[np.int64] | None:
        return None

    def fingerprint(self) -> str:
        return digest(repr(self._cfg).encode(), self._seed, self.vocab_size, self._num_tokens)

    def _draws(self, index: int) -> tuple[NDArray[np.uint64], ...]:
        """Four independent 32-bit draws per position; from raw words, which numpy guarantees never to change."""
        philox = np.random.Philox(key=np.array([self._seed, index], dtype=np.uint64))
        first, second = philox.random_raw(2 * self._num_tokens).reshape(2, -1)
        shift, mask = np.uint64(DRAW_BITS), np.uint64(DRAW_RANGE - 1)
        return first >> shift, first & mask, second >> shift, second & mask


def embedded_documents() -> list[str]:
    """The documents of the embedded text: Python 3.11's reference topics, the same with every version of Python.

    They are ordered by a hash of their names: the tail of an alphabetical order would be too similar.
    """
    documents: list[str] = json.loads(gzip.decompress(EMBEDDED.read_bytes()))
    return documents


def _zipf_bounds(num_tokens: int, exponent: float) -> NDArray[np.uint64]:
    """Upper bound of each token's share of the draw range, except the last token's, which takes the rest."""
    cumulative = np.cumsum(np.power(np.arange(1, num_tokens + 1), -exponent))
    bounds: NDArray[np.uint64] = (cumulative[:-1] * (DRAW_RANGE / cumulative[-1])).astype(np.uint64)
    return bounds


def _threshold(probability: float) -> int:
    """The bound that a draw is below with `probability`."""
    return round(probability * DRAW_RANGE)
