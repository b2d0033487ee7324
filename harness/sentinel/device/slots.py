"""What each rank said for itself, in brief: how it spreads, and who stands out.

Why: after a reduction a NaN is everywhere; only what a rank said before it names the guilty one. And a log line must
not grow with the cluster.
How: the reduced vector ends in a table of one row a signal and one column a rank; each rank filled its own column and
zeros elsewhere, so the sum is a gather. The table is read as it lies in host memory; a row takes three selections and
no sort, so that 16,384 ranks are summarised in well under a millisecond.
Left out: judging. How far is too far is for the detectors to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.core.events import RankSpread

LIMBS = ("data_low", "data_middle", "data_high")
"""The fingerprint of a rank's rows in limbs of 24, 24 and 16 bits, the lowest first: float32 holds each exactly."""
SLOTS = (
    *("loss", "grad_square", "busy_s", "device_s", "decision", "weight_digest", "step_s"),
    *("plan", *LIMBS, "own_row", "other_row"),
)
"""A rank's mean loss; squares of its gradient before the reduction; the host's seconds outside collectives; on CUDA the
seconds of its loss head (`harness.distributed.compute_clock`); digests of its decisions and, when probed, of its
weights; its last step time. Of its data: a digest of the plan (corpus, order, ledger), the fingerprint of its rows, and
now and then the digest of one of its rows and of one row of another rank."""

DIGEST_BITS = 24
"""Digests are integers of so many bits: float32 holds them exactly."""

MAX_WORST = 4
"""Ranks that a spread, or a digest, names."""
MAX_NAMED = 64
"""Ranks that a list of guilty ones names: where all are, a few say enough."""
MAX_DIGESTS = 8

MAD_TO_SIGMA = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""

Numbers = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The fields of a `ReducedRecord` that tell ranks apart, or come from what each rank said."""

    ranks: dict[str, RankSpread] = field(default_factory=dict)
    nonfinite_ranks: list[int] = field(default_factory=list)
    mismatched_ranks: list[int] = field(default_factory=list)
    digests: dict[str, list[int]] = field(default_factory=dict)
    median_step_s: float = 0.0
    fingerprint: str = ""
    other_data: dict[str, list[int]] = field(default_factory=dict)


def summarize_slots(table: Numbers, *, divisor: float, replicate: int, stride: int = 1) -> RankFacts:
    """The facts of a table of `SLOTS` x ranks; `divisor` turns stored gradients into true ones.

    `stride` is how far the rank whose row another one read lies ahead of it.
    """
    said = dict(zip(SLOTS, table, strict=True))
    loss, grad_square = said["loss"], said["grad_square"]
    is_bad = ~(np.isfinite(loss) & np.isfinite(grad_square))
    nonfinite = [int(rank) for rank in np.flatnonzero(is_bad)[:MAX_NAMED]]
    total = sum_fingerprints(*(said[name] for name in LIMBS))
    alike = RankFacts(
        nonfinite_ranks=nonfinite,
        median_step_s=_median(said["step_s"]),
        fingerprint=f"{total:016x}" if total else "",
    )
    if len(loss) == 1:
        return alike
    with np.errstate(invalid="ignore", divide="ignore"):
        grad_norm = np.sqrt(grad_square) / divisor
    measured = {
        "loss": loss,
        "grad_norm": grad_norm,
        "step_time_s": said["busy_s"],
        "device_time_s": said["device_s"],
    }
    spreads = {name: rank_spread(values) for name, values in measured.items() if values.any()}
    differing = {
        "plan": find_mismatched(said["plan"], replicate=len(loss)),
        "rows": find_misread(said["own_row"], said["other_row"], stride=stride),
    }
    return replace(
        alike,
        ranks={name: found for name, found in spreads.items() if found},
        mismatched_ranks=find_mismatched(said["weight_digest"], replicate=replicate) if replicate > 1 else [],
        digests=ranks_by_digest(said["decision"]),
        other_data={what: ranks for what, ranks in differing.items() if ranks},
    )


def split_fingerprint(fingerprint: int) -> tuple[int, int, int]:
    """A fingerprint of 64 bits in the limbs of `LIMBS`."""
    mask = 2**DIGEST_BITS - 1
    return fingerprint & mask, fingerprint >> DIGEST_BITS & mask, fingerprint >> 2 * DIGEST_BITS


def sum_fingerprints(low: Numbers, middle: Numbers, high: Numbers) -> int:
    """The sum of all ranks' fingerprints modulo 2 ** 64: that of the global batch."""
    sums = [int(limb.sum(dtype=np.float64)) for limb in (low, middle, high)]  # exact below 2 ** 53
    return sum(limb << place * DIGEST_BITS for place, limb in enumerate(sums)) % 2**64


def find_misread(own_row: Numbers, other_row: Numbers, *, stride: int) -> list[int]:
    """Ranks that read other tokens for a row than the rank it belongs to, where rows were compared.

    One that differs both as a reader and as the one that is read is wrong; where there is none such, both sides are
    named.
    """
    if not own_row.any():
        return []
    is_reader = other_row != np.roll(own_row, -stride)
    is_read = np.roll(is_reader, stride)
    wrong = is_reader & is_read
    return [int(rank) for rank in np.flatnonzero(wrong if wrong.any() else is_reader | is_read)[:MAX_NAMED]]


def rank_spread(values: Numbers) -> RankSpread:
    """Median, robust sigma and the farthest ranks of the finite values; empty where there is none."""
    is_finite = np.isfinite(values)
    finite = values if is_finite.all() else values[is_finite]
    if not len(finite):
        return {}
    median = _median(finite)
    distances = np.abs(finite - median)
    least = np.partition(distances, -MAX_WORST)[-MAX_WORST] if len(finite) > MAX_WORST else 0.0
    far = np.flatnonzero(distances >= least)
    far = far[np.argsort(-distances[far], kind="stable")[:MAX_WORST]]
    ranks = far if finite is values else np.flatnonzero(is_finite)[far]
    worst = [[int(rank), float(value)] for rank, value in zip(ranks, finite[far], strict=True)]
    return {"median": median, "spread": MAD_TO_SIGMA * _median(distances), "worst": worst}


def _median(values: Numbers) -> float:
    """By one selection: of one place, numpy's is many times faster than of two."""
    middle = len(values) // 2
    parted = np.partition(values, middle)
    high = float(parted[middle])
    return high if len(values) % 2 else (float(parted[:middle].max()) + high) / 2


def find_mismatched(weight_digest: Numbers, *, replicate: int) -> list[int]:
    """Ranks whose weights are not those of most of their replicas; where no digest has a majority, all of them."""
    by_replica = weight_digest.reshape(replicate, -1)
    num_shards = by_replica.shape[1]
    ranks: list[int] = []
    for shard in np.flatnonzero((by_replica != by_replica[0]).any(axis=0))[:MAX_NAMED]:
        digests, counts = np.unique(by_replica[:, shard], return_counts=True)
        has_majority = 2 * counts.max() > replicate
        agrees = (by_replica[:, shard] == digests[counts.argmax()]) & has_majority
        ranks += [int(replica * num_shards + shard) for replica in np.flatnonzero(~agrees)]
    return sorted(ranks)[:MAX_NAMED]


def ranks_by_digest(decision: Numbers) -> dict[str, list[int]]:
    """Each digest of decisions, the commonest first, and some of the ranks that hold it; empty where all agree."""
    if (decision == decision[0]).all():
        return {}
    digests, counts = np.unique(decision, return_counts=True)
    commonest = digests[np.argsort(-counts, kind="stable")[:MAX_DIGESTS]]
    return {
        f"{int(digest):06x}": [int(rank) for rank in np.flatnonzero(decision == digest)[:MAX_WORST]]
        for digest in commonest
    }
