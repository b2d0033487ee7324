"""Online baseline of a scalar series (loss, gradient norm): level, trend, spread, and the upper bound from them.

Why: the gate on the device and the detectors on the host must use the same baseline, so there is one recursion, written
over `ops`: plain floats on the host, float64 scalars on the device. It selects and never branches on a value, takes
constant time per row, and its state is a flat tuple of numbers that goes into snapshots.
How: the recursion works on logarithms, so that one set of options fits loss and gradient norm.
- level: a moving average whose upward pull is clipped, so that a spike cannot drag it along. Only a downward trend is
  extrapolated, because no healthy loss rises.
- memory: a much slower level. Easy data lets the loss fall and come back; a return to where it was a few hundred rows
  ago is no spike. It counts only while it describes most of the recent rows.
- spread: the robust standard deviation of the noise, from differences of neighbouring rows, which contain neither level
  nor trend.
- tail: the height, in spreads, that one row in a hundred exceeds. It widens the bounds for heavy-tailed noise (the loss
  of one rank, small batches). Consecutive high rows count once.
A row that is not accepted does not change the state at all.
Left out: gaps between rows (the caller may `reopen` the state), and logs that were smoothed before they were written:
their neighbouring rows are so similar that the spread comes out too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from harness.config.sentinel import DetectConfig

Number = Any
"""A float on the host, a float64 scalar on the device."""
State = tuple[Number, ...]

FIELDS = (
    "count",
    "level",
    "lagged",
    "memory",
    "memory_slope",
    "spread",
    "miss",
    "tail",
    "was_beyond",
    "trust",
    "last",
)
"""The numbers of a state. lagged: the level smoothed once more; their difference is the trend. miss: mean distance of
rows from the level, larger than the spread if the level lags. was_beyond: 1 if the last row was above the tail. trust:
share of the recent rows that the memory describes."""

SMALLEST = 1e-12
"""Smaller values, which may have no logarithm, are replaced by this one."""
PRIOR_SPREAD, LATE_SPREAD, LEAST_SPREAD = 0.1, 0.03, 0.002
"""Relative to the value: the initial spread at the start of a run and late in a run, and the minimum."""
NORMAL_TAIL, HEAVY_TAIL, HIGHEST_TAIL = 2.4, 3.0, 12.0
"""In spreads: the tail of normal noise, the tail from which noise counts as heavy, and the maximum."""
TAIL_SHARE, TAIL_GAIN = 0.01, 0.05
PULL_UP, PULL_DOWN, FALL, OUTLYING = 2.0, 4.0, 8.0, 4.0
"""In spreads: how far one row may pull the level up or down, the largest fall that counts at once, and the distance
from which a row is an outlier and does not count for the spread."""
MEAN_TO_SIGMA = math.sqrt(math.pi / 2)
"""Sigma over mean absolute value of normal noise; differences of neighbours are larger by sqrt(2)."""
REOPENED_COUNT, LATE_COUNT = 4.0, 20.0
"""Initial row counts of a reopened state and of one that starts late in a run."""
CAPPED_FROM_COUNT = 8.0
"""Rows after which the caps apply, whatever the noise."""
LARGEST_EXPONENT = 700.0


class Ops(Protocol):
    """Arithmetic beyond operators. On the device the first argument is a tensor; the others may be Python constants."""

    def where(self, condition: Any, chosen: Number, otherwise: Number) -> Number: ...

    def choose(self, condition: Any, chosen: State, otherwise: State) -> State:
        """`where` for each number of a state."""

    def minimum(self, number: Number, other: Number) -> Number: ...

    def maximum(self, number: Number, other: Number) -> Number: ...

    def absolute(self, number: Number) -> Number: ...

    def log(self, number: Number) -> Number: ...

    def exp(self, number: Number) -> Number: ...


class FloatOps:
    """Plain floats. Conditionals, because the built-in min and max are several times slower for two numbers."""

    absolute, log = staticmethod(abs), staticmethod(math.log)

    @staticmethod
    def where(condition: Any, chosen: Number, otherwise: Number) -> Number:
        return chosen if condition else otherwise

    @staticmethod
    def choose(condition: Any, chosen: State, otherwise: State) -> State:
        return chosen if condition else otherwise

    @staticmethod
    def minimum(number: Number, other: Number) -> Number:
        return other if other < number else number

    @staticmethod
    def maximum(number: Number, other: Number) -> Number:
        return other if other > number else number

    @staticmethod
    def exp(number: Number) -> Number:
        return math.exp(number) if number < LARGEST_EXPONENT else math.inf


FLOATS = FloatOps()


def initial_state() -> State:
    """The state before the first row of a run."""
    return (0.0, 0.0, 0.0, 0.0, 0.0, PRIOR_SPREAD, PRIOR_SPREAD, NORMAL_TAIL, 0.0, 0.0, 0.0)


def initial_state_late(value: float) -> State:
    """The state at the first row of a log that starts after the steep descent; its prior spread is smaller."""
    row = math.log(max(value, SMALLEST))
    return (LATE_COUNT, row, row, row, 0.0, LATE_SPREAD, LATE_SPREAD, NORMAL_TAIL, 0.0, 0.0, row)


def expected_log_value(state: Sequence[Number], cfg: DetectConfig, ops: Ops) -> tuple[Number, Number]:
    """Logarithm of the highest expected value, and the spread around it."""
    level, lagged, memory, memory_slope, spread, miss = state[1:7]
    trend = ops.minimum(level - lagged, 0.0) * (1.0 + 1.0 / cfg.level_rows)
    return ops.maximum(level + trend, memory + memory_slope), _whole_spread(spread, miss, ops)


def tolerance(state: Sequence[Number], cfg: DetectConfig, ops: Ops, *, warming: Number = 0.0) -> Number:
    """Factor on the spread: above 1 for heavy noise, for the first rows, and while the learning rate rises."""
    early = ops.maximum(1.0 - state[0] / cfg.warmup_rows, 0.0)
    heavy = ops.maximum(state[7] / HEAVY_TAIL, 1.0)
    return heavy * (1.0 + early * 3.0) * (1.0 + warming * (cfg.warmup_widening - 1.0))


def upper_bound(
    state: Sequence[Number],
    cfg: DetectConfig,
    ops: Ops,
    *,
    sigmas: float,
    factor: float,
    cap: float = math.inf,
    warming: Number = 0.0,
    planned: Number = 0.0,
) -> Number:
    """The value that is both `sigmas` spreads and a factor `factor` above the expected one; after the first rows at
    most `cap` times the expected one, whatever the noise. Infinite before the first row, because no value is expected
    yet. `planned`: 1 within the window of a planned change."""
    level, spread = expected_log_value(state, cfg, ops)
    reach = ops.maximum(spread * sigmas * tolerance(state, cfg, ops, warming=warming), math.log(factor))
    reach = reach + planned * math.log(cfg.planned_widening)
    capped = ops.where(state[0] < CAPPED_FROM_COUNT, reach, ops.minimum(reach, math.log(cap)))
    return ops.where(state[0] == 0.0, math.inf, ops.exp(level + capped))


def gate_bounds(
    loss_state: Sequence[Number],
    grad_state: Sequence[Number],
    cfg: DetectConfig,
    ops: Ops,
    *,
    warming: Number = 0.0,
    planned: Number = 0.0,
) -> tuple[Number, Number, Number, Number]:
    """The bounds of the gate: loss alone, gradient norm alone, and the lower joint bounds of loss and gradient norm."""

    def of(state: Sequence[Number], sigmas: float, factor: float, cap: float = math.inf) -> Number:
        return upper_bound(state, cfg, ops, sigmas=sigmas, factor=factor, cap=cap, warming=warming, planned=planned)

    return (
        of(loss_state, cfg.gate_sigmas, cfg.gate_loss_factor, cfg.gate_loss_cap),
        of(grad_state, cfg.gate_sigmas, cfg.gate_grad_factor, cfg.gate_grad_cap),
        of(loss_state, cfg.joint_sigmas, 1.0),
        of(grad_state, cfg.joint_sigmas, cfg.joint_grad_factor),
    )


def beyond(loss: Number, grad_norm: Number, bounds: tuple[Number, Number, Number, Number]) -> Any:
    """Whether a bound is exceeded; false for NaN, which the gate rejects by a separate rule."""
    loss_alone, grad_alone, loss_joint, grad_joint = bounds
    return (loss > loss_alone) | (grad_norm > grad_alone) | ((loss > loss_joint) & (grad_norm > grad_joint))


def advance(state: Sequence[Number], value: Number, accept: Any, cfg: DetectConfig, ops: Ops) -> State:
    """The state after a row; bitwise the same state if the row is not accepted."""
    where, minimum, maximum, absolute = ops.where, ops.minimum, ops.maximum, ops.absolute
    count, level, lagged, memory, memory_slope, spread, miss, tail, was_beyond, trust, last = state
    row = ops.log(maximum(value, SMALLEST))
    level, lagged, memory, last = ops.choose(count == 0.0, (row, row, row, row), (level, lagged, memory, last))
    zero = count * 0.0
    whole = _whole_spread(spread, miss, ops)
    trended = level + minimum(level - lagged, 0.0) * (1.0 + 1.0 / cfg.level_rows)
    remembered = memory + memory_slope
    longest_fall = maximum(miss, whole)
    far = OUTLYING * whole * (tail / NORMAL_TAIL)
    settled = count > cfg.warmup_rows

    gain = maximum(1.0 / (count + 2.0), 1.0 / cfg.level_rows)
    new_level = level + gain * maximum(minimum(row - level, PULL_UP * whole), -PULL_DOWN * longest_fall)
    new_lagged = lagged + gain * (new_level - lagged)
    missed = absolute(maximum(minimum(row - trended, far), -FALL * longest_fall))
    new_miss = miss + gain * (MEAN_TO_SIGMA * missed - miss)

    slow = 1.0 / cfg.memory_rows
    nudge = slow * maximum(minimum(row - remembered, PULL_UP * whole), -PULL_UP * whole)
    described = where(absolute(row - remembered) < OUTLYING * whole, 1.0 - trust, -trust)
    new_trust = trust + described * (0.5 * slow)
    trusted = new_trust >= 0.5
    new_memory = where(trusted, remembered + nudge, new_level + minimum(new_level - new_lagged, 0.0))
    new_slope = where(trusted, memory_slope + 0.25 * slow * nudge, (new_level - new_lagged) / cfg.level_rows)

    jump = absolute(row - last) * math.sqrt(0.5)
    towards = maximum(1.0 / (count + 2.0), 1.0 / cfg.spread_rows) * (MEAN_TO_SIGMA * minimum(jump, far) - spread)
    new_spread = spread + where(settled & (jump > far), zero, towards)

    is_beyond = where(row - maximum(trended, remembered) > tail * whole, zero + 1.0, zero)
    change = where(settled, (1.0 - is_beyond * was_beyond) * (is_beyond - TAIL_SHARE), zero)
    new_tail = minimum(maximum(tail * (1.0 + TAIL_GAIN * change), NORMAL_TAIL), HIGHEST_TAIL)

    levels = (count + 1.0, new_level, new_lagged, new_memory, new_slope)
    following = (*levels, new_spread, new_miss, new_tail, is_beyond, new_trust, row)
    return ops.choose(accept, following, tuple(state))


def reopen(state: Sequence[Number], value: Number, accept: Any, ops: Ops, *, num_seen: float = REOPENED_COUNT) -> State:
    """The state with `value` as its new level, if `accept`: the spread stays, the bounds are wide at first. `num_seen`:
    upper limit of the row count; from `CAPPED_FROM_COUNT` on the caps apply at once."""
    row = ops.log(ops.maximum(value, SMALLEST))
    count, _, _, _, _, spread, miss, tail, *_ = state
    zero = 0.0 * count
    reopened = (ops.minimum(count, num_seen), row, row, row, zero, spread, miss, tail, zero, zero, row)
    return ops.choose(accept, reopened, tuple(state))


def _whole_spread(spread: Number, miss: Number, ops: Ops) -> Number:
    return ops.maximum(ops.maximum(spread, 0.5 * miss), LEAST_SPREAD)
