"""Steps that a rollback or a rewind loses, computed from the configuration alone.

Why: the checkpoint interval trades time spent on saving against work lost. The lost work must be known before the run
is in trouble. `harness plan` shows it, and every checkpoint's manifest contains it.

How: a problem is found in the report of step r, when the host has already issued r + lag steps. All steps after the
target are lost.

A *rollback* goes to the newest good checkpoint. `good_after_steps` clean reports have followed it, so it was taken at
or before step r - 1 - good_after_steps. Checkpoints are `interval` steps apart, so it was taken at most interval - 1
steps before that:

    lost = good_after_steps + lag + 1  ..  interval + good_after_steps + lag

A *rewind* goes to the newest trusted snapshot in memory. One clean step was computed from it, so it was taken at or
before r - 2; snapshots are `ring.every_steps` apart:

    lost = lag + 2  ..  ring.every_steps + lag + 1

Problems are equally likely at every step, so the average is the middle. A save that the clock requests reaches all
ranks `lag` steps later. With both steps and minutes, whichever comes first counts; with neither, and before the first
target, the whole run is lost.
Left out: problems that began before they were found (the policy then goes back further), and a disk so slow that a
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
    """Steps that a rollback or rewind loses."""

    steps_at_most: int | None
    """None: only `every_minutes` is set and the step time is unknown."""
    steps_on_average: float | None
    tokens_at_most: int | None
    minutes_at_most: float | None = None
    """If `every_minutes` is set: the loss is at most these minutes plus `steps_besides` steps."""
    steps_besides: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As stored in a manifest."""
        return asdict(self)


def rollback_cost(cfg: Config, *, step_time_s: float | None = None) -> RollbackCost:
    """Cost of a rollback to the newest good checkpoint; `step_time_s` converts minutes to steps if it is given."""
    proving = cfg.checkpoint.good_after_steps + cfg.sentinel.lag
    cost = _cost(cfg, interval=_interval(cfg, step_time_s), least=proving + 1)
    if cfg.checkpoint.every_minutes is None:
        return cost
    return replace(cost, minutes_at_most=cfg.checkpoint.every_minutes, steps_besides=proving + cfg.sentinel.lag)


def rewind_cost(cfg: Config) -> RollbackCost | None:
    """Cost of a rewind to the newest trusted snapshot; None if the ring is off."""
    ring = cfg.checkpoint.ring
    return _cost(cfg, interval=ring.every_steps, least=cfg.sentinel.lag + 2) if ring.slots else None


def _interval(cfg: Config, step_time_s: float | None) -> int | None:
    """Most steps between two checkpoints; None if unknown."""
    by_steps, minutes = cfg.checkpoint.every_steps, cfg.checkpoint.every_minutes
    if minutes is None:
        return by_steps or cfg.train.num_steps
    if step_time_s is None:
        return by_steps or None
    by_clock = math.ceil(60 * minutes / step_time_s) + cfg.sentinel.lag
    return min(by_steps, by_clock) if by_steps else by_clock


def _cost(cfg: Config, *, interval: int | None, least: int) -> RollbackCost:
    """Between `least` and `least + interval - 1` steps are lost; never more than the whole run."""
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
    """Snapshot buffers in memory: those to rewind to, and one that is being saved."""
    return cfg.slots + 1


def num_replica_buffers(cfg: RingConfig, *, num_nodes: int, replicate: int) -> int:
    """Buffers of a rank for its partner's snapshot: the newest complete one, and one that arrives. None on one node,
    and none with several replicas of the model, which hold the same state."""
    return 2 * cfg.replicas if num_nodes > 1 and replicate == 1 else 0
