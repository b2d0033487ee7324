"""What going back costs, from the configuration alone.

Why: how often to save is a bargain between time stolen and work lost, and the second half must be a number before the
run is in trouble. `harness plan` shows it, and every checkpoint's manifest carries it.

How: trouble is found in the report of step r, when the host has issued r + lag steps; those after the target are lost.

A *rollback* goes to the newest checkpoint that is good: `good_after_steps` clean reports have followed it, so it was
taken at or before step r - 1 - good_after_steps. Checkpoints lie `interval` steps apart, so it was taken no earlier
than interval - 1 steps before that:

    lost = good_after_steps + lag + 1  ..  interval + good_after_steps + lag

A *rewind* goes to the newest snapshot in memory that is trusted: one clean step was computed from it, so it was taken
at or before r - 2; snapshots lie `ring.every_steps` apart:

    lost = lag + 2  ..  ring.every_steps + lag + 1

Trouble is as likely at one step as at the next, so on average it is the middle. A clock that rings between checkpoints
is heard by all ranks `lag` steps later. With steps and minutes, whichever comes first; with neither, and before the
first target, the way back is the whole run.
Left out: trouble that began before it was found (the policy then goes further back), and a disk so slow that a
checkpoint is still being written when `good_after_steps` steps have followed it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from harness.config.checkpoint import RingConfig
from harness.config.schema import Config


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackCost:
    """Steps that are done again, or lost, when a run goes back."""

    steps_at_most: int | None
    """None: only the clock decides, and how long a step takes is not known."""
    steps_on_average: float | None
    tokens_at_most: int | None
    minutes_at_most: float | None = None
    """Where the clock decides too: it loses no more than these minutes and `steps_besides`."""
    steps_besides: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For a manifest."""
        return asdict(self)


def rollback_cost(cfg: Config, *, step_time_s: float | None = None) -> RollbackCost:
    """What a rollback to the newest good checkpoint loses; minutes become steps where the time of one is known."""
    proving = cfg.checkpoint.good_after_steps + cfg.sentinel.lag
    cost = _cost(cfg, interval=_interval(cfg, step_time_s), least=proving + 1)
    if cfg.checkpoint.every_minutes is None:
        return cost
    return replace(cost, minutes_at_most=cfg.checkpoint.every_minutes, steps_besides=proving + cfg.sentinel.lag)


def rewind_cost(cfg: Config) -> RollbackCost | None:
    """What a rewind to the newest trusted snapshot loses; None where no snapshots are kept."""
    ring = cfg.checkpoint.ring
    return _cost(cfg, interval=ring.every_steps, least=cfg.sentinel.lag + 2) if ring.slots else None


def _interval(cfg: Config, step_time_s: float | None) -> int | None:
    """Most steps between two checkpoints; None where that is not known."""
    by_steps, minutes = cfg.checkpoint.every_steps, cfg.checkpoint.every_minutes
    if minutes is None:
        return by_steps or cfg.train.num_steps
    if step_time_s is None:
        return by_steps or None
    by_clock = math.ceil(60 * minutes / step_time_s) + cfg.sentinel.lag
    return min(by_steps, by_clock) if by_steps else by_clock


def _cost(cfg: Config, *, interval: int | None, least: int) -> RollbackCost:
    """From `least` steps, right after the target, to an interval less one more; never more than the whole run."""
    if interval is None:
        return RollbackCost(steps_at_most=None, steps_on_average=None, tokens_at_most=None)
    whole_run = cfg.train.num_steps
    at_most = min(least + interval - 1, whole_run)
    batch_tokens = cfg.train.batch_size * cfg.train.sequence_length
    return RollbackCost(
        steps_at_most=at_most,
        steps_on_average=min(least + (interval - 1) / 2, (1 + whole_run) / 2),
        tokens_at_most=at_most * batch_tokens,
    )


def num_buffers(cfg: RingConfig) -> int:
    """Snapshots that lie in memory at once: those to rewind to, and the one being saved."""
    return cfg.slots + 1
