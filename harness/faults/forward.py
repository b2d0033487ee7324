"""Faults of the forward pass: what a layer computes is wrong, or grows until it is.

How: hooks on modules of the real model. Blocks that are compiled share one graph, which knows no hook of one of them:
the block that is struck is not compiled in a drill. Evaluations are left alone: they compute no gradient.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from harness.config.errors import require
from harness.distributed.fsdp import unwrap
from harness.faults.site import Site


def uncompiled(site: Site) -> None:
    """Let the block of a layer that is struck run by itself."""
    for block in site.run.parts.model.blocks:
        if site.layer in set(block.modules()):
            unwrap(block)


@final
class SpoiledLoss:
    """nan_loss: one number of the final norm's output is NaN, and with it the loss of one token."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._armed = False
        site.run.parts.model.norm.register_forward_hook(self._spoil)

    def before(self, iteration: int) -> None:
        self._armed = self._site.strikes(iteration)
        if self._armed:
            self._site.tell("one number of what the head reads becomes NaN")

    def after(self, iteration: int) -> None:
        pass

    def _spoil(self, _module: Any, _inputs: Any, output: Tensor) -> Tensor:
        if not (self._armed and torch.is_grad_enabled()):
            return output
        self._armed = False
        site = self._site
        dice = site.fault.dice(site.seed, site.iteration, site.run.parts.world.rank)
        spoiled = output.clone()
        spoiled.view(-1)[dice.randrange(output.numel())] = torch.nan
        return spoiled


@final
class Overflow:
    """fp16_overflow: what a layer gives on is so large that fp16 has no number for it."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._factor = 1.0
        site.layer.register_forward_hook(self._multiply)
        uncompiled(site)

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            fault = self._site.fault
            self._site.tell(f"what {fault.layer} gives on is multiplied with {fault.factor:g}")
            self._factor = fault.factor

    def after(self, iteration: int) -> None:  # noqa: ARG002 -- part of the FaultInjector protocol
        self._factor = 1.0

    def _multiply(self, _module: Any, _inputs: Any, output: Any) -> Any:
        return output if self._factor == 1.0 else tree_map(lambda each: each * self._factor, output)


@final
class Outlier:
    """fp8_outlier: one token out of all proportion, as the first one of a sequence becomes in large models.

    Each map of the layer reads it `factor` times as large, and what it makes of it is divided by `factor` again. A
    power of two is exact in fp32 and bf16: there the layer computes the same bits, forward and backward, and so does
    every update. In fp8 with one scale for a tensor all other tokens become zero.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._maps = [module for module in site.layer.modules() if isinstance(module, nn.Linear)]
        self._hooks: list[RemovableHandle] = []
        require(bool(self._maps), "drill.fault.layer", f"must hold a linear map, {site.fault.layer} has none")
        uncompiled(site)

    def before(self, iteration: int) -> None:
        """Only while it lasts: maps that somebody watches do not share the rounding of what they read."""
        if self._site.strikes(iteration):
            fault = self._site.fault
            self._site.tell(f"the maps of {fault.layer} read the first token of every sequence times {fault.factor:g}")
            for module in self._maps:
                self._hooks += [
                    module.register_forward_pre_hook(self._enlarge),
                    module.register_forward_hook(self._reduce),
                ]

    def after(self, iteration: int) -> None:  # noqa: ARG002 -- part of the FaultInjector protocol
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _enlarge(self, _module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self._first(inputs[0], self._site.fault.factor),)

    def _reduce(self, _module: Any, _inputs: Any, output: Tensor) -> Tensor:
        return self._first(output, 1 / self._site.fault.factor)

    @staticmethod
    def _first(hidden: Tensor, factor: float) -> Tensor:
        """[..., tokens, channels] with the first token times `factor`."""
        factors = hidden.new_ones(hidden.shape[-2], 1)
        factors[0] = factor
        return hidden * factors


@final
class LogitGrowth:
    """logit_growth: query and key weights of a layer's attention grow, and its logits with their product."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._weights = [site.weight(f"{site.fault.layer}.{name}") for name in ("query", "key")]

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            fault = self._site.fault
            self._site.tell(f"query and key weights of {fault.layer} are multiplied with {fault.factor:g}")
            for weight in self._weights:
                weight.mul_(fault.factor)

    def after(self, iteration: int) -> None:
        pass
