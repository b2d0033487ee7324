"""What is remarkable about a batch, for the record of its step.

Why: when a step goes wrong, the first questions are whether its batch was seen before, whether it holds rare tokens,
and which source it came from; the answers must be there without reading the batch again.
How: a row's fingerprint is a 64-bit hash of its token ids, whatever type they are stored in; that of several rows is
the sum modulo 2 ** 64. So the fingerprints of all ranks add up to that of the global batch, whatever the number of
ranks and the order of the rows, and no rank reads the rows of the others. Now and then each rank also reads one row of
another one, so that a rank that reads other bytes is found out. Tokens are ranked by how often they occur in the corpus
where that is known, and otherwise in the batch itself; of equally frequent ones the highest id is the rarest, since
tokenizers number frequent tokens first.
Left out: memory of other batches. Facts are a pure function of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from harness.data.corpus.corpus import Tokens

NUM_RAREST = 8


class RareBatchToken(NamedTuple):
    token: int
    num_in_batch: int
    num_in_corpus: int | None
    """Where it is known without a scan."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalFacts:
    fingerprint: int
    rarest: tuple[RareBatchToken, ...]
    """The rarest first."""
    entropy_nats: float
    """Of the distribution of token ids in the batch."""
    rows_by_source: tuple[int, ...]
    """In the order of the sources."""


class RowComparison(NamedTuple):
    """One row of this rank and one of another, each in brief: what `row_digest` gives."""

    own: int
    other: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    fingerprint: int
    """Of this rank's rows."""
    rows_by_source: tuple[int, ...]
    """Of the global batch, in the order of the sources; known from the plan, without reading it."""
    own: GlobalFacts | None
    """Of this rank's rows alone; on rank 0 only, for the log."""
    compared: RowComparison | None
    """None in a batch in which no rows are compared."""


def fingerprint(rows: Tokens) -> int:
    """Equal for equal rows in any order; additive over parts of a batch."""
    words = np.ascontiguousarray(rows, dtype="<u4")
    total = sum(int.from_bytes(blake2b(row.data, digest_size=8).digest(), "little") for row in words)
    return total % 2**64


def row_digest(row: Tokens) -> int:
    """A row in 24 bits, which float32 holds exactly; never 0, which stands for "not measured"."""
    return 1 + fingerprint(row[None, :]) % (2**24 - 1)


def comparison_stride(turn: int, world_size: int) -> int:
    """How far ahead the rank lies whose row a rank reads too, at the `turn`-th comparison.

    It changes, so that ranks of one machine are compared with those of others. It is never half of the ranks: two ranks
    that compare only with each other cannot tell which of them is wrong.
    """
    strides = [each for each in (1, 2, 3, 5, 7, 11, 13) if each < world_size and 2 * each != world_size] or [1]
    return strides[turn % len(strides)]


def global_facts(
    rows: Tokens, sources: NDArray[np.int64], *, num_sources: int, frequencies: NDArray[np.int64] | None
) -> GlobalFacts:
    """Facts of some rows, of a global batch where it is given; `frequencies`: how often each token id occurs in the
    corpus."""
    counts = np.bincount(rows.ravel())
    return GlobalFacts(
        fingerprint=fingerprint(rows),
        rarest=_rarest(counts, frequencies),
        entropy_nats=_entropy_nats(counts, rows.size),
        rows_by_source=tuple(np.bincount(sources, minlength=num_sources).tolist()),
    )


def _entropy_nats(counts: NDArray[np.int64], num_tokens: int) -> float:
    """From how many tokens occur how often: far fewer logarithms than tokens."""
    num_with = np.bincount(counts)
    often = np.flatnonzero(num_with[1:]) + 1
    return max(0.0, math.log(num_tokens) - float((num_with[often] * often * np.log(often)).sum()) / num_tokens)


def _rarest(counts: NDArray[np.int64], frequencies: NDArray[np.int64] | None) -> tuple[RareBatchToken, ...]:
    present = np.flatnonzero(counts)
    ranks = (counts if frequencies is None else frequencies)[present]
    if len(present) > NUM_RAREST:
        limit = np.partition(ranks, NUM_RAREST)[NUM_RAREST]
        below, even = np.flatnonzero(ranks < limit), np.flatnonzero(ranks == limit)[-NUM_RAREST:]
        chosen = np.concatenate([below, even])
        present, ranks = present[chosen], ranks[chosen]
    first = np.lexsort((-present, ranks))[:NUM_RAREST]
    return tuple(
        RareBatchToken(token, int(counts[token]), None if frequencies is None else int(frequencies[token]))
        for token in present[first].tolist()
    )


def facts_to_record(facts: BatchFacts | None, source_names: Sequence[str]) -> dict[str, Any]:
    """Facts as they stand in a step's record, but for the fingerprint of the global batch, which is a sum over ranks;
    empty where there are none."""
    if facts is None or facts.own is None:
        return {}
    return {
        "entropy_nats": facts.own.entropy_nats,
        "rarest": [list(rare) for rare in facts.own.rarest],
        "rows": dict(zip(source_names, facts.rows_by_source, strict=True)),
    }
