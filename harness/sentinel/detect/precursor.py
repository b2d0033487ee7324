"""Forecasts trouble from slow trends of probed signals (precursor), before the loss shows anything.

| signal | bound | why |
|---|---|---|
| attention logit | `logit_bound` | the softmax of a head with huge logits saturates |
| update ratio | `UPDATE_FACTOR` times its own level | updates outgrow the weights: the learning rate is too high |
| fp8 underflow | `fp8_underflow` | the range of an fp8 tensor is used up |

How: a line through the logarithms of the last probes of each layer group, by the median of the slopes between all pairs
(Theil-Sen), so a single odd probe does not matter. Where the line meets the bound within `HORIZON_STEPS`, a finding
names signal, group and the number of steps. It is raised only if most pairs of probes rise (underflow rises in stairs,
one tensor after another, and falls a little on each), if the line rose by `LEAST_RISE` and by `RISE_SIGMAS` times the
noise of the probes before, if it ends above all of these, and if the signal has come a part of the way to its bound
(`NEARNESS`), because an early exponential rise forecasts anything. It is raised again only after the signal fell to
half of where it was raised.
The level of the update ratio is the median of the probes before the window. It falls in a healthy run, and rises with
the learning rate: nothing is forecast before the warm-up has ended or after an expected change of the learning rate.
It also rises while Adam's second moment forgets the large gradients of the first steps: nothing is forecast in the
first 1 / (1 - beta2) steps, over which the second moment averages.
Left out: the gradient over the root of Adam's second moment, which `v_stale` judges: it is noisy, and a lasting growth
of the gradients did no harm in drills. The entropy of the output: it falls as a model learns. Both are in the records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple, final

from harness.config.sentinel import DetectConfig
from harness.core.events import Finding, FindingKind, PrecursorSignal, ReducedRecord
from harness.sentinel.detect.guards import SETTLED_STEPS, make_finding

WINDOW = 6
"""Probes that the line goes through."""
LEVEL_PROBES = 24
"""Probes before the window; their median is the level, and their differences are the noise."""
LEAST_LEVEL_PROBES = 6
HORIZON_STEPS = 150
"""Forecasts that lie further ahead are not raised."""
LEAST_RISE = 1.3
"""Least factor between both ends of the line over the window."""
RISE_SIGMAS = 6.0
"""Least rise of the logarithm over the window, in robust standard deviations of the noise."""
RISING_PAIRS = 0.85
"""Least share of the pairs of probes whose later one is higher."""
FALLEN = 0.5
"""Share of the value at which a finding was raised, below which the signal counts as fallen."""
UPDATE_FACTOR = 4.0
MAD_TO_SIGMA = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""
LEAST_INTERVAL = 10
"""Steps between two probes of a series, at least: more frequent ones would shorten the window."""
NEARNESS = {
    PrecursorSignal.attention_logit: 0.4,
    PrecursorSignal.update_ratio: 0.5,
    PrecursorSignal.fp8_underflow: 0.25,
}
"""Share of its bound that a signal must have reached. The logits of a healthy run rise while it learns, in the small
default to 30, and then stay there."""
FLOOR = 0.01
"""Values below this share of an absolute bound count as this: their noise means nothing."""


class _Limit(NamedTuple):
    bound: float
    nearness: float
    """Value below which nothing is raised."""


class Forecast(NamedTuple):
    """A line through the last probes of a signal that meets a bound."""

    value: float
    """Of the line at the last probe."""
    steps: float
    """Steps from there until the bound; 0 if it is reached."""


@final
@dataclass(slots=True)
class PrecursorGuard:
    series: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)
    """Signal -> layer group -> step and value of the last probes, oldest first."""
    raised: dict[str, dict[str, float]] = field(default_factory=dict)
    """Signal -> layer group with a finding -> value at which it was raised."""
    rate: float = 0.0
    """Learning rate of the last probe."""
    is_warm: bool = False
    """The warm-up has ended: the learning rate did not rise between two probes."""

    def observe(self, record: ReducedRecord, cfg: DetectConfig) -> Iterator[Finding]:
        if not math.isfinite(record.loss) or not math.isfinite(record.grad_norm):
            return
        self.is_warm = self.is_warm or 0 < record.lr <= self.rate
        self.rate = record.lr
        values: dict[PrecursorSignal, tuple[Mapping[str, float], float | None]] = {
            PrecursorSignal.attention_logit: (record.attention_logits, cfg.logit_bound),
            PrecursorSignal.update_ratio: (record.group_update_ratios if self._is_steady(record) else {}, None),
            PrecursorSignal.fp8_underflow: (record.fp8_underflow, cfg.fp8_underflow),
        }
        for signal, (by_group, bound) in values.items():
            found = {
                group: forecast
                for group, value in by_group.items()
                if math.isfinite(value) and (forecast := self._add(signal, group, record.step, value, bound))
            }
            if found:
                yield _make_precursor(signal, record, found)

    def _is_steady(self, record: ReducedRecord) -> bool:
        """Whether a rise of the update ratio means something: after the warm-up, with a filled second moment."""
        return self.is_warm and (record.beta2 is None or record.step * (1 - record.beta2) >= 1)

    def forget_update_ratios(self) -> None:
        """The learning rate is about to change on purpose: learn the level of the update ratios again."""
        self.series.pop(PrecursorSignal.update_ratio, None)

    def _add(
        self, signal: PrecursorSignal, group: str, step: int, value: float, bound: float | None
    ) -> tuple[Forecast, float] | None:
        """Add a probe to its series; returns the forecast and the bound if a finding is due."""
        probes = [probe for probe in self.series.get(signal, {}).get(group, []) if probe[0] < step]
        if probes and step - probes[-1][0] < LEAST_INTERVAL:
            return None
        value = value if bound is None else max(value, FLOOR * bound)
        if value > 0:
            probes.append((step, value))
        probes = probes[-WINDOW - LEVEL_PROBES :]
        self.series.setdefault(signal, {})[group] = probes
        raised = self.raised.setdefault(signal, {})
        before, window = probes[:-WINDOW], probes[-WINDOW:]
        if step < SETTLED_STEPS or len(before) < LEAST_LEVEL_PROBES:
            return None
        limit = _find_limit(signal, before, bound)
        forecast = make_forecast(window, limit.bound, least_rise=RISE_SIGMAS * measure_noise(before))
        if group in raised:
            if max(value for _, value in window) < FALLEN * raised[group]:
                del raised[group]
            return None
        if forecast is None or forecast.value < max(limit.nearness, *(value for _, value in before)):
            return None
        raised[group] = forecast.value
        return forecast, limit.bound


def _find_limit(signal: PrecursorSignal, before: list[tuple[int, float]], bound: float | None) -> _Limit:
    """The bound of a signal, by default a multiple of its level, and the value from which it is near."""
    if bound is None:
        bound = UPDATE_FACTOR * median(value for _, value in before)
    return _Limit(bound, NEARNESS[signal] * bound)


def measure_noise(probes: list[tuple[int, float]]) -> float:
    """Robust standard deviation of the logarithms of the values around their trend, from differences between
    neighbours."""
    logs = [math.log(value) for _, value in probes]
    changes = [later - earlier for earlier, later in pairwise(logs)]
    usual = median(changes)
    return MAD_TO_SIGMA / math.sqrt(2) * median(abs(change - usual) for change in changes)


def make_forecast(probes: list[tuple[int, float]], bound: float, *, least_rise: float = 0.0) -> Forecast | None:
    """When a line through the logarithms of the probes (step, value) meets the bound; None: it does not rise clearly,
    by less than `least_rise`, or too slowly for the horizon."""
    points = [(step, math.log(value)) for step, value in probes]
    slopes = [(high - low) / (later - earlier) for (earlier, low), (later, high) in combinations(points, 2)]
    if sum(slope > 0 for slope in slopes) < RISING_PAIRS * len(slopes):
        return None
    slope = median(slopes)
    if slope * (points[-1][0] - points[0][0]) < max(math.log(LEAST_RISE), least_rise):
        return None
    last = points[-1][0]
    now = median(value + slope * (last - step) for step, value in points)
    steps = max((math.log(bound) - now) / slope, 0.0)
    return Forecast(math.exp(now), steps) if steps <= HORIZON_STEPS else None


def _make_precursor(
    signal: PrecursorSignal, record: ReducedRecord, found: Mapping[str, tuple[Forecast, float]]
) -> Finding:
    """A finding that names the groups, the one with the earliest forecast first; no batch is blamed."""
    groups = sorted(found, key=lambda group: found[group][0].steps)
    forecast, bound = found[groups[0]]
    ahead = f"in about {forecast.steps:.0f} steps" if forecast.steps else "now"
    message = f"{signal} of {groups[0]} rises: {forecast.value:.3g}, reaches {bound:.3g} {ahead}"
    finding = make_finding(FindingKind.precursor, record, forecast.value, bound, message)
    finding.groups, finding.cursors = groups, []
    finding.signal, finding.forecast_steps = signal, round(forecast.steps)
    return finding
