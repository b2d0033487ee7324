"""What the curves of loss and gradient norm show: spikes, shifts of level, divergence.

Why: single rows mislead. A batch can be odd for one step, the loss of one rank is full of outliers, easy data lets the
loss fall and come back; a model that breaks stays high for several rows, or never comes back.
How: each row's distance above the baseline, in spreads, beyond what every row has free, adds to a sum that forgets; one
row counts only so much, so it takes two. Where rows are several steps apart a whole spike may fit between them, and one
extreme row is enough. Where gradient norms are known they must move too: other data shifts the loss, not the gradients.
Slow change is judged on means of blocks: a floor of the last blocks above the ceiling of those before is a shift of the
level; blocks that keep rising, or stay far above, are a divergence.
Left out: what a step was refused for; its numbers enter nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, final

from harness.config.sentinel import DetectConfig
from harness.core.events import Finding, FindingKind, ReducedRecord
from harness.sentinel.detect.baseline import (
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
"""Rows before anything is said; steps from which on a log does not begin with the steep start."""
LARGE_RISE, DOUBLED = math.log(1.5), math.log(2.0)
"""A loss 50 % above its level needs no second witness and is a divergence where it stays; twice, no second row."""
FORGOTTEN_GRADIENT = 0.9
NUM_RISING, NUM_FLOOR, NUM_CEILING, NUM_FAR = 8, 8, 12, 4
"""Blocks that rise, that make the floor, that it is held against, and that stay far above."""
NUM_BLOCKS, LEAST_BLOCK_ROWS = 40, 5
LEAST_QUIET_ROWS = 3
"""Where rows are many steps apart, fewer of them make a block or the end of a spike."""
SHIFT_SIGMAS, RISE_SIGMAS = 2.0, 3.0
LOUD_FACTOR = 10.0
"""Times the quietest rank's gradient norm from which a rank can be to blame for a spike."""
NUM_CURSORS = 16


@final
@dataclass(slots=True)
class CurveWatch:
    loss: State = field(default_factory=initial_state)
    grad: State = field(default_factory=initial_state)
    sum: float = 0.0
    """Distance beyond the slack, in spreads, of the last rows."""
    onset: int = 0
    """Iteration where the sum left zero."""
    gradient: float = 0.0
    """Highest distance of recent gradient norms, in spreads."""
    spiking: bool = False
    quiet: int = 0
    """Rows back to normal since the spike."""
    grad_spiking: bool = False
    grad_quiet: int = 0
    last_step: int | None = None
    interval: float = 1.0
    """Steps between rows."""
    cursors: list[int] = field(default_factory=list)
    """Batches of the last rows, newest last."""
    blocks: list[Any] = field(default_factory=list)
    """First iteration, mean of the logarithm of the loss, and level of the gradient norm; oldest first."""
    block: list[Any] = field(default_factory=list)
    """The block that fills: its first iteration, rows it will have, rows it has, and their sum."""
    slow: str = ""
    """What the blocks showed last."""
    slow_quiet: int = 0
    """Blocks since then."""

    def observe(self, record: ReducedRecord, cfg: DetectConfig, warming: float) -> list[Finding]:
        """Findings of one row that was applied and is finite."""
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
        if self.loss[0]:
            found.append(self._watch_loss(record, cfg, warming, steps))
        self.loss = advance(self.loss, record.loss, True, cfg, FLOATS)
        if self._fill_block(record, cfg, steps):
            found.append(self._watch_blocks(record, cfg))
        return [finding for finding in found if finding is not None]

    def observe_rejected(self, record: ReducedRecord, cfg: DetectConfig) -> Iterator[Finding]:
        """What a refused row would have been; nothing is learnt from it."""
        limit = upper_bound(self.grad, cfg, FLOATS, sigmas=cfg.lone_sigmas, factor=cfg.grad_spike_factor)
        if self.grad[0] and record.grad_norm > limit:
            yield self._grad_spike(record, limit)
        limit = upper_bound(self.loss, cfg, FLOATS, sigmas=cfg.lone_sigmas, factor=1.0)
        if self.loss[0] and record.loss > limit:
            words = "the gate refused this batch for its loss"
            finding = self._finding(FindingKind.loss_spike, record, record.iteration, limit, words)
            finding.cursors = [record.cursor]
            yield finding

    def accept_level(self, *, loss: float | None = None, grad_norm: float | None = None) -> None:
        """These levels, or where loss and gradient norm are now, are normal from here on."""
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
                finding = self._grad_spike(record, math.exp(level) * cfg.grad_spike_factor)
            self.grad_quiet = 0 if beyond else self.grad_quiet + 1
            self.grad_spiking = beyond or (self.grad_spiking and self.grad_quiet < cfg.recovered_rows)
        self.grad = advance(self.grad, record.grad_norm, True, cfg, FLOATS)
        return finding

    def _watch_loss(self, record: ReducedRecord, cfg: DetectConfig, warming: float, steps: int) -> Finding | None:
        level, spread = expected_log_value(self.loss, cfg, FLOATS)
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
        alone = rise > spread * math.sqrt(wide) * cfg.lone_sigmas and (steps > 1 or rise > DOUBLED)
        summed = self.sum > cfg.spike_sigmas and distance > cfg.slack_sigmas
        witnessed = not self.grad[0] or self.gradient > cfg.slack_sigmas or rise > LARGE_RISE
        if not ((alone or summed) and witnessed and self.loss[0] >= LEAST_ROWS):
            return None
        self.spiking, self.quiet = True, 0
        limit = math.exp(level + cfg.slack_sigmas * spread * wide)
        words = f"loss {record.loss:.4g}, {rise / spread:.1f} spreads above its level of {math.exp(level):.4g}"
        return self._finding(FindingKind.loss_spike, record, self.onset, limit, words)

    def _fill_block(self, record: ReducedRecord, cfg: DetectConfig, steps: int) -> bool:
        """Add a row; whether its block is full."""
        if steps > 0 and steps != self.interval:
            self.interval += (min(float(steps), 4.0 * self.interval) - self.interval) / 16.0
        if not self.block:
            wanted = max(LEAST_BLOCK_ROWS, round(cfg.divergence_rows / NUM_RISING / self.interval))
            self.block = [record.iteration, wanted, 0, 0.0]
        block = self.block
        block[2] += 1
        block[3] += self.loss[-1]
        if block[2] < block[1]:
            return False
        self.blocks = [*self.blocks[1 - NUM_BLOCKS :], [block[0], block[3] / block[2], self.grad[1]]]
        self.block = []
        return True

    def _watch_blocks(self, record: ReducedRecord, cfg: DetectConfig) -> Finding | None:
        means = [mean for _, mean, _ in self.blocks]
        shown = slow_change(means, expected_log_value(self.loss, cfg, FLOATS)[1])
        recent = range(max(1, len(means) - NUM_FLOOR - NUM_CEILING // 2), len(means))
        lowest = max(recent, key=lambda place: -means[place - 1], default=0)
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
        words = f"loss rose by {rise:.1%} to {now:.4g} and has not come back"
        if not moved:
            words += "; gradients did not move: other data rather than damage"
        limit = math.exp(means[lowest - 1])
        return self._finding(FindingKind(shown), record, int(first), limit, words, value=now)

    def _grad_spike(self, record: ReducedRecord, limit: float) -> Finding:
        largest = max(record.group_grad_norms.values(), default=0.0)
        groups = [name for name, norm in record.group_grad_norms.items() if norm >= 0.5 * largest]
        words = f"gradient norm {record.grad_norm:.4g} against at most {limit:.4g}"
        finding = self._finding(FindingKind.grad_spike, record, record.iteration, limit, words, value=record.grad_norm)
        finding.groups, finding.cursors, finding.ranks = groups, [record.cursor], loud_ranks(record)
        return finding

    def _finding(
        self,
        kind: FindingKind,
        record: ReducedRecord,
        onset: int,
        limit: float,
        words: str,
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
            message=words,
            cursors=self.cursors[-back:],
        )

    def _start_over(self, record: ReducedRecord) -> None:
        """The steps went back, as after a restart from a checkpoint: what was learnt of the noise is all that holds."""
        self.loss = reopen(self.loss, record.loss, bool(self.loss[0]), FLOATS)
        self.grad = reopen(self.grad, record.grad_norm, bool(self.grad[0]) and record.grad_norm > 0, FLOATS)
        self._forget()

    def _forget(self) -> None:
        self.sum, self.spiking, self.quiet = 0.0, False, 0
        self.blocks, self.block, self.slow, self.slow_quiet = [], [], "", 0


def slow_change(means: list[float], spread: float) -> str:
    """What means of blocks of the loss show, oldest first: divergence, level_shift, or nothing."""
    recent = means[-NUM_FLOOR - NUM_CEILING :]
    if len(recent) <= NUM_RISING:
        return ""
    far = min(recent[-NUM_FAR:]) > max(recent[:-NUM_FAR]) + LARGE_RISE
    if far or _rises(recent, spread) or _creeps(means, spread):
        return FindingKind.divergence
    stays = min(recent[-NUM_FLOOR:]) > max(recent[:-NUM_FLOOR]) + SHIFT_SIGMAS * spread
    return FindingKind.level_shift if stays and len(recent) == NUM_FLOOR + NUM_CEILING else ""


def _rises(means: list[float], spread: float) -> bool:
    """Whether the last blocks rise one after the other, above all before them and not with the last one alone."""
    rising = means[-NUM_RISING:]
    lowest = max(*means[:-NUM_RISING], rising[0])
    num_ups = sum(later > earlier for earlier, later in pairwise(rising))
    rose = rising[-1] == max(rising) and rising[-1] > lowest + RISE_SIGMAS * spread
    return num_ups >= NUM_RISING - 2 and rose and rising[-NUM_FAR] > lowest + 0.25 * RISE_SIGMAS * spread


def _creeps(means: list[float], spread: float) -> bool:
    """Whether the later half rises too slowly for single blocks to tell, to above all of the earlier half."""
    if len(means) < NUM_BLOCKS:
        return False
    size = NUM_BLOCKS // 8
    quarters = [sum(means[first : first + size]) / size for first in range(NUM_BLOCKS // 2, NUM_BLOCKS, size)]
    rises = all(later - earlier > 0.25 * RISE_SIGMAS * spread for earlier, later in pairwise(quarters))
    return rises and quarters[-1] > max(means[: NUM_BLOCKS // 2]) + 0.25 * RISE_SIGMAS * spread


def restore_curve_watch(data: dict[str, Any]) -> CurveWatch:
    """The watch whose fields were `data`; JSON has turned tuples into lists."""
    watch = CurveWatch(**data)
    watch.loss, watch.grad = tuple(watch.loss), tuple(watch.grad)
    return watch


def loud_ranks(record: ReducedRecord) -> list[int]:
    """Ranks whose own gradient makes most of the whole one, where others' is far smaller; empty where all are alike."""
    spread = record.ranks.get("grad_norm")
    if spread is None:
        return []
    norms = {int(rank): float(norm) for rank, norm in spread["worst"]}
    least = min([spread["median"], *norms.values()])
    return sorted(rank for rank, norm in norms.items() if norm >= 0.5 * record.grad_norm and norm > LOUD_FACTOR * least)
