"""Learning-rate schedules as tables: step -> factor on the peak learning rate. Pure; read on the device by index."""

from __future__ import annotations

import math

from harness.config.optim import OptimConfig, ScheduleKind


def schedule_factor(cfg: OptimConfig, *, step: int, num_steps: int) -> float:
    """Factor on the peak learning rate for the update after `step` applied updates."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    done, low = step - cfg.warmup_steps, cfg.min_lr_fraction
    num_decay_steps = max(num_steps - cfg.warmup_steps, 1)
    match cfg.schedule:
        case ScheduleKind.constant:
            return 1.0
        case ScheduleKind.cosine:
            return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done / num_decay_steps, 1.0)))
        case ScheduleKind.linear:
            return 1 - (1 - low) * min(done / num_decay_steps, 1.0)
        case ScheduleKind.inverse_sqrt:
            return math.sqrt(max(cfg.warmup_steps, 1) / max(step, 1))
        case ScheduleKind.wsd:
            decayed = step - (num_steps - cfg.decay_steps)
            return 1 - (1 - low) * min(max(decayed / max(cfg.decay_steps, 1), 0.0), 1.0)


def schedule_table(cfg: OptimConfig, *, num_steps: int) -> list[float]:
    """Factors of steps 0 .. num_steps; the last one holds for all later steps."""
    return [schedule_factor(cfg, step=step, num_steps=num_steps) for step in range(num_steps + 1)]
