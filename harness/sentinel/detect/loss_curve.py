"""Detects loss spikes, gradient spikes, level shifts and divergence in the curves of loss and gradient norm.

Why: single rows mislead. One batch can be odd, the loss of one rank is full of outliers, and easy data lets the loss
fall and come back. A damaged model stays high for several rows or never recovers.
How: the distance of each row above the baseline, in spreads and minus a slack, adds to a leaky sum (a one-sided CUSUM).
One row counts at most `row_sigmas`, so a spike takes two rows. If rows are several steps apart, a whole spike may fall
between them, and one extreme row is enough. If gradient norms are logged, they must rise too: new data shifts the loss,
not the gradients. Slow changes are detected on block means: if the minimum of the last blocks is above the maximum of
those before, the level shifted; blocks that keep rising, or stay far above and do not fall, are a divergence.
If rows are several steps apart, the memory of the baseline spans fewer of them, and from `SPARSE_INTERVAL` steps on
its other parts too (`scale_rows`): else they lag behind the steep start of a run, and spikes there stay below them.
What still lags there is subtracted, and the baseline does not follow the first rows of a rise (`_estimate_lag`).
Left out: the values of rejected updates; they change nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, final

from harness.config.sentinel import DetectConfig
from harness.core.events import Finding, FindingKind, ReducedRecord
from harness.sentinel.detect.baseline import (
    FIELDS,
    FLOATS,
    SMALLEST,
    State,
    advance,
    expected_log_value,
    initial_state,
    initial_state_late,
    reopen,
    tolerance,
    upper_bound,
)

LEAST_ROWS, LATE_STEPS = 20, 1000
"""Rows before the first finding; first step from which a log does not start with the steep descent."""
LARGE_RISE, DOUBLED = math.log(1.5), math.log(2.0)
"""A loss 50 % above its level needs no confirmation by the gradients, and is a divergence if it stays. At twice its
level one row is enough."""
FORGOTTEN_GRADIENT = 0.9
"""Decay per row of the highest recent gradient distance."""
NUM_RISING, NUM_FLOOR, NUM_CEILING, NUM_FAR, NUM_FALLING = 8, 8, 12, 4, 3
"""Numbers of blocks: that rise; whose minimum is compared; whose maximum it is compared with; that stay far above; that
fall if a spike recovers."""
NUM_BLOCKS, LEAST_BLOCK_ROWS = 40, 5
INTERVAL_ROWS = 16.0
"""Rows averaged in the interval."""
SPARSE_INTERVAL = 8
"""Steps between rows from which all rows of the baseline are scaled. At 5 steps only a shorter memory found more."""
LEAST_SCALED_ROWS = {"level_rows": 12, "memory_rows": 60, "spread_rows": 40, "warmup_rows": 20}
"""Rows that sparse logs keep at least; chosen on the tuning logs."""
LAG_ROWS, LARGEST_LAG = 8, 8.0
"""Rows averaged in the lag of a sparse baseline, and its limit per row in spreads."""
HELD_ROWS, HELD_FROM_COUNT = 2, 40
"""Rows of a rise that a sparse baseline does not follow, after this many rows."""
TRUST, TRUSTED = FIELDS.index("trust"), 0.5
"""Place of the trust in a state. Below this value the memory does not describe the recent rows: the loss falls
steeply."""
LEAST_QUIET_ROWS = 3
"""Minimum rows that end a spike. If rows are many steps apart, fewer rows make a block or end a spike."""
SHIFT_SIGMAS, RISE_SIGMAS, FALL_SIGMAS = 2.0, 3.0, 0.5
FALL_SHARE = 0.02
"""Share of the rise by which each block of a recovering spike falls, if that is less than `FALL_SIGMAS`."""
LOUD_FACTOR = 10.0
"""Multiple of the smallest rank's gradient norm from which a rank can be the cause of a spike."""
NUM_CURSORS = 16
"""Recent batches that are stored."""


@final
@dataclass(slots=True)
class CurveWatch:
    loss: State = field(default_factory=initial_state)
    grad: State = field(default_factory=initial_state)
    sum: float = 0.0
    """Leaky sum of the distances above the slack, in spreads."""
    onset: int = 0
    """Iteration at which the sum left zero."""
    gradient: float = 0.0
    """Highest recent distance of the gradient norm, in spreads; decays."""
    spiking: bool = False
    quiet: int = 0
    """Normal rows since the spike."""
    grad_spiking: bool = False
    grad_quiet: int = 0
    last_step: int | None = None
    interval: float = 1.0
    """Steps between rows."""
    cursors: list[int] = field(default_factory=list)
    """Batches of the last rows, newest last."""
    blocks: list[Any] = field(default_factory=list)
    """First iteration, mean log loss and gradient level of each block; oldest first."""
    block: list[Any] = field(default_factory=list)
    """The current block: its first iteration, its final number of rows, its rows so far, and their sum."""
    slow: str = ""
    """The last slow change: divergence, level_shift or empty."""
    slow_quiet: int = 0
    """Blocks without a slow change since then."""
    lag: float = 0.0
    """Mean distance of the recent rows below the expected log loss, in a sparse log; 0 or negative."""
    held: int = 0
    """Rows of the current rise that the baseline did not follow."""

    def observe(self, record: ReducedRecord, cfg: DetectConfig, warming: float) -> list[Finding]:
        """Return the findings of a row that was applied and is finite."""
        steps = 1 if self.last_step is None else record.step - self.last_step
        if steps <= 0:
            self._start_over(record)
        elif self.last_step is None and record.step > LATE_STEPS:
            self.loss = initial_state_late(record.loss)
            self.grad = initial_state_late(record.grad_norm) if record.grad_norm > 0 else self.grad
        self.last_step = record.step
        self.cursors.append(record.cursor)
        if len(self.cursors) > 2 * NUM_CURSORS:
            del self.cursors[:-NUM_CURSORS]
        found = [self._watch_gradient(record, cfg, warming)] if record.grad_norm > 0 else []
        followed = record.loss
        if self.loss[0]:
            is_steep = self.interval >= SPARSE_INTERVAL and self.loss[TRUST] < TRUSTED
            found.append(self._watch_loss(record, cfg, warming, steps, lag=self.lag if is_steep else 0.0))
            followed = self._estimate_lag(record, cfg) if is_steep else record.loss
        self.loss = advance(self.loss, followed, True, cfg, FLOATS)
        if self._fill_block(record, cfg, steps):
            found.append(self._watch_blocks(record, cfg))
        return [finding for finding in found if finding is not None]

    def observe_rejected(self, record: ReducedRecord, cfg: DetectConfig) -> Iterator[Finding]:
        """Yield the findings of a rejected update; the baselines do not change."""
        limit = upper_bound(self.grad, cfg, FLOATS, sigmas=cfg.lone_sigmas, factor=cfg.grad_spike_factor)
        if self.grad[0] and record.grad_norm > limit:
            yield self._make_grad_spike(record, limit)
        limit = upper_bound(self.loss, cfg, FLOATS, sigmas=cfg.lone_sigmas, factor=1.0)
        if self.loss[0] and record.loss > limit:
            message = "the gate rejected the update of this batch for its loss"
            finding = self._make_finding(FindingKind.loss_spike, record, record.iteration, limit, message)
            finding.cursors = [record.cursor]
            yield finding

    def accept_level(self, *, loss: float | None = None, grad_norm: float | None = None) -> None:
        """Set the baselines to these levels, or to the present loss and gradient norm."""
        loss, grad_norm = loss or math.exp(self.loss[-1]), grad_norm or math.exp(self.grad[-1])
        self.loss = reopen(self.loss, loss, bool(self.loss[0]), FLOATS)
        self.grad = reopen(self.grad, grad_norm, bool(self.grad[0]), FLOATS)
        self._forget()

    def _watch_gradient(self, record: ReducedRecord, cfg: DetectConfig, warming: float) -> Finding | None:
        finding = None
        if self.grad[0]:
            level, spread = expected_log_value(self.grad, cfg, FLOATS)
            wide = tolerance(self.grad, cfg, FLOATS, warming=warming)
            distance = math.log(record.grad_norm) - level
            height, faded = distance / (spread * wide), FORGOTTEN_GRADIENT * self.gradient
            self.gradient = height if height > faded else faded
            beyond = height > cfg.lone_sigmas and distance > math.log(cfg.grad_spike_factor)
            if beyond and not self.grad_spiking:
                finding = self._make_grad_spike(record, math.exp(level) * cfg.grad_spike_factor)
            self.grad_quiet = 0 if beyond else self.grad_quiet + 1
            self.grad_spiking = beyond or (self.grad_spiking and self.grad_quiet < cfg.recovered_rows)
        self.grad = advance(self.grad, record.grad_norm, True, cfg, FLOATS)
        return finding

    def _estimate_lag(self, record: ReducedRecord, cfg: DetectConfig) -> float:
        """Measure how far the loss falls ahead of the baseline; returns the value that the baseline follows."""
        level, spread = expected_log_value(self.loss, cfg, FLOATS)
        if self.sum == 0.0:
            below = min(math.log(max(record.loss, SMALLEST)) - level, 0.0)
            self.lag += (max(below, -LARGEST_LAG * spread) - self.lag) / LAG_ROWS
            self.held = 0
        elif not self.spiking and self.held < HELD_ROWS and self.loss[0] >= HELD_FROM_COUNT:
            self.held += 1
            return min(record.loss, math.exp(level))
        return record.loss

    def _watch_loss(
        self, record: ReducedRecord, cfg: DetectConfig, warming: float, steps: int, *, lag: float
    ) -> Finding | None:
        level, spread = expected_log_value(self.loss, cfg, FLOATS)
        level += lag
        wide = tolerance(self.loss, cfg, FLOATS, warming=warming)
        rise = (math.log(record.loss) if record.loss > SMALLEST else math.log(SMALLEST)) - level
        distance = rise / (spread * wide)
        if self.sum == 0.0:
            if distance <= cfg.slack_sigmas and not self.spiking:
                return None
            self.onset = record.iteration
        gained = min(distance, cfg.row_sigmas) - cfg.slack_sigmas
        self.sum = max(0.0, (1.0 - cfg.spike_forgetting) * self.sum + gained)
        if self.spiking:
            self.quiet = self.quiet + 1 if distance < cfg.slack_sigmas else 0
            if self.quiet >= max(LEAST_QUIET_ROWS, cfg.recovered_rows / self.interval):
                self.spiking, self.sum = False, 0.0
            return None
        is_extreme = rise > spread * math.sqrt(wide) * cfg.lone_sigmas and (steps > 1 or rise > DOUBLED)
        is_sustained = self.sum > cfg.spike_sigmas and distance > cfg.slack_sigmas
        is_confirmed = not self.grad[0] or self.gradient > cfg.slack_sigmas or rise > LARGE_RISE
        if not ((is_extreme or is_sustained) and is_confirmed and self.loss[0] >= LEAST_ROWS):
            return None
        self.spiking, self.quiet = True, 0
        limit = math.exp(level + cfg.slack_sigmas * spread * wide)
        message = f"loss {record.loss:.4g} is {rise / spread:.1f} sigma above normal ({math.exp(level):.4g})"
        return self._make_finding(FindingKind.loss_spike, record, self.onset, limit, message)

    def _fill_block(self, record: ReducedRecord, cfg: DetectConfig, steps: int) -> bool:
        """Add a row to the current block; returns whether the block is full."""
        if steps > 0 and steps != self.interval:
            self.interval = next_interval(self.interval, steps, num_rows=self.loss[0])
        if not self.block:
            wanted = max(LEAST_BLOCK_ROWS, round(cfg.divergence_rows / NUM_RISING / self.interval))
            self.block = [record.iteration, wanted, 0, 0.0]
        block = self.block
        block[2] += 1
        block[3] += math.log(record.loss) if record.loss > SMALLEST else math.log(SMALLEST)
        if block[2] < block[1]:
            return False
        self.blocks = [*self.blocks[1 - NUM_BLOCKS :], [block[0], block[3] / block[2], self.grad[1]]]
        self.block = []
        return True

    def _watch_blocks(self, record: ReducedRecord, cfg: DetectConfig) -> Finding | None:
        means = [mean for _, mean, _ in self.blocks]
        shown = slow_change(means, expected_log_value(self.loss, cfg, FLOATS)[1])
        recent = range(max(1, len(means) - NUM_FLOOR - NUM_CEILING // 2), len(means))
        lowest = max(recent, key=lambda index: -means[index - 1], default=0)
        first, _, grad_level = self.blocks[lowest]
        rise = means[-1] - means[lowest - 1]
        moved = not self.grad[0] or self.grad[1] - grad_level > expected_log_value(self.grad, cfg, FLOATS)[1]
        if shown and not moved and rise < LARGE_RISE:
            shown = FindingKind.level_shift
        self.slow_quiet = 0 if shown else self.slow_quiet + 1
        if self.slow_quiet >= NUM_FLOOR:
            self.slow = ""
        if not shown or self.slow in (shown, FindingKind.divergence):
            return None
        self.slow = shown
        now = math.exp(means[-1])
        message = f"loss rose by {rise:.1%} to {now:.4g} and stays there"
        if not moved:
            message += "; gradient norms did not rise: new data rather than damage"
        limit = math.exp(means[lowest - 1])
        return self._make_finding(FindingKind(shown), record, int(first), limit, message, value=now)

    def _make_grad_spike(self, record: ReducedRecord, limit: float) -> Finding:
        largest = max(record.group_grad_norms.values(), default=0.0)
        groups = [name for name, norm in record.group_grad_norms.items() if norm >= 0.5 * largest]
        message, value = f"gradient norm {record.grad_norm:.4g} exceeds its bound of {limit:.4g}", record.grad_norm
        finding = self._make_finding(FindingKind.grad_spike, record, record.iteration, limit, message, value=value)
        finding.groups, finding.cursors, finding.ranks = groups, [record.cursor], loud_ranks(record)
        return finding

    def _make_finding(
        self,
        kind: FindingKind,
        record: ReducedRecord,
        onset: int,
        limit: float,
        message: str,
        *,
        value: float | None = None,
    ) -> Finding:
        back = min(record.iteration - onset + 2, NUM_CURSORS)
        return Finding(
            time=record.time,
            iteration=record.iteration,
            kind=kind,
            step=record.step,
            onset=onset,
            value=record.loss if value is None else value,
            bound=limit,
            message=message,
            cursors=self.cursors[-back:],
        )

    def _start_over(self, record: ReducedRecord) -> None:
        """The steps went back, as after a restart from a checkpoint: keep only the spreads."""
        self.loss = reopen(self.loss, record.loss, bool(self.loss[0]), FLOATS)
        self.grad = reopen(self.grad, record.grad_norm, bool(self.grad[0]) and record.grad_norm > 0, FLOATS)
        self._forget()

    def _forget(self) -> None:
        self.sum, self.spiking, self.quiet, self.lag, self.held = 0.0, False, 0, 0.0, 0
        self.blocks, self.block, self.slow, self.slow_quiet = [], [], "", 0


def scale_rows(cfg: DetectConfig, interval: int) -> DetectConfig:
    """The config for rows that are `interval` steps apart. The memory and, from `SPARSE_INTERVAL` on, the first rows
    span as many steps as before. Averages over fewer rows are noisier, so level and spread then span more steps than
    before, by the root of the interval."""
    rows = {"memory_rows": cfg.memory_rows / interval}
    if interval >= SPARSE_INTERVAL:
        rows["level_rows"] = cfg.level_rows / math.sqrt(interval)
        rows["spread_rows"] = cfg.spread_rows / math.sqrt(interval)
        rows["warmup_rows"] = cfg.warmup_rows / interval
    least = {name: min(getattr(cfg, name), LEAST_SCALED_ROWS[name]) for name in rows}
    return replace(cfg, **{name: max(least[name], round(num)) for name, num in rows.items()})


def next_interval(interval: float, steps: int, *, num_rows: float) -> float:
    """Mean number of steps between rows. A long gap, as at a restart, counts little; in the first rows there is none to
    compare it with."""
    if num_rows <= INTERVAL_ROWS:
        return interval + (steps - interval) / max(num_rows - 1.0, 1.0)
    return interval + (min(float(steps), 4.0 * interval) - interval) / INTERVAL_ROWS


def slow_change(means: list[float], spread: float) -> str:
    """Classify block means of the log loss, oldest first: divergence, level_shift or empty."""
    recent = means[-NUM_FLOOR - NUM_CEILING :]
    if len(recent) <= NUM_RISING:
        return ""
    rise = min(recent[-NUM_FAR:]) - max(recent[:-NUM_FAR])
    is_far = rise > LARGE_RISE and not _falls(recent[-NUM_FALLING:], rise, spread)
    if is_far or _rises(recent, spread) or _creeps(means, spread):
        return FindingKind.divergence
    stays = min(recent[-NUM_FLOOR:]) > max(recent[:-NUM_FLOOR]) + SHIFT_SIGMAS * spread
    return FindingKind.level_shift if stays and len(recent) == NUM_FLOOR + NUM_CEILING else ""


def _falls(means: list[float], rise: float, spread: float) -> bool:
    """Whether blocks fall steadily, as those of a spike that recovers over hundreds of rows."""
    least = min(FALL_SIGMAS * spread, FALL_SHARE * rise)
    return all(earlier - later > least for earlier, later in pairwise(means))


def _rises(means: list[float], spread: float) -> bool:
    """Whether the last blocks rise steadily above all earlier ones, and not only in the last block."""
    rising = means[-NUM_RISING:]
    lowest = max(*means[:-NUM_RISING], rising[0])
    num_ups = sum(later > earlier for earlier, later in pairwise(rising))
    rose = rising[-1] == max(rising) and rising[-1] > lowest + RISE_SIGMAS * spread
    return num_ups >= NUM_RISING - 2 and rose and rising[-NUM_FAR] > lowest + 0.25 * RISE_SIGMAS * spread


def _creeps(means: list[float], spread: float) -> bool:
    """Whether the later half rises, too slowly to show between single blocks, above all of the earlier half."""
    if len(means) < NUM_BLOCKS:
        return False
    size = NUM_BLOCKS // 8
    quarters = [sum(means[first : first + size]) / size for first in range(NUM_BLOCKS // 2, NUM_BLOCKS, size)]
    rises = all(later - earlier > 0.25 * RISE_SIGMAS * spread for earlier, later in pairwise(quarters))
    return rises and quarters[-1] > max(means[: NUM_BLOCKS // 2]) + 0.25 * RISE_SIGMAS * spread


def restore_curve_watch(data: dict[str, Any]) -> CurveWatch:
    """Rebuild from a dict of fields; JSON has turned tuples into lists."""
    watch = CurveWatch(**data)
    watch.loss, watch.grad = tuple(watch.loss), tuple(watch.grad)
    return watch


def loud_ranks(record: ReducedRecord) -> list[int]:
    """Ranks whose own gradient is at least half of the global one and far above that of other ranks."""
    spread = record.ranks.get("grad_norm")
    if spread is None:
        return []
    norms = {int(rank): float(norm) for rank, norm in spread["worst"]}
    least = min([spread["median"], *norms.values()])
    return sorted(rank for rank, norm in norms.items() if norm >= 0.5 * record.grad_norm and norm > LOUD_FACTOR * least)
