"""Facts about a batch for its step record: fingerprint, rarest tokens, entropy, rows per source.

Why: when a step goes wrong, the first questions are whether its batch was seen before, whether it contains rare tokens,
and which source it came from. The record must answer them without reading the batch again.
How: the fingerprint of a row is a 64-bit hash of its token ids, whatever dtype they are stored in; that of several rows
is the sum modulo 2 ** 64. So the fingerprints of all ranks add up to that of the global batch, whatever the number of
ranks and the order of the rows, and no rank reads the rows of the others. Every few batches each rank also reads one
row of another rank, which reveals a rank that reads different bytes. Tokens are ranked by their count in the corpus if
that is known, else in the batch; of equally frequent tokens the highest id is the rarest, since tokenizers number
frequent tokens first.
Left out: history. Facts are a pure function of the rows.
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
    """None: not known without a scan."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalFacts:
    fingerprint: int
    rarest: tuple[RareBatchToken, ...]
    """Rarest first."""
    entropy_nats: float
    """Entropy of the token ids in the batch."""
    rows_by_source: tuple[int, ...]
    """In the order of the sources."""


class RowComparison(NamedTuple):
    """`row_digest` of one row of this rank and of one row of another rank."""

    own: int
    other: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    fingerprint: int
    """Fingerprint of this rank's rows."""
    rows_by_source: tuple[int, ...]
    """Rows of the global batch, in the order of the sources; from the plan, without reading them."""
    own: GlobalFacts | None
    """Facts of this rank's rows; on rank 0 only, for the log."""
    compared: RowComparison | None
    """None if no rows are compared in this batch."""


def fingerprint(rows: Tokens) -> int:
    """Hash that is equal for equal rows in any order, and additive over parts of a batch."""
    ids = np.ascontiguousarray(rows, dtype="<u4")
    total = sum(int.from_bytes(blake2b(row.data, digest_size=8).digest(), "little") for row in ids)
    return total % 2**64


def row_digest(row: Tokens) -> int:
    """24-bit hash of a row, which float32 represents exactly; never 0, which means "not compared"."""
    return 1 + fingerprint(row[None, :]) % (2**24 - 1)


def comparison_stride(turn: int, world_size: int) -> int:
    """Distance to the rank whose row a rank also reads, at the `turn`-th comparison.

    It changes, so that ranks of one machine are compared with those of others. It is never half of the ranks: two ranks
    that are compared only with each other cannot show which of them is wrong.
    """
    strides = [stride for stride in (1, 2, 3, 5, 7, 11, 13) if stride < world_size and 2 * stride != world_size] or [1]
    return strides[turn % len(strides)]


def global_facts(
    rows: Tokens, sources: NDArray[np.int64], *, num_sources: int, frequencies: NDArray[np.int64] | None
) -> GlobalFacts:
    """Facts of these rows; `frequencies`: how often each token id occurs in the corpus, None if unknown."""
    counts = np.bincount(rows.ravel())
    return GlobalFacts(
        fingerprint=fingerprint(rows),
        rarest=_rarest(counts, frequencies),
        entropy_nats=_entropy_nats(counts, rows.size),
        rows_by_source=tuple(np.bincount(sources, minlength=num_sources).tolist()),
    )


def _entropy_nats(counts: NDArray[np.int64], num_tokens: int) -> float:
    """Entropy from the histogram of counts, which needs far fewer logarithms than there are tokens."""
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
    """Facts for the step record; empty if there are none. The fingerprint is added later, as a sum over ranks."""
    if facts is None or facts.own is None:
        return {}
    return {
        "entropy_nats": facts.own.entropy_nats,
        "rarest": [list(rare) for rare in facts.own.rarest],
        "rows": dict(zip(source_names, facts.rows_by_source, strict=True)),
    }
