"""Computes the numbers of a log that the decision tree uses, from its rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

from harness.analysis.judge.run_events import tell_detectors
from harness.analysis.postmortem.incident_numbers import finite_median
from harness.analysis.postmortem.recorded_batch import rare_count
from harness.analysis.postmortem.rules.data_rules import RARE_FACTOR
from harness.config.sentinel import DetectConfig
from harness.core.events import Event, Finding, FindingKind, StepRecord
from harness.sentinel.detect.detectors import Detectors

WINDOW_ROWS, SPIKE_SIGMAS = 100, 3.0
RECOVERED_SIGMAS, RECOVERED_WITHIN, RECOVERED_ROWS = 0.5, 50, 5
OF_A_SPIKE = (FindingKind.loss_spike, FindingKind.level_shift, FindingKind.grad_spike)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A row with a high loss, and mean and standard deviation of the rows before it."""

    at: StepRecord
    position: int
    """Index of the row in the log."""
    mean: float
    sigma: float
    is_above: bool
    """More than three sigma above the mean; false: only the detectors found it."""

    @property
    def sigmas(self) -> float:
        return (self.at.loss - self.mean) / self.sigma if self.sigma > 0 else math.inf

    @property
    def recovered_level(self) -> float:
        return self.mean + RECOVERED_SIGMAS * self.sigma


def spikes_of(records: Sequence[StepRecord]) -> list[Spike]:
    """Rows whose loss is three sigma above the mean of the hundred applied rows before them."""
    window = LossWindow()
    found: list[Spike] = []
    for position, record in enumerate(records):
        if not math.isfinite(record.loss):
            continue
        if len(window.rows) == WINDOW_ROWS:
            mean, sigma = window.mean_and_sigma() if window.may_be_spike(record.loss) else (math.inf, 0.0)
            if record.loss > mean + SPIKE_SIGMAS * sigma:
                found.append(Spike(at=record, position=position, mean=mean, sigma=sigma, is_above=True))
        if not record.refused:
            window.add(record)
    return found


def detected_spikes(records: Sequence[StepRecord], findings: Sequence[Finding], known: Sequence[Spike]) -> list[Spike]:
    """Loss spikes that the detectors found at rows where three sigma found none, such as in the first hundred rows."""
    spikes = []
    for finding in findings:
        if finding.kind is not FindingKind.loss_spike or any(_is_at(spike, finding) for spike in known):
            continue
        window = LossWindow()
        for record in records:
            if record.iteration < finding.onset and not record.refused and math.isfinite(record.loss):
                window.add(record)
        rows = [
            at
            for at, record in enumerate(records)
            if finding.onset <= record.iteration <= finding.iteration and math.isfinite(record.loss)
        ]
        if rows and len(window.rows) > 1:
            at = max(rows, key=lambda index: records[index].loss)
            mean, sigma = window.mean_and_sigma()
            spikes.append(Spike(at=records[at], position=at, mean=mean, sigma=sigma, is_above=False))
    return spikes


@final
class LossWindow:
    """The last hundred applied losses of the current state; rows that a restore undid leave it."""

    def __init__(self) -> None:
        self.rows: deque[tuple[int, float]] = deque()
        """Step and loss."""
        self._total = self._squares = 0.0

    def add(self, record: StepRecord) -> None:
        while self.rows and self.rows[-1][0] >= record.step:
            self._subtract(self.rows.pop()[1])
        self.rows.append((record.step, record.loss))
        self._total += record.loss
        self._squares += record.loss * record.loss
        if len(self.rows) > WINDOW_ROWS:
            self._subtract(self.rows.popleft()[1])

    def _subtract(self, loss: float) -> None:
        """Take a loss that has left the rows out of the sums. One that dominates them leaves its rounding error there,
        so the rest is added up again."""
        if loss * loss < self._squares / 2:
            self._total -= loss
            self._squares -= loss * loss
        else:
            self._total = sum(other for _, other in self.rows)
            self._squares = sum(other * other for _, other in self.rows)

    def may_be_spike(self, loss: float) -> bool:
        """A fast test by running sums, which are a little inexact."""
        mean = self._total / len(self.rows)
        variance = max(self._squares / len(self.rows) - mean * mean, 0.0)
        return loss > mean + 0.9 * SPIKE_SIGMAS * math.sqrt(variance) - 1e-6 * abs(mean)

    def mean_and_sigma(self) -> tuple[float, float]:
        losses = [loss for _, loss in self.rows]
        mean = math.fsum(losses) / len(losses)
        return mean, math.hypot(*(loss - mean for loss in losses)) / math.sqrt(len(losses))


def is_confirmed(spike: Spike, findings: Sequence[Finding]) -> bool:
    """Whether it is more than one outlier: the gate rejected this row, or a detector also found something at it."""
    return spike.at.refused or any(finding.kind in OF_A_SPIKE and _is_at(spike, finding) for finding in findings)


def _is_at(spike: Spike, finding: Finding) -> bool:
    return finding.onset - 2 <= spike.at.iteration <= finding.iteration + 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How the loss went on after a spike."""

    answer: bool | None
    """None: the log does not show it."""
    number: str
    ending: str
    """The end of a sentence: about the spike, or about the loss if that did not recover."""
    is_restored: bool = False
    """A restore of an older state ended the rows after the spike."""


def recovery_of_spike(spike: Spike, records: Sequence[StepRecord]) -> Recovery:
    """Whether the loss is back at mean + 0.5 sigma within fifty steps, on the same state.

    Back means that a row and the median of the `RECOVERED_ROWS` rows from it on are at the level: one low row is noise.
    Rows after a restore belong to another state and say nothing about the spike. Neither does a loss that stays high
    after a rejected update, which changed no state.
    """
    after, restored_at = rows_until_restore(spike, records)
    level = f"mean + 0.5 sigma is {spike.recovered_level:.4g}"
    for first in range(len(after) - RECOVERED_ROWS + 1):
        rows = [row.loss for row in after[first : first + RECOVERED_ROWS]]
        if max(rows[0], median(rows)) <= spike.recovered_level:
            return Recovery(answer=True, number=f"{level}; back at step {after[first].step}", ending="that recovered")
    if spike.at.refused:
        number = f"{level}; not back in {len(after)} rows, but its update was rejected and changed no state"
        return Recovery(answer=None, number=number, ending="whose update was rejected")
    if len(after) == RECOVERED_WITHIN:
        number, ending = f"{level}; not in the {len(after)} rows after it", f"within {RECOVERED_WITHIN} steps"
        return Recovery(answer=False, number=number, ending=ending)
    if restored_at is None:
        number = f"{level}; only {len(after)} of {RECOVERED_WITHIN} rows are there"
        return Recovery(answer=None, number=number, ending=f"less than {RECOVERED_WITHIN} steps ago")
    restore = f"an older state was restored at step {restored_at}, {len(after)} rows after it"
    if len(after) < RECOVERED_ROWS:
        number, ending = f"{level}; {restore}", f"that a restore undid {len(after)} rows later"
        return Recovery(answer=None, number=number, ending=ending)
    number, ending = f"{level}; not back when {restore}", "before an older state was restored"
    return Recovery(answer=False, number=number, ending=ending, is_restored=True)


def rows_until_restore(spike: Spike, records: Sequence[StepRecord]) -> tuple[list[StepRecord], int | None]:
    """At most fifty applied rows after a spike, and the step of the restore that ends them; None: no restore."""
    after: list[StepRecord] = []
    newest = spike.at.step
    for record in records[spike.position + 1 :]:
        if record.refused:
            continue
        if is_restored(record, newest, was_refused=spike.at.refused and not after):
            return after, record.step
        newest = record.step
        after.append(record)
        if len(after) == RECOVERED_WITHIN:
            break
    return after, None


def is_restored(record: StepRecord, newest: int, *, was_refused: bool) -> bool:
    """Whether an applied row started from an older state: its step is not after the newest one.

    A rejected update does not count as a step, so the next row after it has the same number plus one.
    """
    return record.step < newest + (0 if was_refused else 1)


def describe_rare_tokens(spike: Spike, records: Sequence[StepRecord]) -> str | None:
    """How many rare tokens the batch of a spike holds; None: not unusually many, or not recorded."""
    before = [r for r in records if r.iteration < spike.at.iteration and not r.refused][-WINDOW_ROWS:]
    usual, count = finite_median(rare_count(record) for record in before), rare_count(spike.at)
    if usual is None or count is None or count < RARE_FACTOR * max(usual, 1.0):
        return None
    return f"its rarest tokens occur {count} times (usually {usual:g} times)"


def run_detectors(
    records: Sequence[StepRecord], detect: DetectConfig, *, events: Sequence[Event] = ()
) -> list[Finding]:
    """Findings of the sentinel's detectors over the log, independent of what was found during the run; its other events
    say what was planned."""
    detectors, findings, waiting = Detectors(detect), list[Finding](), deque(events)
    for record in records:
        while waiting and waiting[0].time <= record.time:  # iterations repeat after a crash
            tell_detectors(detectors, waiting.popleft())
        findings += detectors.observe(record)
    return findings


def largest_weight_change(records: Sequence[StepRecord]) -> tuple[str, float] | None:
    """The layer group whose weight norm changed most from the first to the last probe, and last over first; None: there
    are fewer than two probes."""
    probes = [record.group_param_norms for record in records if record.group_param_norms]
    if len(probes) < 2:
        return None
    ratios = [(name, probes[-1][name] / norm) for name, norm in probes[0].items() if norm > 0 and name in probes[-1]]
    return max(ratios, key=lambda pair: change_factor(pair[1]), default=None)


def change_factor(ratio: float) -> float:
    """A ratio as a factor of change, up or down; a norm that vanished changed infinitely."""
    return max(ratio, 1 / ratio) if ratio > 0 else math.inf


def split_in_thirds(records: Sequence[StepRecord]) -> list[Sequence[StepRecord]]:
    third = len(records) // 3
    return [records[:third], records[third : 2 * third], records[2 * third :]]
