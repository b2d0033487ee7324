"""Guards for non-finite values, weights, learning rate, data, loss scale and ranks: one small class per finding.

How: the fields of a guard are its whole state and plain data. `observe` raises a finding when its condition begins to
hold, and again only after the condition ceased. A field that is missing in a record raises nothing.
All guards read a `ReducedRecord`, which has only fields that are equal on all ranks: every rank has the same findings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from harness.core.events import Finding, FindingKind, RankSpread, ReducedRecord

DRIFT_STEPS, DRIFT_FACTOR, DRIFT_PROBES, FASTER = 200, 2.0, 10, 1.5
"""Window of weight drift, in steps; factor of the norm within it; probes in it; factor on the growth per step before
the window, up to which a growing norm is still learning."""
SETTLED_STEPS = 100
"""Steps before norms of weights and moments are compared with anything: they start near zero."""
JUMP_OF_PEAK, JUMP_OF_VALUE, EXPECTED_ROWS = 0.1, 0.2, 50
"""An lr change is a jump above these shares of the peak lr and of the lr itself; rows for which a change is
expected."""
FALLS_ON = 0.5
"""A rate falls on if it falls in the next row too, by at least this share of the fall per step."""
MOST_EXPECTED_RISE = 3.0
"""A change on purpose that multiplies the rate by more than this within one record is a jump all the same: after more
steps were added at the end of a schedule, for example."""
LEAST_ROWS = 20
"""Rows before a learning rate can be a jump: logs round the small ones of the warm-up."""
NUM_FINGERPRINTS = 512
OTHER_DATA = {
    "plan": "have another corpus, order or ledger than the rest",
    "rows": "read other tokens for the same row",
}
"""Message for each kind of difference between the data of ranks."""
STUCK_ROWS = 5
FAR_SIGMAS, FARTHEST_SIGMAS, FAR_ROWS = 8.0, 20.0, 5
RANK_FACTOR = {"grad_norm": 10.0, "loss": 2.0}
"""Multiple of the median from which one rank stands out in a single row."""
LEAST_RANK_SPREAD = 0.02
"""Minimum spread as a share of the median; smaller differences between ranks are insignificant."""


def make_finding(kind: FindingKind, record: ReducedRecord, value: float, bound: float, message: str) -> Finding:
    """A finding whose onset is this iteration and whose batch is that of the record."""
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
        """Non-finite loss, gradient norm or weights; names the ranks and the layer groups, those of weights first."""
        weights = broken_groups(record.group_param_norms)
        broken = bool(weights) or not (math.isfinite(record.loss) and math.isfinite(record.grad_norm))
        if broken and not self.raised:
            value = record.grad_norm if math.isfinite(record.loss) else record.loss
            message = f"loss {record.loss:g}, gradient norm {record.grad_norm:g}"
            if weights:
                value, message = math.inf, f"weights of {', '.join(weights)} are not finite; {message}"
            finding = make_finding(FindingKind.nonfinite, record, value, math.inf, message)
            finding.ranks = list(record.nonfinite_ranks)
            finding.groups = weights or broken_groups(record.group_grad_norms)
            yield finding
        self.raised = broken


@final
@dataclass(slots=True)
class WeightGuard:
    probes: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Step and norm of each layer group over the last two windows of `DRIFT_STEPS`, oldest first."""
    raised: list[str] = field(default_factory=list)

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        """Layer groups whose weight norm doubled or halved within 200 steps. An update changes a norm by a limited
        amount, so a norm that began small doubles while it learns: growth that is no faster than before is no drift."""
        norms = record.group_param_norms or ({} if record.param_norm is None else {"all": record.param_norm})
        norms = {name: norm for name, norm in norms.items() if math.isfinite(norm) and norm > 0}
        if not norms:
            return
        self.probes = [probe for probe in self.probes if record.step - 2 * DRIFT_STEPS <= probe[0] < record.step]
        factors = {name: self._drift(name, norm, record.step) for name, norm in norms.items()}
        drifting = [name for name, factor in factors.items() if factor > DRIFT_FACTOR]
        fresh = [name for name in drifting if name not in self.raised]
        self.raised = drifting
        last = self.probes[-1][0] if self.probes else -DRIFT_STEPS
        if record.step - last >= DRIFT_STEPS // DRIFT_PROBES or last < SETTLED_STEPS <= record.step:
            self.probes.append((record.step, norms))
        if fresh:
            worst = max(fresh, key=lambda name: factors[name])
            message = f"weight norm of {worst} changed by a factor of {factors[worst]:.2f} within {DRIFT_STEPS} steps"
            finding = make_finding(FindingKind.weight_drift, record, factors[worst], DRIFT_FACTOR, message)
            finding.groups = fresh
            yield finding

    def _drift(self, name: str, norm: float, step: int) -> float:
        """Largest factor between the norm of a group and one within the window, unless the group is still learning."""
        first = max(step - DRIFT_STEPS, SETTLED_STEPS)
        largest = 1.0
        for at, probe in self.probes:
            old = probe.get(name)
            if at < first or old is None:
                continue
            factor = max(norm / old, old / norm)
            is_learning = norm > old and (norm - old) / (step - at) <= FASTER * self._growth_before(name, at)
            if factor > largest and not (factor > DRIFT_FACTOR and is_learning):
                largest = factor
        return largest

    def _growth_before(self, name: str, step: int) -> float:
        """Growth of a norm per step in the window before a step; 0 if it is not known or the norm shrank."""
        earlier = [probe for probe in self.probes if step - DRIFT_STEPS <= probe[0] <= step and probe[1].get(name)]
        if not earlier or earlier[-1][0] - earlier[0][0] < DRIFT_STEPS // DRIFT_PROBES:
            return 0.0
        (first, old), (last, new) = earlier[0], earlier[-1]
        return max(0.0, (new[name] - old[name]) / (last - first))


@final
@dataclass(slots=True)
class RateGuard:
    """Learning-rate jumps: a schedule is locally linear, so a row far off the line through the last two is a jump.

    A fall is one only if the next row does not fall on: where a short decay begins, the line bends and goes on.
    """

    step: int = -1
    rate: float = 0.0
    """Of the last row."""
    slope: float | None = None
    """Change per step between the last two rows; None with fewer rows."""
    count: int = 0
    peak: float = 0.0
    expected: int = 0
    """Rows left in which a change is expected, unless the rate rises by more than `MOST_EXPECTED_RISE`."""
    rising: bool = False
    fallen: list[float] = field(default_factory=list)
    """Of a fall in the last row, which the next row decides: its iteration, the rates before and after, and the change
    per step."""

    def observe(self, record: ReducedRecord) -> list[Finding]:
        rate, steps = record.lr, record.step - self.step
        change = rate - self.rate
        slope = change / steps if steps > 0 and self.count else None
        found, self.fallen = self._judge_fall(record, slope), []
        if slope is not None and self.slope is not None and self.count >= LEAST_ROWS:
            off_line = min(abs(change - self.slope * steps), abs(change))
            if off_line > JUMP_OF_PEAK * self.peak and off_line > JUMP_OF_VALUE * max(rate, self.rate):
                if change < 0.0 and self.expected == 0:
                    self.fallen = [record.iteration, self.rate, rate, slope]
                elif self.expected == 0 or rate > MOST_EXPECTED_RISE * self.rate:
                    found.append(make_jump(record, self.rate, rate))
                slope = None
        self.rising = self.count > 0 and change > 0.0
        self.step, self.rate, self.slope = record.step, rate, slope
        self.count += 1
        self.expected -= self.expected > 0
        if rate > self.peak:
            self.peak = rate
        return found

    def _judge_fall(self, record: ReducedRecord, slope: float | None) -> list[Finding]:
        """The finding of a fall in the row before, unless the rate falls on, or a restore undid the row."""
        if not self.fallen or slope is None:
            return []
        iteration, before, after, fall = self.fallen
        if slope <= FALLS_ON * fall:
            return []
        finding = make_jump(record, before, after)
        finding.onset = int(iteration)
        return [finding]


def make_jump(record: ReducedRecord, before: float, after: float) -> Finding:
    message = f"learning rate jumped from {before:.3g} to {after:.3g} within one record"
    return make_finding(FindingKind.lr_jump, record, after, before, message)


@final
@dataclass(slots=True)
class BatchGuard:
    seen: dict[str, int] = field(default_factory=dict)
    """Fingerprint -> batch index, oldest first."""
    differing: dict[str, list[int]] = field(default_factory=dict)
    """Kind of difference -> ranks, in the last row with a difference."""

    def compare(self, record: ReducedRecord) -> Iterator[Finding]:
        """Ranks that read other data than the rest; also if the update was rejected."""
        for difference, ranks in record.other_data.items():
            if fresh := [rank for rank in ranks if rank not in self.differing.get(difference, [])]:
                message = f"ranks {', '.join(map(str, fresh))} {OTHER_DATA[difference]}"
                finding = make_finding(FindingKind.data_mismatch, record, len(fresh), 0.0, message)
                finding.ranks, finding.cursors = fresh, []
                yield finding
        self.differing = {difference: list(ranks) for difference, ranks in record.other_data.items()}

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        """A batch with the same tokens as a recent batch of another index."""
        fingerprint = record.fingerprint
        before = self.seen.get(fingerprint, record.cursor)
        if before != record.cursor:
            message = f"batch {record.cursor} holds the same tokens as batch {before}"
            finding = make_finding(FindingKind.duplicate_batch, record, record.cursor, before, message)
            finding.cursors = [before, record.cursor]
            yield finding
        self.seen[fingerprint] = record.cursor
        if len(self.seen) > NUM_FINGERPRINTS:
            del self.seen[next(iter(self.seen))]


@final
@dataclass(slots=True)
class ScaleGuard:
    """The fp16 loss scale: below 1, or unchanged by consecutive overflows."""

    last: float = 0.0
    stuck: int = 0
    raised: bool = False

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        scale = record.loss_scale
        if scale is None:
            return
        overflow = record.refused and math.isfinite(record.loss) and not math.isfinite(record.grad_norm)
        self.stuck = self.stuck + 1 if overflow and scale == self.last else 0
        self.last = scale
        collapsed = scale < 1.0 or self.stuck >= STUCK_ROWS
        if collapsed and not self.raised:
            stuck = f" did not change in {self.stuck} overflows" if scale >= 1.0 else ""
            yield make_finding(FindingKind.scale_collapse, record, scale, 1.0, f"loss scale {scale:g}{stuck}")
        self.raised = collapsed


@final
@dataclass(slots=True)
class RankGuard:
    """One rank far from the others: at once if extreme, else after `FAR_ROWS` rows with the same rank."""

    rows: dict[str, list[int]] = field(default_factory=dict)
    """Signal -> the outlying rank, and its number of consecutive rows."""
    raised: list[list[int | str]] = field(default_factory=list)
    mismatched: list[int] = field(default_factory=list)

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        raised: list[list[int | str]] = []
        for name, factor in RANK_FACTOR.items():
            spread = record.ranks.get(name)
            far = [(rank, value) for rank, value, sigmas in rank_distances(spread) if sigmas > FAR_SIGMAS]
            if spread is None or not far:
                self.rows.pop(name, None)
                continue
            rank, value = far[0]
            same, num = self.rows.get(name, [rank, 0])
            self.rows[name] = [rank, num + 1 if same == rank else 1]
            extreme = [
                other
                for other, number, sigmas in rank_distances(spread)
                if sigmas > FARTHEST_SIGMAS and number > factor * spread["median"]
            ]
            outliers = extreme or ([rank] if self.rows[name][1] >= FAR_ROWS else [])
            raised += [[name, outlier] for outlier in outliers]
            if fresh := [outlier for outlier in outliers if [name, outlier] not in self.raised]:
                message = f"{name} of rank {rank} is {value:.4g}, the median over ranks is {spread['median']:.4g}"
                finding = make_finding(FindingKind.rank_outlier, record, value, spread["median"], message)
                finding.ranks = fresh
                yield finding
        self.raised = raised
        if record.changed_ranks:
            yield self._make_weights_changed(record)
            return  # the ranks that differ from their replicas are known
        if fresh := [rank for rank in record.mismatched_ranks if rank not in self.mismatched]:
            message = f"weights of ranks {', '.join(map(str, fresh))} differ from their replicas"
            finding = make_finding(FindingKind.replica_mismatch, record, len(fresh), 0.0, message)
            finding.ranks = fresh
            yield finding
        self.mismatched = list(record.mismatched_ranks)

    def _make_weights_changed(self, record: ReducedRecord) -> Finding:
        """The last update read other weights than the one before it had left. The snapshot after that one may hold
        them, so its iteration is the onset."""
        named = ", ".join(map(str, record.changed_ranks))
        message = f"weights of ranks {named} changed between two updates"
        finding = make_finding(FindingKind.weights_changed, record, len(record.changed_ranks), 0.0, message)
        finding.ranks, finding.onset, finding.cursors = list(record.changed_ranks), max(record.iteration - 2, 0), []
        return finding


def rank_distances(spread: RankSpread | None) -> list[tuple[int, float, float]]:
    """Rank, value and distance from the median in robust sigmas, of the finite values that a record lists."""
    if spread is None or not math.isfinite(spread["median"]):
        return []
    sigma = max(spread["spread"], LEAST_RANK_SPREAD * abs(spread["median"]), 1e-12)
    named = [(int(rank), float(value)) for rank, value in spread["worst"]]
    return [(rank, value, abs(value - spread["median"]) / sigma) for rank, value in named if math.isfinite(value)]
