"""Computes the numbers of a log that the decision tree uses, each in one pass over its rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from harness.analysis.postmortem.measures import middle
from harness.analysis.postmortem.recorded_batch import rare_count
from harness.analysis.postmortem.rules.data_rules import RARE_FACTOR
from harness.config.sentinel import DetectConfig
from harness.core.events import Finding, FindingKind, StepRecord
from harness.sentinel.detect.detectors import Detectors

WINDOW_ROWS, SPIKE_SIGMAS = 100, 3.0
OF_A_SPIKE = (FindingKind.loss_spike, FindingKind.level_shift, FindingKind.grad_spike)


@final
@dataclass(slots=True, kw_only=True)
class Spike:
    """A row with a high loss, and mean and standard deviation of the rows before it."""

    at: StepRecord
    mean: float
    sigma: float

    @property
    def sigmas(self) -> float:
        return (self.at.loss - self.mean) / self.sigma if self.sigma > 0 else math.inf


def spikes_of(records: Sequence[StepRecord]) -> list[Spike]:
    """Rows whose loss is three sigma above the mean of the hundred applied rows before them."""
    window: deque[float] = deque()
    total = squares = 0.0
    found: list[Spike] = []
    for record in records:
        if not math.isfinite(record.loss):
            continue
        if len(window) == WINDOW_ROWS:
            middle = total / WINDOW_ROWS
            sigma = math.sqrt(max(squares / WINDOW_ROWS - middle * middle, 0.0))
            if record.loss > middle + SPIKE_SIGMAS * sigma:
                found.append(Spike(at=record, mean=middle, sigma=sigma))
        if not record.refused:
            window.append(record.loss)
            gone = window.popleft() if len(window) > WINDOW_ROWS else 0.0
            total += record.loss - gone
            squares += record.loss * record.loss - gone * gone
    return found


def is_confirmed(spike: Spike, findings: Sequence[Finding]) -> bool:
    """Whether a detector also found something at this row."""
    return any(
        finding.kind in OF_A_SPIKE and finding.onset - 2 <= spike.at.iteration <= finding.iteration + 2
        for finding in findings
    )


def describe_rare_tokens(spike: Spike, records: Sequence[StepRecord]) -> str | None:
    """How many rare tokens the batch of a spike holds; None: not unusually many, or not recorded."""
    before = [r for r in records if r.iteration < spike.at.iteration and not r.refused][-WINDOW_ROWS:]
    usual, count = middle(rare_count(record) for record in before), rare_count(spike.at)
    if usual is None or count is None or count < RARE_FACTOR * max(usual, 1.0):
        return None
    return f"its rarest tokens occur {count} times (usually {usual:g} times)"


def run_detectors(records: Sequence[StepRecord], detect: DetectConfig) -> list[Finding]:
    """Findings of the sentinel's detectors over the log, independent of what was found during the run."""
    detectors = Detectors(detect)
    return [finding for record in records for finding in detectors.observe(record)]


def largest_weight_change(records: Sequence[StepRecord]) -> tuple[str, float]:
    """The layer group whose weight norm changed most from the first to the last probe, and the factor."""
    probes = [record.group_param_norms for record in records if record.group_param_norms]
    factors = [
        (name, max(probes[-1][name] / norm, norm / probes[-1][name]))
        for name, norm in (probes[0].items() if probes else ())
        if norm > 0 and probes[-1].get(name, 0.0) > 0
    ]
    return max(factors, key=lambda pair: pair[1], default=("", 1.0))


def split_in_thirds(records: Sequence[StepRecord]) -> list[Sequence[StepRecord]]:
    third = len(records) // 3
    return [records[:third], records[third : 2 * third], records[2 * third :]]
