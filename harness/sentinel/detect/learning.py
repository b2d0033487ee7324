"""Detects a run that does not learn (never_learned): its loss stays near that of a model that knows no context.

Why: with a learning rate that is too high from the first step, the loss falls to that of the token frequencies, or does
not fall at all, and stays there. Nothing spikes and nothing rises, so no other detector reports it.
How: the mean loss of the last blocks of 50 steps is compared with the loss of the first row and with the blocks
before. The finding is raised 500 steps after the warm-up if the loss is above half of the initial one, and the last
200 steps brought less than a tenth of its whole fall, or less than 1 % of the loss. A loss that is still at its initial
level is reported after 200 steps. A loss that falls back to that range and stays there is reported too.
A slow start is no finding: the loss falls, or the learning rate still rises. Nor is a slow run whose learning rate has
decayed: with a rate that is too low a good part of the fall comes late, with one that is too high nearly all of it
comes in the first 100 steps, or the loss rises at first. If a log has no learning rates, the end of
its warm-up is unknown, and only a loss at its initial level is reported: masked language models stay at the loss of the
token frequencies for thousands of steps and learn afterwards. Runs that start at a low loss (fine-tuning), or whose
first steps were not seen (a log that begins later), are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from harness.core.events import Finding, FindingKind, ReducedRecord
from harness.sentinel.detect.guards import make_finding

FIRST_STEPS = 10
"""A run is judged if its first row is one of these steps."""
LEAST_INITIAL = 5.0
"""Nats. A pretrained model starts below this, an untrained one with at least 256 tokens above it."""
BLOCK_STEPS, NUM_RECENT, NUM_BETWEEN = 50, 2, 4
"""Steps per block; blocks in each of the two means that are compared; blocks from one mean to the other."""
UNLEARNED, UNTOUCHED = 0.5, 0.95
"""Shares of the initial loss, above which a loss knows no context, or has not fallen at all."""
LEAST_FALL, LEAST_SHARE = 0.01, 0.1
"""Fall of a learning run within `NUM_BETWEEN` blocks: share of the loss, and of its fall since the first row."""
LATE_SHARE = 0.25
"""Share of the whole fall that a slow run brings after its first blocks. Chosen on four runs of the small default: 0.08
to 0.15 with a learning rate that was too high, 0.37 to 0.52 with one that was too low."""
WAIT_STEPS, SHORT_WAIT_STEPS, UNKNOWN_WARMUP_STEPS = 500, 200, 2000
"""Steps after the warm-up, the second for a loss that has not fallen at all; the warm-up of a log without learning
rates."""
RISEN = 1.001
"""Factor by which a learning rate exceeds all earlier ones while it is warmed up."""


@final
@dataclass(slots=True)
class LearningGuard:
    initial: float | None = None
    """Loss of the first row."""
    is_judged: bool = True
    """False if the first row showed that this is not the start of a run."""
    peak: float = 0.0
    """Highest learning rate."""
    warm_step: int = -1
    """Step at which the learning rate last exceeded all earlier ones; -1: no learning rates."""
    blocks: list[float] = field(default_factory=list)
    """Mean loss of the last blocks, oldest first."""
    block: list[float] = field(default_factory=list)
    """The current block: its first step, its rows, their sum."""
    last_step: int = -1
    raised: bool = False
    first_blocks: list[float] = field(default_factory=list)
    """Mean loss of the first `NUM_RECENT` whole blocks after the warm-up."""

    def observe(self, record: ReducedRecord) -> Iterator[Finding]:
        """Take a row that was applied and is finite."""
        if not self.is_judged:
            return
        step = record.step
        if self.initial is None:
            self.initial = record.loss
            self.is_judged = step <= FIRST_STEPS and record.loss >= LEAST_INITIAL
        if math.isfinite(record.lr) and record.lr > RISEN * self.peak:
            self.peak, self.warm_step, self.first_blocks = record.lr, step, []
        if step <= self.last_step:  # the steps went back, as after a restart from a checkpoint
            self.blocks, self.block = [], []
        self.last_step = step
        if not self.block:
            self.block = [float(step), 0.0, 0.0]
        self.block[1] += 1.0
        self.block[2] += record.loss
        if step - self.block[0] + 1 < BLOCK_STEPS:
            return
        self.blocks = [*self.blocks[1 - NUM_RECENT - NUM_BETWEEN :], self.block[2] / self.block[1]]
        if len(self.first_blocks) < NUM_RECENT and self.block[0] > self.warm_step:
            self.first_blocks.append(self.blocks[-1])
        self.block = []
        yield from self._judge(record)

    def _judge(self, record: ReducedRecord) -> Iterator[Finding]:
        initial = self.initial
        if initial is None or len(self.blocks) < NUM_RECENT + NUM_BETWEEN:
            return
        recent = sum(self.blocks[-NUM_RECENT:]) / NUM_RECENT
        before = sum(self.blocks[:NUM_RECENT]) / NUM_RECENT
        has_rates = self.warm_step >= 0
        waited = record.step - (self.warm_step if has_rates else UNKNOWN_WARMUP_STEPS)
        if recent > UNTOUCHED * initial:
            is_due = waited >= SHORT_WAIT_STEPS
        else:
            first = sum(self.first_blocks) / NUM_RECENT
            is_slow = first <= initial and first - recent >= LATE_SHARE * (initial - recent)
            is_due = has_rates and waited >= WAIT_STEPS and not is_slow
        least = max(LEAST_FALL * recent, LEAST_SHARE * (initial - recent))
        is_stuck = min(self.blocks) > UNLEARNED * initial and before - recent < least
        if is_stuck and is_due and not self.raised:
            self.raised = True
            rate = f"{self.peak:.3g}" if has_rates else "not logged"
            since = "after the warm-up" if has_rates else f"after step {UNKNOWN_WARMUP_STEPS}"
            message = (
                f"loss {recent:.4g} fell by {before - recent:.2g} in {NUM_BETWEEN * BLOCK_STEPS} steps, {waited} steps "
                f"{since}; it began at {initial:.4g}: the run does not learn, "
                f"the learning rate (peak {rate}) is probably too high"
            )
            finding = make_finding(FindingKind.never_learned, record, recent, UNLEARNED * initial, message)
            finding.cursors = []
            yield finding
        elif recent <= UNLEARNED * initial:
            self.raised = False
