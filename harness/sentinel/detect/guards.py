"""Everything but the curves, the moments and the speed: weights, learning rate, data, loss scale, ranks.

How: one small class for each finding, whose fields are its whole memory and plain data. `observe` gives at most one
finding for each episode: it is raised when its condition begins to hold, and armed again when it no longer does.
A field that a record does not have is no evidence of anything.
All guards read a `ReducedRecord`, which has no field that one rank alone knows: every rank finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from harness.core.events import Finding, FindingKind, RankSpread, ReducedRecord

DRIFT_STEPS, DRIFT_FACTOR, DRIFT_PROBES = 200, 2.0, 10
SETTLED_STEPS = 100
"""Steps before norms of weights and moments are held against anything: they start from nothing."""
JUMP_OF_PEAK, JUMP_OF_VALUE, EXPECTED_ROWS = 0.1, 0.2, 50
LEAST_ROWS = 20
"""Rows of learning rates before any is held against the others: logs round small ones."""
NUM_FINGERPRINTS = 512
OTHER_DATA = {
    "plan": "have another corpus, order or ledger than the rest",
    "rows": "read other tokens for the same row",
}
"""What can differ between the data of ranks, in words."""
STUCK_ROWS = 5
FAR_SIGMAS, FARTHEST_SIGMAS, FAR_ROWS = 8.0, 20.0, 5
RANK_FACTOR = {"grad_norm": 10.0, "loss": 2.0}
"""Times the median from which one rank stands out in a single row."""
LEAST_RANK_SPREAD = 0.02
"""Of the median: ranks with almost equal numbers differ by less than that, and it means nothing."""


def found_now(kind: FindingKind, record: ReducedRecord, value: float, bound: float, message: str) -> Finding:
    """A finding of this very iteration, on its own batch."""
    return Finding(
        time=record.time,
        iteration=record.iteration,
        kind=kind,
        step=record.step,
        onset=record.iteration,
        value=value,
        bound=bound,
        message=message,
        cursors=[record.cursor],
    )


def broken_groups(norms: dict[str, float]) -> list[str]:
    """Layer groups whose norm is not finite."""
    return [name for name, norm in norms.items() if not math.isfinite(norm)]


@final
@dataclass(slots=True)
class NonfiniteGuard:
    raised: bool = False

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        """Whatever is not finite; names the ranks and layer groups where it came from, first of all broken weights."""
        weights = broken_groups(record.group_param_norms)
        broken = bool(weights) or not (math.isfinite(record.loss) and math.isfinite(record.grad_norm))
        if broken and not self.raised:
            value = record.grad_norm if math.isfinite(record.loss) else record.loss
            words = f"loss {record.loss:g}, gradient norm {record.grad_norm:g}"
            if weights:
                value, words = math.inf, f"weights of {', '.join(weights)} are beyond all numbers; {words}"
            finding = found_now(FindingKind.nonfinite, record, value, math.inf, words)
            finding.ranks = list(record.nonfinite_ranks)
            finding.groups = weights or broken_groups(record.group_grad_norms)
            yield finding
        self.raised = broken


@final
@dataclass(slots=True)
class WeightGuard:
    probes: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Step and norm of each group, oldest first, over the last `DRIFT_STEPS`."""
    raised: list[str] = field(default_factory=list)

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        """A group whose norm doubled or halved within 200 steps."""
        norms = record.group_param_norms or ({} if record.param_norm is None else {"all": record.param_norm})
        norms = {name: norm for name, norm in norms.items() if math.isfinite(norm) and norm > 0}
        if not norms or record.step < SETTLED_STEPS:
            return
        self.probes = [probe for probe in self.probes if record.step - DRIFT_STEPS <= probe[0] < record.step]
        factors = {
            name: max(
                (max(norm / old, old / norm) for _, probe in self.probes if (old := probe.get(name))), default=1.0
            )
            for name, norm in norms.items()
        }
        drifting = [name for name, factor in factors.items() if factor > DRIFT_FACTOR]
        fresh = [name for name in drifting if name not in self.raised]
        self.raised = drifting
        if not self.probes or record.step - self.probes[-1][0] >= DRIFT_STEPS // DRIFT_PROBES:
            self.probes.append((record.step, norms))
        if fresh:
            worst = max(fresh, key=lambda name: factors[name])
            words = f"norm of {worst} changed {factors[worst]:.2f}-fold within {DRIFT_STEPS} steps"
            finding = found_now(FindingKind.weight_drift, record, factors[worst], DRIFT_FACTOR, words)
            finding.groups = fresh
            yield finding


@final
@dataclass(slots=True)
class RateGuard:
    """The learning rate: where a line through the last two rows does not lead, nothing on a schedule goes."""

    step: int = -1
    rate: float = 0.0
    """Of the last row."""
    slope: float | None = None
    """Change a step between the last two rows; None where there are no two."""
    count: int = 0
    peak: float = 0.0
    expected: int = 0
    """Rows for which a change was announced."""
    rising: bool = False

    def observe(self, record: ReducedRecord) -> list[Finding]:
        rate, steps = record.lr, record.step - self.step
        change = rate - self.rate
        found, slope = [], change / steps if steps > 0 and self.count else None
        if slope is not None and self.slope is not None and self.count >= LEAST_ROWS:
            off_line = min(abs(change - self.slope * steps), abs(change))
            if off_line > JUMP_OF_PEAK * self.peak and off_line > JUMP_OF_VALUE * max(rate, self.rate):
                if self.expected == 0:
                    words = f"learning rate went from {self.rate:.3g} to {rate:.3g} in one row"
                    found = [found_now(FindingKind.lr_jump, record, rate, self.rate, words)]
                slope = None
        self.rising = self.count > 0 and change > 0.0
        self.step, self.rate, self.slope = record.step, rate, slope
        self.count += 1
        self.expected -= self.expected > 0
        if rate > self.peak:
            self.peak = rate
        return found


@final
@dataclass(slots=True)
class BatchGuard:
    seen: dict[str, int] = field(default_factory=dict)
    """Fingerprint -> batch index, oldest first."""
    differing: dict[str, list[int]] = field(default_factory=dict)
    """What differed in the last row in which something did -> ranks."""

    def compare(self, record: ReducedRecord) -> Iterator[Finding]:
        """Ranks that read other data than the rest; also of a row that was refused."""
        for what, ranks in record.other_data.items():
            if fresh := [rank for rank in ranks if rank not in self.differing.get(what, [])]:
                words = f"ranks {', '.join(map(str, fresh))} {OTHER_DATA[what]}"
                finding = found_now(FindingKind.data_mismatch, record, len(fresh), 0.0, words)
                finding.ranks, finding.cursors = fresh, []
                yield finding
        self.differing = {what: list(ranks) for what, ranks in record.other_data.items()}

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        """A batch whose tokens were seen before, under another index."""
        fingerprint = record.fingerprint
        before = self.seen.get(fingerprint, record.cursor)
        if before != record.cursor:
            words = f"batch {record.cursor} holds the same tokens as batch {before}"
            finding = found_now(FindingKind.duplicate_batch, record, record.cursor, before, words)
            finding.cursors = [before, record.cursor]
            yield finding
        self.seen[fingerprint] = record.cursor
        if len(self.seen) > NUM_FINGERPRINTS:
            del self.seen[next(iter(self.seen))]


@final
@dataclass(slots=True)
class ScaleGuard:
    """The loss scale of fp16: below 1, or unmoved by one overflow after the other."""

    last: float = 0.0
    stuck: int = 0
    raised: bool = False

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        scale = record.loss_scale
        if scale is None:
            return
        overflow = record.refused and not math.isfinite(record.grad_norm)
        self.stuck = self.stuck + 1 if overflow and scale == self.last else 0
        self.last = scale
        collapsed = scale < 1.0 or self.stuck >= STUCK_ROWS
        if collapsed and not self.raised:
            words = f"loss scale {scale:g}" + (f" did not move in {self.stuck} overflows" if scale >= 1.0 else "")
            yield found_now(FindingKind.scale_collapse, record, scale, 1.0, words)
        self.raised = collapsed


@final
@dataclass(slots=True)
class RankGuard:
    """One rank far from the others: at once where out of all proportion, else when it is the same one for long."""

    rows: dict[str, list[int]] = field(default_factory=dict)
    """Signal -> the rank that is far off, and for how many rows in a row."""
    raised: list[list[int | str]] = field(default_factory=list)
    mismatched: list[int] = field(default_factory=list)

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        raised: list[list[int | str]] = []
        for name, factor in RANK_FACTOR.items():
            spread = record.ranks.get(name)
            far = [(rank, value) for rank, value, sigmas in outlying(spread) if sigmas > FAR_SIGMAS]
            if spread is None or not far:
                self.rows.pop(name, None)
                continue
            rank, value = far[0]
            same, num = self.rows.get(name, [rank, 0])
            self.rows[name] = [rank, num + 1 if same == rank else 1]
            gross = [
                each
                for each, number, sigmas in outlying(spread)
                if sigmas > FARTHEST_SIGMAS and number > factor * spread["median"]
            ]
            guilty = gross or ([rank] if self.rows[name][1] >= FAR_ROWS else [])
            raised += [[name, each] for each in guilty]
            if fresh := [each for each in guilty if [name, each] not in self.raised]:
                words = f"{name} of rank {rank} is {value:.4g}, the median of all is {spread['median']:.4g}"
                finding = found_now(FindingKind.rank_outlier, record, value, spread["median"], words)
                finding.ranks = fresh
                yield finding
        self.raised = raised
        if fresh := [rank for rank in record.mismatched_ranks if rank not in self.mismatched]:
            words = f"weights of ranks {', '.join(map(str, fresh))} differ from their replicas"
            finding = found_now(FindingKind.replica_mismatch, record, len(fresh), 0.0, words)
            finding.ranks = fresh
            yield finding
        self.mismatched = list(record.mismatched_ranks)


def outlying(spread: RankSpread | None) -> list[tuple[int, float, float]]:
    """Rank, value and distance from the median in robust sigmas, of the ranks a record names; finite ones only."""
    if spread is None or not math.isfinite(spread["median"]):
        return []
    sigma = max(spread["spread"], LEAST_RANK_SPREAD * abs(spread["median"]), 1e-12)
    named = [(int(rank), float(value)) for rank, value in spread["worst"]]
    return [(rank, value, abs(value - spread["median"]) / sigma) for rank, value in named if math.isfinite(value)]
