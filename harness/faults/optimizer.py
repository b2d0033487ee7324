"""Injects faults into the update: a flipped weight bit, reset moments, a wrong learning rate."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from harness.config.errors import require
from harness.distributed.shards import local
from harness.faults.gradient import flip
from harness.faults.site import Site


@final
class FlippedWeight:
    """bit_flip_weight: flips one bit of one value of this rank's shard of a weight, after an update.

    The value is drawn at random. The other shards are correct; the next all-gather copies the wrong value to all ranks.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._weight = site.weight(site.fault.layer).view(-1)
        message = f"must have a shard on rank {site.run.parts.world.rank}, {site.fault.layer} has none"
        require(not site.is_here or len(self._weight) > 0, "drill.fault.layer", message)

    def before(self, iteration: int) -> None:
        pass

    def after(self, iteration: int) -> None:
        site = self._site
        if not site.strikes(iteration):
            return
        rng = site.fault.rng(site.seed, iteration, site.run.parts.world.rank)
        place = rng.randrange(len(self._weight))
        message = f"bit {site.fault.bit} of value {place} of this rank's shard of {site.fault.layer} is flipped"
        site.log_strike(message, iteration)
        flip(self._weight, torch.tensor([place], device=self._weight.device), site.fault.bit)


@final
class RateSpike:
    """lr_spike: multiplies the learning rate by `factor`, which may grow, for some iterations."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._scheduled: Tensor | None = None

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            factor, rates = self._site.fault.strength_at(iteration), self._site.run.parts.update.rates
            self._site.log_strike(f"learning rate times {factor:g}")
            self._scheduled = rates.clone()
            rates.mul_(factor)

    def after(self, iteration: int) -> None:  # noqa: ARG002 -- part of the FaultInjector protocol
        if self._scheduled is not None:
            self._site.run.parts.update.rates.copy_(self._scheduled)
            self._scheduled = None


@final
class CutWarmup:
    """warmup_cut: from one iteration on, the schedule has no warm-up, as after a wrong resume."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            self._site.log_strike("the rest of the warm-up is skipped")
            rates, num_steps = self._site.run.parts.update.rates, self._site.run.cfg.optim.warmup_steps
            rates[:num_steps] = rates.max()

    def after(self, iteration: int) -> None:
        pass


@final
class ResetMoments:
    """optimizer_reset: sets all moments to zero but keeps the step counter, as after a reload that lost them."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            self._site.log_strike("all moments become zero")
            for moments in self._site.run.parts.update.state().values():
                for name, moment in moments.items():
                    if name != "step":
                        local(moment).zero_()

    def after(self, iteration: int) -> None:
        pass
