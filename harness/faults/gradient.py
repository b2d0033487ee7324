"""Injects a bad gradient on one rank, before the reduce-scatter.

Why: a broken GPU, a bad link or a bad kernel first shows as a bad gradient on one rank. After the reduction it is bad
on all ranks, so the fault must come before.
How: with more than one rank, each sharded module passes its flat, unreduced gradient to its reduce-scatter. That of the
module that owns the layer is wrapped: it changes the gradient, then measures and reduces it as usual, so the signals
see what the collective sees. This works for compiled and eager backward passes. With world_size 1 there is no
reduction: the stored gradient is changed before it is measured.
A layer is changed together with its block, or with all parameters outside the blocks: they are reduced together.
A fault of a single value changes the largest value. It is a pure function of the gradient, found without a host sync,
never padding, and never a zero of an embedding row whose token did not occur: a flipped bit of a zero can be tiny.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from harness.distributed.reduce_scatter import CommStats, MeasuredReduceScatter
from harness.distributed.shards import local
from harness.faults.fault_plan import FaultKind
from harness.faults.site import Site, intercept
from harness.sentinel.device.signals import group_of

SIGN_BIT = 31


def flip(numbers: Tensor, place: Tensor, bit: int) -> None:
    """Flip one bit of one value of a flat float32 tensor, in place and on its device."""
    mask = -(2**SIGN_BIT) if bit == SIGN_BIT else 1 << bit
    integers = numbers.view(torch.int32)
    integers.index_copy_(0, place, integers.index_select(0, place) ^ mask)


@final
class CorruptGradient:
    """nan_grad, inf_grad, bit_flip_grad: one value of a layer's gradient; big_grad: all of it, times `factor`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._armed = False
        self._factor = 1.0
        parts = site.run.parts
        if parts.comm_stats.measures_gradients:
            change_gradient(site, self._corrupt)
        else:
            parts.signals = intercept(parts.signals, "add_gradients", self._corrupt_stored, first=True)

    def before(self, iteration: int) -> None:
        self._armed = self._site.strikes(iteration)
        if self._armed:
            fault = self._site.fault
            self._factor = fault.strength_at(iteration)
            change = {
                FaultKind.nan_grad: "its largest value becomes NaN",
                FaultKind.inf_grad: "its largest value becomes infinite",
                FaultKind.big_grad: f"times {self._factor:g}",
            }.get(fault.kind, f"bit {fault.bit} of its largest value is flipped")
            self._site.log_strike(f"gradient of {fault.layer} before the reduction: {change}")

    def after(self, iteration: int) -> None:
        pass

    def _corrupt(self, gradient: Tensor) -> None:
        """Change the gradient. A single value is changed in one micro-batch only, a whole layer in all of them."""
        if not self._armed:
            return
        fault = self._site.fault
        self._armed = fault.kind is FaultKind.big_grad
        flat = gradient.view(-1)
        place = flat.abs().argmax().view(1)
        match fault.kind:
            case FaultKind.nan_grad:
                flat.index_fill_(0, place, torch.nan)
            case FaultKind.inf_grad:
                flat.index_fill_(0, place, torch.inf)
            case FaultKind.big_grad:
                flat.mul_(self._factor)
            case _:
                flip(flat, place, fault.bit)

    def _corrupt_stored(self) -> None:
        gradients = stored_gradients(self._site)
        if self._site.fault.kind is FaultKind.big_grad:
            for gradient in gradients:
                self._corrupt(gradient)
        else:
            self._corrupt(max(gradients, key=Tensor.numel))
        self._armed = False


def affected_group(site: Site) -> str:
    """The block that has the layer of a fault; empty: the layer is outside the blocks."""
    in_blocks = {module for block in site.run.parts.model.blocks for module in block.modules()}
    return group_of(site.fault.layer) if site.layer in in_blocks else ""


def stored_gradients(site: Site) -> list[Tensor]:
    """This rank's shards of the gradients of the block of a fault, or of all weights outside the blocks."""
    group = affected_group(site)
    own = f"{group or 'blocks'}."
    return [
        local(parameter.grad)
        for name, parameter in site.run.parts.update.parameters.items()
        if parameter.grad is not None and name.startswith(own) == bool(group)
    ]


def change_gradient(site: Site, act: Callable[[Tensor], None]) -> None:
    """Call `act` on the gradient of the fault's layer in every backward pass, before it is measured and reduced. With
    world_size 1 nothing is reduced: `act` gets the largest gradient when FSDP2 has stored it."""
    parts, group = site.run.parts, affected_group(site)
    owner: Any = parts.model.get_submodule(group)
    if parts.comm_stats.measures_gradients:
        blocks = list(parts.model.blocks)
        _run_before_reduction(owner, parts.comm_stats, act, block=blocks.index(owner) if group else len(blocks))
        return
    weights = [
        parameter for parameter in owner.parameters() if group or parameter not in set(parts.model.blocks.parameters())
    ]
    largest = max(weights, key=Tensor.numel)
    largest.register_post_accumulate_grad_hook(lambda parameter: act(local(parameter.grad)))


_ACTS: WeakKeyDictionary[nn.Module, list[Callable[[Tensor], None]]] = WeakKeyDictionary()
"""Functions to call on a module's gradient before its reduction; a plan may have several faults of one layer."""


def _run_before_reduction(owner: Any, comm_stats: CommStats, act: Callable[[Tensor], None], *, block: int) -> None:
    """Call `act` on a module's own flat gradient before it is measured and reduced."""
    acts = _ACTS.setdefault(owner, [])
    acts.append(act)
    owner.set_custom_reduce_scatter(MeasuredReduceScatter(comm_stats, block=block, before_measuring=acts))
