"""Faults of the update: a weight, the moments or the learning rate are not what the optimizer left or was given."""

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
    """bit_flip_weight: one bit of one number of this rank's part of a weight, after an update, as memory errors do it.

    Which number is left to chance. The other shards are whole; the next gathering brings the wrong number to all ranks.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._weight = site.weight(site.fault.layer).view(-1)
        message = f"{site.fault.layer} has no part on rank {site.run.parts.world.rank}"
        require(not site.is_here or len(self._weight) > 0, "drill.fault.layer", message)

    def before(self, iteration: int) -> None:
        pass

    def after(self, iteration: int) -> None:
        site = self._site
        if not site.strikes(iteration):
            return
        dice = site.fault.dice(site.seed, iteration, site.run.parts.world.rank)
        place = dice.randrange(len(self._weight))
        message = f"bit {site.fault.bit} of number {place} of this rank's part of {site.fault.layer} is turned over"
        site.tell(message, iteration)
        flip(self._weight, torch.tensor([place], device=self._weight.device), site.fault.bit)


@final
class RateSpike:
    """lr_spike: a schedule that is wrong for some iterations, and right again afterwards."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._scheduled: Tensor | None = None

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            factor, rates = self._site.fault.factor, self._site.run.parts.update.rates
            self._site.tell(f"learning rate times {factor:g}")
            self._scheduled = rates.clone()
            rates.mul_(factor)

    def after(self, iteration: int) -> None:  # noqa: ARG002 -- part of the FaultInjector protocol
        if self._scheduled is not None:
            self._site.run.parts.update.rates.copy_(self._scheduled)
            self._scheduled = None


@final
class CutWarmup:
    """warmup_cut: from one iteration on, the schedule of this process has no warm-up, as after a wrong resume."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            self._site.tell("the rest of the warm-up is left out")
            rates, num_steps = self._site.run.parts.update.rates, self._site.run.cfg.optim.warmup_steps
            rates[:num_steps] = rates.max()

    def after(self, iteration: int) -> None:
        pass


@final
class ResetMoments:
    """optimizer_reset: both moments are zero while the step counter goes on, as after a reload that lost them."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            self._site.tell("both moments become zero")
            for moments in self._site.run.parts.update.state().values():
                for name in ("exp_avg", "exp_avg_sq"):
                    local(moments[name]).zero_()

    def after(self, iteration: int) -> None:
        pass
