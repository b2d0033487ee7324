"""Summarizes the per-rank slots of a report: median, spread and the farthest ranks of each signal.

Why: after the reduce-scatter a NaN is everywhere; only per-rank values from before it identify the rank. And the size
of a log line must not grow with the cluster.
How: the reduced vector ends in a table with one row per signal and one column per rank. Each rank filled its own column
and left zeros elsewhere, so the sum is a gather. A row needs three partitions and no sort: 16,384 ranks are summarized
in well under a millisecond.
Left out: thresholds. The detectors apply them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.core.batch_shares import Sharing
from harness.core.events import RankSpread

LIMBS = ("data_low", "data_middle", "data_high")
"""The fingerprint of a rank's rows in limbs of 24, 24 and 16 bits, lowest first; float32 holds each exactly."""
SLOTS = (
    *("loss", "grad_square", "busy_s", "device_s", "decision"),
    *("weights_low", "weights_high", "weights_changed", "step_s", "corruption"),
    *("exchange", "corrupted_exchange"),
    *("plan", *LIMBS, "own_row", "other_row"),
)
"""Mean loss of the rank; squared norm of its gradient before the reduce-scatter; host seconds outside collectives; on
CUDA the seconds of its loss head (`harness.distributed.compute_clock`); digest of its decisions. Digest of its weights
in halves of 16 bits, and 1 if they changed between the last two updates; its last step time; on some steps 1 + the
first stage at which a micro-batch that was computed twice differs (`harness.distributed.bit_digests`). With context
parallelism the first exchange in which it sent NaN or Inf to its group, and on some steps the first one that differs
when it is computed twice (`harness.distributed.exchange_watch`). Data: digest of
the data plan (corpus, order, ledger), fingerprint of its rows, and on some steps the digests of one of its rows and of
one row of another rank."""

DIGEST_BITS = 24
"""Width of a digest; float32 holds integers of 24 bits exactly."""

MAX_WORST = 4
"""Ranks named per signal or per digest."""
MAX_NAMED = 64
"""Ranks named per list of non-finite or mismatched ranks."""
MAX_DIGESTS = 8

MAD_TO_SIGMA = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""

Numbers = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The fields of a `ReducedRecord` that come from the per-rank slots."""

    ranks: dict[str, RankSpread] = field(default_factory=dict)
    nonfinite_ranks: list[int] = field(default_factory=list)
    mismatched_ranks: list[int] = field(default_factory=list)
    changed_ranks: list[int] = field(default_factory=list)
    corrupted_ranks: list[int] = field(default_factory=list)
    corrupted_stage: int | None = None
    """The first stage that differs (`harness.distributed.bit_digests`)."""
    weight_digest: str = ""
    digests: dict[str, list[int]] = field(default_factory=dict)
    median_step_s: float = 0.0
    fingerprint: str = ""
    other_data: dict[str, list[int]] = field(default_factory=dict)


def summarize_slots(
    table: Numbers,
    *,
    divisor: float,
    replicate: int,
    stride: int = 1,
    recomputed: int | None = None,
    context: int = 1,
    batch_size: int | None = None,
) -> RankFacts:
    """Summarize a table of `SLOTS` x ranks. Stored gradients divided by `divisor` are the true ones.

    `stride`: distance from a rank to the rank whose row it also read. `recomputed`: distance to the rank whose rows it
    also computed; None: nothing was computed twice. `context`: number of neighbouring ranks that share their sequences;
    they read the same rows, which count once. `batch_size`: rows of the global batch; None: as many for each rank.
    """
    slots = dict(zip(SLOTS, table, strict=True))
    loss, grad_square = slots["loss"], slots["grad_square"]
    is_bad = ~(np.isfinite(loss) & np.isfinite(grad_square))
    if context > 1:
        is_bad = keep_sources(is_bad, slots["exchange"], context=context)
    nonfinite = [int(rank) for rank in np.flatnonzero(is_bad)[:MAX_NAMED]]
    total = sum_fingerprints(*(slots[name][::context] for name in LIMBS))
    corruption = slots["corruption"]
    if context > 1:
        corruption = np.where(keep_sources(corruption > 0, slots["corrupted_exchange"], context=context), corruption, 0)
    is_corrupted = recomputed is not None and bool(corruption.any())
    weights = slots["weights_low"].astype(np.int64) + (slots["weights_high"].astype(np.int64) << 16)
    facts = RankFacts(
        nonfinite_ranks=nonfinite,
        median_step_s=_median(slots["step_s"]),
        fingerprint=f"{total:016x}" if total else "",
        changed_ranks=[int(rank) for rank in np.flatnonzero(slots["weights_changed"])[:MAX_NAMED]],
        corrupted_ranks=find_corrupted(corruption, distance=recomputed or 0) if is_corrupted else [],
        corrupted_stage=int(corruption[corruption > 0].min()) - 1 if is_corrupted else None,
        weight_digest=f"{combine_digests(weights, replicate=replicate):08x}",
    )
    if len(loss) == 1:
        return facts
    with np.errstate(invalid="ignore", divide="ignore"):
        grad_norm = np.sqrt(grad_square) / divisor
    if batch_size is not None:
        grad_norm = remove_share_effect(grad_norm, share_sizes(batch_size, len(loss), context))
    measured = {
        "loss": remove_position_effect(loss, context),
        "grad_norm": grad_norm,
        "step_time_s": slots["busy_s"],
        "device_time_s": slots["device_s"],
    }
    spreads = {name: rank_spread(values) for name, values in measured.items() if values.any()}
    differing = {
        "plan": find_mismatched(slots["plan"], replicate=len(loss)),
        "rows": find_misread(slots["own_row"], slots["other_row"], stride=stride)
        or find_other_rows([slots[name] for name in LIMBS], context=context),
    }
    return replace(
        facts,
        ranks={name: found for name, found in spreads.items() if found},
        mismatched_ranks=find_mismatched(weights, replicate=replicate) if replicate > 1 else [],
        digests=ranks_by_digest(slots["decision"]),
        other_data={name: ranks for name, ranks in differing.items() if ranks},
    )


def split_fingerprint(fingerprint: int) -> tuple[int, int, int]:
    """Split a 64-bit fingerprint into the limbs of `LIMBS`."""
    mask = 2**DIGEST_BITS - 1
    return fingerprint & mask, fingerprint >> DIGEST_BITS & mask, fingerprint >> 2 * DIGEST_BITS


def sum_fingerprints(low: Numbers, middle: Numbers, high: Numbers) -> int:
    """The fingerprint of the global batch: the sum of all ranks' fingerprints modulo 2 ** 64."""
    sums = [int(limb.sum(dtype=np.float64)) for limb in (low, middle, high)]  # exact below 2 ** 53
    return sum(limb << place * DIGEST_BITS for place, limb in enumerate(sums)) % 2**64


def find_misread(own_row: Numbers, other_row: Numbers, *, stride: int) -> list[int]:
    """Ranks that disagree with another rank on the tokens of a row; empty if no rows were compared.

    Each row is read by its owner and by one other rank. A rank that disagrees in both roles is named; if there is none,
    both sides of each disagreement are named.
    """
    if not own_row.any():
        return []
    is_reader = other_row != np.roll(own_row, -stride)
    is_read = np.roll(is_reader, stride)
    wrong = is_reader & is_read
    return [int(rank) for rank in np.flatnonzero(wrong if wrong.any() else is_reader | is_read)[:MAX_NAMED]]


def find_other_rows(limbs: list[Numbers], *, context: int) -> list[int]:
    """Ranks whose rows differ from those of the other ranks of their context group, by the majority of the group."""
    if context == 1:
        return []
    ranks: set[int] = set()
    for limb in limbs:
        by_member = limb.reshape(-1, context).T
        num_groups = by_member.shape[1]
        found = find_mismatched(by_member.reshape(-1), replicate=context)
        ranks |= {number % num_groups * context + number // num_groups for number in found}
    return sorted(ranks)[:MAX_NAMED]


def keep_sources(is_bad: NDArray[np.bool_], exchange: Numbers, *, context: int) -> NDArray[np.bool_]:
    """The bad ranks without those that got their bad values from another rank of their context group.

    `exchange`: the first exchange in which each rank sent bad values, 0: in none. The ranks of a group that did so
    first are the sources. A group that exchanged nothing bad keeps its bad ranks.
    """
    groups, by_group = is_bad.reshape(-1, context), exchange.reshape(-1, context)
    order = np.where(by_group > 0, by_group, np.inf)
    first = order.min(axis=1, keepdims=True)
    is_source = (order == first) & groups.any(axis=1, keepdims=True)
    return np.where(np.isfinite(first), is_source, groups).reshape(-1)


def remove_position_effect(loss: Numbers, context: int) -> Numbers:
    """The loss of each rank, less what its positions in a sequence usually add to it; a NaN stays with its rank.

    The ranks of a context group compute different positions. Early tokens of a sequence have a higher loss, so single
    ranks of a group differ in every healthy run. Ranks with the same positions in other groups show by how much: the
    median over the groups of the distance to the mean of the group. With a single group all ranks get its mean.
    """
    if context == 1:
        return loss
    groups = loss.reshape(-1, context)
    is_finite = np.isfinite(groups)
    counts = is_finite.sum(axis=1, keepdims=True).clip(min=1)
    means = np.where(is_finite, groups, 0).sum(axis=1, keepdims=True) / counts
    offsets = np.zeros(context)
    for place in range(context):
        finite = (groups - means)[is_finite[:, place], place]
        offsets[place] = _median(finite) if len(finite) else 0.0
    return (groups - offsets).reshape(-1)


@cache
def share_sizes(batch_size: int, num_ranks: int, context: int) -> NDArray[np.int64]:
    """Number of rows of each rank."""
    sharing = Sharing(batch_size=batch_size, world_size=num_ranks // context)
    spans = [sharing.rows_of(rank // context) for rank in range(num_ranks)]
    return np.array([span.stop - span.start for span in spans])


def remove_share_effect(grad_norm: Numbers, num_rows: NDArray[np.int64]) -> Numbers:
    """The gradient norm of each rank, as if each had as many rows as the largest share; shares differ by one row.

    The gradients of rows add up. The norm of their sum grows with the number of rows if they agree, with its root if
    they are noise. The ratio of the medians of both kinds of ranks shows by how much. It is limited to what lies
    between, so that the norm of a single rank with its share cannot explain itself.
    """
    is_larger = num_rows > num_rows.min()
    is_finite = np.isfinite(grad_norm)
    larger, smaller = grad_norm[is_larger & is_finite], grad_norm[~is_larger & is_finite]
    if not (len(larger) and len(smaller)):
        return grad_norm
    most = float(num_rows.max() / num_rows.min())
    usual = _median(smaller)
    ratio = min(max(_median(larger) / usual, math.sqrt(most)), most) if usual > 0 else most
    return np.where(is_larger, grad_norm, grad_norm * ratio)


def find_corrupted(corruption: Numbers, *, distance: int) -> list[int]:
    """Ranks whose computation differs from a second one of the same rows.

    With distance 0 a rank is compared with itself. Otherwise each rank is compared with two others: with the owner of
    the rows that it computed, and with the rank that computed its own. A rank that differs from both is named; if there
    is none, both sides of each difference are named.
    """
    differs = corruption > 0
    if distance:
        is_owner = np.roll(differs, distance)
        both = differs & is_owner
        differs = both if both.any() else differs | is_owner
    return [int(rank) for rank in np.flatnonzero(differs)[:MAX_NAMED]]


def rank_spread(values: Numbers) -> RankSpread:
    """Median, robust sigma and the farthest ranks of the finite values; empty if no value is finite."""
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
    """Median by one partition: numpy partitions at one index many times faster than at two."""
    middle = len(values) // 2
    parted = np.partition(values, middle)
    high = float(parted[middle])
    return high if len(values) % 2 else (float(parted[:middle].max()) + high) / 2


def combine_digests(weights: NDArray[np.int64], *, replicate: int) -> int:
    """The digest of all weights, from those of the shards of the first replica."""
    return int(weights.reshape(replicate, -1)[0].sum() % 2**32)


def find_mismatched(digests: Numbers | NDArray[np.int64], *, replicate: int) -> list[int]:
    """Ranks whose digest differs from the majority of their replicas; all replicas if there is no majority."""
    by_replica = digests.reshape(replicate, -1)
    num_shards = by_replica.shape[1]
    ranks: list[int] = []
    for shard in np.flatnonzero((by_replica != by_replica[0]).any(axis=0))[:MAX_NAMED]:
        values, counts = np.unique(by_replica[:, shard], return_counts=True)
        has_majority = 2 * counts.max() > replicate
        agrees = (by_replica[:, shard] == values[counts.argmax()]) & has_majority
        ranks += [int(replica * num_shards + shard) for replica in np.flatnonzero(~agrees)]
    return sorted(ranks)[:MAX_NAMED]


def ranks_by_digest(decision: Numbers) -> dict[str, list[int]]:
    """Digest of decisions -> some of the ranks that hold it, most common digest first; empty if all agree."""
    if (decision == decision[0]).all():
        return {}
    digests, counts = np.unique(decision, return_counts=True)
    commonest = digests[np.argsort(-counts, kind="stable")[:MAX_DIGESTS]]
    return {
        f"{int(digest):06x}": [int(rank) for rank in np.flatnonzero(decision == digest)[:MAX_WORST]]
        for digest in commonest
    }
