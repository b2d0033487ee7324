"""Learning-rate schedules as tables: step -> factor on the peak learning rate. Pure; read on the device by index."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from harness.config.optim import OptimConfig, ScheduleKind

PIECE = 2**20
"""Steps that are computed at once: what they need beside the table stays small in a run of many millions."""

Factors = NDArray[np.float64]


def schedule_factor(cfg: OptimConfig, *, step: int, num_steps: int) -> float:
    """Factor on the peak learning rate for the update after `step` applied updates."""
    return float(_factors(cfg, np.array([step]), num_steps)[0])


def schedule_table(cfg: OptimConfig, *, num_steps: int) -> Factors:
    """Factors of steps 0 .. num_steps; the last one holds for all later steps."""
    table = np.empty(num_steps + 1)
    for first in range(0, len(table), PIECE):
        steps = np.arange(first, min(first + PIECE, len(table)))
        table[first : first + len(steps)] = _factors(cfg, steps, num_steps)
    return table


def _factors(cfg: OptimConfig, steps: NDArray[np.int64], num_steps: int) -> Factors:
    warmup = (steps + 1) / max(cfg.warmup_steps, 1)
    factors: Factors = np.where(steps < cfg.warmup_steps, warmup, _after_warmup(cfg, steps, num_steps))
    return factors


def _after_warmup(cfg: OptimConfig, steps: NDArray[np.int64], num_steps: int) -> Factors:
    low = cfg.min_lr_fraction
    done = np.minimum((steps - cfg.warmup_steps) / max(num_steps - cfg.warmup_steps, 1), 1.0)
    match cfg.schedule:
        case ScheduleKind.constant:
            return np.ones(len(steps))
        case ScheduleKind.cosine:
            cosines = np.fromiter(map(math.cos, (math.pi * done).data), np.float64, len(steps))
            return low + (1 - low) * 0.5 * (1 + cosines)  # numpy's cosine differs in the last bit between machines
        case ScheduleKind.linear:
            return 1 - (1 - low) * done
        case ScheduleKind.inverse_sqrt:
            return np.sqrt(max(cfg.warmup_steps, 1) / np.maximum(steps, 1))
        case ScheduleKind.wsd:
            decayed = steps - (num_steps - cfg.decay_steps)
            return 1 - (1 - low) * np.clip(decayed / max(cfg.decay_steps, 1), 0.0, 1.0)
