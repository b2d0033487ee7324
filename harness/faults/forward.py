"""Injects faults into the forward pass: NaN outputs, overflow, outliers and growing attention logits.

They are hooks on modules of the real model. Compiled blocks share one graph, which cannot hold a hook of a single
block, so the affected block is not compiled. Evaluations are not affected: they compute no gradient.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from harness.config.errors import require
from harness.distributed.fsdp import unwrap
from harness.distributed.torch_private.pytree import tree_map
from harness.faults.fault_plan import FaultKind
from harness.faults.site import Site


def disable_compile(site: Site) -> None:
    """Run the block of the affected layer without torch.compile."""
    for block in site.run.parts.model.blocks:
        if site.layer in set(block.modules()):
            unwrap(block)


@final
class NanOutput:
    """nan_loss, nan_activation: one value of the output of the final norm, or of a layer, is NaN."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._armed = False
        if site.fault.kind is FaultKind.nan_loss:
            site.run.parts.model.norm.register_forward_hook(self._corrupt)
        else:
            site.layer.register_forward_hook(self._corrupt)
            disable_compile(site)

    def before(self, iteration: int) -> None:
        self._armed = self._site.strikes(iteration)
        if self._armed:
            is_loss = self._site.fault.kind is FaultKind.nan_loss
            where = "the head's input" if is_loss else f"the output of {self._site.fault.layer}"
            self._site.log_strike(f"one value of {where} becomes NaN")

    def after(self, iteration: int) -> None:
        pass

    def _corrupt(self, _module: Any, _inputs: Any, output: Any) -> Any:
        if not (self._armed and torch.is_grad_enabled()):
            return output
        self._armed = False
        site = self._site
        rng = site.fault.rng(site.seed, site.iteration, site.run.parts.world.rank)
        first, *others = output if isinstance(output, tuple) else (output,)
        changed = first.clone()
        changed.view(-1)[rng.randrange(first.numel())] = torch.nan
        return (changed, *others) if isinstance(output, tuple) else changed


@final
class Overflow:
    """fp16_overflow: the output of a layer is multiplied by `factor`, beyond the range of fp16."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._factor = 1.0
        site.layer.register_forward_hook(self._multiply)
        disable_compile(site)

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            fault = self._site.fault
            self._site.log_strike(f"output of {fault.layer} is multiplied by {fault.factor:g}")
            self._factor = fault.factor

    def after(self, iteration: int) -> None:  # noqa: ARG002 -- part of the FaultInjector protocol
        self._factor = 1.0

    def _multiply(self, _module: Any, _inputs: Any, output: Any) -> Any:
        return output if self._factor == 1.0 else tree_map(lambda tensor: tensor * self._factor, output)


@final
class Outlier:
    """fp8_outlier: an extreme activation of the first token of every sequence, as in large models.

    Each linear layer below the module reads the token `factor` times as large, and its output is divided by `factor`. A
    power of two is exact in fp32 and bf16: there forward, backward and updates are bit-identical. In fp8 with one scale
    per tensor all other tokens underflow to zero.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._factor = 1.0
        self._linears = [module for module in site.layer.modules() if isinstance(module, nn.Linear)]
        self._hooks: list[RemovableHandle] = []
        require(bool(self._linears), "drill.fault.layer", f"must contain a linear layer, {site.fault.layer} has none")
        disable_compile(site)

    def before(self, iteration: int) -> None:
        """Add the hooks only while the fault lasts: linear layers with hooks do not share their quantized input."""
        if self._site.strikes(iteration):
            self._factor, layer = self._site.fault.strength_at(iteration), self._site.fault.layer
            self._site.log_strike(f"input of {layer}: the first token of every sequence times {self._factor:g}")
            for module in self._linears:
                self._hooks += [
                    module.register_forward_pre_hook(self._enlarge),
                    module.register_forward_hook(self._reduce),
                ]

    def after(self, iteration: int) -> None:  # noqa: ARG002 -- part of the FaultInjector protocol
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _enlarge(self, _module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self._scale_first_token(inputs[0], self._factor),)

    def _reduce(self, _module: Any, _inputs: Any, output: Tensor) -> Tensor:
        return self._scale_first_token(output, 1 / self._factor)

    @staticmethod
    def _scale_first_token(hidden: Tensor, factor: float) -> Tensor:
        """[..., tokens, channels] with the first token times `factor`."""
        factors = hidden.new_ones(hidden.shape[-2], 1)
        factors[0] = factor
        return hidden * factors


@final
class LogitGrowth:
    """logit_growth: query and key weights of an attention layer grow, and so do its logits."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._weights = [site.weight(f"{site.fault.layer}.{name}") for name in ("query", "key")]

    def before(self, iteration: int) -> None:
        if self._site.strikes(iteration):
            fault = self._site.fault
            self._site.log_strike(f"query and key weights of {fault.layer} are multiplied by {fault.factor:g}")
            self._site.run.parts.ring.finish_copy()
            for weight in self._weights:
                weight.mul_(fault.factor)
            self._site.run.parts.update.measure_digest()  # training grew them; no weight changed between two updates

    def after(self, iteration: int) -> None:
        pass
