"""Faults of a gradient: what one rank computed is wrong, and only that rank could know.

Why: a cluster learns of a broken GPU, a bad link or a bad kernel from a gradient that is wrong on one rank; after the
reduction it is wrong on all, so the fault must be there before.
How: with more than one rank, each sharded module hands its flat, unreduced gradient to its reduction. The one that
owns the layer is wrapped: it spoils the gradient, then measures and reduces it as ever, so that the signals see what
the collective sees. It works on whatever backward gave, compiled or not. One rank reduces nothing: its stored gradient
is spoiled before anybody looks at it.
A layer is spoiled with its block, or with all that is in no block: they travel together.
One number is spoiled where the fault is one number: the largest. It is a pure function of the gradient, found without a
wait for the device, never padding, and never one of the zeros that fill the rows of tokens that did not occur, in which
a flipped bit can be as small as any number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from harness.distributed.fsdp import Collectives, WatchedScatter
from harness.distributed.shards import local
from harness.faults.plan import FaultKind
from harness.faults.site import Site, watched
from harness.sentinel.device.signals import group_of

SIGN_BIT = 31


def flip(numbers: Tensor, place: Tensor, bit: int) -> None:
    """Turn over one bit of one number of a flat float32 tensor, in place and on its device."""
    mask = -(2**SIGN_BIT) if bit == SIGN_BIT else 1 << bit
    words = numbers.view(torch.int32)
    words.index_copy_(0, place, words.index_select(0, place) ^ mask)


@final
class SpoiledGradient:
    """nan_grad, inf_grad, bit_flip_grad: one number of one layer's gradient; big_grad: all of it, times `factor`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._armed = False
        parts = site.run.parts
        in_blocks = {module for block in parts.model.blocks for module in block.modules()}
        self._group = group_of(site.fault.layer) if site.layer in in_blocks else ""
        if parts.collectives.sees_gradients:
            owner = parts.model.get_submodule(self._group)
            _put_before_reduction(owner, parts.collectives, self._spoil)
        else:
            parts.signals = watched(parts.signals, "add_gradients", self._spoil_stored, first=True)

    def before(self, iteration: int) -> None:
        self._armed = self._site.strikes(iteration)
        if self._armed:
            fault = self._site.fault
            what = {
                FaultKind.nan_grad: "its largest number becomes NaN",
                FaultKind.inf_grad: "its largest number becomes infinite",
                FaultKind.big_grad: f"times {fault.factor:g}",
            }.get(fault.kind, f"bit {fault.bit} of its largest number is turned over")
            self._site.tell(f"gradient of {fault.layer} before the reduction: {what}")

    def after(self, iteration: int) -> None:
        pass

    def _spoil(self, gradient: Tensor) -> None:
        """One number is one number, also where a step has several micro-batches; a layer is spoiled in all of them."""
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
                flat.mul_(fault.factor)
            case _:
                flip(flat, place, fault.bit)

    def _spoil_stored(self) -> None:
        own = f"{self._group or 'blocks'}."
        gradients = [
            local(parameter.grad)
            for name, parameter in self._site.run.parts.update.parameters.items()
            if parameter.grad is not None and name.startswith(own) == bool(self._group)
        ]
        if self._site.fault.kind is FaultKind.big_grad:
            for gradient in gradients:
                self._spoil(gradient)
        else:
            self._spoil(max(gradients, key=Tensor.numel))
        self._armed = False


_ACTS: WeakKeyDictionary[nn.Module, list[Callable[[Tensor], None]]] = WeakKeyDictionary()
"""Faults that a module's gradient meets before its reduction: a plan may hold several of one layer."""


def _put_before_reduction(owner: Any, collectives: Collectives, act: Callable[[Tensor], None]) -> None:
    """Let `act` have a module's own flat gradient before it is measured and reduced."""
    acts = _ACTS.setdefault(owner, [])
    acts.append(act)
    owner.set_custom_reduce_scatter(WatchedScatter(collectives, first=acts))
